"""The links that each axis runs on, its bytes per step, and the collective algorithm that NCCL uses for it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from phalanx.hardware.types import Cluster
from phalanx.job.parameter_counts import count_parameters
from phalanx.job.schema import Job
from phalanx.network import collectives as net
from phalanx.network.nccl_choice import ExpectedTime, Operation, expect_collective, possible_pairs
from phalanx.network.nccl_cluster import group_system
from phalanx.network.nccl_system import NcclSystem
from phalanx.plan import traffic
from phalanx.plan.cases import Cases
from phalanx.plan.compute import element_bytes, routed_tokens
from phalanx.plan.layout import Layout
from phalanx.plan.request import PlanRequest
from phalanx.plan.score import price_layouts
from phalanx.plan.step import StepTimes
from phalanx.plan.weights import RankWeights, rank_weights

EARLY_STOP = ("phalanx", "pytorch", "torchtitan")  # profiles of trainers on torch.utils.checkpoint
# Those of them that gather ZeRO-3's tables once: the head stays until its backward, and a lookup's backward needs no
# weight.
TABLES_ONCE = ("phalanx", "pytorch")
# Fastest-varying first: neighbours in rank are tensor peers.
RANK_ORDER = ("tensor", "context", "data", "pipeline")


@dataclass(frozen=True, kw_only=True, slots=True)
class AxisUse:
    """One axis of the mesh. Bytes are what one device sends per step; `shown_s` is the exposed part.

    The data axis is one row, or two where ZeRO shards within groups (HSDP): `shard` and `replica`. `expert data` is
    the group of copies of an expert. The `shown_s` of these rows add up to the step's ZeRO-3 and gradient traffic.
    """

    axis: str
    size: int
    stride: int
    tier: str
    operation: str
    algorithm: str
    next_best: str  # the runner-up algorithm and how much slower it is
    bytes_per_step: float
    wire_s: float
    shown_s: float
    network_copies: float = 1.0  # for an all-to-all: the share of bytes for other domains that crosses the network
    # One message of its sums, gathers or scatters, alone on the network, as NCCL sends it (network/nccl_choice.py); 0
    # without NCCL. `wire_s` is the planner's estimate while computing, fitted to published runs (decision 0027).
    protocol: str = ""
    message_bytes: float = 0.0
    message_s: float = 0.0
    message_interval_s: tuple[float, float] | None = None  # holds 80 % of systems

    @property
    def exposed(self) -> float:
        """The share of the time on the wire that is exposed in the step."""
        return self.shown_s / self.wire_s if self.wire_s > 0 else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class _Load:
    """The traffic of an axis in a step: `calls` of an operation with `nbytes` each."""

    operation: str
    calls: float
    nbytes: float
    network_copies: float = 1.0  # for an all-to-all: share of the bytes that crosses the network


@dataclass(frozen=True, kw_only=True, slots=True)
class _Axis:
    """An axis with its group and loads, before its exposed time is known. `part` is a field of StepTimes."""

    name: str
    group: net.Group
    stride: int
    loads: list[_Load]
    part: str
    pace: float = 1.0  # measured over modelled seconds, from a calibration

    @property
    def ranks(self) -> int:
        return int(np.max(self.group.ranks))

    @property
    def wire_s(self) -> float:
        return self.pace * sum(load.calls * _load_seconds(self.group, load) for load in self.loads)


def map_axes(request: PlanRequest, layout: Layout) -> tuple[AxisUse, ...]:
    """Return every axis with more than one rank, in rank order, experts last."""
    table, times, _ = price_layouts(request, [layout])
    groups = traffic.axis_groups(table, request.physics, request.profile)
    axes = [
        *_inner_axes(request, layout, table, groups),
        *_replica_axes(request, layout, table, groups),
        *_stage_axes(request, layout, table, groups),
        *_expert_axes(request, layout, table, groups),
    ]
    used_axes = [axis for axis in axes if axis.ranks > 1]
    exposed_s = _exposed_seconds(times, used_axes)
    return tuple(_axis_use(request, axis, exposed_s[axis.name]) for axis in used_axes)


def bytes_between_domains(request: PlanRequest, layout: Layout, table: Cases) -> float:
    """Return the bytes per step that one fast domain (a host, or an NVLink rack) sends to others under this layout.

    A ring or a chain leaves a domain on one link, however many members it has there; in an all-to-all every member
    sends to all others.
    """
    groups = traffic.axis_groups(table, request.physics, request.profile)
    axes = [
        *_inner_axes(request, layout, table, groups),
        *_replica_axes(request, layout, table, groups),
        *_stage_axes(request, layout, table, groups),
        *_expert_axes(request, layout, table, groups),
    ]
    domain, total = min(request.cluster.domain_devices, layout.devices), 0.0
    for axis in axes:
        domain_ranks = max(1, int(np.max(axis.group.per_domain)))
        if axis.ranks <= domain_ranks:
            continue
        for load in axis.loads:
            sent_bytes = load.calls * _bytes_sent(load, axis.ranks)
            if load.operation == "all-to-all":
                total += domain * sent_bytes * (axis.ranks - domain_ranks) / (axis.ranks - 1) * load.network_copies
            else:
                total += domain / domain_ranks * sent_bytes
    return total


def _exposed_seconds(times: StepTimes, axes: list[_Axis]) -> dict[str, float]:
    """Divide the seconds of each part of the step between its axes, in proportion to their wire time."""
    wires = {axis.name: axis.wire_s for axis in axes}
    totals = {axis.part: sum(wires[same.name] for same in axes if same.part == axis.part) for axis in axes}
    return {
        axis.name: float(np.max(getattr(times, axis.part))) * wires[axis.name] / max(totals[axis.part], 1e-30)
        for axis in axes
    }


def _axis_use(request: PlanRequest, axis: _Axis, shown_s: float) -> AxisUse:
    algorithm, next_best = _fastest_algorithm(axis.group, axis.loads[0])
    return AxisUse(
        axis=axis.name,
        size=axis.ranks,
        stride=axis.stride,
        tier=link_words(request, axis.group),
        operation=" + ".join(dict.fromkeys(load.operation for load in axis.loads)),
        algorithm=algorithm,
        next_best=next_best,
        bytes_per_step=sum(load.calls * _bytes_sent(load, axis.ranks) for load in axis.loads),
        # The cost model may show more than the bare wire time (contention in nanotron's profile): then the wire is as
        # slow.
        wire_s=max(axis.wire_s, shown_s),
        shown_s=shown_s,
        network_copies=axis.loads[0].network_copies,
    )


def link_words(request: PlanRequest, group: net.Group) -> str:
    """Describe the links that a group runs on."""
    link = request.cluster.accelerator.link
    ranks, domain_ranks = int(np.max(group.ranks)), int(np.max(group.per_domain))
    if ranks <= domain_ranks:
        return link
    return "NIC" if domain_ranks == 1 else f"{link}×{domain_ranks}+NIC"


def _layer_passes(layout: Layout) -> int:
    return 2 + (layout.recompute == "full")


def _exchange_passes(request: PlanRequest, layout: Layout) -> float:
    """Return the number of passes of a layer that exchange the experts' tokens, or keys and values."""
    recompute_passes = float(np.max(request.profile.exchange_again)) if layout.recompute == "selective" else 0.0
    return _layer_passes(layout) + recompute_passes


