"""One optimizer step under any layout: forward and backward over the micro-batches, one small agreement, one update.

The loss of a step is the sum over all valid tokens of the global batch, divided by their number. Backward runs on the
sum divided by the batch's size in tokens (known beforehand); how many of those were valid is agreed on together with
the gradient norm, and the quotient joins the clipping factor. So a step needs one small collective, not three.

B sequences of this data rank, S tokens of a sequence on this context rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from phalanx.errors import mistake
from phalanx.job.model import ModelShape
from phalanx.job.schema import Optim
from phalanx.plan.parametrization import parameter_scales
from phalanx.plan.schedules import is_v_shaped
from phalanx.train.data.batches import IGNORED
from phalanx.train.expert_balance import ExpertBalance
from phalanx.train.guard.compiled import TrialPass, drawn_so_far
from phalanx.train.guard.spikes import SpikeDetector
from phalanx.train.kernels.engine_kernels import StepKernels, choose_kernels
from phalanx.train.micro_batches import MicroBatches, TokenSum, summed_loss
from phalanx.train.model_stages import (
    ModelStage,
    StageTensor,
    build_stages,
    copy_weights,
    draw_weights,
    stage_tensors,
)
from phalanx.train.models.own_model import PREFIX, NetworkOutline, OwnStage, lookup_tables, whole_values
from phalanx.train.optim.base import Optimizer
from phalanx.train.optim.build_optimizer import build_optimizer
from phalanx.train.optim.master_weights import MasterWeights
from phalanx.train.optim.scaler import LossScale
from phalanx.train.own_loss import own_loss
from phalanx.train.parallel.across_replicas import AcrossReplicas, ReplicaLost
from phalanx.train.parallel.buffers import BufferExchange
from phalanx.train.parallel.compress_fsdp import GradientCompression
from phalanx.train.parallel.context import split_sequence
from phalanx.train.parallel.dims import Meshes, ParallelDims, build_meshes
from phalanx.train.parallel.gradients import GradientExchange, TiedTable, scale_gradients, squared_norm
from phalanx.train.parallel.replicate import local_gradient
from phalanx.train.parallel.tensor_shard import TensorShard
from phalanx.train.rank_settings import Settings
from phalanx.train.step_result import NO_REQUESTS, MemoryChanged, StepRequest, StepResult
from phalanx.train.telemetry.clock import clock_of, time_gathers
from phalanx.train.telemetry.local_gradients import fsdp_groups, listen_for_noise
from phalanx.train.telemetry.noise import NoiseScale, noise_of_step


class Engine:
    """Builds this rank's part of a model and steps it. Every rank of the job builds one and calls it in step."""

    def __init__(
        self,
        shape: ModelShape,
        settings: Settings,
        optim: Optim,
        *,
        device: torch.device,
        state_dtype: str = "fp32",
        read: Callable[[torch.Tensor], list[float]] = torch.Tensor.tolist,
        across: AcrossReplicas | None = None,
    ) -> None:
        self.shape, self.settings, self.device = shape, settings, device
        self.across = across  # other replicas, each a world of its own; None where all ranks are one world
        self._clip, self._read = optim.clip, read
        self.dims = ParallelDims.of(settings.layout)
        self.meshes: Meshes = build_meshes(self.dims, device.type, experts=shape.is_moe)
        if settings.compile:
            from phalanx.train.parallel.compiling import prepare_compiler  # it imports dynamo, which takes seconds

            prepare_compiler(self.meshes)
        # Compiled, the loss reads the logits in their own format and never holds a float32 copy of them.
        loss: TokenSum = own_loss(settings, shape.vocab) if settings.loss else summed_loss
        if settings.compile:
            loss = torch.compile(loss, backend=settings.compile_backend)
        self.parts: list[ModelStage] = build_stages(shape, settings, self.meshes, device)
        self.held: list[StageTensor] = stage_tensors(self.parts, self.meshes, tied=shape.tied)
        self._trained = [held for held in self.held if held.trained]
        self.exchange = None if self.dims.zero else GradientExchange(self._trained, self.meshes, settings)
        parameters = [held for held in self.held if held.is_parameter]
        self.masters = MasterWeights(parameters, settings)
        pairs = list(zip(self.masters.shards, parameters, strict=True))
        self.shards: list[TensorShard] = [one for one, held in pairs if held.trained]
        self._frozen: list[TensorShard] = [one for one, held in pairs if not held.trained]
        # Weight decay is for matrices: norms and biases, our own or of a user's network, are left alone.
        matrices = {shard.name for shard in self.shards if len(shard.shape) > 1}
        self._scales = parameter_scales(shape, settings.scale, optimizer=optim.name)
        self.optimizer: Optimizer = build_optimizer(
            self.shards,
            optim=optim,
            state_dtype=state_dtype,
            decays=matrices.__contains__,
            tables=lookup_tables(self._stage_models(), shape.vocab),
            own=settings.optimizer,
            allow_code=settings.allow_code,
            scales=self._scales,
        )
        self.kernels = StepKernels()
        if across is None:  # other replicas could not be asked what they measured
            self.kernels = choose_kernels(self.optimizer, self._stage_models(), settings, device, world=self.dims.world)
        self.peer_state: list[
            TensorShard
        ] = []  # what peers on slow links share beside it: slow_links/outer_optimizer.py
        # What a checkpoint holds for others than the engine: the states of callbacks, the position in the data.
        self.restored_extras: dict[str, Any] = {}
        self.outline: NetworkOutline | None = next(
            (m.outline for m in self._stage_models() if isinstance(m, OwnStage)), None
        )
        self.first_rank_buffers: set[str] = set()  # changed by forward; the first data rank's value counts for all
        self._buffers = None
        if self.outline is not None:
            self._buffers = BufferExchange(self._stage_models(), self.meshes.group("data"))
        self.loss_scale = LossScale.of(settings.fixed_loss_scale) if settings.compute == "fp16" else None
        self.experts = ExpertBalance(self._stage_models(), self.meshes, device)
        v_shaped = is_v_shaped(settings.layout.schedule, settings.layout.virtual_pipeline)
        self._tied = None
        if shape.tied and self.dims.pipeline > 1:
            self._tied = TiedTable(self.held, self.meshes, v_shaped=v_shaped)
        self.compression = GradientCompression(self.exchange, self._stage_models(), settings)
        self.listener = None
        if across is None:  # else the noise of a replica's gradient would be taken for that of all
            self.listener = listen_for_noise(self._trained, self.meshes, self.exchange, self._stage_models())
        self.noise = NoiseScale(every=self.listener.norms.every if self.listener is not None else 1)
        self.clock = clock_of(device, compiled=settings.compile)
        if device.type == "cuda":
            time_gathers(fsdp_groups(self._stage_models()), self.clock)
        self.micro_batches = MicroBatches(
            self.parts,
            shape,
            settings,
            self.meshes,
            loss=loss,
            exchange=self.exchange,
            clock=self.clock,
            device=device,
        )
        # Called in every step: by callbacks of the loop.
        self.on_gradients_ready: Callable[[Sequence[torch.Tensor]], None] = lambda grads: None  # before their norm
        self.average_over_peers: Callable[[Sequence[torch.Tensor]], bool] = lambda grads: False  # True: means by now
        self.on_before_update: Callable[[Sequence[torch.Tensor]], None] = lambda grads: None  # averaged and clipped
        self.on_after_update: Callable[[], None] = lambda: None
        # 1 where memory changed since the last update; None where nobody compares it.
        self.compare_memory: Callable[[], torch.Tensor | None] = lambda: None
        self.wants_round: Callable[[], bool] = lambda: False  # whether this rank knows of replicas that come back
        self.spikes = SpikeDetector(0.0)  # which finite norms are skipped all the same

    def _stage_models(self) -> list[torch.nn.Module]:
        return [part.model for part in self.parts]

    # ---- values ----------------------------------------------------------------------------------------------------

    def initialise(self) -> None:
        """First values of every weight and buffer. Every rank must call this together."""
        if self.outline is not None:
            self._take_own(list(self.outline.tensors))
            return
        draw_weights(self.shards, seed=self.settings.seed, layers=self.shape.layers, scales=self._scales)
        self._clear_buffers()
        self.publish()

    def initialise_unsaved(self) -> None:
        """First values of what no checkpoint holds: for an engine that is restored. Every rank must call this."""
        if self.outline is None:
            self._clear_buffers()
        elif self.outline.unsaved:
            self._take_own(self.outline.unsaved)

    def _clear_buffers(self) -> None:
        for model in self._stage_models():
            for buffer in model.buffers():
                buffer.zero_()

    def _take_own(self, names: Sequence[str]) -> None:
        """Values as the user's own constructor makes them, of these tensors."""
        assert self.outline is not None
        settings = self.settings
        values = whole_values(self.shape, self.outline, names, seed=settings.seed, allow_code=settings.allow_code)
        copy_weights(values, self.parts, self.weights(), prefix=PREFIX)
        self.publish()

    @torch.no_grad()
    def publish(self) -> None:
        """Copy the optimizer's weights to where the model reads them, where the two are not the same storage.

        Buffers are now what all ranks have.
        """
        self.masters.copy_to_model()
        if self._buffers is not None:
            self._buffers.remember()

    def weights(self) -> list[TensorShard]:
        """The model as the optimizer sees it, frozen weights and buffers included."""
        buffers = [held.shard(held.local) for held in self.held if not held.is_parameter]
        return [*self.shards, *self._frozen, *buffers]

    def state(self) -> list[TensorShard]:
        """Everything a checkpoint must hold: weights, buffers, optimizer state."""
        return [*self.weights(), *self.optimizer.state(), *self.peer_state]

    def at_rest(self) -> list[TensorShard]:
        """What must be the same before an update as after the last one: the state and the model's copies, as stored."""
        resting = [*self.weights(), *self.optimizer.stored(), *self.masters.model_copies]
        return [shard for shard in resting if not shard.moves]

    def changed_unsaved(self) -> list[str]:
        """Buffers that no checkpoint holds and that are no longer what the constructor made them."""
        return self._buffers.changed_unsaved() if self._buffers is not None else []

    def carried(self) -> dict[str, torch.Tensor]:
        """What gradient compression carries over to the next step: this rank's own, in this layout."""
        return self.compression.state()

    def take_carried(self, state: Mapping[str, torch.Tensor], unit: float) -> None:
        """Go on with what `carried` gave when gradients were in `unit`."""
        self.micro_batches.unit = unit
        self.compression.load(state)

    @property
    def unit(self) -> float:
        """What the last gradients were multiplied by; 0 before the first."""
        return self.micro_batches.unit

    # ---- one step --------------------------------------------------------------------------------------------------

    def step(
        self,
        tokens_BS: torch.Tensor,
        targets_BS: torch.Tensor,
        *,
        lr: float,
        requests: Callable[[], Sequence[bool]] = lambda: NO_REQUESTS,
    ) -> StepResult:
        """Learn from this data rank's part of the global batch; `requests` is asked late, and heard by all ranks."""
        with self.clock.observe_waits():
            return self._run_step(tokens_BS, targets_BS, lr=lr, requests=requests)

    def _run_step(
        self, tokens_BS: torch.Tensor, targets_BS: torch.Tensor, *, lr: float, requests: Callable[[], Sequence[bool]]
    ) -> StepResult:
        sent = self.bytes_sent
        self.clock.begin()
        if self.listener is not None:
            self.listener.norms.begin()
        batch_sequences = tokens_BS.shape[0] * self.data_ranks
        batch_tokens = batch_sequences * self.settings.sequence
        scale = self.loss_scale.scale if self.loss_scale is not None else 1.0
        micro = self.settings.layout.micro_batch
        self.experts.begin(targets_BS, micro=micro, ignored=IGNORED, scale=scale / batch_sequences)
        tokens_BS, targets_BS = self._own_slices(tokens_BS), self._own_slices(targets_BS)
        loss_sum = self._forward_backward(tokens_BS, targets_BS, unit=scale / batch_tokens)
        with self.clock.phase("other"):
            moved = self._buffers_changed(loss_sum)
            grads = self._gradients()
            flags = [*requests(), *([self.wants_round()] if self.across is not None else [])]
            said, lost = self._own_numbers(loss_sum, targets_BS, requests=flags), []
            if self.across is not None:
                # Each place in a replica adds up its gradients and its numbers with the same place in the others.
                with self.clock.stall():
                    is_whole = self.across.sum([*grads, said])
                lost.append(torch.full_like(loss_sum, float(not is_whole)))
            is_mean = self.average_over_peers(grads)
            self.on_gradients_ready(grads)
            # As late as can be before the weights are used up. No rank waits to hear it: it is read with the numbers.
            rested = self.compare_memory()
            resting = [] if rested is None else [rested]
            norm_squared = squared_norm(self.shards, grads)
            heard = self._noise_numbers(targets_BS, grads, norm_squared)
        numbers = self._sum_over_ranks(norm_squared, said, heard=[*lost, *resting, *moved, *heard])
        self.clock.settle()
        squared, loss, valid, *rest = self._read(numbers)
        wanted, more = rest[: len(StepRequest)], rest[len(StepRequest) :]
        is_round_due = was_lost = has_changed = 0.0
        if self.across is not None:
            is_round_due, was_lost, *more = more
        if resting:
            has_changed, *more = more
        if has_changed or was_lost:
            self.clear_gradients()
            self.clock.end()
            raise MemoryChanged if has_changed else ReplicaLost
        moved_by_all, heard_by_all = more[: len(moved)], more[len(moved) :]
        factor = 1.0 if is_mean else batch_tokens / (max(valid, 1.0) * scale)
        norm = math.sqrt(squared) * factor if squared >= 0 else math.nan
        finite = math.isfinite(norm)
        skipped = not finite or self.spikes.is_spike(norm)
        with self.clock.phase("optimizer"):
            if not skipped:
                clip = min(1.0, self._clip / (norm + 1e-6)) if self._clip else 1.0  # 1e-6 as torch's clip_grad_norm_
                self._update_weights(grads, factor * clip, lr)
            self.clear_gradients()
            self.experts.finish(learn=not skipped)
            if any(moved_by_all):
                self._exchange_buffers()
        if self.loss_scale is not None:
            self.loss_scale = self.loss_scale.after(finite=finite)
        noise = None if skipped else noise_of_step(heard_by_all, valid=valid, factor=factor)
        self.noise.take(noise, norm)
        timed = self.clock.end()
        return StepResult(
            loss=loss / valid if valid else math.nan,
            tokens=int(valid),
            grad_norm=norm,
            skipped=skipped,
            requests=tuple(count > 0 for count in wanted),
            compute_s=timed.compute_s,
            wait_s=timed.wait_s,
            cpu_s=timed.cpu_s,
            core_wait_s=timed.core_wait_s,
            bytes_sent=None if sent is None or self.bytes_sent is None else self.bytes_sent - sent,
            noise=noise,
            noise_samples=self.noise.samples,
            phases=timed.phases,
            is_round_due=bool(is_round_due),
        )

    def evaluate(self, tokens_BS: torch.Tensor, targets_BS: torch.Tensor) -> tuple[float, int]:
        """(summed loss in nats, valid tokens) over every data rank's sequences."""
        loss, valid = self.evaluate_sums(tokens_BS, targets_BS)
        return loss, int(valid)

    @torch.no_grad()
    def evaluate_sums(
        self, tokens_BS: torch.Tensor, targets_BS: torch.Tensor, metrics: Sequence[TokenSum] = ()
    ) -> tuple[float, ...]:
        """Cross-entropy in nats, valid tokens, then each metric, summed over every data rank's sequences."""
        tokens_BS, targets_BS = self._own_slices(tokens_BS), self._own_slices(targets_BS)
        for part in self.parts:
            part.model.eval()
        sums = self.micro_batches.forward_sums(tokens_BS, targets_BS, (summed_loss, *metrics))
        if self._buffers is not None:
            self._buffers.settle()
        for part in self.parts:
            part.model.train()
        zero = torch.zeros((), dtype=torch.float64, device=self.device)
        others = [one if self._speaks_for_losses else zero for one in sums[1:]]
        said = self._own_numbers(sums[0], targets_BS, requests=NO_REQUESTS)
        numbers = self._read(self._sum_over_ranks(zero, said, heard=others))
        return (*numbers[1:3], *numbers[3 + len(NO_REQUESTS) :])

    @property
    def data_ranks(self) -> int:
        """Data ranks of the job, whether their replicas are present or not."""
        return self.dims.data * (self.across.replicas.count if self.across is not None else 1)

    @property
    def data_rank(self) -> int:
        """This rank's place among them."""
        before = self.across.replica * self.dims.data if self.across is not None else 0
        return before + self.meshes.index("data")

    def _own_slices(self, whole_BL: torch.Tensor) -> torch.Tensor:
        """This context rank's slices of the sequences."""
        whole_BL = whole_BL.to(self.device, non_blocking=True)
        if self.dims.context == 1:
            return whole_BL
        return split_sequence(whole_BL, self.meshes.index("context"), self.dims.context, dim=1)

    def trial_pass(self, tokens_BS: torch.Tensor, targets_BS: torch.Tensor) -> TrialPass:
        """Forward and backward over the first micro-batch, of a pipeline over one for each of its ranks.

        Nothing is learnt from it, and gradients are summed uncompressed: rounded to eight bits, two that are all but
        equal lie far apart. Every rank must call this; the caller puts back what forward changes
        (`guard.compiled.restore_after`).
        """
        micro = self.settings.layout.micro_batch
        count = min(tokens_BS.shape[0] // micro, self.dims.pipeline)
        if self.settings.reproducible:
            count = 1 << (count.bit_length() - 1)  # every rank holds a whole subtree of the sum
        tokens_BS, targets_BS = tokens_BS[: count * micro], targets_BS[: count * micro]
        batch_sequences = count * micro * self.dims.data
        scale = self.loss_scale.scale if self.loss_scale is not None else 1.0
        self.experts.begin(targets_BS, micro=micro, ignored=IGNORED, scale=scale / batch_sequences)
        tokens_BS, targets_BS = self._own_slices(tokens_BS), self._own_slices(targets_BS)
        if self.listener is not None:
            self.listener.norms.on = False
        before, unit = self.unit, scale / (batch_sequences * self.settings.sequence)
        self.micro_batches.unit = unit
        self.compression.compress(False)
        loss_sum = self.micro_batches.accumulate_gradients(tokens_BS, targets_BS)
        self.compression.compress(True)
        self.micro_batches.unit = before
        grads = self._gradients()
        norms = [torch.linalg.vector_norm(grad, dtype=torch.float64).to(self.device) / unit for grad in grads]
        self.clear_gradients()
        zero = torch.zeros_like(loss_sum)
        return TrialPass(
            loss_sum=loss_sum if self._speaks_for_losses else zero,
            valid=(targets_BS != IGNORED).sum().double() if self._speaks_for_losses else zero,
            norms_P=torch.stack(norms) if norms else zero[None][:0],
            random=drawn_so_far(self.device),
        )

    def _forward_backward(self, tokens_BS: torch.Tensor, targets_BS: torch.Tensor, *, unit: float) -> torch.Tensor:
        """Accumulate gradients of `unit` × the summed loss; returns the summed loss of this rank."""
        if self.unit and unit != self.unit:  # errors that compression carries over are in the unit of the last step
            self.compression.rescale(unit / self.unit)
        self.micro_batches.unit = unit
        return self.micro_batches.accumulate_gradients(tokens_BS, targets_BS)

    def _gradients(self) -> list[torch.Tensor]:
        """The summed gradient of every shard, in the optimizer's order; zeros where a parameter took no part."""
        found = []
        for held, shard in zip(self._trained, self.shards, strict=True):
            grad = self.exchange.gradient(held.tensor) if self.exchange is not None else local_gradient(held.tensor)
            found.append(torch.zeros_like(held.local, dtype=shard.tensor.dtype) if grad is None else grad)
        if self._tied is not None:
            self._tied.sum(self._trained, found)
        return found

    def more_gradients(self, tokens_BS: torch.Tensor, targets_BS: torch.Tensor) -> list[torch.Tensor]:
        """Gradients of `unit` × the summed loss of further sequences, in the middle of a step; on every rank."""
        self.clear_gradients()
        self.micro_batches.accumulate_gradients(self._own_slices(tokens_BS), self._own_slices(targets_BS))
        return self._gradients()

    def _buffers_changed(self, like: torch.Tensor) -> list[torch.Tensor]:
        """Whether forward changed buffers of a user's own network here; nothing for our own, which have none such."""
        if self._buffers is None:
            return []
        self._buffers.settle()
        return [self._buffers.changed(like)]

    def _exchange_buffers(self) -> None:
        assert self._buffers is not None
        names = self._buffers.exchange()
        self.first_rank_buffers.update(names)
        if names and self.settings.reproducible:
            raise mistake(
                "numerics.reproducible",
                f"forward changes the buffer {names[0]}",
                why="on several ranks the first one's value counts, so its bits depend on how many there are",
                fix="keep it constant, or set numerics.reproducible = false",
            )

    def _noise_numbers(
        self, targets_BS: torch.Tensor, grads: Sequence[torch.Tensor], squared: torch.Tensor
    ) -> list[torch.Tensor]:
        """What this rank adds to the estimate of the gradient's noise. Without context ranks sequences are whole."""
        if self.listener is None:
            return []
        return self.listener.own_numbers(
            self.shards,
            grads,
            squared.to(self.device),
            targets_BS,
            micro=self.settings.layout.micro_batch,
            ignored=IGNORED,
            speaks=self._speaks_for_losses,
        )

    @property
    def _speaks_for_losses(self) -> bool:
        """Whether this rank speaks for the losses and tokens of its sequences."""
        return any(part.model.head is not None for part in self.parts) and self.meshes.index("tensor") == 0

    def _own_numbers(
        self, loss_sum: torch.Tensor, targets_BS: torch.Tensor, *, requests: Sequence[bool]
    ) -> torch.Tensor:
        """What this rank adds to the step's numbers: summed loss, valid tokens, and its requests."""
        valid = (targets_BS != IGNORED).sum().double() if self._speaks_for_losses else torch.zeros_like(loss_sum)
        loss = loss_sum if self._speaks_for_losses else torch.zeros_like(loss_sum)
        flags = [torch.full_like(loss_sum, float(one)) for one in requests]
        return torch.stack([loss, valid, *flags])

    def _sum_over_ranks(
        self, squared: torch.Tensor, said: torch.Tensor, *, heard: Sequence[torch.Tensor] = ()
    ) -> torch.Tensor:
        """Sum the step's few numbers over all ranks, `heard` behind: the only collective that every rank joins."""
        behind = [torch.stack(list(heard))] if heard else []
        numbers = torch.cat([squared.to(self.device).view(1), said, *behind])
        if self.dims.world > 1:
            dist.all_reduce(numbers)
        return numbers

    @torch.no_grad()
    def _update_weights(self, grads: Sequence[torch.Tensor], factor: float, lr: float) -> None:
        scale_gradients(grads, factor)
        self.on_before_update(grads)
        self.masters.update(self.optimizer, self.shards, grads, lr)
        self.on_after_update()

    @property
    def bytes_sent(self) -> int | None:
        """Bytes that compressed gradients have put on the wire so far; None without compression."""
        return self.compression.bytes_sent

    def clear_gradients(self) -> None:
        """Forget the gradients of a step, whether it was learnt from or not."""
        for held, shard in zip(self._trained, self.shards, strict=True):
            held.tensor.grad = None
            shard.tensor.grad = None
