"""A shard: this rank's part of one named tensor, with its place in the whole. What optimizers and checkpoints see."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from phalanx.train.parallel.expert import ExpertExchange, ExpertSlices, expert_layers

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TensorShard:
    """A box of one tensor of the whole, unsplit model.

    `tensor` is plain and local: what the optimizer updates in place. `replicas` ranks of the world hold the same box;
    exactly one of them, the one with `owner`, writes it to a checkpoint. `groups` maps a dimension that is split to
    the process groups that together hold it, outermost first; a dimension that is whole is not in it. `moves` is told
    of buffers that forward may change: their values between two updates are no sign of bad memory.
    """

    name: str
    tensor: torch.Tensor
    shape: tuple[int, ...]
    start: tuple[int, ...]
    replicas: int
    owner: bool
    groups: dict[int, tuple[ProcessGroup, ...]]
    moves: bool = False

    @property
    def whole(self) -> bool:
        """Whether this rank holds all of the tensor."""
        return tuple(self.tensor.shape) == self.shape

    @property
    def numel(self) -> int:
        """Elements of the whole tensor."""
        return prod(self.shape)


# Which box of which tensor this rank holds: from the layout alone, without asking any other rank.


# Axes in the order in which they cut a tensor. FSDP2 shards what tensor or expert parallelism has left.
CUTS = ("expert", "tensor", "shard")


@dataclass(frozen=True, kw_only=True, slots=True)
class RegionSplit:
    """One split of a dimension: this rank has chunk `index` of `parts`, as torch.chunk cuts."""

    dim: int
    parts: int
    index: int
    group: ProcessGroup


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardRegion:
    """This rank's part of a whole tensor."""

    shape: tuple[int, ...]
    start: tuple[int, ...]
    size: tuple[int, ...]
    cuts: tuple[RegionSplit, ...]

    @property
    def groups(self) -> dict[int, tuple[ProcessGroup, ...]]:
        """For each split dimension the groups that hold it, outermost first."""
        found: dict[int, tuple[ProcessGroup, ...]] = {}
        for cut in self.cuts:
            found[cut.dim] = (*found.get(cut.dim, ()), cut.group)
        return found

    @property
    def parts(self) -> int:
        """Ranks that hold one copy of the tensor together."""
        total = 1
        for cut in self.cuts:
            total *= cut.parts
        return total

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """The box cut out of the whole tensor, as a view."""
        for dim, (start, size) in enumerate(zip(self.start, self.size, strict=True)):
            whole = whole.narrow(dim, start, size)
        return whole


def region_of(param: torch.Tensor, cuts_before: tuple[RegionSplit, ...] = ()) -> ShardRegion:
    """The box of a parameter; `cuts_before` are splits torch does not know of (a rank's own experts)."""
    cuts = [*cuts_before, *_known_cuts(param)]
    local = param._local_tensor if isinstance(param, DTensor) else param
    shape = list(param.shape)
    for cut in cuts_before:
        shape[cut.dim] *= cut.parts
    start, size = [0] * len(shape), list(shape)
    for cut in cuts:
        first, length = chunk_range(size[cut.dim], cut.parts, cut.index)
        start[cut.dim] += first
        size[cut.dim] = length
    assert tuple(size) == tuple(local.shape), f"box {size} is not the local shape {tuple(local.shape)}"
    return ShardRegion(shape=tuple(shape), start=tuple(start), size=tuple(size), cuts=tuple(cuts))


def chunk_range(length: int, parts: int, index: int) -> tuple[int, int]:
    """(first, length) of a chunk as torch.chunk cuts: all but the last are of the ceiling size, late ones may be empty.

    >>> [chunk_range(5, 4, index) for index in range(4)]
    [(0, 2), (2, 2), (4, 1), (5, 0)]
    """
    full = -(-length // parts)
    first = min(index * full, length)
    return first, min(full, length - first)


def _known_cuts(param: torch.Tensor) -> list[RegionSplit]:
    if not isinstance(param, DTensor):
        return []
    mesh = param.device_mesh
    names = mesh.mesh_dim_names or ()
    found = []
    for axis in CUTS:
        if axis not in names:
            continue
        position = names.index(axis)
        placement = param.placements[position]
        if placement.is_replicate() or mesh.size(position) == 1:
            continue
        index = int(mesh.get_local_rank(position))
        dim: int = placement.dim  # type: ignore[attr-defined]  # what is neither replicated nor partial is a shard
        found.append(RegionSplit(dim=dim, parts=mesh.size(position), index=index, group=mesh.get_group(position)))
    return found


def expert_splits(model: nn.Module) -> Mapping[int, RegionSplit]:
    """For each expert parameter (by id) the split torch does not know of: by expert, or of every expert's width."""
    found = {}
    for _, moe in expert_layers(model):
        if isinstance(moe.dispatch, ExpertExchange | ExpertSlices):
            group = moe.dispatch.group
            for name, param in moe.experts.named_parameters():
                dim = moe.dispatch.offsets()[name][0]
                found[id(param)] = RegionSplit(dim=dim, parts=group.size(), index=group.rank(), group=group)
    return found