def _activation_bytes(c: Cases) -> float:
    return float(np.max(c.tokens * c.hidden * element_bytes(c)))


def _inner_axes(request: PlanRequest, layout: Layout, c: Cases, g: traffic.Groups) -> list[_Axis]:
    """Return the tensor and context axes, whose traffic is within every layer."""
    layer_passes = request.model.layers / layout.pipeline * layout.accumulation
    operations = ("all-gather", "reduce-scatter") if layout.sequence_parallel else ("all-reduce",)
    # Two of each per layer and pass; the embedding and the head have one each way, on one stage of the pipeline.
    calls = 2 * layer_passes * _layer_passes(layout) + 2 * layout.accumulation / layout.pipeline
    nbytes = _activation_bytes(c)
    # torch's recompute stops before the last operation of a layer, because backward does not need its result
    # (docs/trace.md).
    skipped = layer_passes if layout.recompute == "full" and request.profile_name in EARLY_STOP else 0.0
    tensor = [
        _Load(operation=name, calls=calls - (skipped if name == operations[-1] else 0.0), nbytes=nbytes)
        for name in operations
    ]
    width = np.maximum(c.kv_heads / c.tp, 1.0) * (c.qk_dim + c.v_dim) * c.tokens * element_bytes(c)
    hops = (layout.context - 1) * layer_passes * (_exchange_passes(request, layout) + 1)
    ring = [_Load(operation="ring send", calls=hops, nbytes=float(np.max(width)))]
    pace = request.pace("inner_traffic")
    return [
        _Axis(name="tensor", group=g.tensor, stride=1, loads=tensor, part="tensor_s", pace=pace),
        _Axis(name="context", group=g.context, stride=layout.tensor, loads=ring, part="context_s", pace=pace),
    ]


