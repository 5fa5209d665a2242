"""The trace beside the plan: bytes on every axis, FLOPs, memory by category, each with its difference.

The planner speaks of a typical rank of the fullest stage. So traffic inside layers is held against the mean of the
traced stages, traffic between stages, of gradients, and memory against the fullest, FLOPs against all ranks together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from phalanx.plan.layout import Layout
from phalanx.plan.mapping import map_axes
from phalanx.plan.memory import MEMORY_ERROR
from phalanx.plan.prediction import MemoryReport, executed_flops, predict_layout
from phalanx.plan.request import PlanRequest
from phalanx.train.tracing.log import RankTrace

LIMITS = {"communication": 0.03, "FLOPs": 0.02, "memory": MEMORY_ERROR}
AVERAGE = ("tensor", "context", "expert")  # axes whose traffic the planner gives for a mean stage


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """One quantity, predicted and traced. `limit` is 0 where the line only explains another."""

    kind: str  # communication, FLOPs, memory
    name: str
    planned: float
    traced: float
    limit: float = 0.0

    @property
    def difference(self) -> float:
        """Traced over planned, less one."""
        return self.traced / self.planned - 1.0 if self.planned else 0.0 if not self.traced else float("inf")

    @property
    def agrees(self) -> bool:
        """Within its limit, where it has one."""
        return not self.limit or abs(self.difference) <= self.limit


@dataclass(frozen=True, kw_only=True, slots=True)
class TracedFit:
    """Whether the fullest traced rank fits its device: what it needs, and what it may fill."""

    traced_bytes: float
    buffers_bytes: float  # of communication and workspaces, which a trace does not see: as planned
    usable_bytes: float

    @property
    def fits(self) -> bool:
        """True where the rank can run in the memory there is."""
        return self.traced_bytes + self.buffers_bytes <= self.usable_bytes


def traced_fit(memory: MemoryReport, traces: Sequence[RankTrace]) -> TracedFit:
    """The fullest of the traced ranks against the memory of its device."""
    return TracedFit(
        traced_bytes=float(max(trace.peak.nbytes for trace in traces)),
        buffers_bytes=memory.parts_bytes.get("buffers", 0.0),
        usable_bytes=memory.usable_bytes,
    )


def against_plan(ask: PlanRequest, layout: Layout, traces: Sequence[RankTrace]) -> list[Line]:
    """Every line of the comparison; `traces` holds one rank of every pipeline place."""
    stages = list({trace.stages: trace for trace in reversed(traces)}.values())
    _, memory = predict_layout(ask, layout)
    return [*_traffic(ask, layout, stages), *_flops(ask, layout, stages), *_memory(memory, stages)]


def _traffic(ask: PlanRequest, layout: Layout, stages: Sequence[RankTrace]) -> list[Line]:
    lines = []
    for use in map_axes(ask, layout):
        sent = [trace.sent_bytes(use.axis) for trace in stages]
        traced = sum(sent) / len(sent) if use.axis in AVERAGE else max(sent)
        lines.append(Line(kind="communication", name=use.axis, planned=use.bytes_per_step, traced=traced))
    total = Line(
        kind="communication",
        name="all axes",
        planned=sum(line.planned for line in lines),
        traced=sum(line.traced for line in lines),
        limit=LIMITS["communication"],
    )
    return [*lines, total] if lines else []


def _flops(ask: PlanRequest, layout: Layout, stages: Sequence[RankTrace]) -> list[Line]:
    inside = layout.devices // layout.pipeline
    planned = executed_flops(ask, layout)

    def traced(*phases: str, kind: str) -> float:
        return inside * sum(trace.flops.get(phase, {}).get(kind, 0) for trace in stages for phase in phases)

    lines = [
        Line(kind="FLOPs", name=name, planned=planned[name], traced=traced(*phases, kind=kind))
        for name, kind, phases in (
            ("linear", "linear", ("forward", "backward")),
            ("attention", "attention", ("forward", "backward")),
        )
    ]
    again = traced("recompute", kind="linear") + traced("recompute", kind="attention")
    lines.append(Line(kind="FLOPs", name="recompute", planned=planned["recompute"], traced=again))
    total = Line(
        kind="FLOPs",
        name="all",
        planned=sum(planned.values()),
        traced=sum(line.traced for line in lines),
        limit=LIMITS["FLOPs"],
    )
    return [*(line for line in lines if line.planned or line.traced), total]


# A category of the trace -> where the planner counts it. FSDP2 keeps its shards in the master format and gathers what
# is computed with; the planner counts 16-bit weights, and master weights with the optimizer.
TOGETHER = {
    "weights and optimizer": (("parameters", "gathered", "optimizer"), ("weights", "optimizer", "gathered")),
    "gradients": (("gradients",), ("gradients",)),
    "activations and logits": (("activations", "logits", "working", "exchange"), ("activations", "logits")),
}


def _memory(memory: MemoryReport, stages: Sequence[RankTrace]) -> list[Line]:
    fullest = max(stages, key=lambda trace: trace.peak.nbytes)
    parts, planned = fullest.peak.parts_bytes, memory.parts_bytes
    lines = [
        Line(
            kind="memory",
            name=name,
            planned=sum(planned.get(part, 0.0) for part in theirs),
            traced=float(sum(parts.get(part, 0) for part in mine)),
        )
        for name, (mine, theirs) in TOGETHER.items()
    ]
    # The planner's buffers are the communication library's and the allocator's: a trace has neither.
    total = Line(
        kind="memory",
        name="peak",
        planned=memory.total_bytes - planned.get("buffers", 0.0),
        traced=float(fullest.peak.nbytes),
        limit=LIMITS["memory"],
    )
    return [*lines, total]
