"""The three decisions as one SVG with three panels, legible on light and dark pages, without a plotting library."""

from __future__ import annotations

import math
from html import escape

from phalanx.network.fabric.decisions import PACKETS, Decisions, PlaneRow, recovery_row
from phalanx.network.fabric.drawing import (
    PANEL_H,
    PANEL_W,
    STYLE,
    TOP,
    Axis,
    Heading,
    curve,
    frame,
    key,
    labels,
    scale_below,
    ticks_below,
    words,
)
from phalanx.network.fabric.findings import against, findings, formula, show_hours
from phalanx.network.fabric.loads import max_to_mean
from phalanx.network.fabric.recovery import GIVE_UP_S
from phalanx.units import format_count, format_seconds, plural

WIDTH, HEIGHT, LEFT = 1260, 580, 70
GAP = 415  # from one panel to the next
CONVERGES_S = (1.0, 60.0)  # "seconds or tens of seconds" of a conventional fabric (the post on the MRC network)
SOURCES = (
    "Sources: geometry and recovery, arXiv:2605.04333 section 2; loads, balls into bins without sampling; failures of "
    "cables, Alibaba HPN, SIGCOMM'24, of switches, Singh et al., SIGCOMM CCR 51(2) 2021."
)


def picture(one: Decisions) -> str:
    """The SVG text."""
    fabric = one.fabric
    planes = "one plane" if fabric.planes == 1 else plural(fabric.planes, "plane")
    title = f"{one.gpus:,} GPUs at {one.nic_gbps:g} Gb/s: {planes} of {fabric.tiers} tiers, {fabric.switch.name}"
    summary = (
        f"{fabric.switches:,} switches, {plural(fabric.hops, 'hop')}, {plural(fabric.paths, 'path')}; "
        f"{one.paths} paths per connection; recovery after {format_seconds(one.recovery_s)}"
    )
    body = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-labelledby="t d">',
        f'<title id="t">{escape(title)}</title><desc id="d">{escape(_described(one, summary))}</desc>',
        f'<style>{STYLE}</style><rect class="page" width="{WIDTH}" height="{HEIGHT}"/>',
        words(LEFT - 40, 34, title, "ink title"),
        words(LEFT - 40, 57, summary, "soft"),
        *_hosts(one),
        *_load(one),
        *_lost(one),
        words(LEFT - 40, HEIGHT - 16, SOURCES, "soft small"),
        "</svg>",
    ]
    return "\n".join(body) + "\n"


def _described(one: Decisions, summary: str) -> str:
    """For a reader who hears the picture."""
    return ". ".join([summary, *findings(one)]) + "."


def _hosts(one: Decisions) -> list[str]:
    """Panel 1: bars of the hosts that two and three tiers join, by planes; pale where they are too few."""
    x0 = LEFT
    most = max(one.gpus, *(row.most_hosts[1] for row in one.planes))
    least = min(one.gpus, *(row.most_hosts[0] for row in one.planes))
    low = min(100.0, 10.0 ** math.floor(math.log10(least)))
    axis = Axis(low=low, high=10 ** math.ceil(math.log10(most)), start=TOP + PANEL_H, end=TOP)
    slot = PANEL_W / len(one.planes)
    head = Heading(name="1. Planes and radix", finding=findings(one)[0], scale="hosts at full bisection")
    parts = frame(x0, head, axis, axis.decades(), count=True)
    bars = [_bars(row, x0 + index * slot, slot, axis, one.gpus) for index, row in enumerate(one.planes)]
    height = axis.at(one.gpus)
    parts += [mark for marks, _ in bars for mark in marks]
    parts.append(f'<line class="want" x1="{x0}" x2="{x0 + PANEL_W}" y1="{height:.1f}" y2="{height:.1f}"/>')
    parts += [number for _, numbers in bars for number in numbers]
    for index, row in enumerate(one.planes):
        label = f"{row.planes}×{row.radix}"
        parts.append(words(x0 + (index + 0.5) * slot, TOP + PANEL_H + 18, label, "soft small", "middle"))
    parts.append(scale_below(x0, "planes × ports of the same box"))
    ratios = f"{one.switch_ratio} of the switches and {one.optics_ratio} of the optics per host of {against(one)}"
    note = f"dashed: {one.gpus:,} GPUs" + (f"; full, {ratios}" if formula(one) else "")
    return [*parts, *key(x0, ("2 tiers, 3 hops", "3 tiers, 5 hops"), note)]


def _bars(row: PlaneRow, left: float, slot: float, axis: Axis, wanted: int) -> tuple[list[str], list[str]]:
    """Two bars and their numbers."""
    marks, numbers = [], []
    width = min(0.36 * slot, 40.0)
    middle = left + slot / 2
    for x, hosts, kind in ((middle - width, row.most_hosts[0], "a"), (middle + 2, row.most_hosts[1], "b")):
        top, base = axis.at(hosts), TOP + PANEL_H
        pale = " pale" if hosts < wanted else ""
        size = f'width="{width:.1f}" height="{base - top:.1f}"'
        marks.append(f'<rect class="{kind}{pale}" x="{x:.1f}" y="{top:.1f}" {size}/>')
        edge, anchor = (x + width, "end") if kind == "a" else (x, "start")
        numbers.append(words(edge, top - 4, format_count(hosts), "soft small", anchor))
    return marks, numbers


