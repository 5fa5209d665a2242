"""A report as one HTML file: it loads no other file, runs no script, and escapes every text of the run."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Sequence
from html import escape

from phalanx.io.style import REPORT_CSS
from phalanx.io.svg import PLANNED_STYLE, PlotLine, axis_format, line_plot, stacked_bar, svg_element
from phalanx.io.tables import HtmlCell, html_table
from phalanx.io.values import printable
from phalanx.record.account.summary import LayoutResult, Pair, Summary
from phalanx.record.archive.history import Curve
from phalanx.record.report.run_report import RunReport
from phalanx.record.report.sections import (
    Bar,
    Block,
    Cell,
    ColourKey,
    Items,
    Paragraph,
    Quote,
    Stack,
    Table,
    report_headline,
    report_sections,
    wall_seconds,
)
from phalanx.units import format_bytes, format_count, format_money, format_seconds, plural

MOST_ROWS = 64  # ranks, incidents or checkpoints in a table
MOST_SAMPLE = 4000
MOST_UNBROKEN = 40  # longer cells may wrap on a narrow screen
STATES = ("created", "launching", "running", "done", "stopped", "failed", "interrupted")


def render_html(report: RunReport, *, made: str) -> str:
    """Return the complete file; `made` is the footer, with the source and time of the report."""
    s = report.summary
    digest = base64.b64encode(hashlib.sha256(REPORT_CSS.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    sections = report_sections(s, report, most_rows=MOST_ROWS)
    titled_sections = [
        (section.title, "\n".join(_block_html(block) for block in section.blocks)) for section in sections
    ]
    places = [
        place
        for place, (title, _) in enumerate(titled_sections)
        if title in ("Prediction and measurement", "Layouts", "Learning")
    ]
    titled_sections.insert(1 + max(places, default=-1), ("Over the run", report_figures(report)))
    body = "\n".join(f"<section><h2>{title}</h2>\n{text}\n</section>" for title, text in titled_sections if text)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="referrer" content="no-referrer">
<title>{escape(report_headline(s).name)} · Phalanx</title>
<style>{REPORT_CSS}</style>
</head>
<body>
<main>
{_head_html(s)}
{body}
<footer>{escape(printable(made))}</footer>
</main>
</body>
</html>
"""


def _head_html(s: Summary) -> str:
    head = report_headline(s)
    state = s.state if s.state in STATES else "unknown"
    why = f"<pre>{escape(_lines_html(s.message))}</pre>" if head.message else ""
    title = f'<h1>{escape(head.name)} <span class="state {state}">{escape(printable(s.state, most=40))}</span></h1>'
    return (
        f'<header>{title}\n<p class="lead quiet">{escape(printable(head.subject))}</p>{why}\n{_tiles_html(s)}</header>'
    )


def _tiles_html(s: Summary) -> str:
    of = f"of {s.planned_steps:,} steps" if s.planned_steps else "steps"
    usd = s.cost.so_far.usd if s.cost is not None else None
    tiles = [
        (f"{s.steps:,}", of),
        (f"{s.last_loss:.4f}" if s.last_loss is not None else "", f"loss, from {s.first_loss or 0:.4f}"),
        (
            _value_or_dash(s.tokens_per_s.measured, format_count),
            "tokens/s" + _planned_text(s.tokens_per_s, format_count),
        ),
        (_value_or_dash(s.mfu.measured, _percent_text), "MFU" + _planned_text(s.mfu, _percent_text)),
        (_value_or_dash(s.memory_bytes.measured, format_bytes), "memory" + _planned_text(s.memory_bytes, format_bytes)),
        (
            _value_or_dash(s.effective_time.measured, _percent_text),
            "effective time" + _planned_text(s.effective_time, _percent_text),
        ),
        (_value_or_dash(usd, format_money), "so far"),
        (
            _value_or_dash(wall_seconds(s), format_seconds),
            f"wall clock, {plural(s.starts, 'start')}" if s.starts > 1 else "wall clock",
        ),
    ]
    tile_texts = [
        f'<div class="tile"><b>{escape(value)}</b><span>{escape(name)}</span></div>' for value, name in tiles if value
    ]
    return f'<div class="tiles">{"".join(tile_texts)}</div>'


