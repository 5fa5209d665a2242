"""Traffic of a step in seconds: inside every layer, and between the ranks that share weights."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from phalanx.network import collectives as net
from phalanx.plan import traffic
from phalanx.plan.compute import Compute, element_bytes
from phalanx.plan.memory import OFFLOAD_PARAMETERS
from phalanx.plan.optimizer import owned_weights
from phalanx.plan.step import FETCHED_BYTES
from phalanx.plan.weights import RankWeights
from phalanx.sim.step.paths import crosses_network
from phalanx.sim.step.question import Question, one


@dataclass(frozen=True, kw_only=True, slots=True)
class Inner:
    """Traffic inside a pass through one layer: time on the wire, and the part the device waits for in any case."""

    part: str
    tier: str  # "link" or "nic"
    wire_s: float
    exposed_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Sharing:
    """Traffic of a stage that keeps data ranks equal."""

    tier: str
    reduce_s: float  # gradients, after the last micro-batch
    again_s: float  # and after every other one (ZeRO-2); 0 without
    after_s: float  # work on them that nothing hides (PowerSGD's factors)
    gather_s: float  # updated parameters, once
    overlap: float  # share of a reduction that may run behind backward
    gather_overlap: float  # share of the gather that may run behind forward
    layer_gather_s: float  # ZeRO-3: one layer's parameters, for forward and again for backward
    layer_scatter_s: float  # ZeRO-3: one layer's gradients


def inner_traffic(q: Question, g: traffic.Groups, done: Compute) -> tuple[tuple[Inner, ...], tuple[Inner, ...]]:
    """(forward, backward) of one layer and micro-batch; full recompute sends again what forward sent."""
    c, f = q.cases, q.ask.profile
    tensor, expert = one(traffic.tensor_seconds(c, g, f)), one(traffic.expert_seconds(c, g, f))
    context = one(traffic.context_seconds(c, q.ask.physics, g, done.attention.forward))
    shown = {"tensor_s": tensor, "context_s": context, "expert_s": expert}
    wire = {
        "tensor_s": tensor / one(f.tensor_exposed),
        "context_s": _ring_seconds(q, g),
        "expert_s": expert / one(f.expert_exposed),
    }
    again = one(q.cases.recompute == 2)
    passes = {"tensor_s": 1.0, "context_s": 2.0, "expert_s": 1.0}  # ring attention sends twice as much back

    def direction(times: dict[str, float]) -> tuple[Inner, ...]:
        return tuple(_inner(q, g, part, times[part], shown[part], wire[part]) for part in shown if shown[part] > 0)

    return direction(dict.fromkeys(shown, 1.0)), direction({part: count + again for part, count in passes.items()})


def _inner(q: Question, g: traffic.Groups, part: str, times: float, shown_s: float, wire_s: float) -> Inner:
    axis = part.removesuffix("_s")
    scale = times * q.pace(part) / q.ask.model.layers
    return Inner(
        part=part,
        tier=_tier(g, axis),
        # Where a profile shows more than the bare wire (contention), the wire is as slow.
        wire_s=scale * max(wire_s, shown_s),
        exposed_s=scale * shown_s,
    )


def _ring_seconds(q: Question, g: traffic.Groups) -> float:
    """Keys and values once round the context ring, all layers, with the kernels each hop starts."""
    c = q.cases
    width = np.maximum(c.kv_heads / c.tp, 1.0) * (c.qk_dim + c.v_dim)
    hop = net.ring_hop(g.context, c.tokens * width * element_bytes(c))
    return one(c.layers * (c.cp - 1.0) * (hop + traffic.CONTEXT_LAUNCHES * q.ask.physics.start_s))


def _tier(g: traffic.Groups, axis: str) -> str:
    return "nic" if crosses_network(getattr(g, axis), axis) else "link"


def sharing(q: Question, g: traffic.Groups, held: RankWeights, layers: int) -> Sharing:
    """Of the stage with most layers."""
    c, f, layout = q.cases, q.ask.profile, q.plan.layout
    sync = traffic.gradient_traffic(c, g, held, f)
    pace = q.pace("gradient_s")
    gather_s, scatter_s = _layer_shard(q, g, held, layers)
    alone = layout.data * layout.context == 1
    return Sharing(
        tier=_tier(g, "data"),
        reduce_s=0.0 if alone else one(sync.reduce) * pace,
        again_s=one(sync.again) * pace if layout.zero == 2 and layout.pipeline == 1 else 0.0,
        after_s=one(traffic.factoring_seconds(c, q.ask.physics, held)) * pace,
        gather_s=one(sync.gather) * pace,
        overlap=min(one(f.data_overlap if layout.zero == 0 else f.scatter_overlap), 1.0),
        gather_overlap=min(one(f.gather_overlap), 1.0),
        layer_gather_s=gather_s,
        layer_scatter_s=scatter_s,
    )


def _layer_shard(q: Question, g: traffic.Groups, held: RankWeights, layers: int) -> tuple[float, float]:
    """ZeRO-3 without a pipeline: (gather, scatter) of one layer. Gathers carry parameters, the scatter gradients."""
    c, f, layout = q.cases, q.ask.profile, q.plan.layout
    if layout.zero < 3 or layout.pipeline > 1:
        return 0.0, 0.0
    total = one(traffic.shard_seconds(c, g, held, f)) / layers
    # Parameters in host memory come and go with the same rhythm.
    fetched = np.where(c.offload == OFFLOAD_PARAMETERS, owned_weights(c, held) * FETCHED_BYTES, 0.0)
    fetch_s = one(fetched / c.host_link_bytes_per_s) / layers
    size, gradient = one(element_bytes(c)), one(f.gradient_bytes)
    gather_s = total * size / (2.0 * size + gradient)
    return gather_s + fetch_s / 3.0, total - 2.0 * gather_s + fetch_s / 3.0