def _load(one: Decisions) -> list[str]:
    """Panel 2: busiest link over mean against units per link, for one T0 and for the fabric."""
    x0, fabric = LEFT + GAP, one.fabric
    across = Axis(low=1, high=PACKETS, start=x0, end=x0 + PANEL_W)
    units = [2.0**power for power in range(13)]
    groups = fabric.planes * fabric.t0
    alone = [max_to_mean(unit, fabric.t0_up) for unit in units]
    whole = [max_to_mean(unit, fabric.t0_up, groups=groups) for unit in units]
    worst = max(row.worst_of_fabric for row in one.loads)
    up = Axis(low=1, high=max(2.0, worst, *whole) * 1.2, start=TOP + PANEL_H, end=TOP)
    ticks = [tick for tick in (1, 1.2, 1.5, 2, 3, 5, 8, 12, 20) if tick <= up.high]
    head = Heading(
        name="2. Packets instead of flows", finding=findings(one)[1], scale="busiest link over the mean (1 is even)"
    )
    parts = frame(x0, head, up, ticks)
    parts += ticks_below(across, [4.0**power for power in range(7)], lambda tick: f"{tick:g}")
    parts.append(curve("al", [(across.at(x), up.at(y)) for x, y in zip(units, alone, strict=True)]))
    parts.append(curve("bl", [(across.at(x), up.at(y)) for x, y in zip(units, whole, strict=True)]))
    points = []
    for row, short in zip(one.loads, ("1 flow", "16 QPs", f"{one.paths} paths", "packets"), strict=True):
        x, y = across.at(row.units_per_link), up.at(row.worst_of_fabric)
        parts.append(f'<circle class="b" cx="{x:.1f}" cy="{y:.1f}" r="4.5"/>')
        points.append((x, y, f"{short} {row.worst_of_fabric:.2f}"))
    parts += labels(points, right=x0 + PANEL_W)
    parts.append(scale_below(x0, "random units per uplink"))
    note = "skipping marked paths removes what is above 1"
    return [*parts, *key(x0, (f"{fabric.t0_up} uplinks of a T0", f"worst of {groups:,} T0s"), note)]


def _lost(one: Decisions) -> list[str]:
    """Panel 3: GPU-hours lost per day against the time to recover."""
    x0, fabric = LEFT + 2 * GAP, one.fabric
    restart_s = one.budget.restart[0].seconds_per_event
    edge = (GIVE_UP_S, GIVE_UP_S * 1.001)  # a step, not a slope
    times = sorted([*(10.0 ** (power / 4) for power in range(-20, 9)), *edge])
    rows = [recovery_row(fabric, time_s, restart_s) for time_s in times]
    hours = [max(row.lost_gpu_hours_per_day, 1e-9) for row in rows]
    across = Axis(low=times[0], high=times[-1], start=x0, end=x0 + PANEL_W)
    restarts = one.recoveries[-1].lost_gpu_hours_per_day
    low = 10 ** math.floor(math.log10(min(hours)))
    high = max(10 * low, *hours, 2 * restarts)
    up = Axis(low=low, high=10 ** math.ceil(math.log10(high)), start=TOP + PANEL_H, end=TOP)
    head = Heading(name="3. Recovery at the edge", finding=findings(one)[2], scale="GPU-hours lost per day")
    first, last = (across.at(bound) for bound in CONVERGES_S)
    band = f'<rect class="band" x="{first:.1f}" y="{TOP}" width="{last - first:.1f}" height="{PANEL_H}"/>'
    parts = [band, *frame(x0, head, up, up.decades(), count=True)]
    parts += ticks_below(across, across.decades(2), format_seconds)
    parts.append(curve("bl", [(x0, up.at(restarts)), (x0 + PANEL_W, up.at(restarts))]))
    parts.append(curve("al", [(across.at(x), up.at(y)) for x, y in zip(times, hours, strict=True)]))
    parts.append(words(last - 4, TOP + 16, "routing converges", "soft small", "end"))
    parts += _chosen(one, across, up)
    parts.append(scale_below(x0, "time from failure to bypass"))
    note = f"a step is late in {one.late[1].step:.0%} of cases if 1 transfer in 10⁶ is"
    return [*parts, *key(x0, ("bypassed", f"a restart each: {show_hours(restarts)}"), note)]


def _chosen(one: Decisions, across: Axis, up: Axis) -> list[str]:
    """The point of the chosen recovery time."""
    hours = recovery_row(one.fabric, one.recovery_s, one.budget.restart[0].seconds_per_event).lost_gpu_hours_per_day
    x, y = across.at(one.recovery_s or across.low), up.at(max(hours, up.low))
    anchor = "end" if x > across.start + 0.6 * PANEL_W else "start"
    label = f"{format_seconds(one.recovery_s)}: {show_hours(hours)}"
    return [f'<circle class="a" cx="{x:.1f}" cy="{y:.1f}" r="5"/>', words(x, y - 11, label, "ink", anchor)]
