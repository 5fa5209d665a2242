"""The work of a step for every stage, from a plan and its cost model.

The cost model is evaluated again for values that a Plan does not store.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from phalanx.network import collectives as net
from phalanx.plan import traffic
from phalanx.plan.cases import Cases, Floats
from phalanx.plan.compute import Compute, compute_seconds, element_bytes
from phalanx.plan.memory_profile import OFFLOAD_PARAMETERS
from phalanx.plan.optimizer import owned_weights
from phalanx.plan.plan import Plan
from phalanx.plan.request import PlanRequest, request_from_job
from phalanx.plan.score import price_layouts
from phalanx.plan.step import FETCHED_BYTES, StepTimes, stage_layers
from phalanx.plan.weights import RankWeights, rank_weights
from phalanx.sim.step.axis_paths import crosses_network


@dataclass(frozen=True, kw_only=True, slots=True)
class StepQuestion:
    """A plan with its cost-model inputs, its uncalibrated prediction, and the groups of each axis."""

    plan: Plan
    request: PlanRequest
    cases: Cases
    times: StepTimes
    groups: traffic.Groups

    def pace(self, part: str) -> float:
        """Return the plan's seconds of a part over those of the uncalibrated model: its calibration factor, or 1."""
        modelled = single_value(getattr(self.times, part))
        return self.plan.prediction.breakdown_s[part] / modelled if modelled > 0 else 1.0


def ask_plan(plan: Plan) -> StepQuestion:
    """Evaluate the plan's own cost model."""
    request, _ = request_from_job(plan.job, plan.cluster)
    cases, times, _ = price_layouts(request, [plan.layout])
    groups = traffic.axis_groups(cases, request.physics, request.profile)
    return StepQuestion(plan=plan, request=request, cases=cases, times=times, groups=groups)


def single_value(value: Floats | float) -> float:
    """Return the single element of a column."""
    return float(np.max(value))


# Traffic of a step in seconds: inside every layer, and between the ranks that share weights.


@dataclass(frozen=True, kw_only=True, slots=True)
class Inner:
    """Traffic inside a pass through one layer: time on the wire, and the part for which the device always waits."""

    part: str
    tier: str  # "link" or "nic"
    wire_s: float
    exposed_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Sharing:
    """Traffic of a stage that keeps its data ranks equal."""

    tier: str
    reduce_s: float  # gradients, after the last micro-batch
    again_s: float  # gradients after every other micro-batch (ZeRO-2); 0 without
    after_s: float  # work on gradients that is never hidden (PowerSGD's factors)
    gather_s: float  # updated parameters, once
    overlap: float  # share of a reduction that may overlap backward
    gather_overlap: float  # share of the gather that may overlap forward
    layer_gather_s: float  # ZeRO-3: one layer's parameters, for forward and again for backward
    layer_scatter_s: float  # ZeRO-3: one layer's gradients


def inner_traffic(q: StepQuestion, g: traffic.Groups, done: Compute) -> tuple[tuple[Inner, ...], tuple[Inner, ...]]:
    """Return the traffic (forward, backward) of one layer and micro-batch; full recompute repeats that of forward."""
    c, f = q.cases, q.request.profile
    tensor, expert = single_value(traffic.tensor_seconds(c, g, f)), single_value(traffic.expert_seconds(c, g, f))
    context = single_value(traffic.context_seconds(c, q.request.physics, g, done.attention.forward))
    shown = {"tensor_s": tensor, "context_s": context, "expert_s": expert}
    wire = {
        "tensor_s": tensor / single_value(f.tensor_exposed),
        "context_s": _ring_seconds(q, g),
        "expert_s": expert / single_value(f.expert_exposed),
    }
    is_repeated = single_value(q.cases.recompute == 2)
    # Ring attention sends twice as much in backward.
    passes = {"tensor_s": 1.0, "context_s": 2.0, "expert_s": 1.0}

    def direction(times: dict[str, float]) -> tuple[Inner, ...]:
        return tuple(
            _inner_traffic(q, g, part, times[part], shown[part], wire[part]) for part in shown if shown[part] > 0
        )

    return direction(dict.fromkeys(shown, 1.0)), direction(
        {part: count + is_repeated for part, count in passes.items()}
    )


