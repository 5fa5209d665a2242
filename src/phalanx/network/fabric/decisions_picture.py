"""The picture of the three decisions: one SVG with three panels, written without a plotting library."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from phalanx.io.svg import svg_element
from phalanx.network.fabric.decisions import PACKETS, Decisions, PlaneRow, max_to_mean, recovery_row
from phalanx.network.fabric.fabric_text import decision_findings, formula_basis, formula_ratios, show_hours
from phalanx.network.fabric.failure_budget import GIVE_UP_S
from phalanx.units import format_count, format_seconds, plural

PANEL_W, PANEL_H, TOP = 320, 270, 160
# Of a finding, in letters of 13 px over a panel and its scale.
LINE_CHARS = 48
# In letters of 12 px under a panel.
REMARK_CHARS = 54
LETTER_PX = 7.2  # width of a letter of 13 px, rounded up

# Colour-blind readers can tell blue from orange, on white and on near-black (contrast over 3:1 with both). Text has
# an outline in the colour of the page, so that no line runs through it.
STYLE = """
.page{fill:#ffffff}.ink{fill:#1b1f24}.soft{fill:#57606a}.line{stroke:#8c959f;stroke-width:1;fill:none}
.grid{stroke:#d0d7de;stroke-width:1}.a{fill:#0969da}.b{fill:#bc4c00}.al{stroke:#0969da;stroke-width:2.5;fill:none}
.bl{stroke:#bc4c00;stroke-width:2.5;fill:none}.want{stroke:#1b1f24;stroke-width:1.5;stroke-dasharray:5 4}
.pale{opacity:.4}.band{fill:#bc4c00;opacity:.1}
text{font-family:system-ui,sans-serif;font-size:13px;paint-order:stroke;stroke:#ffffff;stroke-width:3px;stroke-linejoin:round}
text.small{font-size:12px}.head{font-size:16px;font-weight:600}.title{font-size:20px;font-weight:600}
@media (prefers-color-scheme:dark){.page{fill:#0d1117}.ink{fill:#e6edf3}.soft{fill:#9da7b3}.line{stroke:#6e7681}
.grid{stroke:#30363d}.a{fill:#58a6ff}.b{fill:#f0883e}.al{stroke:#58a6ff}.bl{stroke:#f0883e}.want{stroke:#e6edf3}
.band{fill:#f0883e}text{stroke:#0d1117}}
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Axis:
    """A logarithmic axis: maps values from `low` to `high` to pixels from `start` to `end`."""

    low: float
    high: float
    start: float
    end: float

    def at(self, value: float) -> float:
        """Return the pixel of a value; values outside the axis are clipped to its ends."""
        inside = min(max(value, self.low), self.high)
        share = math.log(inside / self.low) / math.log(self.high / self.low)
        return self.start + share * (self.end - self.start)

    def decades(self, step: int = 1) -> list[float]:
        """Return the powers of ten between the ends, every `step`-th of them."""
        first, last = math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9)
        return [10.0**power for power in range(first, last + 1, step)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Heading:
    """The text above a panel: the decision, its result, and the meaning of the vertical scale."""

    name: str
    finding: str
    scale: str


def panel_frame(x0: float, head: Heading, up: Axis, ticks: Sequence[float], *, count: bool = False) -> list[str]:
    """Draw the heading, the horizontal grid with its numbers, and the base line."""
    marks = [
        text_line(x0 - 40, TOP - 70, head.name, "ink head"),
        text_line(x0 - 40, TOP - 10, head.scale, "soft small"),
    ]
    lines = textwrap.wrap(head.finding, LINE_CHARS)[:2]
    marks += [text_line(x0 - 40, TOP - 50 + 17 * number, line, "ink") for number, line in enumerate(lines)]
    for tick in ticks:
        y = up.at(tick)
        shown = format_count(tick) if count and tick >= 1000 else f"{tick:g}"
        marks.append(_level_line("grid", x0, y))
        marks.append(text_line(x0 - 6, y + 4, _short_number(shown), "soft small", "end"))
    base = TOP + PANEL_H
    return [*marks, _level_line("line", x0, base)]


def _level_line(kind: str, x0: float, y: float) -> str:
    return svg_element("line", class_=kind, x1=x0, x2=x0 + PANEL_W, y1=y, y2=y)


def ticks_below(across: Axis, ticks: Sequence[float], write: Callable[[float], str]) -> list[str]:
    """Draw numbers under the base line."""
    shown = [_short_number(write(tick)) for tick in ticks]
    pairs = zip(ticks, shown, strict=True)
    return [text_line(across.at(tick), TOP + PANEL_H + 18, label, "soft small", "middle") for tick, label in pairs]


def scale_below(x0: float, text: str) -> str:
    """Draw the label of the horizontal axis."""
    return text_line(x0 + PANEL_W / 2, TOP + PANEL_H + 38, text, "soft", "middle")


def curve_line(kind: str, points: Sequence[tuple[float, float]]) -> str:
    """Draw a line through points."""
    return svg_element("polyline", class_=kind, points=" ".join(f"{x:.1f},{y:.1f}" for x, y in points))


def colour_key(x0: float, names: tuple[str, str], remark: str) -> list[str]:
    """Draw two colours with their names under a panel, and a remark below them."""
    y = TOP + PANEL_H + 62
    marks = [
        svg_element("rect", class_="a", x=x0, y=y - 10, width=11, height=11),
        text_line(x0 + 16, y, names[0], "ink"),
        svg_element("rect", class_="b", x=x0 + 160, y=y - 10, width=11, height=11),
        text_line(x0 + 176, y, names[1], "ink"),
    ]
    lines = textwrap.wrap(remark, REMARK_CHARS)[:2]
    return [*marks, *(text_line(x0, y + 21 + 16 * number, line, "soft small") for number, line in enumerate(lines))]


def point_labels(points: Sequence[tuple[float, float, str]], right: float) -> list[str]:
    """Draw a label at the right of each point, or at its left near the right end; labels that would overlap move up."""
    labels: list[str] = []
    placed: list[tuple[float, float, float]] = []
    for x, y, text in sorted(points, reverse=True):
        width = LETTER_PX * len(text)
        label_x = x - width if x + 9 + width > right else x + 9
        height = y - 20 if label_x < x else y - 5
        while any(
            abs(height - y_placed) < 16 and label_x < end and label_x + width > start for start, end, y_placed in placed
        ):
            height -= 4
        placed.append((label_x, label_x + width, height))
        labels.append(text_line(label_x, height, text, "ink"))
    return labels


def _short_number(number: str) -> str:
    """Remove trailing zero decimals: 10.0 becomes 10, and 0.01 stays."""
    return re.sub(r"\.0+(?!\d)", "", number)


def text_line(x: float, y: float, text: str, kind: str, anchor: str = "start") -> str:
    """Draw a line of text."""
    return svg_element("text", escape(text), class_=kind, x=float(x), y=float(y), text_anchor=anchor)


# The three panels, legible on light and dark pages.


WIDTH, HEIGHT, LEFT = 1260, 580, 70
GAP = 415  # from one panel to the next
# "Seconds or even tens of seconds" in a conventional fabric (openai.com/index/mrc-supercomputer-networking).
CONVERGES_S = (1.0, 60.0)
SOURCES = (
    "Sources: geometry and recovery, arXiv:2605.04333 section 2; loads, balls into bins without sampling; failures of "
    "cables, Alibaba HPN, SIGCOMM'24, of switches, Singh et al., SIGCOMM CCR 51(2) 2021."
)


def decisions_svg(one: Decisions) -> str:
    """Return the picture as SVG text."""
    fabric = one.fabric
    planes = "one plane" if fabric.planes == 1 else plural(fabric.planes, "plane")
    title = f"{one.gpus:,} GPUs at {one.nic_gbps:g} Gb/s: {planes} of {fabric.tiers} tiers, {fabric.switch.name}"
    summary = (
        f"{fabric.switches:,} switches, {plural(fabric.hops, 'hop')}, {plural(fabric.paths, 'path')}; "
        f"{one.paths} paths per connection; recovery after {format_seconds(one.recovery_s)}"
    )
    # The description that screen readers use.
    spoken_summary = ". ".join([summary, *decision_findings(one)]) + "."
    body = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-labelledby="t d">',
        f'<title id="t">{escape(title)}</title><desc id="d">{escape(spoken_summary)}</desc>',
        f"<style>{STYLE}</style>{svg_element('rect', class_='page', width=WIDTH, height=HEIGHT)}",
        text_line(LEFT - 40, 34, title, "ink title"),
        text_line(LEFT - 40, 57, summary, "soft"),
        *_hosts_panel(one),
        *_draw_loads(one),
        *_lost_panel(one),
        text_line(LEFT - 40, HEIGHT - 16, SOURCES, "soft small"),
        "</svg>",
    ]
    return "\n".join(body) + "\n"


def _hosts_panel(one: Decisions) -> list[str]:
    """Draw panel 1: bars of the hosts that two and three tiers join, by planes; pale where they are too few."""
    x0 = LEFT
    most = max(one.gpus, *(row.most_hosts[1] for row in one.planes))
    least = min(one.gpus, *(row.most_hosts[0] for row in one.planes))
    low = min(100.0, 10.0 ** math.floor(math.log10(least)))
    axis = Axis(low=low, high=10 ** math.ceil(math.log10(most)), start=TOP + PANEL_H, end=TOP)
    slot = PANEL_W / len(one.planes)
    head = Heading(name="1. Planes and radix", finding=decision_findings(one)[0], scale="hosts at full bisection")
    marks = panel_frame(x0, head, axis, axis.decades(), count=True)
    row_bars = [_two_bars(row, x0 + index * slot, slot, axis, one.gpus) for index, row in enumerate(one.planes)]
    height = axis.at(one.gpus)
    marks += [bar_mark for bar_marks, _ in row_bars for bar_mark in bar_marks]
    marks.append(_level_line("want", x0, height))
    marks += [number for _, numbers in row_bars for number in numbers]
    for index, row in enumerate(one.planes):
        label = f"{row.planes}×{row.radix}"
        marks.append(text_line(x0 + (index + 0.5) * slot, TOP + PANEL_H + 18, label, "soft small", "middle"))
    marks.append(scale_below(x0, "planes × ports of the same box"))
    ratios = f"{one.switch_ratio} of the switches and {one.optics_ratio} of the optics per host of {formula_basis(one)}"
    note = f"dashed: {one.gpus:,} GPUs" + (f"; full, {ratios}" if formula_ratios(one) else "")
    return [*marks, *colour_key(x0, ("2 tiers, 3 hops", "3 tiers, 5 hops"), note)]


def _two_bars(row: PlaneRow, left: float, slot: float, axis: Axis, wanted: int) -> tuple[list[str], list[str]]:
    """Draw two bars and their numbers: the hosts of two and of three tiers."""
    marks, numbers = [], []
    width = min(0.36 * slot, 40.0)
    middle = left + slot / 2
    for x, hosts, kind in ((middle - width, row.most_hosts[0], "a"), (middle + 2, row.most_hosts[1], "b")):
        top, base = axis.at(hosts), TOP + PANEL_H
        style = f"{kind} pale" if hosts < wanted else kind
        marks.append(svg_element("rect", class_=style, x=x, y=top, width=width, height=base - top))
        edge, anchor = (x + width, "end") if kind == "a" else (x, "start")
        numbers.append(text_line(edge, top - 4, format_count(hosts), "soft small", anchor))
    return marks, numbers


def _draw_loads(one: Decisions) -> list[str]:
    """Draw panel 2: busiest link over mean against units per link, for one T0 and for the fabric."""
    x0, fabric = LEFT + GAP, one.fabric
    across = Axis(low=1, high=PACKETS, start=x0, end=x0 + PANEL_W)
    units = [2.0**power for power in range(13)]
    groups = fabric.planes * fabric.t0
    t0_ratios = [max_to_mean(unit, fabric.t0_up) for unit in units]
    fabric_ratios = [max_to_mean(unit, fabric.t0_up, groups=groups) for unit in units]
    worst = max(row.worst_of_fabric for row in one.loads)
    up = Axis(low=1, high=max(2.0, worst, *fabric_ratios) * 1.2, start=TOP + PANEL_H, end=TOP)
    ticks = [tick for tick in (1, 1.2, 1.5, 2, 3, 5, 8, 12, 20) if tick <= up.high]
    head = Heading(
        name="2. Packets instead of flows",
        finding=decision_findings(one)[1],
        scale="busiest link over the mean (1 is even)",
    )
    marks = panel_frame(x0, head, up, ticks)
    marks += ticks_below(across, [4.0**power for power in range(7)], lambda tick: f"{tick:g}")
    marks.append(curve_line("al", [(across.at(x), up.at(y)) for x, y in zip(units, t0_ratios, strict=True)]))
    marks.append(curve_line("bl", [(across.at(x), up.at(y)) for x, y in zip(units, fabric_ratios, strict=True)]))
    points = []
    for row, short in zip(one.loads, ("1 flow", "16 QPs", f"{one.paths} paths", "packets"), strict=True):
        x, y = across.at(row.units_per_link), up.at(row.worst_of_fabric)
        marks.append(svg_element("circle", class_="b", cx=x, cy=y, r=4.5))
        points.append((x, y, f"{short} {row.worst_of_fabric:.2f}"))
    marks += point_labels(points, right=x0 + PANEL_W)
    marks.append(scale_below(x0, "random units per uplink"))
    note = "skipping marked paths removes what is above 1"
    return [*marks, *colour_key(x0, (f"{fabric.t0_up} uplinks of a T0", f"worst of {groups:,} T0s"), note)]


def _lost_panel(one: Decisions) -> list[str]:
    """Draw panel 3: GPU-hours lost per day against the time to recover."""
    x0, fabric = LEFT + 2 * GAP, one.fabric
    restart_s = one.budget.restart[0].seconds_per_event
    # Two points a thousandth apart draw the restart as a step, not a slope.
    edge = (GIVE_UP_S, GIVE_UP_S * 1.001)
    times = sorted([*(10.0 ** (power / 4) for power in range(-20, 9)), *edge])
    rows = [recovery_row(fabric, time_s, restart_s) for time_s in times]
    hours = [max(row.lost_gpu_hours_per_day, 1e-9) for row in rows]
    across = Axis(low=times[0], high=times[-1], start=x0, end=x0 + PANEL_W)
    restarts = one.recoveries[-1].lost_gpu_hours_per_day
    low = 10 ** math.floor(math.log10(min(hours)))
    high = max(10 * low, *hours, 2 * restarts)
    up = Axis(low=low, high=10 ** math.ceil(math.log10(high)), start=TOP + PANEL_H, end=TOP)
    head = Heading(name="3. Recovery at the edge", finding=decision_findings(one)[2], scale="GPU-hours lost per day")
    first, last = (across.at(bound) for bound in CONVERGES_S)
    band = svg_element("rect", class_="band", x=first, y=TOP, width=last - first, height=PANEL_H)
    marks = [band, *panel_frame(x0, head, up, up.decades(), count=True)]
    marks += ticks_below(across, across.decades(2), format_seconds)
    marks.append(curve_line("bl", [(x0, up.at(restarts)), (x0 + PANEL_W, up.at(restarts))]))
    marks.append(curve_line("al", [(across.at(x), up.at(y)) for x, y in zip(times, hours, strict=True)]))
    marks.append(text_line(last - 4, TOP + 16, "routing converges", "soft small", "end"))
    marks += _chosen_point(one, across, up)
    marks.append(scale_below(x0, "time from failure to bypass"))
    note = f"a step is late in {one.late[1].step:.0%} of cases if 1 transfer in 10⁶ is"
    return [*marks, *colour_key(x0, ("bypassed", f"a restart each: {show_hours(restarts)}"), note)]


def _chosen_point(one: Decisions, across: Axis, up: Axis) -> list[str]:
    """Draw the point of the chosen recovery time."""
    hours = recovery_row(one.fabric, one.recovery_s, one.budget.restart[0].seconds_per_event).lost_gpu_hours_per_day
    x, y = across.at(one.recovery_s or across.low), up.at(max(hours, up.low))
    anchor = "end" if x > across.start + 0.6 * PANEL_W else "start"
    label = f"{format_seconds(one.recovery_s)}: {show_hours(hours)}"
    return [svg_element("circle", class_="a", cx=x, cy=y, r=5), text_line(x, y - 11, label, "ink", anchor)]
