"""A step on a fabric compared with the plan's prediction, with the difference in two parts: order and network.

The timeline is run twice: with the plan's own rates, which shows the effect of the order of events, and with the
fabric's, which adds the effect of the network. Plan, order and network add up to the step, line by line.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from phalanx.network.fabric.fabric_types import Fabric
from phalanx.plan.plan import Plan
from phalanx.plan.reasons import PARTS
from phalanx.plan.traffic import Groups
from phalanx.sim.step.axis_paths import (
    AxisPath,
    PathTransport,
    axis_paths,
    check_size,
    derived_fabric,
    on_fabric,
    used_axes,
)
from phalanx.sim.step.step_timeline import BUBBLE, Timeline, check_spans, simulate_timeline
from phalanx.sim.step.step_work import COMPUTE_PARTS, StepQuestion, StepWork, ask_plan, plan_work, single_value
from phalanx.units import plural

COMPUTE = "compute_s"
TRAFFIC = ("tensor_s", "context_s", "expert_s", "pipeline_send_s", "shard_s", "gradient_s")
LINES = (COMPUTE, *TRAFFIC, BUBBLE, "optimizer_s", "overhead_s")
# Part of the step -> axes of its traffic, of which the first in use counts.
AXES_OF = {
    "tensor_s": ("tensor",),
    "context_s": ("context",),
    "expert_s": ("expert",),
    "pipeline_send_s": ("pipeline",),
    "shard_s": ("shard",),
    "gradient_s": ("shard", "data", "replica", "expert_data"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """One line of the step on the busiest stage: plan + order + network = exposed."""

    part: str
    name: str
    wire_s: float
    hidden_s: float
    exposed_s: float
    plan_s: float
    order_s: float
    network_s: float
    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulatedStep:
    """A simulated step, with its comparison with the plan."""

    job: str
    layout: str
    devices: int
    layers: int
    fabric: Fabric
    derived: bool  # derived from the cluster, as no fabric was named
    edge: bool  # True: senders spray packets; False: switches hash QPs
    step_s: float
    plan_step_s: float
    stage: int
    stages: int
    lines: tuple[Line, ...]
    paths: tuple[AxisPath, ...]
    # True if a flow has no path: the step never ends, and its times are those of the other flows.
    stalled: bool
    timeline: Timeline = field(repr=False)

    @property
    def slowest_share(self) -> float:
        """The share of line rate of the slowest flow, over all axes."""
        return min((path.share for path in self.paths), default=1.0)


def step_report(plan: Plan, fabric: Fabric | None, transport: PathTransport | None = None) -> SimulatedStep:
    """Simulate the plan's step on a fabric, or on a non-blocking one with the cluster's NICs."""
    return _simulated_step(ask_plan(plan), fabric, transport or PathTransport())


def _simulated_step(q: StepQuestion, named: Fabric | None, transport: PathTransport) -> SimulatedStep:
    """Run the timeline with the plan's rates and with the fabric's, and compare both with the plan."""
    plan, devices = q.plan, q.plan.layout.devices
    fabric = named or derived_fabric(devices, plan.cluster.nic_bytes_per_s)
    check_size(fabric, devices)
    check_spans(plan.layout, q.request.model.layers)
    axes = used_axes(plan.layout, experts=q.request.model.is_moe)
    paths = axis_paths(fabric, q.groups, axes, devices, transport)
    groups = on_fabric(q.groups, paths, fabric, nic=single_value(q.request.physics.nic))
    planned, work = plan_work(q, q.groups), plan_work(q, groups)
    ordered, timeline = simulate_timeline(planned), simulate_timeline(work)
    return SimulatedStep(
        job=plan.job.name,
        layout=plan.layout.name,
        devices=devices,
        layers=q.request.model.layers,
        fabric=fabric,
        derived=named is None,
        edge=transport.edge,
        step_s=timeline.step_s,
        plan_step_s=plan.prediction.step_s,
        stage=timeline.busiest,
        stages=plan.layout.pipeline,
        lines=_report_lines(q, work, groups, paths, ordered, timeline),
        paths=tuple(paths.values()),
        stalled=any(path.stalled for path in paths.values()),
        timeline=timeline,
    )


def _report_lines(
    q: StepQuestion, here: StepWork, groups: Groups, paths: dict[str, AxisPath], ordered: Timeline, timeline: Timeline
) -> tuple[Line, ...]:
    """Return the lines of the busiest stage, each split into plan, order and network."""
    stage = timeline.busiest
    # The plan's seconds of each line; all compute is one line.
    breakdown = q.plan.prediction.breakdown_s
    compute = sum(breakdown[name] for name in (*COMPUTE_PARTS, "head_s"))
    planned = {part: compute if part == COMPUTE else breakdown[part] for part in LINES}
    lines = []
    for part in LINES:
        exposed, wire = timeline.device_s[stage].get(part, 0.0), timeline.wire_s[stage].get(part, 0.0)
        if not (exposed or wire or planned[part]):
            continue
        in_order = ordered.device_s[stage].get(part, 0.0)
        line = Line(
            part=part,
            name="compute" if part == COMPUTE else PARTS[part],
            wire_s=wire,
            hidden_s=max(0.0, wire - exposed),
            exposed_s=exposed,
            plan_s=planned[part],
            order_s=in_order - planned[part],
            network_s=exposed - in_order,
            why=_why_waiting(here) if part == BUBBLE else _why_different(q, groups, paths, part),
        )
        lines.append(line)
    return tuple(lines)


def _why_different(q: StepQuestion, groups: Groups, paths: dict[str, AxisPath], part: str) -> str:
    """Explain how the simulation differs from the plan on this line."""
    if part in (COMPUTE, "optimizer_s", "overhead_s"):
        return "the plan's own seconds"
    network = _network_text(q, groups, paths, part)
    if part == "shard_s":
        sharp = single_value(q.request.profile.shard_sharpness)
        return f"one layer is prefetched; the plan combines compute and traffic by a {sharp:.3g}-norm. {network}"
    if part == "context_s":
        return f"every hop waits for the one that crosses domains. {network}" if "context" in paths else network
    if part == "gradient_s":
        return f"reduced as each layer's backward ends, also in pipeline bubbles. {network}"
    return network


def _why_waiting(here: StepWork) -> str:
    """Explain why stages wait for each other differently from the plan's formula of equal stages."""
    least, most = min(here.layers), max(here.layers)
    layers = plural(most, "layer") if least == most else f"{least} to {most} layers"
    each_s = here.forward.compute_s + here.backward.compute_s
    head = (here.head_forward_s + here.head_backward_s) / each_s if each_s > 0 else 0.0
    chunk = f", all in one of its {plural(here.chunks, 'chunk')}," if here.chunks > 1 else ""
    return (
        f"stages of {layers} wait for each other; the head takes as long as {head:.1f} layers{chunk} on "
        f"the last; "
        "traffic of a stage that waits anyway costs nothing"
    )


def _network_text(q: StepQuestion, groups: Groups, paths: dict[str, AxisPath], part: str) -> str:
    axis = next((axis for axis in AXES_OF[part] if axis in paths), None)
    if axis is None:
        return "inside a fast domain: no network"
    path = paths[axis]
    planned, simulated = getattr(q.groups, axis), getattr(groups, axis)
    rate = "nic_bytes_per_s" if part in ("pipeline_send_s", "context_s") else "network_bytes_per_s"
    in_plan, on_fabric = (single_value(getattr(group, rate)) / 1e9 for group in (planned, simulated))
    return (
        f"{in_plan:.3g} GB/s per NIC in the plan, {on_fabric:.3g} here: "
        f"slowest flow at {path.share:.2f} of line rate, {plural(path.hops, 'switch')}"
    )
