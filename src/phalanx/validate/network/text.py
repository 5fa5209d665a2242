"""The outcomes of a table, for a terminal."""

from __future__ import annotations

from phalanx.io.tables import text_table
from phalanx.io.visible import one_line
from phalanx.validate.network_claims import ClaimOutcome
from phalanx.validate.network_score import ClaimCounts, NetworkCard

WIDTH = 58  # of a quantity with its conditions


def network_card_text(card: NetworkCard) -> str:
    """Rows by source, then the summary."""
    lines: list[str] = []
    for score in card.sources:
        lines += [one_line(score.source) or "(no source)"]
        mine = [one for one in card.outcomes if one.row.source == score.source]
        lines += ["  " + line for line in text_table([_cells(one) for one in mine], right=(1, 2, 3))]
        lines += [""]
    return "\n".join(lines + network_card_summary(card))


def network_card_summary(card: NetworkCard) -> list[str]:
    """Counts and errors by source."""
    counts = ("rows", "reproduced", "within", "by range", "covered", "calibrated", "not attempted")
    head = ("source", *counts, "median error", "worst")
    rows = [head, *(_count_cells(one) for one in (*card.sources, card.total))]
    return [*text_table(rows, right=range(1, len(head))), "", *_words(card)]


def _words(card: NetworkCard) -> list[str]:
    whole = card.total
    return [
        f"{whole.rows:,} rows: {whole.reproduced:,} reproduced ({whole.within:,} within their tolerance), "
        f"{whole.ranged:,} by range ({whole.covered:,} covered; an input is not published), "
        f"{whole.calibrated:,} calibrated (we took the number from there: no evidence), "
        f"{whole.not_attempted:,} not attempted",
    ]


def _cells(one: ClaimOutcome) -> tuple[str, ...]:
    row = one.row
    named = _cut(f"{row.quantity} | {row.conditions}" if row.conditions else row.quantity)
    theirs = f"{_number(row.value)} {row.unit}".strip()
    if one.status == "not attempted":
        return named, theirs, "", "", f"not attempted: {one.note}"
    return named, theirs, _number(one.ours), _error(one), f"{_verdict(one)}: {one.note}"


def _verdict(one: ClaimOutcome) -> str:
    if one.status == "range":
        return "range covers it" if one.within else "range misses it"
    where = "within" if one.within else "outside"
    if one.tolerance is None:
        return f"{one.status}, {where} what the row allows"
    if one.within and _off(one) > one.tolerance and _off(one) * abs(one.row.value or 0.0) <= one.row.rounding:
        return f"{one.status}, rounds to it"
    held = f"{100 * one.tolerance:.3g} %" if one.row.value else f"{one.tolerance:g} {one.row.unit}"
    return f"{one.status}, {where} ±{held}"


def _off(one: ClaimOutcome) -> float:
    return abs(one.error or 0.0)


def _cut(words: str) -> str:
    return words if len(words) <= WIDTH else words[: WIDTH - 1] + "…"


def _number(value: float | None) -> str:
    if value is None:
        return "?"
    return f"{value:,.0f}" if value == int(value) and abs(value) < 1e12 else f"{value:.4g}"


def _error(one: ClaimOutcome) -> str:
    if one.error is None:
        return ""
    return f"{100 * one.error:+.1f} %" if one.row.value else f"{one.error:+.3g}"


def _count_cells(one: ClaimCounts) -> tuple[str, ...]:
    errors = (f"{100 * value:.1f} %" if value is not None else "" for value in (one.median_error, one.worst_error))
    counts = (one.rows, one.reproduced, one.within, one.ranged, one.covered, one.calibrated, one.not_attempted)
    return (_cut(one.source), *(f"{number:,}" for number in counts), *errors)