def _inner_traffic(q: StepQuestion, g: traffic.Groups, part: str, times: float, shown_s: float, wire_s: float) -> Inner:
    axis = part.removesuffix("_s")
    scale = times * q.pace(part) / q.request.model.layers
    return Inner(
        part=part,
        tier=_axis_tier(g, axis),
        # Where a profile exposes more than the bare wire (contention), the wire is as slow.
        wire_s=scale * max(wire_s, shown_s),
        exposed_s=scale * shown_s,
    )


def _ring_seconds(q: StepQuestion, g: traffic.Groups) -> float:
    """Return the seconds of keys and values once round the context ring, all layers, with each hop's kernel starts."""
    c = q.cases
    width = np.maximum(c.kv_heads / c.tp, 1.0) * (c.qk_dim + c.v_dim)
    hop = net.ring_hop(g.context, c.tokens * width * element_bytes(c))
    return single_value(c.layers * (c.cp - 1.0) * (hop + traffic.CONTEXT_LAUNCHES * q.request.physics.start_s))


def _axis_tier(g: traffic.Groups, axis: str) -> str:
    return "nic" if crosses_network(getattr(g, axis), axis) else "link"


def stage_sharing(q: StepQuestion, g: traffic.Groups, held: RankWeights, layers: int) -> Sharing:
    """Return the sharing traffic of the stage with most layers."""
    c, f, layout = q.cases, q.request.profile, q.plan.layout
    sync = traffic.gradient_traffic(c, g, held, f)
    pace = q.pace("gradient_s")
    gather_s, scatter_s = _layer_shard(q, g, held, layers)
    single_rank = layout.data * layout.context == 1
    return Sharing(
        tier=_axis_tier(g, "data"),
        reduce_s=0.0 if single_rank else single_value(sync.reduce) * pace,
        again_s=single_value(sync.again) * pace if layout.zero == 2 and layout.pipeline == 1 else 0.0,
        after_s=single_value(traffic.factoring_seconds(c, q.request.physics, held)) * pace,
        gather_s=single_value(sync.gather) * pace,
        overlap=min(single_value(f.data_overlap if layout.zero == 0 else f.scatter_overlap), 1.0),
        gather_overlap=min(single_value(f.gather_overlap), 1.0),
        layer_gather_s=gather_s,
        layer_scatter_s=scatter_s,
    )


def _layer_shard(q: StepQuestion, g: traffic.Groups, held: RankWeights, layers: int) -> tuple[float, float]:
    """Return (gather, scatter) seconds of one layer with ZeRO-3 and no pipeline, else zeros.

    Gathers carry parameters, the scatter gradients.
    """
    c, f, layout = q.cases, q.request.profile, q.plan.layout
    if layout.zero < 3 or layout.pipeline > 1:
        return 0.0, 0.0
    total = single_value(traffic.shard_seconds(c, g, held, f)) / layers
    # Parameters in host memory are fetched and returned in the same rhythm.
    fetched = np.where(c.offload == OFFLOAD_PARAMETERS, owned_weights(c, held) * FETCHED_BYTES, 0.0)
    fetch_s = single_value(fetched / c.host_link_bytes_per_s) / layers
    size, gradient = single_value(element_bytes(c)), single_value(f.gradient_bytes)
    gather_s = total * size / (2.0 * size + gradient)
    return gather_s + fetch_s / 3.0, total - 2.0 * gather_s + fetch_s / 3.0


# The work of every stage of a plan in a step: seconds of compute from the plan, of traffic from the fabric.
# Compute is the plan's own (its breakdown per layer and micro-batch), so that differences from the plan come from the
# network and the order of events. Traffic is the planner's arithmetic over groups with the fabric's rates
# (`on_fabric`).


