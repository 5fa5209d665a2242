"""From the boxes of several ranks to the whole tensor, and sums over all of it.

A dimension is cut as torch.chunk cuts: parts of ceil(n / ranks), the last ones smaller or empty. Where several groups
cut one dimension, the outermost cut first and the next one cut each of its parts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from phalanx.train.parallel.tensor_shard import TensorShard


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """One group's cut through one dimension that was `extent` long before it."""

    dim: int
    group: ProcessGroup
    extent: int

    @property
    def ranks(self) -> int:
        """Parts, the empty ones included."""
        return self.group.size()

    @property
    def part(self) -> int:
        """The longest part."""
        return -(-self.extent // self.ranks)

    def length(self, rank: int) -> int:
        """The part of one rank of the group."""
        return max(0, min(self.part, self.extent - rank * self.part))


def cuts(piece: TensorShard) -> list[Cut]:
    """The cuts that made a piece, last one first: undo them in this order."""
    found = []
    for dim, groups in piece.groups.items():
        extent = piece.shape[dim]
        for group in groups:
            cut = Cut(dim=dim, group=group, extent=extent)
            found.append(cut)
            extent = cut.length(group.rank())
    return found[::-1]


def gather(piece: TensorShard, tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor of which every rank holds a box like `piece`'s. All ranks of its groups must call this."""
    for cut in cuts(piece):
        padded = pad(tensor, cut)
        parts = [torch.empty_like(padded) for _ in range(cut.ranks)]
        dist.all_gather(parts, padded, group=cut.group)
        tensor = join(parts, cut)
    return tensor


def box(piece: TensorShard, whole: torch.Tensor) -> torch.Tensor:
    """This rank's part of a whole tensor, as a view."""
    for dim, (start, length) in enumerate(zip(piece.start, piece.tensor.shape, strict=True)):
        whole = whole.narrow(dim, start, length)
    return whole


def pad(tensor: torch.Tensor, cut: Cut) -> torch.Tensor:
    """The tensor, contiguous, with zeros behind it up to the longest part: collectives move equal sizes."""
    missing = cut.part - tensor.shape[cut.dim]
    if missing:
        shape = list(tensor.shape)
        shape[cut.dim] = missing
        tensor = torch.cat([tensor, tensor.new_zeros(shape)], dim=cut.dim)
    return tensor.contiguous()


def join(parts: Sequence[torch.Tensor], cut: Cut) -> torch.Tensor:
    """The padded parts of all ranks, put together without the padding."""
    return torch.cat([part.narrow(cut.dim, 0, cut.length(rank)) for rank, part in enumerate(parts)], dim=cut.dim)


def part_of(tensor: torch.Tensor, cut: Cut, rank: int) -> torch.Tensor:
    """What one rank of the group holds after the cut."""
    length = cut.length(rank)
    return tensor.narrow(cut.dim, min(rank * cut.part, cut.extent), length)


def sum_over(groups: Iterable[ProcessGroup], tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The sums of each tensor over the groups, in one message per group."""
    chain = list(groups)
    if not chain or not tensors:
        return list(tensors)
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    for group in chain:
        dist.all_reduce(flat, group=group)
    sizes = [tensor.numel() for tensor in tensors]
    return [part.view_as(tensor) for part, tensor in zip(torch.split(flat, sizes), tensors, strict=True)]