def _value_or_dash(value: float | None, show: Callable[[float], str]) -> str:
    return show(value) if value is not None else ""


def _planned_text(pair: Pair, show: Callable[[float], str]) -> str:
    return f", planned {show(pair.predicted)}" if pair.predicted else ""


def _percent_text(value: float) -> str:
    return f"{value:.1%}"


# ---- blocks ----------------------------------------------------------------------------------------------------------


def _block_html(block: Block) -> str:
    match block:
        case Table():
            return _table_html(block)
        case Stack():
            return stacked_bar(block.parts)
        case Paragraph():
            return f'<p class="quiet">{escape(block.text)}</p>'
        case Items():
            attributes = ' class="quiet"' if block.quiet else ""
            return "".join(f"<p{attributes}>{escape(text)}</p>" for text in block.texts)
        case Quote():
            return "".join(f"<pre>{escape(_lines_html(text))}</pre>" for text in block.texts)


def _table_html(table: Table) -> str:
    number = ["n" if column in table.right else "" for column in range(len(table.head))]
    head = [HtmlCell(escape(cell), kind) for cell, kind in zip(table.head, number, strict=True)]
    rows = [
        [HtmlCell(_cell_html(cell), kind or _width_class(cell)) for cell, kind in zip(row, number, strict=True)]
        for row in table.rows
    ]
    return f'<div class="scroll">{html_table(rows, head=head, alarms=table.alarms)}</div>'


def _width_class(cell: Cell) -> str:
    return "long" if isinstance(cell, str) and len(cell) > MOST_UNBROKEN else ""


def _cell_html(cell: Cell) -> str:
    if isinstance(cell, Bar):
        rest = max(0.0, cell.whole - sum(size for _, size in cell.parts))
        return stacked_bar([*cell.parts, ("rest", rest)], height=10).replace('"stack"', '"cell"')
    if isinstance(cell, ColourKey):
        square = svg_element("rect", class_=f"part {cell.name.replace(' ', '-')}", width=10, height=10)
        return svg_element("svg", square, class_="swatch", viewBox="0 0 10 10", aria_hidden="true") + escape(cell.name)
    return escape(cell)


def _lines_html(text: str) -> str:
    """Return a text with its line breaks, without other control characters."""
    return "\n".join(printable(line, most=MOST_SAMPLE) for line in text[:MOST_SAMPLE].splitlines()[:60])


# ---- plots -----------------------------------------------------------------------------------------------------------


# The memory limit is drawn only up to this multiple of the largest use.
LIMIT_SEEN = 4.0


def report_figures(report: RunReport) -> str:
    """Return every curve that the run has, each with caption and legend."""
    s, curves = report.summary, report.curves
    figures = [
        _curve_figure(report, "Loss", "", [_curve_line(curves, "loss", "training"), _evaluation_line(report)]),
        _curve_figure(
            report,
            "Tokens per second",
            "",
            [_curve_line(curves, "tokens_per_s"), _planned_line(s.layouts, lambda layout: layout.tokens_per_s)],
            rough=True,
        ),
        _curve_figure(
            report,
            "MFU",
            "share",
            [_curve_line(curves, "mfu"), _planned_line(s.layouts, lambda layout: layout.mfu)],
            rough=True,
        ),
        _effective_figure(report),
        _curve_figure(report, "Gradient noise scale, samples", "", [_curve_line(curves, "noise_scale")]),
        _curve_figure(report, "Gradient norm", "", [_curve_line(curves, "grad_norm")]),
        _curve_figure(report, "Memory of rank 0", "bytes", _memory_lines(report), zero=True),
        _curve_figure(report, "A step of rank 0", "s", _step_lines(curves), zero=True, rough=True),
        _curve_figure(report, "Utilization of rank 0", "share", [_curve_line(curves, "utilization")], zero=True),
    ]
    return f'<div class="plots">{"".join(figures)}</div>' if any(figures) else ""