def _stage_axes(request: PlanRequest, layout: Layout, c: Cases, g: traffic.Groups) -> list[_Axis]:
    spread = layout.tensor if layout.sequence_parallel else 1
    # Forward and backward from each of its chunks; with two ranks each is an end, which has one neighbour less.
    calls = (2 * layout.virtual_pipeline - (layout.pipeline == 2)) * layout.accumulation
    loads = [_Load(operation="send", calls=calls, nbytes=_activation_bytes(c) / spread)]
    stride = layout.tensor * layout.context * layout.data
    pace = request.pace("inner_traffic")
    return [
        _Axis(name="pipeline", group=g.pipeline, stride=stride, loads=loads, part="pipeline_send_s", pace=pace),
    ]


def _replica_axes(request: PlanRequest, layout: Layout, c: Cases, g: traffic.Groups) -> list[_Axis]:
    """Return the data axis as one group, or as the shard groups and the groups between copies of a shard."""
    stage_weights = _stage_weights(c)
    weights, tables = float(np.max(stage_weights.dense)), float(np.max(stage_weights.embedding))
    pace = request.pace("outer_traffic")
    name = "data" if int(np.max(g.replica.ranks)) == 1 else "shard"
    group, part = (g.data, "gradient_s") if layout.zero == 0 else (g.shard, _sharded_part(layout))
    loads = _sharing_loads(request, layout, c, weights, once=tables if request.profile_name in TABLES_ONCE else 0.0)
    shard = _Axis(name=name, group=group, stride=layout.tensor, loads=loads, part=part, pace=pace)
    sharers = max(int(np.max(g.shard.ranks)), 1)
    replica_loads = [_Load(operation="all-reduce", calls=1, nbytes=weights * _gradient_bytes(request, c) / sharers)]
    stride = layout.tensor * sharers
    replica = _Axis(name="replica", group=g.replica, stride=stride, loads=replica_loads, part="gradient_s", pace=pace)
    return [shard, replica]


