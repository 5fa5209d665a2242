"""From the boxes of several ranks to the whole tensor, and sums over all of it.

A dimension is cut as torch.chunk cuts: parts of ceil(n / ranks), the last ones smaller or empty. Where several groups
cut one dimension, the outermost cut first and the next one cut each of its parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from phalanx.train.parallel.tensor_shard import TensorShard


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupSplit:
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


def group_splits(shard: TensorShard) -> list[GroupSplit]:
    """The cuts that made a shard, last one first: undo them in this order."""
    found = []
    for dim, groups in shard.groups.items():
        extent = shard.shape[dim]
        for group in groups:
            cut = GroupSplit(dim=dim, group=group, extent=extent)
            found.append(cut)
            extent = cut.length(group.rank())
    return found[::-1]


def gather_tensor(shard: TensorShard, tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor of which every rank holds a box like `shard`'s. All ranks of its groups must call this."""
    for cut in group_splits(shard):
        padded = pad_to_longest(tensor, cut)
        parts = [torch.empty_like(padded) for _ in range(cut.ranks)]
        dist.all_gather(parts, padded, group=cut.group)
        tensor = join_shards(parts, cut)
    return tensor


def local_region(shard: TensorShard, whole: torch.Tensor) -> torch.Tensor:
    """This rank's part of a whole tensor, as a view."""
    for dim, (start, length) in enumerate(zip(shard.start, shard.tensor.shape, strict=True)):
        whole = whole.narrow(dim, start, length)
    return whole


def pad_to_longest(tensor: torch.Tensor, cut: GroupSplit) -> torch.Tensor:
    """The tensor, contiguous, with zeros behind it up to the longest part: collectives move equal sizes."""
    missing = cut.part - tensor.shape[cut.dim]
    if missing:
        shape = list(tensor.shape)
        shape[cut.dim] = missing
        tensor = torch.cat([tensor, tensor.new_zeros(shape)], dim=cut.dim)
    return tensor.contiguous()


def join_shards(parts: Sequence[torch.Tensor], cut: GroupSplit) -> torch.Tensor:
    """The padded parts of all ranks, put together without the padding."""
    return torch.cat([part.narrow(cut.dim, 0, cut.length(rank)) for rank, part in enumerate(parts)], dim=cut.dim)


def shard_of_rank(tensor: torch.Tensor, cut: GroupSplit, rank: int) -> torch.Tensor:
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


# Work that needs whole tensors, shared out: each rank gets some of them whole, works, and gives the parts back.


Work = Callable[[torch.Tensor], torch.Tensor]


def spread_work(boxes: Sequence[torch.Tensor], undo: Sequence[GroupSplit], work: Work) -> list[torch.Tensor]:
    """`work`, which keeps the shape, on tensors that were all cut alike; gives this rank's box of every result.

    Tensor i goes to rank i modulo the ranks of the last cut, all of them in one message, and so on outwards. Every
    rank of the groups must call this with as many boxes.
    """
    if not undo or not boxes:
        return [work(box) for box in boxes]
    cut, me = undo[0], undo[0].group.rank()
    like = pad_to_longest(boxes[0], cut)
    counts = [len(range(rank, len(boxes), cut.ranks)) for rank in range(cut.ranks)]
    mine = [counts[me]] * cut.ranks
    sent = [pad_to_longest(box, cut) for rank in range(cut.ranks) for box in boxes[rank :: cut.ranks]]
    came = _exchange_shards(sent, counts, mine, like, cut)
    wholes = [join_shards([came[rank][k] for rank in range(cut.ranks)], cut) for k in range(counts[me])]
    finished = spread_work(wholes, undo[1:], work)
    sent = [pad_to_longest(shard_of_rank(whole, cut, rank), cut) for rank in range(cut.ranks) for whole in finished]
    came = _exchange_shards(sent, mine, counts, like, cut)
    return [came[i % cut.ranks][i // cut.ranks].narrow(cut.dim, 0, cut.length(me)) for i in range(len(boxes))]


def _exchange_shards(
    tensors: Sequence[torch.Tensor], give: list[int], take: list[int], like: torch.Tensor, cut: GroupSplit
) -> list[torch.Tensor]:
    """Send the first `give[0]` tensors to rank 0, and so on; `take[r]` of them come from rank r, stacked."""
    size = like.numel()
    result = like.new_empty(sum(take) * size)
    flat = torch.cat([like.new_empty(0), *(tensor.reshape(-1) for tensor in tensors)])
    if size:
        dist.all_to_all_single(
            result, flat, [count * size for count in take], [count * size for count in give], group=cut.group
        )
    return list(torch.split(result.view(sum(take), *like.shape), take))
