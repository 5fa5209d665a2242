"""What a plan sends in its collectives: which group, how large a message, what NCCL makes of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from phalanx.hardware.types import Cluster
from phalanx.job.schema import Job
from phalanx.network.nccl_choice import Expected, Operation, choices, expect
from phalanx.network.nccl_cluster import group_system
from phalanx.network.nccl_system import System
from phalanx.plan.layout import Layout
from phalanx.plan.mapping import AxisUse
from phalanx.plan.parameter_counts import count_parameters

MIB = 2.0**20
# What `comm.bucket_mib = "auto"` is: train/parallel/replicate.py, after DistributedDataParallel's default.
BUCKET_MIB = 25.0
REDUCING = ("data", "shard", "replica", "expert data")  # axes that sum gradients
NCCL_VENDORS = ("nvidia", "amd")  # AMD's RCCL is NCCL's code with other tables


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """One kind of collective of a step: `count` messages of `nbytes` each, between `ranks` ranks."""

    axis: str
    operation: Operation
    ranks: int
    per_domain: int
    nbytes: float
    count: float
    wire_s: float  # of the whole axis, as planned
    shown_s: float

    @property
    def domains(self) -> int:
        """Fast domains the group touches."""
        return max(1, math.ceil(self.ranks / max(1, self.per_domain)))

    @property
    def where(self) -> str:
        """The group's place for people."""
        return "in one domain" if self.domains == 1 else f"in {self.domains:,} domains, {self.per_domain} in each"

    @property
    def size(self) -> str:
        """The message for people."""
        return f"{self.nbytes / MIB:,.0f} MiB" if self.nbytes >= MIB else f"{self.nbytes / 1024:,.0f} KiB"


def members_per_domain(ranks: int, stride: int, *, domain: int, devices: int) -> int:
    """Ranks of a group that share a fast domain, when ranks fill domains in order.

    Where groups do not tile the domain, some straddle two of them, and the worst one counts.

    >>> [members_per_domain(n, s, domain=8, devices=64) for n, s in ((8, 1), (8, 8), (16, 4), (3, 1))]
    [8, 1, 2, 1]
    """
    ranks, stride, domain = max(1, ranks), max(1, stride), max(1, domain)
    block = ranks * stride
    if devices > domain and 1 < block <= domain and domain % block:
        return max(1, ranks // 2)
    return max(1, min(ranks, domain // stride))


def axis_messages(job: Job, cluster: Cluster, layout: Layout, uses: Sequence[AxisUse]) -> tuple[Message, ...]:
    """Every sum, gather and scatter of a step that more than one rank takes part in, gradients first."""
    found = [one for axis in uses if axis.size > 1 for one in _of_axis(job, cluster, layout, axis)]
    return tuple(sorted(found, key=lambda one: one.axis not in REDUCING))


def message_system(message: Message, cluster: Cluster) -> System:
    """The message's group, as NCCL sees it."""
    return group_system(cluster, nodes=message.domains, per_node=message.per_domain)


def message_time(message: Message, cluster: Cluster) -> Expected:
    """What NCCL picks for one message of its own accord, and how long that takes."""
    found = expect(message_system(message, cluster), message.nbytes, operation=message.operation)
    assert found is not None  # rings exist for every operation
    return found


def with_messages(job: Job, cluster: Cluster, layout: Layout, uses: Sequence[AxisUse]) -> tuple[AxisUse, ...]:
    """The axes with what NCCL makes of one message of their first sum, gather or scatter.

    Not of TPUs and CPUs, which do not run NCCL.
    """
    if cluster.accelerator.vendor not in NCCL_VENDORS:
        return tuple(uses)
    first: dict[str, Message] = {}
    for message in axis_messages(job, cluster, layout, uses):
        first.setdefault(message.axis, message)
    return tuple(_told(one, first[one.axis], cluster) if one.axis in first else one for one in uses)


def _told(use: AxisUse, message: Message, cluster: Cluster) -> AxisUse:
    found = message_time(message, cluster)
    rivals = sorted(
        choices(message_system(message, cluster), message.nbytes, operation=message.operation),
        key=lambda one: one.seconds,
    )
    other = next((one for one in rivals if one.algorithm != found.algorithm), None)
    return replace(
        use,
        algorithm=found.algorithm,
        protocol=found.protocol,
        next_best=f"{other.algorithm} {other.seconds / rivals[0].seconds:.2f}x" if other else "",
        message_bytes=message.nbytes,
        message_s=found.seconds,
        message_interval_s=(found.low_s, found.high_s),
    )


def bucket_bytes(job: Job) -> float:
    """Of gradients that are reduced together where nothing is sharded."""
    mib = job.comm.bucket_mib
    return (BUCKET_MIB if isinstance(mib, str) else mib) * MIB


def _of_axis(job: Job, cluster: Cluster, layout: Layout, axis: AxisUse) -> list[Message]:
    operations: list[Operation] = [
        name for name in ("all-reduce", "reduce-scatter", "all-gather") if name in axis.operation
    ]
    sizes = {one: _size(job, layout, axis, one) for one in operations}
    return [
        Message(
            axis=axis.axis,
            operation=one,
            ranks=axis.size,
            per_domain=members_per_domain(
                axis.size, axis.stride, domain=cluster.domain_devices, devices=layout.devices
            ),
            nbytes=nbytes,
            count=count,
            wire_s=axis.wire_s,
            shown_s=axis.shown_s,
        )
        for one, (nbytes, count) in sizes.items()
        if nbytes > 0 and count > 0
    ]


def _size(job: Job, layout: Layout, axis: AxisUse, operation: Operation) -> tuple[float, float]:
    """(bytes of a message, messages of a step)."""
    element = 4.0 if job.precision.compute == "fp32" else 2.0
    if axis.axis not in REDUCING:
        tokens = layout.micro_batch * job.data.sequence / max(1, layout.context)
        return _shared(tokens * job.model.hidden * element, axis, operation)
    width = element if operation == "all-gather" else (2.0 if job.precision.grad_reduce == "bf16" else 4.0)
    if layout.zero == 0:
        whole = axis.bytes_per_step * axis.size / (2.0 * (axis.size - 1))
        nbytes = min(bucket_bytes(job), whole)
        return nbytes, math.ceil(min(whole / nbytes, 1e15)) if nbytes > 0 else 0.0
    return _shared(_block_parameters(job, layout, axis) * width, axis, operation)


def _shared(nbytes: float, axis: AxisUse, operation: Operation) -> tuple[float, float]:
    """Messages of one size, as many as the axis' bytes make; its operations take equal parts of them, near enough."""
    share = (axis.size - 1) / axis.size * (2.0 if operation == "all-reduce" else 1.0)
    kinds = axis.operation.count("+") + 1
    return nbytes, axis.bytes_per_step / kinds / max(nbytes * share, 1.0)


def _block_parameters(job: Job, layout: Layout, axis: AxisUse) -> float:
    """Parameters of one block of layers on one rank: what FSDP gathers and scatters at once."""
    counts, model = count_parameters(job.model), job.model
    if axis.axis == "expert data":
        return counts.expert * model.experts / max(1, layout.expert)
    mlp = counts.moe_fixed_per_layer if model.is_moe else counts.dense_mlp_per_layer
    block = (counts.attention_per_layer + mlp + counts.norms_per_layer) / max(1, layout.tensor)
    return block / max(1, layout.shard) if axis.axis == "replica" else block
