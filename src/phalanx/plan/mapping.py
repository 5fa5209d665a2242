"""Which axis runs on which links, what it carries per step, and which algorithm carries it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from phalanx.network import collectives as net
from phalanx.plan import traffic
from phalanx.plan.ask import Ask
from phalanx.plan.cases import COMPRESSION, Cases
from phalanx.plan.compute import element_bytes, routed_tokens
from phalanx.plan.layout import Layout
from phalanx.plan.score import price
from phalanx.plan.step import StepTimes
from phalanx.plan.weights import rank_weights

RANK_ORDER = ("tensor", "context", "data", "pipeline")  # fastest-varying first: neighbours in rank are tensor peers


@dataclass(frozen=True, kw_only=True, slots=True)
class AxisUse:
    """One axis of the mesh. Bytes are what one device sends per step; `shown_s` is the part no compute hides."""

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


def mapping(ask: Ask, layout: Layout) -> tuple[AxisUse, ...]:
    """Every axis with more than one rank, in rank order, experts last."""
    table, times, _ = price(ask, [layout])
    groups = traffic.groups(table, ask.physics, ask.profile)
    strides = {
        "tensor": 1,
        "context": layout.tensor,
        "data": layout.tensor,
        "pipeline": layout.tensor * layout.context * layout.data,
        "expert": 1,
    }
    shown = _shown(times, layout)
    rows = []
    for axis in (*RANK_ORDER, "expert"):
        group: net.Group = getattr(groups, axis)
        ranks = int(np.max(group.ranks))
        if ranks > 1:
            loads = _loads(ask, layout, table, axis)
            rows.append(_use(ask, axis, group, ranks, strides[axis], loads, shown[axis]))
    return tuple(rows)


def _use(ask: Ask, axis: str, group: net.Group, ranks: int, stride: int, loads: list[_Load], shown_s: float) -> AxisUse:
    wire_s = sum(load.calls * _seconds(group, load) for load in loads)
    algorithm, next_best = _algorithm(group, loads[0])
    # Where the cost model shows more than the bare wire (contention in nanotron's profile), the wire is as slow.
    return AxisUse(
        axis=axis,
        size=ranks,
        stride=stride,
        tier=tier(ask, group),
        operation=" + ".join(dict.fromkeys(load.operation for load in loads)),
        algorithm=algorithm,
        next_best=next_best,
        bytes_per_step=sum(load.calls * _sent(load, ranks) for load in loads),
        wire_s=max(wire_s, shown_s),
        shown_s=shown_s,
    )


def tier(ask: Ask, group: net.Group) -> str:
    """The links a group runs on, in words."""
    link = ask.cluster.accelerator.link
    ranks, inside = int(np.max(group.ranks)), int(np.max(group.per_domain))
    if ranks <= inside:
        return link
    return "NIC" if inside == 1 else f"{link}×{inside}+NIC"


def _shown(times: StepTimes, layout: Layout) -> dict[str, float]:
    data = times.shard_s if layout.zero == 3 else times.gradient_s
    parts = {
        "tensor": times.tensor_s,
        "context": times.context_s,
        "data": data,
        "pipeline": times.pipeline_send_s,
        "expert": times.expert_s,
    }
    return {axis: float(np.max(value)) for axis, value in parts.items()}


def _loads(ask: Ask, layout: Layout, c: Cases, axis: str) -> list[_Load]:
    layers = ask.model.layers / layout.pipeline
    passes = 2 + (layout.recompute == "full")
    count = layout.accumulation
    size = float(np.max(element_bytes(c)))
    activation = float(np.max(c.tokens * c.hidden)) * size
    if axis == "tensor":
        if layout.sequence_parallel:
            calls = 2 * layers * passes * count
            return [_Load(operation=name, calls=calls, nbytes=activation) for name in ("all-gather", "reduce-scatter")]
        return [_Load(operation="all-reduce", calls=2 * layers * passes * count, nbytes=activation)]
    if axis == "context":
        width = float(np.max(np.maximum(c.kv_heads / c.tp, 1.0) * (c.qk_dim + c.v_dim) * c.tokens)) * size
        hops = (layout.context - 1) * layers * (passes + 1) * count
        return [_Load(operation="ring send", calls=hops, nbytes=width)]
    if axis == "pipeline":
        spread = layout.tensor if layout.sequence_parallel else 1
        return [_Load(operation="send", calls=2 * layout.virtual_pipeline * count, nbytes=activation / spread)]
    if axis == "expert":
        moe_layers = (ask.model.layers - ask.model.dense_layers) / layout.pipeline
        routed = float(np.max(routed_tokens(c) * c.hidden)) * size
        return [_Load(operation="all-to-all", calls=2 * moe_layers * passes * count, nbytes=routed)]
    return _data_loads(ask, layout, c, size)


def _data_loads(ask: Ask, layout: Layout, c: Cases, size: float) -> list[_Load]:
    weights = float(np.max(rank_weights(c, stage_layers=np.ceil(c.layers / c.pp)).dense))
    share = float(traffic.COMPRESSED_SHARE[COMPRESSION.index(layout.compression)])
    gradients = weights * float(np.max(ask.profile.gradient_bytes)) * share
    if layout.zero == 0:
        return [_Load(operation="all-reduce", calls=1, nbytes=gradients)]
    times = layout.accumulation if layout.zero == 3 else 1
    return [
        _Load(operation="reduce-scatter", calls=times, nbytes=gradients),
        _Load(operation="all-gather", calls=times * (2 if layout.zero == 3 else 1), nbytes=weights * size),
    ]


def _seconds(group: net.Group, load: _Load) -> float:
    nbytes = np.asarray(load.nbytes)
    if load.operation == "all-reduce":
        return float(np.max(net.all_reduce(group, nbytes, switch=np.zeros(1))))
    if load.operation in ("all-gather", "reduce-scatter"):
        return float(np.max(net.all_gather(group, nbytes)))
    if load.operation == "all-to-all":
        return float(np.max(net.all_to_all(group, nbytes)))
    return float(np.max(net.send(group, nbytes)))


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
        return "ring", ""  # NCCL has no tree for gathers and scatters
    seconds = net.all_reduce_by_algorithm(group, np.asarray(load.nbytes))
    # The cost model counts on no reduction in the switch, so it is not offered here either.
    timed = {name: float(np.max(s)) for name, s in zip(net.ALGORITHMS, seconds, strict=True) if name != "switch"}
    first, second, *_ = sorted(timed, key=lambda name: timed[name])
    slower = timed[second] / timed[first]
    return first, f"{second} {slower:.2f}x" if np.isfinite(slower) else ""
