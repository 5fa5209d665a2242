"""The three decisions as one SVG with three panels, legible on light and dark pages, without a plotting library."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from phalanx.network.fabric.budget import GIVE_UP_S
from phalanx.network.fabric.decisions import PACKETS, Decisions, recovery_row
from phalanx.network.fabric.loads import max_to_mean
from phalanx.units import format_count, format_seconds

WIDTH, HEIGHT = 1200, 470
PANEL_W, PANEL_H, TOP, LEFT = 300, 270, 110, 70
GAP = 390  # from one panel to the next

# Blue and orange keep apart for the colour-blind, on white and on near-black (contrast over 3:1 with both).
STYLE = """
.page{fill:#ffffff}.ink{fill:#1b1f24}.soft{fill:#57606a}.line{stroke:#8c959f;stroke-width:1;fill:none}
.grid{stroke:#d0d7de;stroke-width:1}.a{fill:#0969da}.b{fill:#bc4c00}.al{stroke:#0969da;stroke-width:2.5;fill:none}
.bl{stroke:#bc4c00;stroke-width:2.5;fill:none}.want{stroke:#1b1f24;stroke-width:1.5;stroke-dasharray:5 4}
text{font-family:system-ui,sans-serif;font-size:12px}text.small{font-size:10.5px}.head{font-size:15px;font-weight:600}.title{font-size:19px;font-weight:600}
@media (prefers-color-scheme:dark){.page{fill:#0d1117}.ink{fill:#e6edf3}.soft{fill:#9da7b3}.line{stroke:#6e7681}
.grid{stroke:#30363d}.a{fill:#58a6ff}.b{fill:#f0883e}.al{stroke:#58a6ff}.bl{stroke:#f0883e}.want{stroke:#e6edf3}}
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Axis:
    """Values to pixels, on a logarithmic scale."""

    low: float
    high: float
    start: float
    end: float

    def at(self, value: float) -> float:
        inside = min(max(value, self.low), self.high)
        share = math.log(inside / self.low) / math.log(self.high / self.low)
        return self.start + share * (self.end - self.start)

    def decades(self, step: int = 1) -> list[float]:
        first, last = math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9)
        return [10.0**power for power in range(first, last + 1, step)]


def picture(one: Decisions) -> str:
    """The SVG text."""
    fabric = one.fabric
    shape = f"{fabric.planes} planes of {fabric.tiers} tiers, {fabric.switch.name}"
    title = f"{one.gpus:,} GPUs at {one.nic_gbps:g} Gb/s: {shape}"
    summary = (
        f"{fabric.switches:,} switches, {fabric.hops} hops, {fabric.paths:,} paths; {one.paths} paths per connection; "
        f"recovery after {format_seconds(one.recovery_s)}"
    )
    body = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-labelledby="t d">',
        f'<title id="t">{escape(title)}</title><desc id="d">{escape(summary)}</desc><style>{STYLE}</style>',
        f'<rect class="page" width="{WIDTH}" height="{HEIGHT}"/>',
        _text(LEFT - 40, 34, title, "ink title"),
        _text(LEFT - 40, 56, summary, "soft"),
        *_hosts(one),
        *_load(one),
        *_lost(one),
        "</svg>",
    ]
    return "\n".join(body) + "\n"


def _hosts(one: Decisions) -> list[str]:
    """Panel 1: bars of the hosts that two and three tiers join, by planes."""
    x0 = LEFT
    most = max(one.gpus, *(row.most_hosts[1] for row in one.planes))
    axis = _Axis(low=100, high=10 ** math.ceil(math.log10(most)), start=TOP + PANEL_H, end=TOP)
    slot = PANEL_W / len(one.planes)
    parts = _frame(x0, "1. Planes and radix", "hosts at full bisection", axis, axis.decades(), count=True)
    for index, row in enumerate(one.planes):
        for offset, hosts, kind in ((0.14, row.most_hosts[0], "a"), (0.5, row.most_hosts[1], "b")):
            top, base = axis.at(hosts), TOP + PANEL_H
            left, width = x0 + (index + offset) * slot, 0.34 * slot
            parts.append(
                f'<rect class="{kind}" x="{left:.1f}" y="{top:.1f}" width="{width:.1f}" height="{base - top:.1f}"/>'
            )
            anchor, edge = ("end", left + width) if kind == "a" else ("middle", left + width / 2)
            parts.append(_text(edge, top - 4, format_count(hosts), "soft small", anchor))
        parts.append(
            _text(x0 + (index + 0.5) * slot, TOP + PANEL_H + 17, f"{row.planes}×{row.radix}", "soft", "middle")
        )
    height = axis.at(one.gpus)
    parts.append(f'<line class="want" x1="{x0}" x2="{x0 + PANEL_W}" y1="{height:.1f}" y2="{height:.1f}"/>')
    parts.append(_text(x0 + PANEL_W / 2, TOP + PANEL_H + 36, "planes × ports of the same box", "soft", "middle"))
    return [*parts, *_key(x0, ("2 tiers, 3 hops", "3 tiers, 5 hops"), f"dashed: {one.gpus:,} GPUs")]


def _load(one: Decisions) -> list[str]:
    """Panel 2: busiest link over mean against units per link, for one T0 and for the fabric."""
    x0, fabric = LEFT + GAP, one.fabric
    across = _Axis(low=1, high=PACKETS, start=x0, end=x0 + PANEL_W)
    units = [2.0**power for power in range(13)]
    groups = fabric.planes * fabric.t0
    alone = [max_to_mean(unit, fabric.t0_up) for unit in units]
    whole = [max_to_mean(unit, fabric.t0_up, groups=groups) for unit in units]
    up = _Axis(low=1, high=max(2.0, *whole) * 1.2, start=TOP + PANEL_H, end=TOP)
    ticks = [tick for tick in (1, 1.2, 1.5, 2, 3, 5, 8, 12) if tick <= up.high]
    parts = _frame(x0, "2. Packets instead of flows", "busiest link / mean", up, ticks)
    parts += _ticks_below(across, [4.0**power for power in range(7)], lambda tick: f"{tick:g}")
    parts.append(_curve("al", [(across.at(x), up.at(y)) for x, y in zip(units, alone, strict=True)]))
    parts.append(_curve("bl", [(across.at(x), up.at(y)) for x, y in zip(units, whole, strict=True)]))
    for row, short in zip(one.loads, ("1 flow", "16 QPs", f"{one.paths} paths", "packets"), strict=True):
        x, y = across.at(row.units_per_link), up.at(row.worst_of_fabric)
        parts.append(f'<circle class="b" cx="{x:.1f}" cy="{y:.1f}" r="4.5"/>')
        right = x > x0 + 0.8 * PANEL_W
        label = f"{short} {row.worst_of_fabric:.2f}"
        parts.append(_text(x, y - 18, label, "ink", "end") if right else _text(x + 9, y - 3, label, "ink"))
    parts.append(_text(x0 + PANEL_W / 2, TOP + PANEL_H + 36, "random units per uplink", "soft", "middle"))
    return [*parts, *_key(x0, (f"{fabric.t0_up} uplinks of a T0", f"all {groups:,} T0s"), "")]


def _lost(one: Decisions) -> list[str]:
    """Panel 3: GPU-hours lost per day against the time to recover."""
    x0, fabric = LEFT + 2 * GAP, one.fabric
    restart_s = one.budget.restart[0].seconds_per_event
    edge = (GIVE_UP_S, GIVE_UP_S * 1.001)  # a step, not a slope
    times = sorted([*(10.0 ** (power / 4) for power in range(-20, 9)), *edge])
    rows = [recovery_row(fabric, time_s, restart_s) for time_s in times]
    hours = [max(row.lost_gpu_hours_per_day, 1e-3) for row in rows]
    across = _Axis(low=times[0], high=times[-1], start=x0, end=x0 + PANEL_W)
    low = 10 ** math.floor(math.log10(min(hours)))
    high = max(10 * low, *hours, one.budget.restart[1].lost_gpu_hours_per_day)
    up = _Axis(low=low, high=10 ** math.ceil(math.log10(high)), start=TOP + PANEL_H, end=TOP)
    parts = _frame(x0, "3. Recovery at the edge", "GPU-hours lost per day", up, up.decades(), count=True)
    parts += _ticks_below(across, across.decades(2), format_seconds)
    parts.append(_curve("al", [(across.at(x), up.at(y)) for x, y in zip(times, hours, strict=True)]))
    restarts = one.budget.restart[0].lost_gpu_hours_per_day
    parts.append(_curve("bl", [(x0, up.at(restarts)), (x0 + PANEL_W, up.at(restarts))]))
    chosen = recovery_row(fabric, one.recovery_s, restart_s)
    x, y = across.at(one.recovery_s or times[0]), up.at(max(chosen.lost_gpu_hours_per_day, up.low))
    parts.append(f'<circle class="a" cx="{x:.1f}" cy="{y:.1f}" r="5"/>')
    anchor = "end" if x > x0 + 0.6 * PANEL_W else "start"
    parts.append(_text(x, y - 10, f"chosen: {chosen.lost_gpu_hours_per_day:,.0f}", "ink", anchor))
    parts.append(_text(x0 + PANEL_W / 2, TOP + PANEL_H + 36, "time from failure to bypass", "soft", "middle"))
    note = f"step late: {one.late[1].step:.0%} if 1 transfer in 10⁶ is"
    return [*parts, *_key(x0, ("bypassed", f"a restart each: {restarts:,.0f}"), note)]


def _frame(x0: float, head: str, label: str, up: _Axis, ticks: Sequence[float], *, count: bool = False) -> list[str]:
    """Heading, horizontal grid with its numbers, and the base line."""
    parts = [_text(x0 - 40, TOP - 26, head, "ink head"), _text(x0 - 40, TOP - 10, label, "soft")]
    for tick in ticks:
        y = up.at(tick)
        shown = format_count(tick) if count and tick >= 1000 else f"{tick:g}"
        parts.append(f'<line class="grid" x1="{x0}" x2="{x0 + PANEL_W}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(_text(x0 - 6, y + 4, shown.replace(".00", "").replace(".0", ""), "soft", "end"))
    base = TOP + PANEL_H
    return [*parts, f'<line class="line" x1="{x0}" x2="{x0 + PANEL_W}" y1="{base}" y2="{base}"/>']


def _ticks_below(across: _Axis, ticks: Sequence[float], write: Callable[[float], str]) -> list[str]:
    shown = [write(tick).replace(".00", "").replace(".0", "") for tick in ticks]
    pairs = zip(ticks, shown, strict=True)
    return [_text(across.at(tick), TOP + PANEL_H + 17, label, "soft", "middle") for tick, label in pairs]


def _curve(kind: str, points: Sequence[tuple[float, float]]) -> str:
    return f'<polyline class="{kind}" points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in points)}"/>'


def _key(x0: float, names: tuple[str, str], remark: str) -> list[str]:
    """Two colours and their names under a panel, and a remark."""
    y = TOP + PANEL_H + 58
    parts = [
        f'<rect class="a" x="{x0}" y="{y - 9}" width="10" height="10"/>',
        _text(x0 + 15, y, names[0], "ink"),
        f'<rect class="b" x="{x0 + 150}" y="{y - 9}" width="10" height="10"/>',
        _text(x0 + 165, y, names[1], "ink"),
    ]
    return [*parts, _text(x0, y + 20, remark, "soft")] if remark else parts


def _text(x: float, y: float, words: str, kind: str, anchor: str = "start") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'
