"""Gradient exchange of unsharded weights, the global gradient norm, and the sum for a tied embedding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from phalanx.train.models.decoder import TIED
from phalanx.train.parallel.compress import Codec, build_codec
from phalanx.train.parallel.dims import Meshes
from phalanx.train.parallel.replicate import BUCKET_BYTES, LocalGradientWatcher, Replicas
from phalanx.train.parallel.reproducible import TreeReplicas
from phalanx.train.parallel.tensor_shard import TensorShard

if TYPE_CHECKING:
    from phalanx.train.model_stages import StageTensor
    from phalanx.train.rank_settings import Settings


class Exchange(Protocol):
    """Sums the gradients of some parameters over the ranks that hold them."""

    def listen(self, ear: LocalGradientWatcher, *, each: bool) -> bool:
        """Pass gradients to `ear` before they are summed; return whether it gets those of each micro-batch."""

    def begin(self, micro_batches: int) -> None:
        """Prepare a step, before its first backward."""

    def micro_batch_done(self) -> None:
        """Account for one micro-batch, after its backward."""

    def finish(self) -> None:
        """Complete all sums, after the last backward of the step."""

    def gradient(self, param: torch.Tensor) -> torch.Tensor:
        """Return the summed gradient of a parameter."""


class GradientExchange:
    """Gradient exchange of all parameters: dense ones over all data ranks, experts over their holders."""

    def __init__(self, trained: Sequence[StageTensor], meshes: Meshes, settings: Settings) -> None:
        dense = meshes.dense.get_group("copies")
        expert = meshes.experts.get_group("copies") if meshes.experts is not None else dense
        expert_ids = {id(stage_tensor.tensor) for stage_tensor in trained if _is_expert(stage_tensor, meshes)}
        self._all: list[Exchange] = []
        self._codecs: list[Codec] = []
        self._of: dict[int, Exchange] = {}
        for group, members in (
            (dense, [stage_tensor.tensor for stage_tensor in trained if id(stage_tensor.tensor) not in expert_ids]),
            (expert, [stage_tensor.tensor for stage_tensor in trained if id(stage_tensor.tensor) in expert_ids]),
        ):
            if members:
                exchange: Exchange
                if settings.reproducible:
                    exchange = TreeReplicas(members, group, reduce=settings.reduce_dtype)
                else:
                    codec = build_codec(settings.layout.compression) if settings.layout.compression != "none" else None
                    self._codecs += [codec] if codec is not None else []
                    exchange = Replicas(
                        members, group, reduce=settings.reduce_dtype, codec=codec, bucket_bytes=bucket_bytes(settings)
                    )
                self._all.append(exchange)
                self._of |= {id(tensor): exchange for tensor in members}

    @property
    def bytes_sent(self) -> int | None:
        """Bytes that compressed exchange has sent so far; None without compression."""
        return sum(codec.bytes_sent for codec in self._codecs) if self._codecs else None

    def compress(self, on: bool) -> None:
        """Switch compression on where the job has it, or off for exact sums."""
        for codec in self._codecs:
            codec.is_off = not on

    def state(self) -> dict[str, torch.Tensor]:
        """Return the tensors that compression carries to the next step."""
        return {
            f"{number}/{name}": tensor
            for number, codec in enumerate(self._codecs)
            for name, tensor in codec.state().items()
        }

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restore the tensors returned by `state`."""
        for number, codec in enumerate(self._codecs):
            prefix = f"{number}/"
            codec.load({name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)})

    def rescale(self, factor: float) -> None:
        """Multiply the carried errors by `factor`, by which the unit of gradients has changed."""
        for codec in self._codecs:
            codec.rescale(factor)

    def listen(self, ear: LocalGradientWatcher, *, each: bool) -> bool:
        """Pass gradients to `ear` before they are summed; return whether it gets those of each micro-batch."""
        gets_each = [exchange.listen(ear, each=each) for exchange in self._all]
        return any(gets_each)

    def begin(self, micro_batches: int) -> None:
        """Prepare a step, before its first backward."""
        for exchange in self._all:
            exchange.begin(micro_batches)

    def micro_batch_done(self) -> None:
        """Account for one micro-batch, after its backward."""
        for exchange in self._all:
            exchange.micro_batch_done()

    def finish(self) -> None:
        """Complete all sums, after the last backward of the step."""
        for exchange in self._all:
            exchange.finish()

    def gradient(self, param: torch.Tensor) -> torch.Tensor:
        """The summed gradient of a parameter."""
        return self._of[id(param)].gradient(param)


def bucket_bytes(settings: Settings) -> int:
    """Return the size of a bucket: the job's `comm.bucket_mib`, or DistributedDataParallel's default."""
    return round(settings.bucket_mib * 2**20) if settings.bucket_mib is not None else BUCKET_BYTES


def _is_expert(held: StageTensor, meshes: Meshes) -> bool:
    if meshes.experts is None:
        return False
    group = meshes.experts.get_group("expert")
    return any(cut.group is group for cut in held.box.cuts)


# The global gradient norm under any layout, which needs one small collective per step.


def squared_norm(shards: Sequence[TensorShard], grads: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return this rank's part of the squared gradient norm; summed over all ranks it counts each value once.

    Copies that another rank counts add 0, or NaN if one of them is not finite, so that every rank's bad values are
    noticed.
    """
    total = torch.zeros((), dtype=torch.float64, device=grads[0].device if grads else None)
    # A weight of 0 still turns a norm that is infinite or NaN into NaN.
    for owner, weight in ((True, 1.0), (False, 0.0)):
        counted_grads = [
            grad for shard, grad in zip(shards, grads, strict=True) if shard.owner is owner and grad.numel()
        ]
        if counted_grads:
            # Norms first, squares after: foreach makes one pass over the gradients without a temporary copy.
            norm_dtype = torch.promote_types(counted_grads[0].dtype, torch.float32)
            total += (
                torch.stack(torch._foreach_norm(counted_grads, 2, dtype=norm_dtype)).double().square().sum() * weight
            )
    return total


def scale_gradients(grads: Sequence[torch.Tensor], factor: float) -> None:
    """Multiply every gradient in place; a factor of exactly 1 does nothing."""
    if factor != 1.0 and grads:
        torch._foreach_mul_(list(grads), factor)


# A tied embedding under a pipeline: the first and the last stage each hold a copy, and both must be updated alike.


class TiedTable:
    """Sums the two gradients of a tied embedding table, so that both copies take the same step."""

    def __init__(self, held: Sequence[StageTensor], meshes: Meshes, *, v_shaped: bool) -> None:
        tables = [stage_tensor for stage_tensor in held if stage_tensor.name == TIED[0]]
        # a V-shaped pipeline has its first and last stage on the same rank
        self._both_here = v_shaped and len(tables) == 2
        self._pair: ProcessGroup | None = None
        ranks, last = meshes.dims.stage, meshes.dims.pipeline - 1
        if v_shaped:
            return
        for stage_rank in range(ranks):
            group = dist.new_group([stage_rank, last * ranks + stage_rank])
            if dist.get_rank() % ranks == stage_rank and tables:
                self._pair = group

    def sum(self, held: Sequence[StageTensor], grads: Sequence[torch.Tensor]) -> None:
        """Sum the table's gradients in place."""
        table_grads = [grad for stage_tensor, grad in zip(held, grads, strict=True) if stage_tensor.name == TIED[0]]
        if self._both_here:
            total = table_grads[0] + table_grads[1]
            for grad in table_grads:
                grad.copy_(total)
        elif self._pair is not None and table_grads:
            dist.all_reduce(table_grads[0], group=self._pair)