def _curve_line(curves: dict[str, Curve], name: str, label: str = "measured", style: str = "1") -> PlotLine | None:
    curve = curves.get(name)
    if curve is None:
        return None
    return PlotLine(label=label, x=curve.step, mean=curve.mean, low=curve.low, high=curve.high, style=style)


def _constant_line(curves: dict[str, Curve], value: float | None) -> PlotLine | None:
    """Return a horizontal line from the first step to the last."""
    steps = next(iter(curves.values())).step if curves else ()
    if not value or not steps:
        return None
    return PlotLine(label="planned", x=(steps[0], steps[-1]), mean=(value, value), style=PLANNED_STYLE)


def _planned_line(layouts: Sequence[LayoutResult], pair: Callable[[LayoutResult], Pair]) -> PlotLine | None:
    """Return the prediction over the steps, each layout's own."""
    planned_values = [(layout, pair(layout).predicted) for layout in layouts]
    if not any(value for _, value in planned_values):
        return None
    x = tuple(step for layout, _ in planned_values for step in (layout.first_step, layout.last_step))
    mean = tuple(value or None for _, value in planned_values for _ in range(2))
    return PlotLine(label="planned", x=x, mean=mean, style=PLANNED_STYLE)


def _evaluation_line(report: RunReport) -> PlotLine | None:
    if not report.evaluations:
        return None
    steps, losses = zip(*report.evaluations, strict=True)
    return PlotLine(label="held-out", x=steps, mean=losses, style="2", dots=True)


def _memory_lines(report: RunReport) -> list[PlotLine | None]:
    lines = [
        _curve_line(report.curves, "memory_used_bytes", "now"),
        _curve_line(report.curves, "memory_bytes", "most so far", "2"),
    ]
    limit, most = report.memory_limit_bytes, report.summary.memory_bytes.measured
    # A limit far above would flatten all other lines.
    if not limit or not most or limit > LIMIT_SEEN * most:
        return [*lines, _planned_line(report.summary.layouts, lambda layout: layout.memory_bytes)]
    flat = _constant_line(report.curves, limit)
    return [
        *lines,
        PlotLine(label="limit", x=flat.x, mean=flat.mean, style=PLANNED_STYLE) if flat is not None else None,
    ]


def _step_lines(curves: dict[str, Curve]) -> list[PlotLine | None]:
    return [
        _curve_line(curves, "duration_s", "whole"),
        _curve_line(curves, "compute_s", "computing", "3"),
        _curve_line(curves, "wait_s", "not computing", "2"),
    ]


def _curve_figure(
    report: RunReport,
    title: str,
    unit: str,
    lines: Sequence[PlotLine | None],
    *,
    zero: bool = False,
    rough: bool = False,
) -> str:
    known_lines = [line for line in lines if line is not None]
    if not any(line.style != PLANNED_STYLE for line in known_lines):
        return ""
    svg = line_plot(title, known_lines, show=axis_format(unit), marks=report.marks, zero=zero, rough=rough)
    return _captioned_figure(title, known_lines, svg)


def _effective_figure(report: RunReport) -> str:
    effective = report.effective
    if len(effective.t) < 2:
        return ""
    hours = [(t - effective.t[0]) for t in effective.t]
    lines = [
        PlotLine(label="cumulative", x=hours, mean=effective.cumulative, style="1"),
        PlotLine(label=effective.window, x=hours, mean=effective.last_hour, style="2"),
    ]
    title = "Effective training time"
    svg = line_plot(title, lines, show=axis_format("share"), show_x=axis_format("s"), zero=True, most=1.0, times=True)
    return _captioned_figure(title, lines, svg)


def _captioned_figure(title: str, lines: Sequence[PlotLine], drawn: str) -> str:
    if not drawn:
        return ""
    keys = (
        "".join(f'<span class="key s{line.style}"></span>{escape(line.label)}' for line in lines)
        if len(lines) > 1
        else ""
    )
    return f"<figure><figcaption><b>{escape(title)}</b>{keys}</figcaption>{drawn}</figure>"
