"""The plots of a report: which curves stand together, with what was planned beside them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape

from phalanx.io.svg import PLANNED, Line, plot, shower
from phalanx.record.account.summary import LayoutResult, Pair
from phalanx.record.archive.history import Curve
from phalanx.record.page.story import Story

LIMIT_SEEN = 4.0  # times the most memory used, up to which the limit is drawn


def figures(story: Story) -> str:
    """Every curve that the run has, each with its words and its legend."""
    s, curves = story.summary, story.curves
    drawn = [
        _figure(story, "Loss", "", [_line(curves, "loss", "training"), _evaluations(story)]),
        _figure(
            story,
            "Tokens per second",
            "",
            [_line(curves, "tokens_per_s"), _planned(s.layouts, lambda one: one.tokens_per_s)],
            rough=True,
        ),
        _figure(story, "MFU", "share", [_line(curves, "mfu"), _planned(s.layouts, lambda one: one.mfu)], rough=True),
        _effective(story),
        _figure(story, "Gradient noise scale, samples", "", [_line(curves, "noise_scale")]),
        _figure(story, "Gradient norm", "", [_line(curves, "grad_norm")]),
        _figure(story, "Memory of rank 0", "bytes", _memory(story), zero=True),
        _figure(story, "A step of rank 0", "s", _step_lines(curves), zero=True, rough=True),
        _figure(story, "Utilization of rank 0", "share", [_line(curves, "utilization")], zero=True),
    ]
    return f'<div class="plots">{"".join(drawn)}</div>' if any(drawn) else ""


def _line(curves: dict[str, Curve], name: str, label: str = "measured", style: str = "1") -> Line | None:
    one = curves.get(name)
    if one is None:
        return None
    return Line(label=label, x=one.step, mean=one.mean, low=one.low, high=one.high, style=style)


def _flat(curves: dict[str, Curve], value: float | None) -> Line | None:
    """A number, from the first step to the last."""
    steps = next(iter(curves.values())).step if curves else ()
    if not value or not steps:
        return None
    return Line(label="planned", x=(steps[0], steps[-1]), mean=(value, value), style=PLANNED)


def _planned(layouts: Sequence[LayoutResult], pair: Callable[[LayoutResult], Pair]) -> Line | None:
    """The prediction over the steps, each layout's own."""
    known = [(one, pair(one).predicted) for one in layouts]
    if not any(value for _, value in known):
        return None
    x = tuple(step for one, _ in known for step in (one.first_step, one.last_step))
    mean = tuple(value or None for _, value in known for _ in range(2))
    return Line(label="planned", x=x, mean=mean, style=PLANNED)


def _evaluations(story: Story) -> Line | None:
    if not story.evaluations:
        return None
    steps, losses = zip(*story.evaluations, strict=True)
    return Line(label="held-out", x=steps, mean=losses, style="2", dots=True)


def _memory(story: Story) -> list[Line | None]:
    lines = [_line(story.curves, "memory_used_bytes", "now"), _line(story.curves, "memory_bytes", "most so far", "2")]
    limit, most = story.memory_limit_bytes, story.summary.memory_bytes.measured
    if not limit or not most or limit > LIMIT_SEEN * most:  # far away, it would flatten all the rest
        return [*lines, _planned(story.summary.layouts, lambda one: one.memory_bytes)]
    flat = _flat(story.curves, limit)
    return [*lines, Line(label="limit", x=flat.x, mean=flat.mean, style=PLANNED) if flat is not None else None]


def _step_lines(curves: dict[str, Curve]) -> list[Line | None]:
    return [
        _line(curves, "duration_s", "whole"),
        _line(curves, "compute_s", "computing", "3"),
        _line(curves, "wait_s", "not computing", "2"),
    ]


def _figure(
    story: Story, title: str, unit: str, lines: Sequence[Line | None], *, zero: bool = False, rough: bool = False
) -> str:
    known = [line for line in lines if line is not None]
    if not any(line.style != PLANNED for line in known):
        return ""
    drawn = plot(title, known, show=shower(unit), marks=story.marks, zero=zero, rough=rough)
    return _captioned(title, known, drawn)


def _effective(story: Story) -> str:
    found = story.effective
    if len(found.t) < 2:
        return ""
    hours = [(t - found.t[0]) for t in found.t]
    lines = [
        Line(label="cumulative", x=hours, mean=found.cumulative, style="1"),
        Line(label=found.window, x=hours, mean=found.last_hour, style="2"),
    ]
    title = "Effective training time"
    drawn = plot(title, lines, show=shower("share"), show_x=shower("s"), zero=True, most=1.0, times=True)
    return _captioned(title, lines, drawn)


def _captioned(title: str, lines: Sequence[Line], drawn: str) -> str:
    if not drawn:
        return ""
    keys = (
        "".join(f'<span class="key s{line.style}"></span>{escape(line.label)}' for line in lines)
        if len(lines) > 1
        else ""
    )
    return f"<figure><figcaption><b>{escape(title)}</b>{keys}</figcaption>{drawn}</figure>"
