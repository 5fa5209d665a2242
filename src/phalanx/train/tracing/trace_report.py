"""The report of a trace for a terminal, and its comparison with the plan: bytes per axis, FLOPs, memory by category.

The planner describes a typical rank of the fullest stage. So traffic inside layers is compared with the mean of the
traced stages, traffic between stages, traffic of gradients and memory with the fullest, FLOPs with all ranks
together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from phalanx.io.tables import text_table
from phalanx.plan.layout import Layout
from phalanx.plan.mapping import map_axes
from phalanx.plan.prediction import MemoryReport, executed_flops, predict_layout
from phalanx.plan.request import PlanRequest
from phalanx.plan.trainer_memory import MEMORY_ERROR
from phalanx.train.tracing.log import RankTrace, message_rows
from phalanx.train.tracing.meter import MEMORY_PARTS
from phalanx.units import format_bytes, format_seconds


def render_rank(trace: RankTrace) -> str:
    """Return the report of one rank: messages, FLOPs, memory."""
    place = ", ".join(f"{axis} {index} of {size}" for axis, (index, size) in trace.place.items() if size > 1)
    layers = _range_text(trace.layers)
    lines = [
        f"rank {trace.rank}" + (f" ({place})" if place else "") + f": layers {layers}",
        *_message_lines(trace),
        *_phase_flop_lines(trace),
        *_peak_lines(trace),
        f"  traced in {format_seconds(trace.seconds)} using {format_bytes(trace.rss_bytes)} of memory",
    ]
    return "\n".join(lines)


SHORT_HEAD = ("rank", "stages", "layers", "operations", "sent", "FLOPs", "peak", "in", "traced")


def render_ranks(traces: Sequence[RankTrace]) -> list[str]:
    """Return a table with a line for each rank."""
    rows = [
        (
            f"{trace.rank:,}",
            _range_text(trace.stages),
            str(len(trace.layers)),
            f"{len(trace.operations):,}",
            format_bytes(sum(operation.sent_bytes for operation in trace.operations)),
            _flop_text(trace.total_flops),
            format_bytes(trace.peak.nbytes),
            trace.peak.phase,
            format_seconds(trace.seconds),
        )
        for trace in traces
    ]
    return text_table([SHORT_HEAD, *rows], right=(0, 2, 3, 4, 5, 6, 8), indent=2)


def render_against(lines: Sequence[PlanLine]) -> str:
    """Return the comparison with the plan, with a mark for values outside their limit."""
    rows = [("", "", "plan", "trace", "difference", "")]
    for line in lines:
        show_size = _flop_text if line.kind == "FLOPs" else format_bytes
        word = "within" if line.agrees else "more than"
        mark = f"{word} {line.limit:.0%}" + (" of all" if line.total else "") if line.limit else line.reason
        difference = f"{line.difference:+.1%}"
        rows.append((line.kind, line.name, show_size(line.planned), show_size(line.traced), difference, mark))
    return "\n".join(["AGAINST THE PLAN", *text_table(rows, right=(2, 3, 4), indent=2)])


def render_fit(fit: TracedFit, *, recompute: str) -> str:
    """Return a verdict on whether the traced step fits its device, with remedies if it does not."""
    need = (
        f"{format_bytes(fit.traced_bytes)} traced + {format_bytes(fit.buffers_bytes)} for buffers, of "
        f"{format_bytes(fit.usable_bytes)} usable"
    )
    if fit.fits:
        return f"FITS: {need}"
    advice = {"none": 'parallel.recompute = "selective", ', "selective": 'parallel.recompute = "full", '}.get(
        recompute, ""
    )
    return (
        f"DOES NOT FIT: {need}\n  the step would run out of memory\n"
        f'  try {advice}a smaller batch.micro, parallel.offload = "optimizer" or more devices, and trace again'
    )


def _message_lines(trace: RankTrace) -> list[str]:
    table = message_rows(trace)
    if not table:
        return ["", "COMMUNICATION PER STEP", "  none: one rank"]
    rows = [
        (
            row.axis,
            f"{row.ranks:,}",
            f"{row.stride:,}",
            row.kind,
            row.phase,
            f"{row.calls:,}",
            format_bytes(row.nbytes),
            format_bytes(row.sent_bytes),
        )
        for row in table
    ]
    head = ("axis", "ranks", "stride", "operation", "phase", "calls", "payload", "sent")
    total = format_bytes(sum(row.sent_bytes for row in table))
    last = ("total", "", "", "", "", f"{len(trace.operations):,}", "", total)
    return ["", "COMMUNICATION PER STEP", *text_table([head, *rows, last], right=(1, 2, 5, 6, 7), indent=2)]


def _phase_flop_lines(trace: RankTrace) -> list[str]:
    rows = [
        (phase, ", ".join(f"{kind} {_flop_text(count)}" for kind, count in kinds.items()))
        for phase, kinds in trace.flops.items()
        if any(kinds.values())
    ]
    return ["", "FLOPS PER STEP", *text_table([*rows, ("total", _flop_text(trace.total_flops))], indent=2)]


def _peak_lines(trace: RankTrace) -> list[str]:
    peak = trace.peak
    categories = [(category, size) for category in MEMORY_PARTS if (size := peak.parts_bytes.get(category))]
    rows = [(category, format_bytes(size), f"{size / peak.nbytes:.1%}") for category, size in categories]
    rows += [("peak", format_bytes(peak.nbytes), ""), ("between steps", format_bytes(peak.rest_bytes), "")]
    if peak.host_bytes:
        rows.append(("on the host", format_bytes(peak.host_bytes), ""))
    return ["", f"PEAK MEMORY, in {peak.phase}", *text_table(rows, right=(1, 2), indent=2)]


def _flop_text(value: float) -> str:
    for suffix, scale in (("PFLOP", 1e15), ("TFLOP", 1e12), ("GFLOP", 1e9)):
        if value >= scale:
            return f"{value / scale:.2f} {suffix}"
    return f"{value / 1e6:.2f} MFLOP"


def _range_text(numbers: Sequence[int]) -> str:
    """Format ascending numbers as ranges, such as "0-3, 16-19"."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)


