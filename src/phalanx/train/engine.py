"""The engine: one optimizer step of this rank's model, under any layout.

A step runs forward and backward over the micro-batches, sums a few numbers over all ranks (loss, valid tokens,
squared gradient norm, requests), and updates the weights.

The loss of a step is the sum over all valid tokens of the global batch, divided by their number. Backward runs on the
sum divided by the batch's size in tokens, which is known beforehand; the number of valid tokens is summed over the
ranks together with the gradient norm, and the correction is multiplied into the clipping factor. So a step needs one
small collective, not three.

Shapes in tensor names: B sequences of this data rank, S tokens of a sequence on this context rank, L tokens of a
whole sequence, P parameters.
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
    """This rank's stages of the model, its optimizer and the exchange of gradients.

    Every rank of the job builds an engine and calls the same methods in the same order, since most of them use
    collectives.
    """

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
        # The other model replicas, each a torch world of its own; None where all ranks are one world.
        self.across = across
        self._clip, self._read = optim.clip, read
        self.dims = ParallelDims.of(settings.layout)
        self.meshes: Meshes = build_meshes(self.dims, device.type, experts=shape.is_moe)
        if settings.compile:
            # Imported only here: it imports dynamo, which takes seconds.
            from phalanx.train.parallel.compiling import prepare_compiler

            prepare_compiler(self.meshes)
        # Compiled, the loss reads the logits in their own format and never holds a float32 copy of them.
        loss: TokenSum = own_loss(settings, shape.vocab) if settings.loss else summed_loss
        if settings.compile:
            loss = torch.compile(loss, backend=settings.compile_backend)
        self.parts: list[ModelStage] = build_stages(shape, settings, self.meshes, device)
        self.held: list[StageTensor] = stage_tensors(self.parts, self.meshes, tied=shape.tied)
        self._trained = [stage_tensor for stage_tensor in self.held if stage_tensor.trained]
        self.exchange = None if self.dims.zero else GradientExchange(self._trained, self.meshes, settings)
        parameters = [stage_tensor for stage_tensor in self.held if stage_tensor.is_parameter]
        self.masters = MasterWeights(parameters, settings)
        pairs = list(zip(self.masters.shards, parameters, strict=True))
        self.shards: list[TensorShard] = [shard for shard, stage_tensor in pairs if stage_tensor.trained]
        self._frozen: list[TensorShard] = [shard for shard, stage_tensor in pairs if not stage_tensor.trained]
        # Weight decay is for matrices: norms and biases, of Phalanx's models and of a user's network, are not decayed.
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
        # Not with model replicas: they do not share measurements, and could choose different kernels.
        if across is None:
            self.kernels = choose_kernels(self.optimizer, self._stage_models(), settings, device, world=self.dims.world)
        # State of the outer optimizer of peers on slow links (slow_links/outer_optimizer.py).
        self.peer_state: list[TensorShard] = []
        # The part of a restored checkpoint that is not the engine's: states of callbacks, the position in the data.
        self.restored_extras: dict[str, Any] = {}
        self.outline: NetworkOutline | None = next(
            (m.outline for m in self._stage_models() if isinstance(m, OwnStage)), None
        )
        # Buffers that forward changes: the value of the first data rank is copied to all.
        self.first_rank_buffers: set[str] = set()
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
        # Not with model replicas: the noise of one replica's gradient would be taken for that of all.
        if across is None:
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
        # Hooks that are called in every step; callbacks and peers replace them.
        # The summed gradients, before their norm is computed.
        self.on_gradients_ready: Callable[[Sequence[torch.Tensor]], None] = lambda grads: None
        # Replaces the gradients by their mean over peers on slow links; returns True if it did.
        self.average_over_peers: Callable[[Sequence[torch.Tensor]], bool] = lambda grads: False
        # The gradients as the optimizer gets them: averaged and clipped.
        self.on_before_update: Callable[[Sequence[torch.Tensor]], None] = lambda grads: None
        self.on_after_update: Callable[[], None] = lambda: None
        # Returns 1 if this rank's memory changed since the last update, else 0; None where memory is not compared.
        self.compare_memory: Callable[[], torch.Tensor | None] = lambda: None
        # Returns True if this rank knows of model replicas that come back.
        self.wants_round: Callable[[], bool] = lambda: False
        # Steps whose gradient norm is a spike are skipped; factor 0 finds none.
        self.spikes = SpikeDetector(0.0)

    def _stage_models(self) -> list[torch.nn.Module]:
        return [part.model for part in self.parts]

    # ---- values ----------------------------------------------------------------------------------------------------

    def initialise(self) -> None:
        """Set every weight and buffer to its first value. Every rank must call this together."""
        if self.outline is not None:
            self._take_own(list(self.outline.tensors))
            return
        draw_weights(self.shards, seed=self.settings.seed, layers=self.shape.layers, scales=self._scales)
        self._clear_buffers()
        self.publish()

    def initialise_unsaved(self) -> None:
        """Set the first values of buffers that no checkpoint holds, before a checkpoint is restored.

        Every rank must call this together.
        """
        if self.outline is None:
            self._clear_buffers()
        elif self.outline.unsaved:
            self._take_own(self.outline.unsaved)

    def _clear_buffers(self) -> None:
        for model in self._stage_models():
            for buffer in model.buffers():
                buffer.zero_()

    def _take_own(self, names: Sequence[str]) -> None:
        """Set the named tensors to the values that the constructor of the user's own network gives them."""
        assert self.outline is not None
        settings = self.settings
        values = whole_values(self.shape, self.outline, names, seed=settings.seed, allow_code=settings.allow_code)
        copy_weights(values, self.parts, self.weights(), prefix=PREFIX)
        self.publish()

    @torch.no_grad()
    def publish(self) -> None:
        """Copy the optimizer's weights to the model's parameters, where the two are not the same storage.

        Also records that all ranks now have the same buffers.
        """
        self.masters.copy_to_model()
        if self._buffers is not None:
            self._buffers.remember()

    def weights(self) -> list[TensorShard]:
        """Return the weights as the optimizer stores them, with frozen weights and buffers."""
        buffers = [
            stage_tensor.shard(stage_tensor.local) for stage_tensor in self.held if not stage_tensor.is_parameter
        ]
        return [*self.shards, *self._frozen, *buffers]

    def state(self) -> list[TensorShard]:
        """Return everything that a checkpoint holds.

        These are weights, buffers, the optimizer's state, and the state that peers on slow links share.
        """
        return [*self.weights(), *self.optimizer.state(), *self.peer_state]

    def at_rest(self) -> list[TensorShard]:
        """Return the shards that must not change between two updates, as they are stored.

        These are weights, optimizer state and the model's copies of the weights; not buffers that forward changes.
        """
        shards = [*self.weights(), *self.optimizer.stored(), *self.masters.model_copies]
        return [shard for shard in shards if not shard.moves]

    def changed_unsaved(self) -> list[str]:
        """Return the names of buffers that no checkpoint holds and that forward has changed since construction."""
        return self._buffers.changed_unsaved() if self._buffers is not None else []

    def carried(self) -> dict[str, torch.Tensor]:
        """Return the errors that gradient compression carries over to the next step.

        They belong to this rank in this layout.
        """
        return self.compression.state()

    def take_carried(self, state: Mapping[str, torch.Tensor], unit: float) -> None:
        """Restore what `carried` returned, from a time when gradients were multiplied by `unit`."""
        self.micro_batches.unit = unit
        self.compression.load(state)

    @property
    def unit(self) -> float:
        """The factor by which the last gradients were multiplied; 0 before the first step."""
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
        """Take one optimizer step on this data rank's part of the global batch.

        Every rank must call this together. `requests` returns this rank's requests by StepRequest; it is called as
        late as possible, and the result holds the requests of all ranks.

        Raises MemoryChanged if the memory of some rank changed since the last update, and ReplicaLost if a model
        replica was lost in this step. In both cases no rank has updated anything.
        """
        with self.clock.observe_waits():
            return self._run_step(tokens_BS, targets_BS, lr=lr, requests=requests)

    def _run_step(
        self, tokens_BS: torch.Tensor, targets_BS: torch.Tensor, *, lr: float, requests: Callable[[], Sequence[bool]]
    ) -> StepResult:
        """Do the work of `step`, inside the clock's record of waits."""
        sent_before = self.bytes_sent
        self.clock.begin()
        if self.listener is not None:
            self.listener.norms.begin()
        # Known without a collective: every data rank has the same number of sequences.
        batch_sequences = tokens_BS.shape[0] * self.data_ranks
        batch_tokens = batch_sequences * self.settings.sequence
        scale = self.loss_scale.scale if self.loss_scale is not None else 1.0
        micro = self.settings.layout.micro_batch
        self.experts.begin(targets_BS, micro=micro, ignored=IGNORED, scale=scale / batch_sequences)
        tokens_BS, targets_BS = self._own_slices(tokens_BS), self._own_slices(targets_BS)
        loss_sum = self._forward_backward(tokens_BS, targets_BS, unit=scale / batch_tokens)
        with self.clock.phase("other"):
            buffer_flags = self._buffers_changed(loss_sum)
            grads = self._gradients()
            # Called after backward, so that a request made meanwhile is met in this step.
            flags = [*requests(), *([self.wants_round()] if self.across is not None else [])]
            own_numbers, lost_flags = self._own_numbers(loss_sum, targets_BS, requests=flags), []
            if self.across is not None:
                # Each rank sums its gradients and numbers with the ranks at the same place in the other replicas.
                with self.clock.stall():
                    is_complete = self.across.sum([*grads, own_numbers])
                lost_flags.append(torch.full_like(loss_sum, float(not is_complete)))
            is_mean = self.average_over_peers(grads)
            self.on_gradients_ready(grads)
            # As late as possible before the update. The result stays on the device until the sums below are read.
            memory_flag = self.compare_memory()
            memory_flags = [] if memory_flag is None else [memory_flag]
            norm_squared = squared_norm(self.shards, grads)
            noise_numbers = self._noise_numbers(targets_BS, grads, norm_squared)
        numbers = self._sum_over_ranks(
            norm_squared, own_numbers, heard=[*lost_flags, *memory_flags, *buffer_flags, *noise_numbers]
        )
        self.clock.settle()
        # In the order in which they were concatenated; this read is where the host waits for the device.
        squared, loss, valid, *counts = self._read(numbers)
        request_counts, extra = counts[: len(StepRequest)], counts[len(StepRequest) :]
        is_round_due = was_lost = has_changed = 0.0
        if self.across is not None:
            is_round_due, was_lost, *extra = extra
        if memory_flags:
            has_changed, *extra = extra
        # Every rank has the same sums, so all raise, skip or update alike.
        if has_changed or was_lost:
            self.clear_gradients()
            self.clock.end()
            raise MemoryChanged if has_changed else ReplicaLost
        buffer_counts, noise_sums = extra[: len(buffer_flags)], extra[len(buffer_flags) :]
        # Backward summed losses × scale / batch_tokens; the factor makes that their mean over the valid tokens.
        factor = 1.0 if is_mean else batch_tokens / (max(valid, 1.0) * scale)
        norm = math.sqrt(squared) * factor if squared >= 0 else math.nan
        finite = math.isfinite(norm)
        skipped = not finite or self.spikes.is_spike(norm)
        with self.clock.phase("optimizer"):
            if not skipped:
                # 1e-6 as torch's clip_grad_norm_
                clip = min(1.0, self._clip / (norm + 1e-6)) if self._clip else 1.0
                self._update_weights(grads, factor * clip, lr)
            self.clear_gradients()
            self.experts.finish(learn=not skipped)
            if any(buffer_counts):
                self._exchange_buffers()
        if self.loss_scale is not None:
            self.loss_scale = self.loss_scale.after(finite=finite)
        noise = None if skipped else noise_of_step(noise_sums, valid=valid, factor=factor)
        self.noise.take(noise, norm)
        timing = self.clock.end()
        return StepResult(
            loss=loss / valid if valid else math.nan,
            tokens=int(valid),
            grad_norm=norm,
            skipped=skipped,
            requests=tuple(count > 0 for count in request_counts),
            compute_s=timing.compute_s,
            wait_s=timing.wait_s,
            cpu_s=timing.cpu_s,
            core_wait_s=timing.core_wait_s,
            bytes_sent=None if sent_before is None or self.bytes_sent is None else self.bytes_sent - sent_before,
            noise=noise,
            noise_samples=self.noise.samples,
            phases=timing.phases,
            is_round_due=bool(is_round_due),
        )

    def evaluate(self, tokens_BS: torch.Tensor, targets_BS: torch.Tensor) -> tuple[float, int]:
        """Return (summed loss in nats, valid tokens) over every data rank's sequences."""
        loss, valid = self.evaluate_sums(tokens_BS, targets_BS)
        return loss, int(valid)

    @torch.no_grad()
    def evaluate_sums(
        self, tokens_BS: torch.Tensor, targets_BS: torch.Tensor, metrics: Sequence[TokenSum] = ()
    ) -> tuple[float, ...]:
        """Evaluate the model and return the sums over every data rank's sequences.

        The first is the cross-entropy in nats, the second the number of valid tokens, then one sum per metric.
        """
        tokens_BS, targets_BS = self._own_slices(tokens_BS), self._own_slices(targets_BS)
        for part in self.parts:
            part.model.eval()
        sums = self.micro_batches.forward_sums(tokens_BS, targets_BS, (summed_loss, *metrics))
        if self._buffers is not None:
            self._buffers.settle()
        for part in self.parts:
            part.model.train()
        zero = torch.zeros((), dtype=torch.float64, device=self.device)
        metric_sums = [metric_sum if self._speaks_for_losses else zero for metric_sum in sums[1:]]
        own_numbers = self._own_numbers(sums[0], targets_BS, requests=NO_REQUESTS)
        numbers = self._read(self._sum_over_ranks(zero, own_numbers, heard=metric_sums))
        return (*numbers[1:3], *numbers[3 + len(NO_REQUESTS) :])

    @property
    def data_ranks(self) -> int:
        """Data ranks of the job in all model replicas, present or not."""
        return self.dims.data * (self.across.replicas.count if self.across is not None else 1)

    @property
    def data_rank(self) -> int:
        """This rank's index among the `data_ranks`."""
        before = self.across.replica * self.dims.data if self.across is not None else 0
        return before + self.meshes.index("data")

    def _own_slices(self, whole_BL: torch.Tensor) -> torch.Tensor:
        """Return this context rank's slices of whole sequences, on the device."""
        whole_BL = whole_BL.to(self.device, non_blocking=True)
        if self.dims.context == 1:
            return whole_BL
        return split_sequence(whole_BL, self.meshes.index("context"), self.dims.context, dim=1)

    def trial_pass(self, tokens_BS: torch.Tensor, targets_BS: torch.Tensor) -> TrialPass:
        """Run forward and backward on the first micro-batches, without an update.

        One micro-batch is used, in a pipeline one per pipeline rank. Gradients are summed uncompressed: compression
        rounds them to eight bits, after which two gradients that are almost equal may differ by a whole rounding
        step. Every rank must call this; the caller restores what forward changes (`guard.compiled.restore_after`).
        """
        micro = self.settings.layout.micro_batch
        count = min(tokens_BS.shape[0] // micro, self.dims.pipeline)
        if self.settings.reproducible:
            # A power of two: in reproducible sums every rank holds a whole subtree.
            count = 1 << (count.bit_length() - 1)
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
        """Accumulate gradients of `unit` × the summed loss; return the summed loss of this rank."""
        # Errors that compression carries over are in the unit of the last step.
        if self.unit and unit != self.unit:
            self.compression.rescale(unit / self.unit)
        self.micro_batches.unit = unit
        return self.micro_batches.accumulate_gradients(tokens_BS, targets_BS)

    def _gradients(self) -> list[torch.Tensor]:
        """Return the summed gradient of every shard, in the optimizer's order.

        Parameters that took no part in the step have zeros.
        """
        grads = []
        for stage_tensor, shard in zip(self._trained, self.shards, strict=True):
            grad = (
                self.exchange.gradient(stage_tensor.tensor)
                if self.exchange is not None
                else local_gradient(stage_tensor.tensor)
            )
            grads.append(torch.zeros_like(stage_tensor.local, dtype=shard.tensor.dtype) if grad is None else grad)
        if self._tied is not None:
            self._tied.sum(self._trained, grads)
        return grads

    def more_gradients(self, tokens_BS: torch.Tensor, targets_BS: torch.Tensor) -> list[torch.Tensor]:
        """Return gradients of `unit` × the summed loss of further sequences, in the middle of a step.

        Clears the gradients of the step. Every rank must call this together.
        """
        self.clear_gradients()
        self.micro_batches.accumulate_gradients(self._own_slices(tokens_BS), self._own_slices(targets_BS))
        return self._gradients()

    def _buffers_changed(self, like: torch.Tensor) -> list[torch.Tensor]:
        """Return one flag on the device: 1 if forward changed a buffer of the user's own network on this rank.

        Empty for Phalanx's own models, whose buffers forward does not exchange.
        """
        if self._buffers is None:
            return []
        self._buffers.settle()
        return [self._buffers.changed(like)]

    def _exchange_buffers(self) -> None:
        """Copy buffers that forward changed from the first data rank to all; raise if runs must be reproducible."""
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
        """Return this rank's contributions to the estimate of the gradient's noise.

        Empty where noise is not measured, as with context ranks: here `targets_BS` are whole sequences.
        """
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
        """True if this rank counts the losses and tokens of its sequences.

        Of the ranks that compute the same sequences, only one that holds the head, at tensor rank 0, counts them.
        """
        return any(part.model.head is not None for part in self.parts) and self.meshes.index("tensor") == 0

    def _own_numbers(
        self, loss_sum: torch.Tensor, targets_BS: torch.Tensor, *, requests: Sequence[bool]
    ) -> torch.Tensor:
        """Return this rank's terms of the step's sums: summed loss, valid tokens, and its requests as 0 or 1."""
        valid = (targets_BS != IGNORED).sum().double() if self._speaks_for_losses else torch.zeros_like(loss_sum)
        loss = loss_sum if self._speaks_for_losses else torch.zeros_like(loss_sum)
        flags = [torch.full_like(loss_sum, float(request)) for request in requests]
        return torch.stack([loss, valid, *flags])

    def _sum_over_ranks(
        self, squared: torch.Tensor, said: torch.Tensor, *, heard: Sequence[torch.Tensor] = ()
    ) -> torch.Tensor:
        """Sum the step's few numbers over all ranks, `heard` at the end.

        This is the only collective of a step that every rank joins.
        """
        extra = [torch.stack(list(heard))] if heard else []
        numbers = torch.cat([squared.to(self.device).view(1), said, *extra])
        if self.dims.world > 1:
            dist.all_reduce(numbers)
        return numbers

    @torch.no_grad()
    def _update_weights(self, grads: Sequence[torch.Tensor], factor: float, lr: float) -> None:
        """Scale the gradients by `factor` and update the weights, with the hooks before and after."""
        scale_gradients(grads, factor)
        self.on_before_update(grads)
        self.masters.update(self.optimizer, self.shards, grads, lr)
        self.on_after_update()

    @property
    def bytes_sent(self) -> int | None:
        """Bytes that compressed gradients have put on the wire so far; None without compression."""
        return self.compression.bytes_sent

    def clear_gradients(self) -> None:
        """Release the gradients of a step, whether it updated the weights or not."""
        for stage_tensor, shard in zip(self._trained, self.shards, strict=True):
            stage_tensor.tensor.grad = None
            shard.tensor.grad = None