def _expert_axes(request: PlanRequest, layout: Layout, c: Cases, g: traffic.Groups) -> list[_Axis]:
    if not request.model.is_moe:
        return []
    moe_layers = (request.model.layers - request.model.dense_layers) / layout.pipeline
    routed_bytes = float(np.max(routed_tokens(c) * c.hidden * element_bytes(c)))
    calls = 2 * moe_layers * _exchange_passes(request, layout) * layout.accumulation
    # A token travels once to each domain that needs it, as in traffic.expert_seconds.
    domains, per_token = float(np.max(g.expert.domains)), request.model.experts_per_token
    copies = domains * (1.0 - (1.0 - 1.0 / domains) ** per_token) / per_token if domains > 1 else 1.0
    loads = [_Load(operation="all-to-all", calls=calls, nbytes=routed_bytes, network_copies=copies)]
    data_loads = _sharing_loads(request, layout, c, float(np.max(_stage_weights(c).experts)))
    return [
        _Axis(
            name="expert", group=g.expert, stride=1, loads=loads, part="expert_s", pace=request.pace("inner_traffic")
        ),
        _Axis(
            name="expert data",
            group=g.expert_data,
            stride=layout.expert,
            loads=data_loads,
            part=_sharded_part(layout),
            pace=request.pace("outer_traffic"),
        ),
    ]


def _stage_weights(c: Cases) -> RankWeights:
    return rank_weights(c, stage_layers=np.ceil(c.layers / c.pp))


def _sharded_part(layout: Layout) -> str:
    return "shard_s" if layout.zero == 3 and layout.pipeline == 1 else "gradient_s"


def _gradient_bytes(request: PlanRequest, c: Cases) -> float:
    return float(np.max(traffic.gradient_width(c, request.profile)))


def _gradient_reductions(layout: Layout) -> int:
    """Return the gradient reductions per step.

    ZeRO-2 keeps no whole gradient, so it reduces after every micro-batch; but in a pipeline torch's schedules reduce
    once, after the last micro-batch.
    """
    return layout.accumulation if layout.zero == 2 and layout.pipeline == 1 else 1


def _sharing_loads(request: PlanRequest, layout: Layout, c: Cases, weights: float, *, once: float = 0.0) -> list[_Load]:
    """Return the traffic that keeps holders of `weights` parameters equal; ZeRO-3 gathers `once` of them only once."""
    gradients = weights * _gradient_bytes(request, c)
    weight_bytes = weights * float(np.max(element_bytes(c)))
    if layout.zero == 0:
        return [_Load(operation="all-reduce", calls=1, nbytes=gradients)]
    # In a pipeline ZeRO-3 keeps what it gathered for the whole step.
    if layout.zero < 3 or layout.pipeline > 1:
        return [
            _Load(operation="reduce-scatter", calls=_gradient_reductions(layout), nbytes=gradients),
            _Load(operation="all-gather", calls=1, nbytes=weight_bytes),
        ]
    # ZeRO-3 gathers for forward and again for backward; its gradients are scattered uncompressed.
    count = layout.accumulation
    gathers = 2.0 - once / weights if weights else 0.0
    return [
        _Load(operation="reduce-scatter", calls=count, nbytes=weights * float(np.max(request.profile.gradient_bytes))),
        _Load(operation="all-gather", calls=gathers * count, nbytes=weight_bytes),
    ]


def _load_seconds(group: net.Group, load: _Load) -> float:
    nbytes = np.asarray(load.nbytes)
    if load.operation == "all-reduce":
        return float(np.max(net.all_reduce(group, nbytes)))
    if load.operation in ("all-gather", "reduce-scatter"):
        return float(np.max(net.all_gather(group, nbytes)))
    if load.operation == "all-to-all":
        return float(np.max(net.all_to_all(group, nbytes, network_copies=load.network_copies)))
    hop = net.ring_hop if load.operation == "ring send" else net.message_seconds
    return float(np.max(hop(group, nbytes)))


def _bytes_sent(load: _Load, ranks: int) -> float:
    """Return the bytes that one device sends in one call."""
    share = (ranks - 1) / ranks
    factor = {"all-reduce": 2 * share, "all-gather": share, "reduce-scatter": share, "all-to-all": share}
    return load.nbytes * factor.get(load.operation, 1.0)


