"""What a plan sends in its collectives: which group, how large a message, and how much of it shows in the step."""

from __future__ import annotations

import math
from dataclasses import dataclass

from phalanx.arch.counts import count_parameters
from phalanx.hardware.types import Cluster
from phalanx.job.schema import Job
from phalanx.network import nccl
from phalanx.plan.layout import Layout
from phalanx.plan.mapping import AxisUse
from phalanx.plan.plan import Plan
from phalanx.spec.evidence import Evidence
from phalanx.spec.outcome import Outcome, unknown

MIB = 2.0**20
# What `comm.bucket_mib = "auto"` is: train/parallel/replicate.py, after DistributedDataParallel's default.
BUCKET_MIB = 25.0
FASTEST = 1e15  # bytes per second: no link is
REDUCING = ("data", "shard", "replica", "expert data")  # axes that sum gradients


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """One kind of collective of a step: `count` messages of `nbytes` each, between `ranks` ranks."""

    axis: str
    operation: nccl.Operation
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


def sane(bytes_per_s: float) -> float:
    """A rate that can be divided by, whatever a cluster file or a plan says."""
    return max(1.0, min(bytes_per_s, FASTEST)) if math.isfinite(bytes_per_s) else 1.0


def communicator(message: Message, cluster: Cluster) -> nccl.Communicator:
    """The message's group, as NCCL sees it."""
    return nccl.communicator(
        ranks=message.ranks,
        per_node=message.per_domain,
        link_bytes_per_s=sane(cluster.link_bytes_per_s),
        nic_bytes_per_s=sane(cluster.nic_bytes_per_s),
        family=cluster.accelerator.family,
    )


def damaged(plan: Plan) -> Outcome | None:
    """A plan file whose traffic is no traffic: edited by hand, or torn."""
    numbers = [n for one in plan.mapping for n in (one.bytes_per_step, one.wire_s, one.shown_s, plan.prediction.step_s)]
    if all(math.isfinite(number) and number >= 0 for number in numbers):
        return None
    return unknown("the plan's traffic has numbers that cannot be", fix="plan the job again: phalanx plan JOB --out")


def messages(evidence: Evidence) -> tuple[Message, ...]:
    """Every sum, gather and scatter of a step that more than one rank takes part in, gradients first."""
    plan, job = evidence.the_plan, evidence.the_job
    found = [one for axis in plan.mapping if axis.size > 1 for one in _of_axis(job, plan, axis)]
    return tuple(sorted(found, key=lambda one: one.axis not in REDUCING))


def gradient_messages(evidence: Evidence) -> tuple[Message, ...]:
    """Those that sum gradients."""
    return tuple(one for one in messages(evidence) if one.axis in REDUCING and one.operation != "all-gather")


def bucket_bytes(job: Job) -> float:
    """Of gradients that are reduced together where nothing is sharded."""
    mib = job.comm.bucket_mib
    return (BUCKET_MIB if isinstance(mib, str) else mib) * MIB


def _of_axis(job: Job, plan: Plan, axis: AxisUse) -> list[Message]:
    operations: list[nccl.Operation] = [
        name for name in ("all-reduce", "reduce-scatter", "all-gather") if name in axis.operation
    ]
    sizes = {one: _size(job, plan.layout, axis, one) for one in operations}
    return [
        Message(
            axis=axis.axis,
            operation=one,
            ranks=axis.size,
            per_domain=members_per_domain(
                axis.size, axis.stride, domain=plan.cluster.domain_devices, devices=plan.layout.devices
            ),
            nbytes=nbytes,
            count=count,
            wire_s=axis.wire_s,
            shown_s=axis.shown_s,
        )
        for one, (nbytes, count) in sizes.items()
        if nbytes > 0 and count > 0
    ]


def _size(job: Job, layout: Layout, axis: AxisUse, operation: nccl.Operation) -> tuple[float, float]:
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


def _shared(nbytes: float, axis: AxisUse, operation: nccl.Operation) -> tuple[float, float]:
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