# Comparison of the trace with the plan.

LIMITS = {"communication": 0.03, "FLOPs": 0.02, "memory": MEMORY_ERROR}
# Axes for which the planner predicts the traffic of a mean stage
AVERAGE = ("tensor", "context", "expert")


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanLine:
    """One quantity, predicted and traced; `limit` is 0 if the two are not comparable, and `reason` explains why."""

    JSON_PROPERTIES: ClassVar = ("difference", "agrees")

    kind: str  # communication, FLOPs, memory
    name: str
    planned: float
    traced: float
    limit: float = 0.0
    total: float = 0.0  # the value that the limit is a share of: the planned sum, for a part; 0 means `planned`
    reason: str = ""

    @property
    def difference(self) -> float:
        """Relative difference: traced over planned, less one."""
        return self.traced / self.planned - 1.0 if self.planned else 0.0 if not self.traced else float("inf")

    @property
    def agrees(self) -> bool:
        """True if the traced value is within its limit, or has none."""
        if not self.limit:
            return True
        if self.total:
            return abs(self.traced - self.planned) <= self.limit * self.total
        return abs(self.difference) <= self.limit


@dataclass(frozen=True, kw_only=True, slots=True)
class TracedFit:
    """Memory need of the fullest traced rank, and the memory of its device."""

    JSON_PROPERTIES: ClassVar = ("fits",)

    traced_bytes: float
    buffers_bytes: float  # of communication and workspaces, which a trace does not see: as planned
    usable_bytes: float

    @property
    def fits(self) -> bool:
        """True if the rank fits into the usable memory."""
        return self.traced_bytes + self.buffers_bytes <= self.usable_bytes


def traced_fit(request: PlanRequest, layout: Layout, memory: MemoryReport, traces: Sequence[RankTrace]) -> TracedFit:
    """Compare the fullest traced rank, less the bytes that fp8 saves, with the memory of its device."""
    narrower = _traced_memory(request, layout).total_bytes - predict_layout(request, layout)[1].total_bytes
    return TracedFit(
        traced_bytes=max(trace.peak.nbytes for trace in traces) - narrower,
        buffers_bytes=memory.parts_bytes.get("buffers", 0.0),
        usable_bytes=memory.usable_bytes,
    )


def against_plan(request: PlanRequest, layout: Layout, traces: Sequence[RankTrace]) -> list[PlanLine]:
    """Return every line of the comparison; `traces` must contain a rank of every pipeline stage."""
    stages = list({trace.stages: trace for trace in reversed(traces)}.values())
    memory = _traced_memory(request, layout)
    return [
        *_traffic_lines(request, layout, stages),
        *_flop_lines(request, layout, stages),
        *_memory_lines(memory, stages),
    ]


