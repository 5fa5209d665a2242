"""Full tensors gathered from the shards of several ranks, sums over them, and work on them divided among ranks.

A dimension is split as by torch.chunk: parts of ceil(n / ranks), the last ones smaller or empty. If several groups
split one dimension, the outermost splits first and the next one splits each of its parts.
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
    """One group's split of a dimension that had length `extent` before it."""

    dim: int
    group: ProcessGroup
    extent: int

    @property
    def ranks(self) -> int:
        """Number of parts, including empty ones."""
        return self.group.size()

    @property
    def part(self) -> int:
        """Length of the longest part."""
        return -(-self.extent // self.ranks)

    def length(self, rank: int) -> int:
        """Return the length of one rank's part."""
        return max(0, min(self.part, self.extent - rank * self.part))


def group_splits(shard: TensorShard) -> list[GroupSplit]:
    """Return the splits that made a shard, last one first, which is the order to undo them in."""
    splits = []
    for dim, groups in shard.groups.items():
        extent = shard.shape[dim]
        for group in groups:
            cut = GroupSplit(dim=dim, group=group, extent=extent)
            splits.append(cut)
            extent = cut.length(group.rank())
    return splits[::-1]


def gather_tensor(shard: TensorShard, tensor: torch.Tensor) -> torch.Tensor:
    """Gather the full tensor of which every rank holds a part like `shard`'s.

    All ranks of its groups must call this.
    """
    for cut in group_splits(shard):
        padded = pad_to_longest(tensor, cut)
        parts = [torch.empty_like(padded) for _ in range(cut.ranks)]
        dist.all_gather(parts, padded, group=cut.group)
        tensor = join_shards(parts, cut)
    return tensor


def local_region(shard: TensorShard, whole: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a full tensor, as a view."""
    for dim, (start, length) in enumerate(zip(shard.start, shard.tensor.shape, strict=True)):
        whole = whole.narrow(dim, start, length)
    return whole


def pad_to_longest(tensor: torch.Tensor, cut: GroupSplit) -> torch.Tensor:
    """Return the tensor, contiguous and zero-padded to the longest part, because collectives move equal sizes."""
    num_padding = cut.part - tensor.shape[cut.dim]
    if num_padding:
        shape = list(tensor.shape)
        shape[cut.dim] = num_padding
        tensor = torch.cat([tensor, tensor.new_zeros(shape)], dim=cut.dim)
    return tensor.contiguous()


def join_shards(parts: Sequence[torch.Tensor], cut: GroupSplit) -> torch.Tensor:
    """Concatenate the padded parts of all ranks without the padding."""
    return torch.cat([shard.narrow(cut.dim, 0, cut.length(rank)) for rank, shard in enumerate(parts)], dim=cut.dim)


def shard_of_rank(tensor: torch.Tensor, cut: GroupSplit, rank: int) -> torch.Tensor:
    """Return the part that one rank of the group holds after the split."""
    length = cut.length(rank)
    return tensor.narrow(cut.dim, min(rank * cut.part, cut.extent), length)


def sum_over(groups: Iterable[ProcessGroup], tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the sums of each tensor over the groups, in one message per group."""
    chain = list(groups)
    if not chain or not tensors:
        return list(tensors)
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    for group in chain:
        dist.all_reduce(flat, group=group)
    sizes = [tensor.numel() for tensor in tensors]
    return [total.view_as(tensor) for total, tensor in zip(torch.split(flat, sizes), tensors, strict=True)]


# Work that needs full tensors, distributed: each rank gathers some of them, works, and returns the parts.


Work = Callable[[torch.Tensor], torch.Tensor]


def spread_work(boxes: Sequence[torch.Tensor], undo: Sequence[GroupSplit], work: Work) -> list[torch.Tensor]:
    """Apply `work`, which keeps the shape, to full tensors that were all split alike.

    Returns this rank's part of each result. Tensor i goes to rank i modulo the ranks of the last split, all of them
    in one message, and so on outwards. Every rank of the groups must call this with the same number of parts.
    """
    if not undo or not boxes:
        return [work(box) for box in boxes]
    cut, own_rank = undo[0], undo[0].group.rank()
    like = pad_to_longest(boxes[0], cut)
    # Tensors are dealt round-robin: rank r works on tensors r, r + ranks, and so on.
    counts = [len(range(rank, len(boxes), cut.ranks)) for rank in range(cut.ranks)]
    own_counts = [counts[own_rank]] * cut.ranks
    outgoing = [pad_to_longest(box, cut) for rank in range(cut.ranks) for box in boxes[rank :: cut.ranks]]
    incoming = _exchange_shards(outgoing, counts, own_counts, like, cut)
    full_tensors = [
        join_shards([incoming[rank][place] for rank in range(cut.ranks)], cut) for place in range(counts[own_rank])
    ]
    finished = spread_work(full_tensors, undo[1:], work)
    outgoing = [
        pad_to_longest(shard_of_rank(result, cut, rank), cut) for rank in range(cut.ranks) for result in finished
    ]
    incoming = _exchange_shards(outgoing, own_counts, counts, like, cut)
    return [incoming[i % cut.ranks][i // cut.ranks].narrow(cut.dim, 0, cut.length(own_rank)) for i in range(len(boxes))]


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
