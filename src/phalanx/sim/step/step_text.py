"""Text of a simulated step: the table of differences, and the timeline in letters.

The timeline has a line per stage and a column per slice of the step, with the letter of the longest activity in it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

from phalanx.io.tables import text_table
from phalanx.sim.step.axis_paths import HASHED_QPS, SPRAYED_PATHS
from phalanx.sim.step.breaks import GREY_LOSS, PARTS, Aftermath
from phalanx.sim.step.step_report import Line, SimulatedStep
from phalanx.sim.step.step_timeline import BUBBLE, DEVICE, Span, Timeline
from phalanx.units import format_seconds, plural

COLUMNS = 72
MOST_STAGES = 8  # lines; with more stages, some of them from first to last
LEGEND = "F forward, B backward, x both, W weight gradients, c exposed communication, . bubble, o optimizer and host"
# Share of a column above which forward next to backward is shown as x.
BOTH = 0.2


def timeline_picture(timeline: Timeline) -> list[str]:
    """Draw the timeline in lines of a fixed width, with the legend last."""
    shown = drawn_stages(len(timeline.device_s))
    columns: dict[int, list[dict[str, float]]] = {
        stage: [defaultdict(float) for _ in range(COLUMNS)] for stage in shown
    }
    for span in timeline.spans:
        if span.track == DEVICE and span.stage in columns:
            column_s = timeline.step_s / COLUMNS
            first, last = (min(int(at_s / column_s), COLUMNS - 1) for at_s in (span.start_s, span.end_s))
            for index in range(first, last + 1):
                inside_s = min(span.end_s, (index + 1) * column_s) - max(span.start_s, index * column_s)
                columns[span.stage][index][_span_letter(span)] += inside_s
    width = len(str(shown[-1]))
    lines = [f"stage {stage:{width}}  {''.join(map(_main_letter, columns[stage]))}" for stage in shown]
    return [*lines, LEGEND]


def drawn_stages(stages: int) -> list[int]:
    """Return the stages to draw: all, or evenly chosen ones with the first and the last.

    >>> drawn_stages(3), drawn_stages(16)
    ([0, 1, 2], [0, 2, 4, 6, 9, 11, 13, 15])
    """
    if stages <= MOST_STAGES:
        return list(range(stages))
    return [round(index * (stages - 1) / (MOST_STAGES - 1)) for index in range(MOST_STAGES)]


def _span_letter(span: Span) -> str:
    if span.part == "compute_s":
        # The head runs between forward and backward.
        return span.name[0] if span.name[0] in "FBW" else "B"
    if span.part == BUBBLE:
        return "."
    return "o" if span.part in ("optimizer_s", "overhead_s") else "c"


def _main_letter(column: dict[str, float]) -> str:
    if min(column.get("F", 0.0), column.get("B", 0.0)) > BOTH * sum(column.values()):
        return "x"
    return max(column, key=lambda letter: column[letter], default=" ")


# The text of a simulated step.


NOTHING = 5e-4  # share of the step below which differences are not explained


def step_text(report: SimulatedStep) -> str:
    """Format the step, its table compared with the plan, and the reasons for the differences."""
    difference = report.step_s / report.plan_step_s - 1.0
    lines = [
        f"{report.job}: {report.layout} on {plural(report.devices, 'device')}",
        f"  step      {format_seconds(report.step_s)}; the plan predicts {format_seconds(report.plan_step_s)} "
        f"({difference:+.1%})",
        f"  fabric    {_fabric_text(report)}",
        f"  busiest   stage {report.stage} of {report.stages}",
        "",
        f"WHERE THE TIME GOES ({_table_unit(report)[0]} of the busiest stage; exposed = plan + order + network)",
        *_table_lines(report),
        "",
        f"THE STEP ({format_seconds(report.step_s / COLUMNS)} per column; --trace has every slice)",
        *(f"  {line}" for line in timeline_picture(report.timeline)),
        "",
        "WHY IT DIFFERS FROM THE PLAN",
        *_reason_lines(report),
    ]
    return "\n".join(lines)


def _fabric_text(report: SimulatedStep) -> str:
    f = report.fabric
    if report.derived:
        return f"unspecified: one non-blocking plane, {f.nic_gbps:g} Gb/s per device (choose one with --fabric)"
    route = f"packets over {SPRAYED_PATHS} paths" if report.edge else f"{HASHED_QPS} hashed QPs (ECMP)"
    planes = plural(f.planes, "plane")
    tiers = plural(f.tiers, "tier")
    unused = "" if report.paths else "; unused: all traffic of this step stays inside a fast domain"
    return f"{f.name}: {f.hosts:,} NICs of {f.nic_gbps:g} Gb/s, {planes}, {tiers}, {route}{unused}"


def _table_unit(report: SimulatedStep) -> tuple[str, float]:
    """Return the name and size of the table's unit."""
    return ("seconds", 1.0) if report.step_s >= 1.0 else ("milliseconds", 1e-3)


