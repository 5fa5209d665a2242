"""SVG elements and plots: a band from minimum to maximum, a line through the means, marks on the same axis.

Colours come from classes in the page's style sheet, so a plot follows light and dark mode.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from phalanx.io.style import REPORT_CSS
from phalanx.units import format_bytes, format_count, format_seconds

WIDTH, HEIGHT = 640, 220
LEFT, RIGHT, TOP, BOTTOM = 62, 10, 12, 28
# Average width in pixels of a character of a tick label.
LETTER_WIDTH = 6.5
TICKS = 5
PLANNED_STYLE = "planned"  # the style of predicted values
MOST_MARKS = 200  # drawn marks; more are thinned

Value = float | None


def svg_element(name: str, content: str = "", **attributes: object) -> str:
    """Return one element.

    Attributes are escaped, `content` is SVG; `class_` stands for class, `text_anchor` for text-anchor.

    >>> svg_element("rect", class_="part a", x=1.04, width=10)
    '<rect class="part a" x="1.0" width="10"/>'
    """
    words = [name]
    for key, value in attributes.items():
        value_text = f"{value:.1f}" if isinstance(value, float) else escape(str(value), quote=True)
        words.append(f'{key.rstrip("_").replace("_", "-")}="{value_text}"')
    head = " ".join(words)
    return f"<{head}>{content}</{name}>" if content else f"<{head}/>"


def standalone_svg(svg: str) -> str:
    """Return the plot with the style sheet inside, for a file without a surrounding page."""
    style = f'<style>{REPORT_CSS.replace("<", "")}</style><rect width="100%" height="100%" fill="var(--card, #fff)"/>'
    return svg.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1).replace(">", f">{style}", 1)


def stacked_svgs(pictures: Sequence[str]) -> str:
    """Return plots of `line_plot`, one below the other, as one element."""
    placed = [
        picture.replace("<svg ", f'<svg y="{place * HEIGHT}" width="{WIDTH}" height="{HEIGHT}" ', 1)
        for place, picture in enumerate(pictures)
    ]
    box = f"0 0 {WIDTH} {HEIGHT * len(pictures)}"
    return svg_element("svg", "\n".join(placed), viewBox=box, role="img")


def coloured_bar(parts: Sequence[tuple[str, float]], *, colours: Sequence[str], height: int = 26) -> str:
    """Return a horizontal bar of named parts with explicit colours, for pages without the report's style sheet."""
    total, x, rects = sum(size for _, size in parts) or 1.0, 0.0, []
    for index, (name, size) in enumerate(parts):
        width, colour = WIDTH * size / total, colours[index % len(colours)]
        title = svg_element("title", escape(name))
        rects.append(svg_element("rect", title, x=x, y=0, width=width, height=height, fill=colour))
        x += width
    box = f"0 0 {WIDTH} {height}"
    return svg_element("svg", "".join(rects), viewBox=box, width=WIDTH, height=height, role="img")


@dataclass(frozen=True, kw_only=True, slots=True)
class PlotLine:
    """One series of a plot.

    `low` and `high` are its band, empty for none. `style` is 1, 2, … for a colour, "planned" for dashed.
    """

    label: str
    x: Sequence[float]
    mean: Sequence[Value]
    low: Sequence[Value] = ()
    high: Sequence[Value] = ()
    style: str = "1"
    dots: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class PlotMark:
    """A mark on the x axis; kind is incident, checkpoint or epoch."""

    x: float
    kind: str
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class PlotScale:
    """A linear mapping from values to pixels."""

    low: float
    high: float
    begin: float
    end: float

    def at(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low) if self.high > self.low else 0.5
        share = min(1.0, max(0.0, share))
        return self.begin + share * (self.end - self.begin)


@dataclass(frozen=True, kw_only=True, slots=True)
class LinePlot:
    """The data of a plot, drawn as SVG by `to_svg` and as PNG by io/png_plot.py."""

    title: str
    lines: Sequence[PlotLine]
    show: Callable[[float], str]
    show_x: Callable[[float], str]

    @property
    def size(self) -> tuple[int, int]:
        """Width and height in pixels."""
        return WIDTH, HEIGHT

    @property
    def is_empty(self) -> bool:
        """True if there is nothing to draw."""
        return not any(len(line.x) and _line_values(line) for line in self.lines if line.style != PLANNED_STYLE)

    def scales(self) -> tuple[PlotScale, PlotScale]:
        """Return the scales of both axes."""
        return _plot_scales(self.lines)

    def to_svg(self) -> str:
        """Return the plot as an SVG element; empty if there is nothing to draw."""
        return line_plot(self.title, self.lines, show=self.show, show_x=self.show_x)


