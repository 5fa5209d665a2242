"""Gradient exchange of unsharded weights: dense ones over all data ranks, each expert over those that hold it."""

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
        """Let `ear` hear gradients before they are summed; returns whether it hears each micro-batch."""

    def begin(self, micro_batches: int) -> None:
        """Before the first backward of a step."""

    def micro_batch_done(self) -> None:
        """After each backward."""

    def finish(self) -> None:
        """After the last one: everything is summed when this returns."""

    def gradient(self, param: torch.Tensor) -> torch.Tensor:
        """The sum for one parameter."""


class GradientExchange:
    """All parameters of this rank, each with its own group."""

    def __init__(self, trained: Sequence[StageTensor], meshes: Meshes, settings: Settings) -> None:
        dense = meshes.dense.get_group("copies")
        expert = meshes.experts.get_group("copies") if meshes.experts is not None else dense
        split = {id(held.tensor) for held in trained if _is_expert(held, meshes)}
        self._all: list[Exchange] = []
        self._codecs: list[Codec] = []
        self._of: dict[int, Exchange] = {}
        for group, members in (
            (dense, [held.tensor for held in trained if id(held.tensor) not in split]),
            (expert, [held.tensor for held in trained if id(held.tensor) in split]),
        ):
            if members:
                made: Exchange
                if settings.reproducible:
                    made = TreeReplicas(members, group, reduce=settings.reduce_dtype)
                else:
                    codec = build_codec(settings.layout.compression) if settings.layout.compression != "none" else None
                    self._codecs += [codec] if codec is not None else []
                    made = Replicas(
                        members, group, reduce=settings.reduce_dtype, codec=codec, bucket_bytes=bucket_bytes(settings)
                    )
                self._all.append(made)
                self._of |= {id(tensor): made for tensor in members}

    @property
    def bytes_sent(self) -> int | None:
        """Bytes compressed exchange has put on the wire so far; None without compression."""
        return sum(codec.bytes_sent for codec in self._codecs) if self._codecs else None

    def compress(self, on: bool) -> None:
        """Compress gradients, where they are to be; or sum them as they are for a while."""
        for codec in self._codecs:
            codec.is_off = not on

    def state(self) -> dict[str, torch.Tensor]:
        """What compression carries over to the next step."""
        return {
            f"{number}/{name}": one for number, codec in enumerate(self._codecs) for name, one in codec.state().items()
        }

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Go on from what `state` gave."""
        for number, codec in enumerate(self._codecs):
            start = f"{number}/"
            codec.load({name.removeprefix(start): one for name, one in state.items() if name.startswith(start)})

    def rescale(self, factor: float) -> None:
        """Gradients come in a unit `factor` times the last one's: so must the errors carried over."""
        for codec in self._codecs:
            codec.rescale(factor)

    def listen(self, ear: LocalGradientWatcher, *, each: bool) -> bool:
        """Let `ear` hear gradients before they are summed; returns whether it hears each micro-batch."""
        heard = [one.listen(ear, each=each) for one in self._all]
        return any(heard)

    def begin(self, micro_batches: int) -> None:
        """Before the first backward of a step."""
        for one in self._all:
            one.begin(micro_batches)

    def micro_batch_done(self) -> None:
        """After each backward."""
        for one in self._all:
            one.micro_batch_done()

    def finish(self) -> None:
        """After the last backward."""
        for one in self._all:
            one.finish()

    def gradient(self, param: torch.Tensor) -> torch.Tensor:
        """The summed gradient of a parameter."""
        return self._of[id(param)].gradient(param)


def bucket_bytes(settings: Settings) -> int:
    """Of one bucket: the job's `comm.bucket_mib`, or what DistributedDataParallel takes."""
    return round(settings.bucket_mib * 2**20) if settings.bucket_mib is not None else BUCKET_BYTES


def _is_expert(held: StageTensor, meshes: Meshes) -> bool:
    if meshes.experts is None:
        return False
    group = meshes.experts.get_group("expert")
    return any(cut.group is group for cut in held.box.cuts)


# The true global gradient norm under any layout, in the one small collective a step needs.


def squared_norm(shards: Sequence[TensorShard], grads: Sequence[torch.Tensor]) -> torch.Tensor:
    """This rank's share of the squared norm: summed over all ranks of the job it is the whole, each value once.

    Copies that another rank counts add nothing, unless one of them is not finite: that is heard of from every rank.
    """
    total = torch.zeros((), dtype=torch.float64, device=grads[0].device if grads else None)
    for owner, weight in ((True, 1.0), (False, 0.0)):
        mine = [grad for shard, grad in zip(shards, grads, strict=True) if shard.owner is owner and grad.numel()]
        if mine:
            # Norms first, squares after: foreach makes one pass over the gradients without a temporary copy.
            wide = torch.promote_types(mine[0].dtype, torch.float32)
            total += torch.stack(torch._foreach_norm(mine, 2, dtype=wide)).double().square().sum() * weight
    return total


def scale_gradients(grads: Sequence[torch.Tensor], factor: float) -> None:
    """Multiply every gradient in place; nothing is done for exactly one."""
    if factor != 1.0 and grads:
        torch._foreach_mul_(list(grads), factor)


# A tied embedding under a pipeline: the first and the last stage hold a copy each and must learn the same.


class TiedTable:
    """Adds up the two gradients of the table, so that both copies take the same step."""

    def __init__(self, held: Sequence[StageTensor], meshes: Meshes, *, v_shaped: bool) -> None:
        mine = [one for one in held if one.name == TIED[0]]
        self._both_here = v_shaped and len(mine) == 2  # the pipeline's end comes back to its beginning
        self._pair: ProcessGroup | None = None
        ranks, last = meshes.dims.stage, meshes.dims.pipeline - 1
        if v_shaped:
            return
        for place in range(ranks):
            group = dist.new_group([place, last * ranks + place])
            if dist.get_rank() % ranks == place and mine:
                self._pair = group

    def sum(self, held: Sequence[StageTensor], grads: Sequence[torch.Tensor]) -> None:
        """In place."""
        found = [grad for one, grad in zip(held, grads, strict=True) if one.name == TIED[0]]
        if self._both_here:
            total = found[0] + found[1]
            for grad in found:
                grad.copy_(total)
        elif self._pair is not None and found:
            dist.all_reduce(found[0], group=self._pair)
