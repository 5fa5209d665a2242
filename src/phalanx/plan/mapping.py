"""Which axis runs on which links, what it carries per step, and which algorithm carries it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from phalanx.network import collectives as net
from phalanx.plan import traffic
from phalanx.plan.ask import Ask
from phalanx.plan.cases import Cases
from phalanx.plan.compute import element_bytes, routed_tokens
from phalanx.plan.layout import Layout
from phalanx.plan.score import price
from phalanx.plan.step import StepTimes
from phalanx.plan.weights import RankWeights, rank_weights

EARLY_STOP = ("phalanx", "pytorch", "torchtitan")  # profiles of trainers on torch.utils.checkpoint
# And of those that gather ZeRO-3's tables once: the head stays until its backward, a lookup's backward needs no weight.
TABLES_ONCE = ("phalanx", "pytorch")
RANK_ORDER = ("tensor", "context", "data", "pipeline")  # fastest-varying first: neighbours in rank are tensor peers


@dataclass(frozen=True, kw_only=True, slots=True)
class AxisUse:
    """One axis of the mesh. Bytes are what one device sends per step; `shown_s` is the part no compute hides.

    The data axis is one row, or two where ZeRO shards inside groups (HSDP): `shard` and `replica`. `expert data` are
    the copies of an expert. The rows' `shown_s` of these add up to the step's ZeRO-3 and gradient traffic.
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
    network_copies: float = 1.0  # of an all-to-all: share of what goes to other domains that crosses the network
    # One message of its sums, gathers or scatters, alone on the network, as NCCL carries it (network/nccl_choice.py);
    # 0 where NCCL is not asked. `wire_s` is the planner's: beside compute, as published runs fit it (decision 0027).
    protocol: str = ""
    message_bytes: float = 0.0
    message_s: float = 0.0
    message_interval_s: tuple[float, float] | None = None  # of 80 % of systems

    @property
    def exposed(self) -> float:
        """Share of the time on the wire that shows in the step."""
        return self.shown_s / self.wire_s if self.wire_s > 0 else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class _Load:
    """What an axis does in a step: `calls` of an operation with `nbytes` each."""

    operation: str
    calls: float
    nbytes: float
    network_copies: float = 1.0  # of an all-to-all: share of the bytes that crosses the network


@dataclass(frozen=True, kw_only=True, slots=True)
class _Axis:
    """An axis with its group and loads, before it is known how much of it shows. `part` is a field of StepTimes."""

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
        return self.pace * sum(load.calls * _seconds(self.group, load) for load in self.loads)


def mapping(ask: Ask, layout: Layout) -> tuple[AxisUse, ...]:
    """Every axis with more than one rank, in rank order, experts last."""
    table, times, _ = price(ask, [layout])
    groups = traffic.groups(table, ask.physics, ask.profile)
    axes = [
        *_inner(ask, layout, table, groups),
        *_replicas(ask, layout, table, groups),
        *_stages(ask, layout, table, groups),
        *_experts(ask, layout, table, groups),
    ]
    used = [axis for axis in axes if axis.ranks > 1]
    shown = _shown(times, used)
    return tuple(_use(ask, axis, shown[axis.name]) for axis in used)


def _shown(times: StepTimes, axes: list[_Axis]) -> dict[str, float]:
    """The seconds of each part of the step, divided between the axes that make it in proportion to their wire time."""
    wires = {axis.name: axis.wire_s for axis in axes}
    totals = {axis.part: sum(wires[one.name] for one in axes if one.part == axis.part) for axis in axes}
    return {
        axis.name: float(np.max(getattr(times, axis.part))) * wires[axis.name] / max(totals[axis.part], 1e-30)
        for axis in axes
    }


def _use(ask: Ask, axis: _Axis, shown_s: float) -> AxisUse:
    algorithm, next_best = _algorithm(axis.group, axis.loads[0])
    return AxisUse(
        axis=axis.name,
        size=axis.ranks,
        stride=axis.stride,
        tier=tier(ask, axis.group),
        operation=" + ".join(dict.fromkeys(load.operation for load in axis.loads)),
        algorithm=algorithm,
        next_best=next_best,
        bytes_per_step=sum(load.calls * _sent(load, axis.ranks) for load in axis.loads),
        # Where the cost model shows more than the bare wire (contention in nanotron's profile), the wire is as slow.
        wire_s=max(axis.wire_s, shown_s),
        shown_s=shown_s,
        network_copies=axis.loads[0].network_copies,
    )