def _plot_scales(
    lines: Sequence[PlotLine], *, zero: bool = False, most: float | None = None, rough: bool = False
) -> tuple[PlotScale, PlotScale]:
    xs = [x for line in lines for x in line.x]
    ys = sorted(value for line in lines if line.style != PLANNED_STYLE for value in _line_values(line))
    planned_values = [value for line in lines if line.style == PLANNED_STYLE for value in _line_values(line)]
    low, high = _value_range(ys, kept=[*planned_values, *([most] if most is not None else [])], zero=zero, rough=rough)
    return (
        PlotScale(low=min(xs), high=max(xs), begin=LEFT, end=WIDTH - RIGHT),
        PlotScale(low=low, high=high, begin=HEIGHT - BOTTOM, end=TOP),
    )


def line_plot(
    title: str,
    lines: Sequence[PlotLine],
    *,
    show: Callable[[float], str],
    marks: Sequence[PlotMark] = (),
    show_x: Callable[[float], str] | None = None,
    zero: bool = False,
    most: float | None = None,
    rough: bool = False,
    times: bool = False,
) -> str:
    """Return a plot as an SVG element; empty if there is nothing to draw.

    `zero` begins the y axis at 0, `most` is included in it; `rough` cuts off the outermost hundredth, such as a step
    that compiled; `times` means that x is in seconds.
    """
    if not any(_line_values(line) for line in lines if line.style != PLANNED_STYLE):
        return ""
    x_scale, y_scale = _plot_scales(lines, zero=zero, most=most, rough=rough)
    parts = [
        *_draw_axes(x_scale, y_scale, show=show, show_x=show_x or "{:,.0f}".format, times=times),
        *_draw_marks(marks, x_scale),
        *(element for line in lines for element in _draw_line(line, x_scale, y_scale)),
    ]
    drawn_lines = [line for line in lines if any(_is_drawable(value) for value in line.mean)]
    label = escape(f"{title}: {', '.join(_spoken_text(line, show) for line in drawn_lines)}", quote=True)
    head = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}" class="plot">'
    return "\n".join([head, *parts, "</svg>"])


def _spoken_text(line: PlotLine, show: Callable[[float], str]) -> str:
    """Return a description of a line for screen readers."""
    known_values = [value for value in line.mean if value is not None and _is_drawable(value)]
    return f"{line.label} from {show(known_values[0])} to {show(known_values[-1])}"


def _is_drawable(value: Value) -> bool:
    return value is not None and math.isfinite(value) and abs(value) < 1e300


def _line_values(line: PlotLine) -> list[float]:
    return [value for value in (*line.low, *line.high, *line.mean) if value is not None and _is_drawable(value)]


def _value_range(values: Sequence[float], *, kept: Sequence[float], zero: bool, rough: bool) -> tuple[float, float]:
    """Return the range of sorted values; `kept` are values that must be inside."""
    cut = len(values) // 100 + 1 if rough and len(values) >= 20 else 0
    low, high = min(values[cut], *kept, math.inf), max(values[-1 - cut], *kept, -math.inf)
    if zero:
        low = min(0.0, low)
    padding = (high - low) * 0.05 or abs(high) * 0.05 or 1.0
    return (low if zero and low == 0.0 else low - padding), high + padding


def round_ticks(low: float, high: float, count: int = TICKS) -> list[float]:
    """Return round numbers in a range.

    >>> round_ticks(0.0, 10.0), round_ticks(0.13, 0.52)
    ([0.0, 2.0, 4.0, 6.0, 8.0, 10.0], [0.2, 0.3, 0.4, 0.5])
    """
    span = high - low
    if not math.isfinite(span) or span <= 0.0:
        return []
    rough = span / count
    unit = 10.0 ** math.floor(math.log10(rough))
    size = next(unit * factor for factor in (1.0, 2.0, 2.5, 5.0, 10.0) if unit * factor >= rough * 0.999)
    first = math.ceil(low / size - 1e-9)
    last = math.floor(high / size + 1e-9)
    return [float(f"{number * size:.12g}") for number in range(first, min(last, first + 4 * count) + 1)]


def time_ticks(low: float, high: float) -> list[float]:
    """Return round times in a range of seconds.

    >>> time_ticks(0.0, 1500.0)
    [0.0, 300.0, 600.0, 900.0, 1200.0, 1500.0]
    """
    span = high - low
    sizes = [size * unit for unit in (1.0, 60.0, 3600.0, 86400.0) for size in (1, 2, 5, 10, 15, 30)]
    size = next((size for size in sizes if span / size <= TICKS), None)
    if size is None or span < TICKS:
        return round_ticks(low, high)
    return [number * size for number in range(math.ceil(low / size), math.floor(high / size) + 1)]