def _table_lines(report: SimulatedStep) -> list[str]:
    unit_s = _table_unit(report)[1]
    rows: list[tuple[str, ...]] = [("", "on wire", "hidden", "exposed", "plan", "order", "network")]
    rows += [_table_row(line, unit_s) for line in report.lines]
    changes = (sum(line.order_s for line in report.lines), sum(line.network_s for line in report.lines))
    shown = (_number_text(report.step_s / unit_s), _number_text(report.plan_step_s / unit_s))
    rows.append(("step", "", "", *shown, *(_change_text(change / unit_s) for change in changes)))
    return [f"  {line}" for line in text_table(rows, right=range(1, 7))]


def _table_row(line: Line, unit_s: float) -> tuple[str, ...]:
    wires = [line.wire_s, line.hidden_s] if line.wire_s else []
    cells = [_number_text(value / unit_s) for value in (*wires, line.exposed_s, line.plan_s)]
    changes = [_change_text(value / unit_s) for value in (line.order_s, line.network_s)]
    return (line.name, *([] if wires else ["", ""]), *cells, *changes)


def _number_text(value: float) -> str:
    return f"{value:.4f}"


def _change_text(value: float) -> str:
    return f"{value:+.4f}" if abs(value) >= 5e-5 else "-"


def _reason_lines(report: SimulatedStep) -> list[str]:
    reported = [
        f"  {line.name}: {moves}; {line.why}"
        for line in report.lines
        if (moves := _moves_text(line, NOTHING * report.plan_step_s))
    ]
    return reported or [f"  no line differs by more than {NOTHING:.2%} of the step"]


def _moves_text(line: Line, least_s: float) -> str:
    moved = {"order": line.order_s, "network": line.network_s}
    return ", ".join(
        f"{name} {'+' if seconds > 0 else '-'}{format_seconds(abs(seconds))}"
        for name, seconds in moved.items()
        if abs(seconds) >= least_s
    )


def break_text(kind: str, found: Sequence[Aftermath]) -> str:
    """Format a failure with both kinds of recovery, side by side."""
    rows: list[tuple[str, ...]] = [("", *(aftermath.recovery for aftermath in found))]
    rows.append(("step before", *(format_seconds(aftermath.healthy_s) for aftermath in found)))
    rows.append(
        ("stalled for", *(_seconds_or_stop(aftermath.stall_s) if aftermath.stall_s else "-" for aftermath in found))
    )
    rows.append(("step during the failure", *(_seconds_or_stop(aftermath.during_s) for aftermath in found)))
    rows.append(("steps after", *(_seconds_or_stop(aftermath.after_s) for aftermath in found)))
    rows.append(("throughput in that minute", *(f"{aftermath.minute - 1:+.1%}" for aftermath in found)))
    rows.append(("connections affected", *(f"{aftermath.touched:,} of {aftermath.flows:,}" for aftermath in found)))
    rows.append(("without a path", *(f"{aftermath.stalled:,}" for aftermath in found)))
    rows.append(("slowest flow before (share of line rate)", *(f"{aftermath.share_before:.2f}" for aftermath in found)))
    rows.append(("slowest flow after", *(f"{aftermath.share:.2f}" for aftermath in found)))
    if any(aftermath.timeouts_s for aftermath in found):
        waits = (format_seconds(aftermath.timeouts_s) if aftermath.timeouts_s else "-" for aftermath in found)
        rows.append(("waiting for lost ACKs, per step", *waits))
    rows.append(
        ("restart", *(format_seconds(aftermath.restart_s) if aftermath.restart_s else "-" for aftermath in found))
    )
    columns = range(1, len(found) + 1)
    title = f"WHEN {PARTS[kind].upper()} BREAKS (back after {format_seconds(found[0].outage_s)})"
    if kind == "grey":
        title = f"WHEN A T0-T1 LINK LOSES {GREY_LOSS:.0%} OF ITS PACKETS AND STAYS UP"
    return "\n".join([title, *(f"  {line}" for line in text_table(rows, right=columns))])


def _seconds_or_stop(seconds: float) -> str:
    return format_seconds(seconds) if math.isfinite(seconds) else "job stops"