def _fastest_algorithm(group: net.Group, load: _Load) -> tuple[str, str]:
    """Return the fastest algorithm for an all-reduce and its runner-up; other operations have only one algorithm."""
    if load.operation == "all-to-all":
        return "direct", ""
    if load.operation.endswith("send"):
        return "p2p", ""
    if load.operation != "all-reduce":
        return "Ring", ""  # NCCL has no tree for gathers and scatters
    seconds = net.all_reduce_by_algorithm(group, np.asarray(load.nbytes))
    slowest_s = {
        name: float(np.max(seconds_of))
        for name, seconds_of in zip(net.ALGORITHMS, seconds, strict=True)
        if np.all(np.isfinite(seconds_of))
    }
    first, second, *_ = sorted(slowest_s, key=lambda name: slowest_s[name])
    ratio = slowest_s[second] / slowest_s[first]
    return first, f"{second} {ratio:.2f}x" if np.isfinite(ratio) else ""


# The messages of a plan's collectives: their group, their size, and NCCL's choices for them.


MIB = 2.0**20
# The value of `comm.bucket_mib = "auto"`: train/parallel/replicate.py, after DistributedDataParallel's default.
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
        """The number of fast domains that the group spans."""
        return max(1, math.ceil(self.ranks / max(1, self.per_domain)))

    @property
    def where(self) -> str:
        """The group's place, as text."""
        return "in one domain" if self.domains == 1 else f"in {self.domains:,} domains, {self.per_domain} in each"

    @property
    def size(self) -> str:
        """The message's size, as text."""
        return f"{self.nbytes / MIB:,.0f} MiB" if self.nbytes >= MIB else f"{self.nbytes / 1024:,.0f} KiB"


