"""A rank's shard of a named tensor and its region in the full tensor, as optimizers and checkpoints use them."""

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
    """This rank's shard, a rectangular region of one tensor of the unsplit model.

    Attributes:
        name: The tensor's name in the unsplit model.
        tensor: The plain local tensor, which the optimizer updates in place.
        shape: Shape of the full tensor.
        start: First index of the region in each dimension.
        replicas: Number of ranks of the world that hold the same region.
        owner: True on exactly one of these ranks, the one that writes the region to a checkpoint.
        groups: For each split dimension the process groups that together hold it, outermost first.
        moves: True for buffers that forward may change: a change between two updates is no sign of bad memory.
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
        """True if this rank holds all of the tensor."""
        return tuple(self.tensor.shape) == self.shape

    @property
    def numel(self) -> int:
        """Number of elements of the full tensor."""
        return prod(self.shape)


# The region of each tensor that this rank holds, derived from the layout alone, without communication.


# Axes in the order in which they split a tensor. FSDP2 shards what tensor or expert parallelism leaves.
CUTS = ("expert", "tensor", "shard")


@dataclass(frozen=True, kw_only=True, slots=True)
class RegionSplit:
    """One split of a dimension: this rank has chunk `index` of `parts`, as torch.chunk divides."""

    dim: int
    parts: int
    index: int
    group: ProcessGroup


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardRegion:
    """This rank's region of a full tensor, and the splits that led to it."""

    shape: tuple[int, ...]
    start: tuple[int, ...]
    size: tuple[int, ...]
    cuts: tuple[RegionSplit, ...]

    @property
    def groups(self) -> dict[int, tuple[ProcessGroup, ...]]:
        """For each split dimension the process groups that hold it, outermost first."""
        groups: dict[int, tuple[ProcessGroup, ...]] = {}
        for cut in self.cuts:
            groups[cut.dim] = (*groups.get(cut.dim, ()), cut.group)
        return groups

    @property
    def parts(self) -> int:
        """Number of ranks that hold one copy of the tensor together."""
        total = 1
        for cut in self.cuts:
            total *= cut.parts
        return total

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """Return the region of the full tensor `whole`, as a view."""
        for dim, (start, size) in enumerate(zip(self.start, self.size, strict=True)):
            whole = whole.narrow(dim, start, size)
        return whole


def region_of(param: torch.Tensor, cuts_before: tuple[RegionSplit, ...] = ()) -> ShardRegion:
    """Return the region of a parameter; `cuts_before` are splits that torch does not know (a rank's own experts)."""
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
    """Return (first, length) of a chunk as torch.chunk divides.

    All chunks but the last have the ceiling size, and late ones may be empty.

    >>> [chunk_range(5, 4, index) for index in range(4)]
    [(0, 2), (2, 2), (4, 1), (5, 0)]
    """
    full_length = -(-length // parts)
    first = min(index * full_length, length)
    return first, min(full_length, length - first)


def _known_cuts(param: torch.Tensor) -> list[RegionSplit]:
    if not isinstance(param, DTensor):
        return []
    mesh = param.device_mesh
    names = mesh.mesh_dim_names or ()
    splits = []
    for axis in CUTS:
        if axis not in names:
            continue
        position = names.index(axis)
        placement = param.placements[position]
        if placement.is_replicate() or mesh.size(position) == 1:
            continue
        index = int(mesh.get_local_rank(position))
        dim: int = placement.dim  # type: ignore[attr-defined]  # neither replicated nor partial: a shard
        splits.append(RegionSplit(dim=dim, parts=mesh.size(position), index=index, group=mesh.get_group(position)))
    return splits


def expert_splits(model: nn.Module) -> Mapping[int, RegionSplit]:
    """Return, by parameter id, the splits of experts that torch does not know: by expert or by width."""
    splits = {}
    for _, moe in expert_layers(model):
        if isinstance(moe.dispatch, ExpertExchange | ExpertSlices):
            group = moe.dispatch.group
            for name, param in moe.experts.named_parameters():
                dim = moe.dispatch.offsets()[name][0]
                splits[id(param)] = RegionSplit(dim=dim, parts=group.size(), index=group.rank(), group=group)
    return splits
