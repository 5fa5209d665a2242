"""The screen of `phalanx watch`: a run's state as lines of text that fit the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from phalanx.api.watching import KnownVerdicts
from phalanx.io.tables import sparkline, text_bar, two_part_bar
from phalanx.io.values import printable
from phalanx.record.account.summary import Pair, RankTime
from phalanx.record.report.live import View
from phalanx.record.report.sections import BriefLine, cost_section, damage_section, incident_section, time_section
from phalanx.units import format_bytes, format_count, format_seconds, plural

MOST_TOLD = 3  # findings shown on the screen
MOST_RANKS = 8
LABEL = 11  # characters of the first column
NARROW = 60  # columns below which bars are shortened and sparklines left out


def frame(
    view: View, remarks: Sequence[str], *, name: str, width: int, height: int, check: KnownVerdicts | None = None
) -> list[Text]:
    """Return at most `height` lines of at most `width` columns, the most important first."""
    blocks = [
        _head_lines(view, name),
        _curve_lines(view, width),
        _check_lines(check),
        _rank_lines(view, width),
        _time_lines(view, width),
    ]
    blocks.append(_other_lines(view))
    blocks.append([_quiet_text(f"  {printable(line)}") for line in remarks])
    lines: list[Text] = []
    for block in blocks:
        lines += [*([Text("")] if lines and block else []), *block]
    for line in lines:
        line.no_wrap, line.overflow = True, "ellipsis"
        line.truncate(width, overflow="ellipsis")
    return lines[: max(1, height)]


def _head_lines(view: View, name: str) -> list[Text]:
    s, p = view.summary, view.progress
    colour = {"done": "green", "failed": "red", "interrupted": "red", "stopped": "yellow"}.get(view.state, "cyan")
    first = Text.assemble((printable(name, most=100), "bold"), "  ", (printable(view.state, most=20), colour))
    if p is not None:
        first.append(f"  step {p.step:,}" + (f" of {p.steps:,} ({p.step / p.steps:.1%})" if p.steps else ""))
        if p.left_s and not view.is_finished:
            first.append(f"  {format_seconds(p.left_s)} left", "bold")
    ranks = plural(s.world, "rank")
    description = f"{s.model} ({format_count(s.parameters)}) on {s.cluster}, {ranks}: {s.layout}"
    message_lines = [Text(printable(s.message), "red")] if s.message and view.state in ("failed", "interrupted") else []
    return [first, _quiet_text(printable(description)), *message_lines]


def _curve_lines(view: View, width: int) -> list[Text]:
    """Return a line per measured number with its sparkline and the plan's prediction."""
    s, p = view.summary, view.progress
    room = max(0, min(60, width - 62)) if width >= NARROW else 0
    if p is None:
        return [Text("no step was finished yet" if not view.is_finished else "no step was finished")]
    rows = [
        ("loss", f"{p.loss:.4f}" if p.loss is not None else "-", view.loss, ""),
        ("tokens/s", *_rate_now(view, p.tokens_per_s)),
    ]
    lines = [_curve_row(name, value, sparkline(values, room), comparison) for name, value, values, comparison in rows]
    if s.mfu.measured is not None:
        lines.append(_curve_row("MFU", f"{s.mfu.measured:.1%}", "", _beside_plan(s.mfu, _percent_text)))
    if s.memory_bytes.measured is not None:
        lines.append(
            _curve_row("memory", format_bytes(s.memory_bytes.measured), "", _beside_plan(s.memory_bytes, format_bytes))
        )
    if s.noise_scale is not None:
        lines.append(_curve_row("noise", f"{format_count(s.noise_scale)} samples", "", ""))
    if s.effective_time.measured is not None:
        recent = f", {view.effective.last_hour[-1]:.1%} in {view.effective.window}" if view.effective.t else ""
        share = f"{s.effective_time.measured:.1%}{recent}"
        lines.append(_curve_row("effective", share, "", _beside_plan(s.effective_time, _percent_text)))
    return lines


def _rate_now(view: View, now: float | None) -> tuple[str, Sequence[float | None], str]:
    """Return the current tokens per second as text, the series for the sparkline, and the comparison with the plan.

    The plan is compared with the mean rate; a finished run has no current rate, so the mean is shown instead.
    """
    mean = view.summary.tokens_per_s
    if view.is_finished or now is None or mean.measured is None:
        return (
            "-" if mean.measured is None else format_count(mean.measured),
            view.tokens_per_s,
            _beside_plan(mean, format_count),
        )
    parts = [f"mean {format_count(mean.measured)}", _beside_plan(mean, format_count)]
    return f"{format_count(now)} now", view.tokens_per_s, ", ".join(part for part in parts if part)


def _curve_row(name: str, value: str, drawn: str, beside: str) -> Text:
    line = Text.assemble((f"{name:<{LABEL}}", "dim"), (f"{value:<9} ", "bold"))
    line.append(f"{drawn}  " if drawn else "", "cyan")
    return line.append(beside, "dim")


