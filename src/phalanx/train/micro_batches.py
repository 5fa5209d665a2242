"""The micro-batches of a step on this rank's stages: forward and backward, with or without a pipeline, or forward
only.

Shapes in tensor names: B sequences of this data rank, S tokens of a sequence on this context rank, V entries of the
vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel

from phalanx.job.model import ModelShape
from phalanx.plan.schedules import is_v_shaped
from phalanx.train.data.batches import IGNORED
from phalanx.train.kernels.attention import fastest_attention
from phalanx.train.model_stages import ModelStage, num_stages
from phalanx.train.parallel.dims import Meshes
from phalanx.train.parallel.fsdp import set_gradient_sync
from phalanx.train.parallel.gradients import GradientExchange
from phalanx.train.parallel.pipeline import Schedule, build_schedule, forward_only
from phalanx.train.parallel.stage import LeanStage
from phalanx.train.rank_settings import Settings
from phalanx.train.telemetry.clock import StepClock, time_stage

# A number summed over the valid tokens of (logits_BSV, targets_BS): a loss, or a metric.
TokenSum = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class MicroBatches:
    """Runs the micro-batches of a step on the stages that this rank holds."""

    def __init__(
        self,
        parts: Sequence[ModelStage],
        shape: ModelShape,
        settings: Settings,
        meshes: Meshes,
        *,
        loss: TokenSum,
        exchange: GradientExchange | None,
        clock: StepClock,
        device: torch.device,
    ) -> None:
        self.loss = loss
        self.unit = 0.0  # factor of the summed loss before backward; 0 before the first step
        self._parts, self._shape, self._settings = parts, shape, settings
        self._meshes, self._dims, self._device = meshes, meshes.dims, device
        self._exchange, self._clock = exchange, clock
        self._chunks_loss = settings.chunks_loss(shape, device)
        self._schedules: dict[int, tuple[Schedule, list[LeanStage]]] = {}

    def accumulate_gradients(self, tokens_BS: torch.Tensor, targets_BS: torch.Tensor) -> torch.Tensor:
        """Accumulate the gradients of `unit` × the summed loss; return the summed loss of this rank."""
        count = tokens_BS.shape[0] // self._settings.layout.micro_batch
        if self._exchange is not None:
            self._exchange.begin(count)
        with self._loss_context(), fastest_attention(self._device):
            if self._dims.pipeline > 1:
                total = self._run_pipeline(tokens_BS, targets_BS, count)
            else:
                total = self._one_by_one(tokens_BS, targets_BS, count)
        if self._exchange is not None:
            # Compressed gradients are exchanged by a thread, for which this waits.
            with self._clock.stall() if self._exchange.bytes_sent is not None else nullcontext():
                self._exchange.finish()
        return total

    def _one_by_one(self, tokens_BS: torch.Tensor, targets_BS: torch.Tensor, count: int) -> torch.Tensor:
        """Run forward and backward of each micro-batch in turn, without a pipeline; return the summed loss."""
        model = self._parts[0].model
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for index, (x, y) in enumerate(zip(tokens_BS.chunk(count), targets_BS.chunk(count), strict=True)):
            if isinstance(model, FSDPModule):
                set_gradient_sync(model, zero=self._dims.zero, last=index == count - 1)
            with self._clock.phase("forward"):
                # With chunks_loss the head computes its gradients with the loss. `unit` is passed in, so that they are
                # rounded once.
                loss = model(x, y, self.unit) if self._chunks_loss else self.loss(model(x), y)
            with self._clock.phase("backward"):
                (loss * self.unit).backward()
                if self._exchange is not None:
                    self._exchange.micro_batch_done()
            total += whole_value(loss.detach()).double()
        return total

    def _run_pipeline(self, tokens_BS: torch.Tensor, targets_BS: torch.Tensor, count: int) -> torch.Tensor:
        """Run the pipeline schedule; return the summed loss, 0 where this rank does not hold the last stage."""
        losses: list[torch.Tensor] = []
        schedule, stages = self.schedule(count)
        inputs = (tokens_BS,) if any(stage.is_first for stage in stages) else ()
        if any(stage.is_last for stage in stages):
            schedule.step(*inputs, target=targets_BS, losses=losses, return_outputs=False)
        else:
            schedule.step(*inputs)
        for stage in stages:
            stage.finish_sends()
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for loss in losses:
            total += whole_value(loss.detach()).double() / self.unit
        return total

    def forward_sums(
        self, tokens_BS: torch.Tensor, targets_BS: torch.Tensor, wanted: Sequence[TokenSum]
    ) -> list[torch.Tensor]:
        """Return each of the `wanted` numbers, summed over this rank's sequences, without gradients.

        Zeros on ranks without the last stage.
        """
        count = tokens_BS.shape[0] // self._settings.layout.micro_batch
        totals = [torch.zeros((), dtype=torch.float64, device=self._device) for _ in wanted]
        with self._loss_context(), fastest_attention(self._device):
            # Any other number needs the whole logits.
            if self._chunks_loss and list(wanted) == [summed_loss]:
                for x, y in zip(tokens_BS.chunk(count), targets_BS.chunk(count), strict=True):
                    totals[0] += self._parts[0].model(x, y).double()
                return totals
            for x, y in zip(tokens_BS.chunk(count), targets_BS.chunk(count), strict=True):
                logits = self._run_stages(x)
                if logits is not None:
                    for total, function in zip(totals, wanted, strict=True):
                        total += whole_value(function(logits, y)).double()
        return totals

    def _run_stages(self, x: torch.Tensor) -> torch.Tensor | None:
        """Run one micro-batch forward through all stages; return None if this rank does not hold the last."""
        if self._dims.pipeline == 1:
            output: torch.Tensor = self._parts[0].model(x)
            return output
        return forward_only(
            [(part.stage, part.model) for part in self._parts],
            x,
            stages=num_stages(self._settings),
            group=self._meshes.group("pipeline"),
            v_shaped=is_v_shaped(self._settings.layout.schedule, self._settings.layout.virtual_pipeline),
            like=lambda stage: self._stage_boundary(stage)[0],
        )

    def _loss_context(self) -> AbstractContextManager[None]:
        """Return torch's context for a loss over logits split by tensor rank; backward must run inside it too."""
        split = self._dims.tensor > 1 and self._settings.loss_parallel
        return loss_parallel() if split else nullcontext()

    def schedule(self, count: int) -> tuple[Schedule, list[LeanStage]]:
        """Return the pipeline schedule for `count` micro-batches and its stages; a batch ramp needs several counts."""
        if count not in self._schedules:
            self._schedules[count] = build_schedule(
                [(part.stage, part.model) for part in self._parts],
                stages=num_stages(self._settings),
                group=self._meshes.group("pipeline"),
                name=self._settings.layout.schedule,
                order=self._settings.order,
                micro_batches=count,
                loss=lambda logits, targets: self.loss(logits, targets) * self.unit,
                shapes=self._stage_boundary,
                device=self._device,
            )
            for stage in self._schedules[count][1]:
                time_stage(stage, self._clock)
        return self._schedules[count]

    def clear_schedules(self) -> None:
        """Drop all schedules, and with them their receive buffers."""
        self._schedules.clear()

    def _stage_boundary(self, stage: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return tensors on the meta device like a stage's input and output, per micro-batch on this rank."""
        layout = self._settings.layout
        micro, length = layout.micro_batch, self._settings.sequence // self._dims.context
        local_length = length // self._dims.tensor if layout.sequence_parallel and self._dims.tensor > 1 else length
        dtype = self._settings.compute_dtype
        tokens = torch.empty(micro, length, dtype=torch.int64, device="meta")
        hidden = torch.empty(micro, local_length, self._shape.hidden, dtype=dtype, device="meta", requires_grad=True)
        # Split logits are a DTensor, whose shape is that of the whole vocabulary: torch 2.11 compares it in every step.
        logits = torch.empty(micro, length, self._shape.vocab, dtype=dtype, device="meta", requires_grad=True)
        return tokens if stage == 0 else hidden, logits if stage == num_stages(self._settings) - 1 else hidden


def summed_loss(logits_BSV: torch.Tensor, targets_BS: torch.Tensor) -> torch.Tensor:
    """Return the cross-entropy summed over the valid tokens, in float32 or wider."""
    wide = torch.promote_types(logits_BSV.dtype, torch.float32)
    return F.cross_entropy(
        logits_BSV.flatten(0, 1).to(wide), targets_BS.flatten(), reduction="sum", ignore_index=IGNORED
    )


def whole_value(value: torch.Tensor) -> torch.Tensor:
    """Return the value of a tensor that may be a DTensor split over ranks."""
    return value.full_tensor() if isinstance(value, DTensor) else value