def _draw_axes(
    x_scale: PlotScale, y_scale: PlotScale, *, show: Callable[[float], str], show_x: Callable[[float], str], times: bool
) -> list[str]:
    parts = []
    for value in round_ticks(y_scale.low, y_scale.high):
        y = y_scale.at(value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick y" x="{LEFT - 6}" y="{y + 3.5:.1f}">{escape(show(value))}</text>')
    for value in (time_ticks if times else round_ticks)(x_scale.low, x_scale.high):
        label = show_x(value)
        # The last label would be cut off at the edge.
        x = min(x_scale.at(value), WIDTH - len(label) * LETTER_WIDTH / 2)
        parts.append(f'<text class="tick x" x="{x:.1f}" y="{HEIGHT - 8}">{escape(label)}</text>')
    base = HEIGHT - BOTTOM
    parts.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{base}" y2="{base}"/>')
    return parts


def _draw_marks(marks: Sequence[PlotMark], x_scale: PlotScale) -> list[str]:
    every = max(1, math.ceil(len(marks) / MOST_MARKS))
    parts = []
    for mark in marks[::every]:
        if not x_scale.low <= mark.x <= x_scale.high:
            continue
        x = f"{x_scale.at(mark.x):.1f}"
        top = TOP if mark.kind == "incident" else HEIGHT - BOTTOM - 7
        head = (
            f'<line class="mark {escape(mark.kind, quote=True)}" x1="{x}" x2="{x}" y1="{top}" y2="{HEIGHT - BOTTOM}">'
        )
        parts.append(f"{head}<title>{escape(mark.text)}</title></line>")
    return parts


def _draw_line(line: PlotLine, x_scale: PlotScale, y_scale: PlotScale) -> list[str]:
    style = escape(line.style, quote=True)
    parts = []
    if line.low and line.high:
        parts += [f'<path class="band s{style}" d="{path}"/>' for path in _draw_band(line, x_scale, y_scale)]
    points = [(x, y) for x, y in zip(line.x, line.mean, strict=False) if y is not None and _is_drawable(y)]
    if line.dots or len(points) == 1:
        dots = [
            f'<circle class="dot s{style}" cx="{x_scale.at(x):.1f}" cy="{y_scale.at(y):.1f}" r="3"/>' for x, y in points
        ]
        return parts + dots
    return parts + [
        f'<path class="line s{style}" d="{path}"/>' for path in _draw_paths(line.x, line.mean, x_scale, y_scale)
    ]


def _draw_paths(xs: Sequence[float], ys: Sequence[Value], x_scale: PlotScale, y_scale: PlotScale) -> list[str]:
    """Return a path for every stretch without missing values."""
    stretches: list[list[str]] = [[]]
    for x, y in zip(xs, ys, strict=False):
        if y is None or not _is_drawable(y):
            stretches.append([])
        else:
            stretches[-1].append(f"{x_scale.at(x):.1f} {y_scale.at(y):.1f}")
    return ["M" + "L".join(points) for points in stretches if len(points) > 1]


def _draw_band(line: PlotLine, x_scale: PlotScale, y_scale: PlotScale) -> list[str]:
    rows = [
        (x, low, high)
        for x, low, high in zip(line.x, line.low, line.high, strict=False)
        if low is not None and high is not None and _is_drawable(low) and _is_drawable(high)
    ]
    if len(rows) < 2:
        return []
    upper_edge = [f"{x_scale.at(x):.1f} {y_scale.at(high):.1f}" for x, _, high in rows]
    back = [f"{x_scale.at(x):.1f} {y_scale.at(low):.1f}" for x, low, _ in reversed(rows)]
    return ["M" + "L".join([*upper_edge, *back]) + "Z"]


def stacked_bar(parts: Sequence[tuple[str, float]], *, height: int = 26) -> str:
    """Return a horizontal bar of shares, each in the CSS class of its name."""
    total = sum(share for _, share in parts)
    if total <= 0.0:
        return ""
    rects, x = [], 0.0
    for name, share in parts:
        width = share / total * WIDTH
        kind = escape(name.replace(" ", "-"), quote=True)
        title = f"<title>{escape(name)} {share / total:.1%}</title>"
        rects.append(
            f'<rect class="part {kind}" x="{x:.2f}" y="0" width="{width:.2f}" height="{height}">{title}</rect>'
        )
        x += width
    spoken = escape(", ".join(f"{name} {share / total:.1%}" for name, share in parts), quote=True)
    box = f'viewBox="0 0 {WIDTH} {height}" preserveAspectRatio="none"'
    head = f'<svg {box} role="img" aria-label="{spoken}" class="stack">'
    return "\n".join([head, *rects, "</svg>"])


def _short_seconds(value: float) -> str:
    """Format seconds without trailing zeros: 5 min, not 5.00 min."""
    if not value:
        return "0"
    size, _, unit = format_seconds(value).partition(" ")
    return f"{size.rstrip('0').rstrip('.') if '.' in size else size} {unit}"


def axis_format(unit: str) -> Callable[[float], str]:
    """Return the function that formats values of a unit on an axis."""
    if unit == "bytes":
        return format_bytes
    if unit == "s":
        return _short_seconds
    if unit == "share":
        return lambda value: f"{100 * value:.4g}%"
    return lambda value: format_count(value) if abs(value) >= 1000 else f"{value:.4g}"