def _check_lines(known: KnownVerdicts | None) -> list[Text]:
    """Return the counts of verdicts on the training specification, and the most severe findings."""
    if known is None:
        return []
    lines = [_labelled_text("check", known.line() or "reading the record …")]
    problems = known.problems()
    for problem in problems[:MOST_TOLD]:
        text = f"{problem.severity} {problem.rule.id} {problem.rule.slug}: {printable(problem.outcome.what)}"
        lines.append(Text(f"{'':<{LABEL}}{text}", "red" if problem.severity == "error" else "yellow"))
    if len(problems) > MOST_TOLD:
        lines.append(_quiet_text(f"{'':<{LABEL}}and {len(problems) - MOST_TOLD} more: phalanx check RUN"))
    return lines


def _rank_lines(view: View, width: int) -> list[Text]:
    """Return a bar per rank, the slowest first: time computing, time waiting, and own time over that of its peers."""
    timed_ranks = [rank_time for rank_time in view.summary.ranks if rank_time.compute_s is not None]
    if len(timed_ranks) < 2:
        return []
    score = view.scores.score
    shown = sorted(timed_ranks, key=lambda rank_time: (-score.get(rank_time.rank, 0.0), rank_time.rank))[:MOST_RANKS]
    slow = {rank_time.rank for rank_time in view.scores.named}
    max_s = max((rank_time.compute_s or 0.0) + (rank_time.wait_s or 0.0) for rank_time in timed_ranks) or 1.0
    title = (
        f"the {len(shown)} slowest of {plural(len(timed_ranks), 'rank')}" if len(timed_ranks) > len(shown) else "ranks"
    )
    lines = [
        _quiet_text(
            f"{title}: computing █, not computing ░ (other ranks, stages, transfers), own time over that of peers"
        )
    ]
    return lines + [
        _rank_line(rank_time, score.get(rank_time.rank), max_s, width, slow=rank_time.rank in slow)
        for rank_time in shown
    ]


def _rank_line(one: RankTime, score: float | None, most: float, width: int, *, slow: bool) -> Text:
    room = 24 if width >= NARROW else 8
    compute, wait = one.compute_s or 0.0, one.wait_s or 0.0
    bar = two_part_bar(compute / most, wait / most, room)
    line = Text(f"{one.rank:>6}  ").append(f"{bar:<{room}}", "red" if slow else "blue")
    line.append(f"  {format_seconds(compute):>8} {format_seconds(wait):>8}")
    line.append(f"  {score:.2f}" if score is not None else "", "bold red" if slow else "")
    return line.append(f"  {one.place}" + ("  straggler" if slow else ""), "red" if slow else "dim")


def _time_lines(view: View, width: int) -> list[Text]:
    lines = [_brief_text(line) for line in time_section(view.summary).brief]
    ledger = view.summary.ledger
    if lines and ledger is not None and ledger.effective and width >= NARROW:
        bar = text_bar(ledger.effective, min(60, width - LABEL - 2))
        lines.insert(0, Text.assemble((f"{'':<{LABEL}}", ""), (bar, "green")))
    return lines


def _other_lines(view: View) -> list[Text]:
    s = view.summary
    lines = []
    if view.saved_step is not None:
        age = f", {format_seconds(view.saved_age_s)} ago" if view.saved_age_s is not None else ""
        size = f", {format_bytes(s.checkpoint_bytes)}" if s.checkpoint_bytes else ""
        lines.append(_labelled_text("checkpoint", f"step {view.saved_step:,}{age}{size}"))
    lines += [_brief_text(line_or_straggler) for line_or_straggler in cost_section(s).brief]
    for line_or_straggler in view.scores.named[:3]:
        lines.append(Text.assemble((f"{'straggler':<{LABEL}}", "dim"), (line_or_straggler.text, "red")))
    return lines + [_brief_text(line) for section in (incident_section(s), damage_section(s)) for line in section.brief]


def _brief_text(line: BriefLine) -> Text:
    return (
        Text(f"{line.label:<{LABEL}}{line.text}", "yellow") if line.is_alarm else _labelled_text(line.label, line.text)
    )


def _labelled_text(name: str, text: str) -> Text:
    return Text.assemble((f"{name:<{LABEL}}", "dim"), text)


def _quiet_text(text: str) -> Text:
    return Text(text, "dim")


def _beside_plan(pair: Pair, show: object) -> str:
    """Return "planned X (+Y%)" for a measured number, "" where the plan has no prediction of it."""
    if pair.predicted is None or not callable(show):
        return ""
    error = f" ({pair.error:+.1%})" if pair.error is not None else ""
    return f"planned {show(pair.predicted)}{error}"


def _percent_text(value: float) -> str:
    return f"{value:.1%}"
