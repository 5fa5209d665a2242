"""The mesh of a layout: which ranks stand together on which axis. One value hands out every group and sub-mesh."""

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
    """Degrees of every axis. rank = ((pipeline · data + d) · context + c) · tensor + t: tensor peers are neighbours."""

    pipeline: int = 1
    data: int = 1
    context: int = 1
    tensor: int = 1
    expert: int = 1
    shard: int = 1  # of the data × context ranks, those that share one sharded copy
    zero: int = 0

    @classmethod
    def of(cls, layout: Layout) -> ParallelDims:
        """The degrees of a layout; a shard group means nothing without ZeRO."""
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
        """Ranks of the whole job."""
        return self.pipeline * self.stage

    @property
    def stage(self) -> int:
        """Ranks of one pipeline stage."""
        return self.data * self.context * self.tensor

    @property
    def copies(self) -> int:
        """Copies of the (possibly sharded) dense weights: HSDP's outer axis, or all data ranks without ZeRO."""
        return self.data * self.context // self.shard

    @property
    def expert_shard(self) -> int:
        """Copies of an expert that share its sharded state: those inside the shard group, as the planner counts."""
        if not self.zero:
            return 1
        holders = self.stage // self.expert
        wanted = min(max(self.shard * self.tensor // self.expert, 1), holders)
        return max(n for n in range(1, wanted + 1) if holders % n == 0)

    @property
    def expert_copies(self) -> int:
        """Copies of the (possibly sharded) experts."""
        return self.stage // (self.expert * self.expert_shard)


@dataclass(kw_only=True, slots=True)
class GroupTime:
    """What making the groups of one axis took on this rank; each new group is a communicator."""

    group: str  # cut and axis, as "dense/tensor"
    ranks: int  # of one group
    count: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Meshes:
    """The ranks of the job, cut three ways; every cut covers all of them, pipeline outermost."""

    dims: ParallelDims
    dense: DeviceMesh  # pipeline, copies, shard, tensor: who holds which part of the dense weights
    work: DeviceMesh  # pipeline, data, context, tensor: who computes what
    experts: DeviceMesh | None  # pipeline, copies, shard, expert: who holds which experts
    stages: DeviceMesh | None  # pipeline, stage: who counts the tokens of its experts together
    group_times: list[GroupTime] = field(default_factory=list)

    def group(self, axis: str) -> ProcessGroup:
        """The ranks that differ from this one only on `axis` (pipeline, data, context or tensor)."""
        return self.work.get_group(axis)

    def index(self, axis: str) -> int:
        """This rank's place on `axis`."""
        return int(self.work.get_local_rank(axis))


def build_meshes(dims: ParallelDims, device_type: str, *, experts: bool) -> Meshes:
    """Create the groups. Every rank must call this, in the same order as its other collectives."""
    with without_tracing():
        return _build_meshes(dims, device_type, experts=experts)


def _build_meshes(dims: ParallelDims, device_type: str, *, experts: bool) -> Meshes:
    ranks = torch.arange(dims.world)
    times: dict[str, GroupTime] = {}

    def cut(name: str, axes: tuple[str, ...], *sizes: int) -> DeviceMesh:
        with _timed_groups(name, times):
            return DeviceMesh(device_type, ranks.view(dims.pipeline, *sizes), mesh_dim_names=("pipeline", *axes))

    split = experts and dims.expert > 1
    return Meshes(
        dims=dims,
        dense=cut("dense", ("copies", "shard", "tensor"), dims.copies, dims.shard, dims.tensor),
        work=cut("work", ("data", "context", "tensor"), dims.data, dims.context, dims.tensor),
        experts=cut("experts", ("copies", "shard", "expert"), dims.expert_copies, dims.expert_shard, dims.expert)
        if split
        else None,
        stages=cut("stages", ("stage",), dims.stage) if experts else None,
        group_times=list(times.values()),
    )


@contextmanager
def _timed_groups(cut: str, times: dict[str, GroupTime]) -> Iterator[None]:
    """Take the time of every call with which torch's mesh makes groups (2.11 to 2.13: one of two functions).

    An axis of one rank, too, gets its groups, and an axis of all ranks takes the group that is there.
    """

    def timed(make: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            began_s = time.perf_counter()
            try:
                return make(*args, **kwargs)
            finally:
                groups = kwargs.get("split_ranks") or [kwargs.get("ranks") or ()]
                axis = str(kwargs.get("group_desc") or "").removeprefix("mesh_") or "?"
                one = times.setdefault(f"{cut}/{axis}", GroupTime(group=f"{cut}/{axis}", ranks=len(groups[0])))
                one.count += len(groups)
                one.seconds += time.perf_counter() - began_s

        return run

    known = {name: getattr(device_mesh, name) for name in ("new_group", "split_group") if hasattr(device_mesh, name)}
    for name, make in known.items():
        setattr(device_mesh, name, timed(make))
    try:
        yield
    finally:
        for name, make in known.items():
            setattr(device_mesh, name, make)


# Set-up that needs real values also where a step is traced on tensors without any.


def without_tracing() -> AbstractContextManager[Any]:
    """Leave the fake-tensor mode of `phalanx trace` for a while; nothing where there is none.

    A mesh is a tensor of rank numbers that torch reads, and FSDP2 over tensor parallelism looks for its own rank in it
    (`nonzero`); fake tensors refuse both.
    """
    return unset_fake_temporarily()