def tier(ask: Ask, group: net.Group) -> str:
    """The links a group runs on, in words."""
    link = ask.cluster.accelerator.link
    ranks, inside = int(np.max(group.ranks)), int(np.max(group.per_domain))
    if ranks <= inside:
        return link
    return "NIC" if inside == 1 else f"{link}×{inside}+NIC"


def _passes(layout: Layout) -> int:
    return 2 + (layout.recompute == "full")


def _activation_bytes(c: Cases) -> float:
    return float(np.max(c.tokens * c.hidden * element_bytes(c)))


def _inner(ask: Ask, layout: Layout, c: Cases, g: traffic.Groups) -> list[_Axis]:
    """Tensor and context: what travels inside every layer."""
    layer_passes = ask.model.layers / layout.pipeline * layout.accumulation
    operations = ("all-gather", "reduce-scatter") if layout.sequence_parallel else ("all-reduce",)
    # Two of each per layer and pass; the embedding and the head have one each way, on one stage of the pipeline.
    calls = 2 * layer_passes * _passes(layout) + 2 * layout.accumulation / layout.pipeline
    nbytes = _activation_bytes(c)
    # torch's recompute stops before what ends a layer, for backward does not need its result (docs/trace.md).
    skipped = layer_passes if layout.recompute == "full" and ask.profile_name in EARLY_STOP else 0.0
    tensor = [
        _Load(operation=name, calls=calls - (skipped if name == operations[-1] else 0.0), nbytes=nbytes)
        for name in operations
    ]
    width = np.maximum(c.kv_heads / c.tp, 1.0) * (c.qk_dim + c.v_dim) * c.tokens * element_bytes(c)
    hops = (layout.context - 1) * layer_passes * (_passes(layout) + 1)
    ring = [_Load(operation="ring send", calls=hops, nbytes=float(np.max(width)))]
    pace = ask.pace("inner_traffic")
    return [
        _Axis(name="tensor", group=g.tensor, stride=1, loads=tensor, part="tensor_s", pace=pace),
        _Axis(name="context", group=g.context, stride=layout.tensor, loads=ring, part="context_s", pace=pace),
    ]


def _stages(ask: Ask, layout: Layout, c: Cases, g: traffic.Groups) -> list[_Axis]:
    spread = layout.tensor if layout.sequence_parallel else 1
    # Forward and back from each of its chunks; of two ranks each is an end, which has one neighbour less.
    calls = (2 * layout.virtual_pipeline - (layout.pipeline == 2)) * layout.accumulation
    loads = [_Load(operation="send", calls=calls, nbytes=_activation_bytes(c) / spread)]
    stride = layout.tensor * layout.context * layout.data
    pace = ask.pace("inner_traffic")
    return [
        _Axis(name="pipeline", group=g.pipeline, stride=stride, loads=loads, part="pipeline_send_s", pace=pace),
    ]


def _replicas(ask: Ask, layout: Layout, c: Cases, g: traffic.Groups) -> list[_Axis]:
    """The data axis, whole or as groups that share one sharded copy and the copies of a shard."""
    held = _weights(c)
    weights, tables = float(np.max(held.dense)), float(np.max(held.embedding))
    pace = ask.pace("outer_traffic")
    whole = "data" if int(np.max(g.replica.ranks)) == 1 else "shard"
    group, part = (g.data, "gradient_s") if layout.zero == 0 else (g.shard, _sharded_part(layout))
    loads = _sharing(ask, layout, c, weights, once=tables if ask.profile_name in TABLES_ONCE else 0.0)
    shard = _Axis(name=whole, group=group, stride=layout.tensor, loads=loads, part=part, pace=pace)
    sharers = max(int(np.max(g.shard.ranks)), 1)
    between = [_Load(operation="all-reduce", calls=1, nbytes=weights * _gradient_bytes(ask, c) / sharers)]
    stride = layout.tensor * sharers
    replica = _Axis(name="replica", group=g.replica, stride=stride, loads=between, part="gradient_s", pace=pace)
    return [shard, replica]


def _experts(ask: Ask, layout: Layout, c: Cases, g: traffic.Groups) -> list[_Axis]:
    if not ask.model.is_moe:
        return []
    moe_layers = (ask.model.layers - ask.model.dense_layers) / layout.pipeline
    routed = float(np.max(routed_tokens(c) * c.hidden * element_bytes(c)))
    calls = 2 * moe_layers * _passes(layout) * layout.accumulation
    copies = _network_copies(ask, g.expert)
    loads = [_Load(operation="all-to-all", calls=calls, nbytes=routed, network_copies=copies)]
    shared = _sharing(ask, layout, c, float(np.max(_weights(c).experts)))
    return [
        _Axis(name="expert", group=g.expert, stride=1, loads=loads, part="expert_s", pace=ask.pace("inner_traffic")),
        _Axis(
            name="expert data",
            group=g.expert_data,
            stride=layout.expert,
            loads=shared,
            part=_sharded_part(layout),
            pace=ask.pace("outer_traffic"),
        ),
    ]


