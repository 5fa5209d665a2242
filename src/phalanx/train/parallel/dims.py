"""The device meshes of a layout: which ranks form a group on which axis."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed import ProcessGroup, device_mesh
from torch.distributed.device_mesh import DeviceMesh

from phalanx.plan.layout import Layout


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelDims:
    """Degree of every axis. rank = ((pipeline · data + d) · context + c) · tensor + t: tensor ranks are neighbours."""

    pipeline: int = 1
    data: int = 1
    context: int = 1
    tensor: int = 1
    expert: int = 1
    shard: int = 1  # number of data × context ranks that share one sharded copy
    zero: int = 0

    @classmethod
    def of(cls, layout: Layout) -> ParallelDims:
        """Build the degrees from a layout; without ZeRO the shard degree is 1."""
        return cls(
            pipeline=layout.pipeline,
            data=layout.data,
            context=layout.context,
            tensor=layout.tensor,
            expert=layout.expert,
            shard=layout.shard if layout.zero else 1,
            zero=layout.zero,
        )

    @property
    def world(self) -> int:
        """Number of ranks of the job."""
        return self.pipeline * self.stage

    @property
    def stage(self) -> int:
        """Number of ranks of one pipeline stage."""
        return self.data * self.context * self.tensor

    @property
    def copies(self) -> int:
        """Number of copies of the (possibly sharded) dense weights.

        These are HSDP's outer axis, or all data ranks without ZeRO.
        """
        return self.data * self.context // self.shard

    @property
    def expert_shard(self) -> int:
        """Number of an expert's copies that share its sharded state.

        These are the copies inside the shard group, as the planner counts them.
        """
        if not self.zero:
            return 1
        holders = self.stage // self.expert
        sharers = min(max(self.shard * self.tensor // self.expert, 1), holders)
        return max(n for n in range(1, sharers + 1) if holders % n == 0)

    @property
    def expert_copies(self) -> int:
        """Number of copies of the (possibly sharded) experts."""
        return self.stage // (self.expert * self.expert_shard)


@dataclass(kw_only=True, slots=True)
class GroupTime:
    """Time this rank spent on creating the groups of one axis; each group is a communicator."""

    group: str  # mesh and axis, as "dense/tensor"
    ranks: int  # of one group
    count: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Meshes:
    """The ranks of the job in up to four meshes, each of which covers all ranks, with the pipeline axis outermost."""

    dims: ParallelDims
    dense: DeviceMesh  # pipeline, copies, shard, tensor: which rank holds which part of the dense weights
    work: DeviceMesh  # pipeline, data, context, tensor: which rank computes which tokens
    experts: DeviceMesh | None  # pipeline, copies, shard, expert: which rank holds which experts
    stages: DeviceMesh | None  # pipeline, stage: the ranks that count the tokens of their experts together
    group_times: list[GroupTime] = field(default_factory=list)

    def group(self, axis: str) -> ProcessGroup:
        """Return the group of ranks that differ from this one only on `axis` (pipeline, data, context or tensor)."""
        return self.work.get_group(axis)

    def index(self, axis: str) -> int:
        """Return this rank's coordinate on `axis`."""
        return int(self.work.get_local_rank(axis))


def build_meshes(dims: ParallelDims, device_type: str, *, experts: bool) -> Meshes:
    """Create the meshes and their groups. Every rank must call this, in the same order as its other collectives."""
    with without_tracing():
        return _build_meshes(dims, device_type, experts=experts)


def _build_meshes(dims: ParallelDims, device_type: str, *, experts: bool) -> Meshes:
    ranks = torch.arange(dims.world)
    times: dict[str, GroupTime] = {}

    def make_mesh(name: str, axes: tuple[str, ...], *sizes: int) -> DeviceMesh:
        with _timed_groups(name, times):
            return DeviceMesh(device_type, ranks.view(dims.pipeline, *sizes), mesh_dim_names=("pipeline", *axes))

    split = experts and dims.expert > 1
    return Meshes(
        dims=dims,
        dense=make_mesh("dense", ("copies", "shard", "tensor"), dims.copies, dims.shard, dims.tensor),
        work=make_mesh("work", ("data", "context", "tensor"), dims.data, dims.context, dims.tensor),
        experts=make_mesh("experts", ("copies", "shard", "expert"), dims.expert_copies, dims.expert_shard, dims.expert)
        if split
        else None,
        stages=make_mesh("stages", ("stage",), dims.stage) if experts else None,
        group_times=list(times.values()),
    )


@contextmanager
def _timed_groups(cut: str, times: dict[str, GroupTime]) -> Iterator[None]:
    """Measure every call with which torch's DeviceMesh creates groups (torch 2.11 to 2.13 use one of two functions).

    An axis of one rank gets groups too, and an axis of all ranks reuses the existing group.
    """

    def timed(make: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            began_s = time.perf_counter()
            try:
                return make(*args, **kwargs)
            finally:
                groups = kwargs.get("split_ranks") or [kwargs.get("ranks") or ()]
                axis = str(kwargs.get("group_desc") or "").removeprefix("mesh_") or "?"
                group_time = times.setdefault(f"{cut}/{axis}", GroupTime(group=f"{cut}/{axis}", ranks=len(groups[0])))
                group_time.count += len(groups)
                group_time.seconds += time.perf_counter() - began_s

        return run

    functions = {
        name: getattr(device_mesh, name) for name in ("new_group", "split_group") if hasattr(device_mesh, name)
    }
    for name, make in functions.items():
        setattr(device_mesh, name, timed(make))
    try:
        yield
    finally:
        for name, make in functions.items():
            setattr(device_mesh, name, make)


# Set-up that needs real tensor values even when the step is traced on fake tensors.


def without_tracing() -> AbstractContextManager[Any]:
    """Return a context that leaves the fake-tensor mode of `phalanx trace`; it does nothing outside that mode.

    A mesh is a tensor of rank numbers that torch reads, and FSDP2 over tensor parallelism searches it for its own
    rank (`nonzero`); fake tensors support neither.
    """
    return unset_fake_temporarily()