def members_per_domain(ranks: int, stride: int, *, domain: int, devices: int) -> int:
    """Return the ranks of a group that share a fast domain, when ranks fill domains in order.

    Where groups do not tile the domain, some span two of them, and the worst one counts.

    >>> [members_per_domain(n, s, domain=8, devices=64) for n, s in ((8, 1), (8, 8), (16, 4), (3, 1))]
    [8, 1, 2, 1]
    """
    ranks, stride, domain = max(1, ranks), max(1, stride), max(1, domain)
    block = ranks * stride
    if devices > domain and 1 < block <= domain and domain % block:
        return max(1, ranks // 2)
    return max(1, min(ranks, domain // stride))


def axis_messages(job: Job, cluster: Cluster, layout: Layout, uses: Sequence[AxisUse]) -> tuple[Message, ...]:
    """Return every sum, gather and scatter of a step between more than one rank, gradients first."""
    messages = [message for axis in uses if axis.size > 1 for message in _of_axis(job, cluster, layout, axis)]
    return tuple(sorted(messages, key=lambda message: message.axis not in REDUCING))


def message_system(message: Message, cluster: Cluster) -> NcclSystem:
    """Return the message's group, as NCCL sees it."""
    return group_system(cluster, nodes=message.domains, per_node=message.per_domain)


def message_time(message: Message, cluster: Cluster) -> ExpectedTime:
    """Return the algorithm and protocol that NCCL picks for one message, and the expected time."""
    expected = expect_collective(message_system(message, cluster), message.nbytes, operation=message.operation)
    assert expected is not None  # rings exist for every operation
    return expected


def with_messages(job: Job, cluster: Cluster, layout: Layout, uses: Sequence[AxisUse]) -> tuple[AxisUse, ...]:
    """Return the axes with NCCL's choice for one message of their first sum, gather or scatter.

    Axes of TPUs and CPUs, which do not run NCCL, are returned unchanged.
    """
    if cluster.accelerator.vendor not in NCCL_VENDORS:
        return tuple(uses)
    first: dict[str, Message] = {}
    for message in axis_messages(job, cluster, layout, uses):
        first.setdefault(message.axis, message)
    return tuple(_with_nccl_choice(use, first[use.axis], cluster) if use.axis in first else use for use in uses)


def _with_nccl_choice(use: AxisUse, message: Message, cluster: Cluster) -> AxisUse:
    expected = message_time(message, cluster)
    pairs = sorted(
        possible_pairs(message_system(message, cluster), message.nbytes, operation=message.operation),
        key=lambda pair: pair.seconds,
    )
    runner_up = next((pair for pair in pairs if pair.algorithm != expected.algorithm), None)
    return replace(
        use,
        algorithm=expected.algorithm,
        protocol=expected.protocol,
        next_best=f"{runner_up.algorithm} {runner_up.seconds / pairs[0].seconds:.2f}x" if runner_up else "",
        message_bytes=message.nbytes,
        message_s=expected.seconds,
        message_interval_s=(expected.low_s, expected.high_s),
    )


def bucket_bytes(job: Job) -> float:
    """Return the bytes of gradients that are reduced together where nothing is sharded."""
    mib = job.comm.bucket_mib
    return (BUCKET_MIB if isinstance(mib, str) else mib) * MIB


def _of_axis(job: Job, cluster: Cluster, layout: Layout, axis: AxisUse) -> list[Message]:
    operations: list[Operation] = [
        name for name in ("all-reduce", "reduce-scatter", "all-gather") if name in axis.operation
    ]
    sizes = {operation: _message_size(job, layout, axis, operation) for operation in operations}
    return [
        Message(
            axis=axis.axis,
            operation=operation,
            ranks=axis.size,
            per_domain=members_per_domain(
                axis.size, axis.stride, domain=cluster.domain_devices, devices=layout.devices
            ),
            nbytes=nbytes,
            count=count,
            wire_s=axis.wire_s,
            shown_s=axis.shown_s,
        )
        for operation, (nbytes, count) in sizes.items()
        if nbytes > 0 and count > 0
    ]


def _message_size(job: Job, layout: Layout, axis: AxisUse, operation: Operation) -> tuple[float, float]:
    """Return (bytes of a message, messages per step)."""
    element_bytes = 4.0 if job.precision.compute == "fp32" else 2.0
    if axis.axis not in REDUCING:
        tokens = layout.micro_batch * job.data.sequence / max(1, layout.context)
        return _equal_messages(tokens * job.model.hidden * element_bytes, axis, operation)
    width = element_bytes if operation == "all-gather" else (2.0 if job.precision.grad_reduce == "bf16" else 4.0)
    if layout.zero == 0:
        total_bytes = axis.bytes_per_step * axis.size / (2.0 * (axis.size - 1))
        nbytes = min(bucket_bytes(job), total_bytes)
        return nbytes, math.ceil(min(total_bytes / nbytes, 1e15)) if nbytes > 0 else 0.0
    return _equal_messages(_block_parameters(job, layout, axis) * width, axis, operation)


def _equal_messages(nbytes: float, axis: AxisUse, operation: Operation) -> tuple[float, float]:
    """Return messages of one size, as many as the axis' bytes make; its operations take about equal parts of them."""
    share = (axis.size - 1) / axis.size * (2.0 if operation == "all-reduce" else 1.0)
    kinds = axis.operation.count("+") + 1
    return nbytes, axis.bytes_per_step / kinds / max(nbytes * share, 1.0)


def _block_parameters(job: Job, layout: Layout, axis: AxisUse) -> float:
    """Return the parameters of one block of layers on one rank, which FSDP gathers and scatters at once."""
    counts, model = count_parameters(job.model), job.model
    if axis.axis == "expert data":
        return counts.expert * model.experts / max(1, layout.expert)
    mlp = counts.moe_fixed_per_layer if model.is_moe else counts.dense_mlp_per_layer
    block = (counts.attention_per_layer + mlp + counts.norms_per_layer) / max(1, layout.tensor)
    return block / max(1, layout.shard) if axis.axis == "replica" else block
