"""Marks of the decisions' picture: axes, frames, curves, words. SVG text without a plotting library."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from phalanx.units import format_count

PANEL_W, PANEL_H, TOP = 320, 270, 160
LINE_CHARS = 48  # of a finding, 13 px wide words over a panel and its scale
REMARK_CHARS = 54  # of 12 px under a panel
LETTER_PX = 7.2  # a letter of 13 px, rather too wide

# Blue and orange keep apart for the colour-blind, on white and on near-black (contrast over 3:1 with both). Words have
# a rim in the colour of the page, so that no line runs through them.
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
    """Values to pixels, on a logarithmic scale."""

    low: float
    high: float
    start: float
    end: float

    def at(self, value: float) -> float:
        """The pixel of a value; beyond the ends, of the end."""
        inside = min(max(value, self.low), self.high)
        share = math.log(inside / self.low) / math.log(self.high / self.low)
        return self.start + share * (self.end - self.start)

    def decades(self, step: int = 1) -> list[float]:
        """Powers of ten between the ends."""
        first, last = math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9)
        return [10.0**power for power in range(first, last + 1, step)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Heading:
    """Over a panel: the decision, what comes of it, and what the scale counts."""

    name: str
    finding: str
    scale: str


def frame(x0: float, head: Heading, up: Axis, ticks: Sequence[float], *, count: bool = False) -> list[str]:
    """Heading, horizontal grid with its numbers, and the base line."""
    parts = [words(x0 - 40, TOP - 70, head.name, "ink head"), words(x0 - 40, TOP - 10, head.scale, "soft small")]
    lines = textwrap.wrap(head.finding, LINE_CHARS)[:2]
    parts += [words(x0 - 40, TOP - 50 + 17 * number, line, "ink") for number, line in enumerate(lines)]
    for tick in ticks:
        y = up.at(tick)
        shown = format_count(tick) if count and tick >= 1000 else f"{tick:g}"
        parts.append(f'<line class="grid" x1="{x0}" x2="{x0 + PANEL_W}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(words(x0 - 6, y + 4, _short(shown), "soft small", "end"))
    base = TOP + PANEL_H
    return [*parts, f'<line class="line" x1="{x0}" x2="{x0 + PANEL_W}" y1="{base}" y2="{base}"/>']


def ticks_below(across: Axis, ticks: Sequence[float], write: Callable[[float], str]) -> list[str]:
    """Numbers under the base line."""
    shown = [_short(write(tick)) for tick in ticks]
    pairs = zip(ticks, shown, strict=True)
    return [words(across.at(tick), TOP + PANEL_H + 18, label, "soft small", "middle") for tick, label in pairs]


def scale_below(x0: float, text: str) -> str:
    """What the base line counts."""
    return words(x0 + PANEL_W / 2, TOP + PANEL_H + 38, text, "soft", "middle")


def curve(kind: str, points: Sequence[tuple[float, float]]) -> str:
    """A line through points."""
    return f'<polyline class="{kind}" points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in points)}"/>'


def key(x0: float, names: tuple[str, str], remark: str) -> list[str]:
    """Two colours and their names under a panel, and a remark."""
    y = TOP + PANEL_H + 62
    parts = [
        f'<rect class="a" x="{x0}" y="{y - 10}" width="11" height="11"/>',
        words(x0 + 16, y, names[0], "ink"),
        f'<rect class="b" x="{x0 + 160}" y="{y - 10}" width="11" height="11"/>',
        words(x0 + 176, y, names[1], "ink"),
    ]
    lines = textwrap.wrap(remark, REMARK_CHARS)[:2]
    return [*parts, *(words(x0, y + 21 + 16 * number, line, "soft small") for number, line in enumerate(lines))]


def labels(points: Sequence[tuple[float, float, str]], right: float) -> list[str]:
    """A label beside each point, moved up where another is in the way, to the left of it near the right end."""
    parts: list[str] = []
    taken: list[tuple[float, float, float]] = []
    for x, y, text in sorted(points, reverse=True):
        width = LETTER_PX * len(text)
        left = x - width if x + 9 + width > right else x + 9
        height = y - 20 if left < x else y - 5
        while any(abs(height - other) < 16 and left < end and left + width > start for start, end, other in taken):
            height -= 4
        taken.append((left, left + width, height))
        parts.append(words(left, height, text, "ink"))
    return parts


def _short(number: str) -> str:
    """10.0 as 10, and 0.01 as it is."""
    return re.sub(r"\.0+(?!\d)", "", number)


def words(x: float, y: float, text: str, kind: str, anchor: str = "start") -> str:
    """A line of text."""
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