def _network_copies(ask: Ask, group: net.Group) -> float:
    """A token travels once to each domain that wants it, as in traffic.expert_seconds."""
    domains, wanted = float(np.max(group.domains)), ask.model.experts_per_token
    return domains * (1.0 - (1.0 - 1.0 / domains) ** wanted) / wanted if domains > 1 else 1.0


def _weights(c: Cases) -> RankWeights:
    return rank_weights(c, stage_layers=np.ceil(c.layers / c.pp))


def _sharded_part(layout: Layout) -> str:
    return "shard_s" if layout.zero == 3 and layout.pipeline == 1 else "gradient_s"


def _gradient_bytes(ask: Ask, c: Cases) -> float:
    return float(np.max(traffic.gradient_width(c, ask.profile)))


def _reduces(layout: Layout) -> int:
    """Gradient reductions per step; ZeRO-2 owns no whole gradient, so it reduces after every micro-batch.

    Not in a pipeline: torch's schedules reduce once, after the last micro-batch.
    """
    return layout.accumulation if layout.zero == 2 and layout.pipeline == 1 else 1


def _sharing(ask: Ask, layout: Layout, c: Cases, weights: float, *, once: float = 0.0) -> list[_Load]:
    """What keeps the holders of `weights` parameters equal; `once` of them ZeRO-3 gathers once per micro-batch."""
    gradients = weights * _gradient_bytes(ask, c)
    held = weights * float(np.max(element_bytes(c)))
    if layout.zero == 0:
        return [_Load(operation="all-reduce", calls=1, nbytes=gradients)]
    if layout.zero < 3 or layout.pipeline > 1:  # in a pipeline ZeRO-3 keeps what it gathered for the whole step
        return [
            _Load(operation="reduce-scatter", calls=_reduces(layout), nbytes=gradients),
            _Load(operation="all-gather", calls=1, nbytes=held),
        ]
    # ZeRO-3 gathers for forward and again for backward; its gradients are scattered uncompressed.
    count = layout.accumulation
    gathers = 2.0 - once / weights if weights else 0.0
    return [
        _Load(operation="reduce-scatter", calls=count, nbytes=weights * float(np.max(ask.profile.gradient_bytes))),
        _Load(operation="all-gather", calls=gathers * count, nbytes=held),
    ]


def _seconds(group: net.Group, load: _Load) -> float:
    nbytes = np.asarray(load.nbytes)
    if load.operation == "all-reduce":
        return float(np.max(net.all_reduce(group, nbytes)))
    if load.operation in ("all-gather", "reduce-scatter"):
        return float(np.max(net.all_gather(group, nbytes)))
    if load.operation == "all-to-all":
        return float(np.max(net.all_to_all(group, nbytes, network_copies=load.network_copies)))
    hop = net.ring_hop if load.operation == "ring send" else net.send
    return float(np.max(hop(group, nbytes)))


def _sent(load: _Load, ranks: int) -> float:
    """Bytes one device sends for one call."""
    share = (ranks - 1) / ranks
    factor = {"all-reduce": 2 * share, "all-gather": share, "reduce-scatter": share, "all-to-all": share}
    return load.nbytes * factor.get(load.operation, 1.0)


def _algorithm(group: net.Group, load: _Load) -> tuple[str, str]:
    """The fastest algorithm for an all-reduce and its runner-up; the other operations have one."""
    if load.operation == "all-to-all":
        return "direct", ""
    if load.operation.endswith("send"):
        return "p2p", ""
    if load.operation != "all-reduce":
        return "Ring", ""  # NCCL has no tree for gathers and scatters
    seconds = net.all_reduce_by_algorithm(group, np.asarray(load.nbytes))
    timed = {name: float(np.max(s)) for name, s in zip(net.ALGORITHMS, seconds, strict=True) if np.all(np.isfinite(s))}
    first, second, *_ = sorted(timed, key=lambda name: timed[name])
    slower = timed[second] / timed[first]
    return first, f"{second} {slower:.2f}x" if np.isfinite(slower) else ""