# Parts of the plan's step that are work on the device, except the head.
COMPUTE_PARTS = ("matmul_s", "attention_s", "elementwise_s", "recompute_s", "launch_s")
LAYER_PARTS = (*COMPUTE_PARTS, "tensor_s", "context_s", "expert_s")


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerPass:
    """One direction through one layer: its compute and the traffic inside it."""

    compute_s: float
    inner: tuple[Inner, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepWork:
    """The work of a step. Passes are per layer; stage i holds `layers[i]` of them, the last one also the head."""

    schedule: str
    layers: tuple[int, ...]
    chunks: int
    micros: int
    forward: LayerPass
    backward: LayerPass
    weight_s: float  # the part of a layer's backward that may be postponed (zero-bubble)
    head_forward_s: float
    head_backward_s: float
    send_s: float
    send_exposed: float  # share of a send for which the sender waits
    send_tier: str
    host_micro_s: float
    sharing: tuple[Sharing, ...]  # of each stage
    optimizer_s: float
    host_step_s: float
    balanced: bool = True  # the last chunk holds fewer layers because of the head

    @property
    def stages(self) -> int:
        """The number of pipeline stages."""
        return len(self.layers)

    def chunk_layers(self, stage: int, chunk: int) -> float:
        """Return the layers of one chunk, possibly a fraction; next to the head, the last chunk has fewer."""
        layers = self.layers[stage]
        even = layers / self.chunks
        if stage < self.stages - 1 or self.chunks == 1 or not self.balanced:
            return even
        each_s = self.forward.compute_s + self.backward.compute_s
        head = (self.head_forward_s + self.head_backward_s) / each_s
        last = max(0.0, (layers + head) / self.chunks - head)
        return last if chunk == self.chunks - 1 else (layers - last) / (self.chunks - 1)


def plan_work(q: StepQuestion, groups: traffic.Groups) -> StepWork:
    """Return the work of a plan's step with its traffic over `groups`."""
    c, f, layout = q.cases, q.request.profile, q.plan.layout
    compute = compute_seconds(c, q.request.physics, f)
    layers = layers_on_stages(q, compute)
    inner = inner_traffic(q, groups, compute)
    forward_s, backward_s, weight_s = _layer_seconds(q, compute)
    host_micro_s, host_step_s = _host_seconds(q)
    largest = stage_sharing(q, groups, rank_weights(c, stage_layers=np.asarray([float(max(layers))])), max(layers))
    return StepWork(
        schedule=layout.schedule,
        layers=layers,
        chunks=layout.virtual_pipeline,
        micros=layout.accumulation,
        forward=LayerPass(compute_s=forward_s, inner=inner[0]),
        backward=LayerPass(compute_s=backward_s, inner=inner[1]),
        weight_s=weight_s if layout.schedule == "zero-bubble" and layout.pipeline > 1 else 0.0,
        head_forward_s=single_value(compute.head.forward) * q.pace("matmul_s"),
        head_backward_s=single_value(compute.head.backward) * q.pace("matmul_s"),
        send_s=single_value(traffic.send_seconds(c, groups)) * q.pace("pipeline_send_s")
        if layout.pipeline > 1
        else 0.0,
        send_exposed=min(single_value(f.pipeline_exposed), 1.0),
        send_tier="nic" if single_value(groups.pipeline.per_domain) <= 1 else "link",
        host_micro_s=host_micro_s,
        sharing=tuple(_scaled_sharing(largest, number / max(layers)) for number in layers),
        optimizer_s=q.plan.prediction.breakdown_s["optimizer_s"],
        host_step_s=host_step_s,
        balanced=bool(single_value(f.balanced_stages) > 0),
    )


def layers_on_stages(q: StepQuestion, done: Compute) -> tuple[int, ...]:
    """Return the layers of each stage, as the plan splits them: the last may hold fewer because of the head."""
    times, total, balanced = q.times, q.request.model.layers, q.request.profile.balanced_stages
    per_layer = sum(single_value(getattr(times, part)) for part in LAYER_PARTS) / _layers_passed(q, done)
    head = single_value(done.head.forward + done.head.backward) / max(per_layer, 1e-30)
    fullest, least = stage_layers(q.cases, head_layers=np.asarray([head]), balanced=np.asarray(balanced))
    most, last = round(single_value(fullest)), round(single_value(least))
    if single_value(balanced) > 0:
        last = beside_the_head(most, last, head)
    return spread_layers(total, q.plan.layout.pipeline, most=most, last=last)


def beside_the_head(most: int, last: int, head: float) -> int:
    """Return the layers of the last stage: those that other stages leave over, or more where it has time for more.

    The plan considers only the slowest stage, to which a split that leaves the last stage idle is as good.

    >>> beside_the_head(5, 0, 2.2), beside_the_head(8, 6, 1.4), beside_the_head(2, 0, 1.1)
    (2, 6, 0)
    """
    return max(last, min(most, math.floor(max(most, last + head) - head + 1e-9)))


def spread_layers(total: int, stages: int, *, most: int, last: int) -> tuple[int, ...]:
    """Return `last` layers for the last stage; the others are as even as they divide, with at most `most` each.

    >>> spread_layers(126, 16, most=8, last=6), spread_layers(10, 8, most=2, last=0)
    ((8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 6), (2, 2, 2, 1, 1, 1, 1, 0))
    """
    if stages == 1:
        return (total,)
    base, remainder = divmod(total - last, stages - 1)
    assert base + (remainder > 0) <= most
    return (*(base + (number < remainder) for number in range(stages - 1)), last)


def _layers_passed(q: StepQuestion, done: Compute) -> float:
    """Return the layers that the plan's busiest stage runs forward and backward in a step, over all micro-batches."""
    passed = (
        single_value(q.times.matmul_s)
        / single_value(done.matmul.forward + done.matmul.backward)
        * q.request.model.layers
    )
    # The last stage may hold only the head.
    return passed if passed > 0 else float(q.plan.layout.accumulation)


def _layer_seconds(q: StepQuestion, done: Compute) -> tuple[float, float, float]:
    """Return (forward, backward, weight gradients in it) of one layer and micro-batch, by the plan's breakdown."""
    breakdown, passed = q.plan.prediction.breakdown_s, _layers_passed(q, done)
    by_kind = {"matmul_s": done.matmul, "attention_s": done.attention, "elementwise_s": done.elementwise}
    forward = backward = 0.0
    for part, seconds in by_kind.items():
        total = single_value(seconds.forward + seconds.backward)
        share = single_value(seconds.forward) / total if total > 0 else 0.0
        forward += share * breakdown[part] / passed
        backward += (1.0 - share) * breakdown[part] / passed
    backward += breakdown["recompute_s"] / passed
    stretch = 1.0 + breakdown["launch_s"] / passed / max(forward + backward, 1e-30)
    # Half of the backward products are weight gradients, as plan.step counts them for ZB-H1.
    weight = single_value(done.matmul.backward) / 2.0 / q.request.model.layers * q.pace("matmul_s")
    return forward * stretch, backward * stretch, weight * stretch


def _host_seconds(q: StepQuestion) -> tuple[float, float]:
    """Return the host seconds per micro-batch and per step; together they are the plan's overhead."""
    f, overhead = q.request.profile, q.plan.prediction.breakdown_s["overhead_s"]
    once = single_value(f.step_s) + single_value(f.step_log_devices_s) * float(np.log2(q.plan.layout.devices))
    once = min(once * q.pace("overhead_s"), overhead)
    return (overhead - once) / q.plan.layout.accumulation, once


def _scaled_sharing(most: Sharing, share: float) -> Sharing:
    """Scale the traffic of a stage with fewer layers; traffic per layer stays the same."""
    return replace(
        most,
        reduce_s=most.reduce_s * share,
        again_s=most.again_s * share,
        after_s=most.after_s * share,
        gather_s=most.gather_s * share,
    )