def _traced_memory(request: PlanRequest, layout: Layout) -> MemoryReport:
    """Return the memory prediction for the step as traced: fp8 is traced as bf16 (`traceable_settings`)."""
    traced = replace(layout, precision="bf16") if layout.precision == "fp8" else layout
    return predict_layout(request, traced)[1]


def _traffic_lines(request: PlanRequest, layout: Layout, stages: Sequence[RankTrace]) -> list[PlanLine]:
    lines = []
    for axis_use in map_axes(request, layout):
        sent = [trace.sent_bytes(axis_use.axis) for trace in stages]
        traced = sum(sent) / len(sent) if axis_use.axis in AVERAGE else max(sent)
        lines.append(PlanLine(kind="communication", name=axis_use.axis, planned=axis_use.bytes_per_step, traced=traced))
    total = PlanLine(
        kind="communication",
        name="all axes",
        planned=sum(line.planned for line in lines),
        traced=sum(line.traced for line in lines),
        limit=LIMITS["communication"],
    )
    return [*_judge_parts(lines, total), total] if lines else []


def _judge_parts(lines: Sequence[PlanLine], total: PlanLine) -> list[PlanLine]:
    """Set the limit of the parts of a sum: each may differ from its plan by as much as the sum may."""
    return [replace(line, limit=total.limit, total=total.planned) for line in lines]


def _flop_lines(request: PlanRequest, layout: Layout, stages: Sequence[RankTrace]) -> list[PlanLine]:
    ranks_per_stage = layout.devices // layout.pipeline
    planned = executed_flops(request, layout)

    def traced(*phases: str, kind: str) -> float:
        return ranks_per_stage * sum(trace.flops.get(phase, {}).get(kind, 0) for trace in stages for phase in phases)

    lines = [
        PlanLine(kind="FLOPs", name=name, planned=planned[name], traced=traced(*phases, kind=kind))
        for name, kind, phases in (
            ("linear", "linear", ("forward", "backward")),
            ("attention", "attention", ("forward", "backward")),
        )
    ]
    recomputed = traced("recompute", kind="linear") + traced("recompute", kind="attention")
    lines.append(PlanLine(kind="FLOPs", name="recompute", planned=planned["recompute"], traced=recomputed))
    total = PlanLine(
        kind="FLOPs",
        name="all",
        planned=sum(planned.values()),
        traced=sum(line.traced for line in lines),
        limit=LIMITS["FLOPs"],
    )
    return [*_judge_parts([line for line in lines if line.planned or line.traced], total), total]


# A category of the trace -> the planner's categories. FSDP2 holds its shards in the master format and gathers
# weights for computing; the planner counts 16-bit weights, and master weights with the optimizer.
TOGETHER = {
    "weights and optimizer": (("parameters", "gathered", "optimizer"), ("weights", "optimizer", "gathered")),
    "gradients": (("gradients",), ("gradients",)),
    "activations and logits": (("activations", "logits", "working", "exchange"), ("activations", "logits")),
}
# The planner counts each part at its own maximum. At the traced peak gradients may not exist yet, be reduced
# already or be in buffers, whose bytes are those of freed activations: only the sum is comparable.
OTHER_MOMENT = "not comparable: the plan's largest, the trace's at the peak"


def _memory_lines(memory: MemoryReport, stages: Sequence[RankTrace]) -> list[PlanLine]:
    fullest = max(stages, key=lambda trace: trace.peak.nbytes)
    trace_bytes, planned = fullest.peak.parts_bytes, memory.parts_bytes
    lines = [
        PlanLine(
            kind="memory",
            name=name,
            planned=sum(planned.get(category, 0.0) for category in plan_categories),
            traced=float(sum(trace_bytes.get(category, 0) for category in trace_categories)),
            reason=OTHER_MOMENT,
        )
        for name, (trace_categories, plan_categories) in TOGETHER.items()
    ]
    # The planner's buffers belong to the communication library and the allocator, which a trace does not have.
    total = PlanLine(
        kind="memory",
        name="peak",
        planned=memory.total_bytes - planned.get("buffers", 0.0),
        traced=float(fullest.peak.nbytes),
        limit=LIMITS["memory"],
    )
    return [*lines, total]
