"""The report of a drill, as a person reads it."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from phalanx.io.tables import text_table
from phalanx.train.drill.outcomes import FaultOutcome
from phalanx.train.drill.perform import DrillNumbers, DrillResult
from phalanx.units import format_seconds, plural

MOST_ROWS = 40  # of single faults; more are told by kind


def render_drill(result: DrillResult) -> str:
    """Faults, verdicts, and what the plan thought of it."""
    numbers = result.numbers
    length = f"{plural(numbers.steps, 'step')}, {format_seconds(numbers.wall_s)}"
    count = len(result.outcomes)
    head = f"{plural(count, 'fault')} in {length}; the run is {result.state}"
    parts = [head, _table(result.outcomes), _not_fired(result.not_fired), _verdicts(result), _beside(numbers)]
    return "\n".join(part for part in parts if part)


def _table(found: Sequence[FaultOutcome]) -> str:
    if not found:
        return ""
    if len(found) > MOST_ROWS:
        return _by_kind(found)
    rows = [
        (
            one.fault,
            _place(one),
            _seconds(one.detected_s) if one.judged else "not judged",
            _seconds(one.recovered_s),
            "" if one.steps_lost is None else str(one.steps_lost),
            "" if one.steps_redone is None else str(one.steps_redone),
            one.source,
            "" if one.world is None else str(one.world),
        )
        for one in found
    ]
    return _columns(("fault", "hit", "detected", "recovered", "lost", "redone", "from", "ranks"), rows)


def _place(one: FaultOutcome) -> str:
    whom = f"rank {one.rank}, " if one.rank >= 0 else ""
    step = f", step {one.step}" if one.step >= 0 else ""
    return f"{whom}epoch {one.epoch}{step}"


def _by_kind(found: Sequence[FaultOutcome]) -> str:
    rows = []
    for kind in dict.fromkeys(one.kind for one in found):
        mine = [one for one in found if one.kind == kind]
        times = [one.recovered_s for one in mine if one.recovered_s is not None]
        lost = sum(one.steps_lost or 0 for one in mine)
        rows.append(
            (
                kind,
                f"{len(mine)}×",
                _seconds(_median([one.detected_s for one in mine])),
                _seconds(_median(times)),
                _seconds(max(times, default=None)),
                str(lost),
                str(sum(one.steps_redone or 0 for one in mine)),
            )
        )
    return _columns(("fault", "fired", "detected", "recovered", "at worst", "lost", "redone"), rows)


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _columns(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"  {line}" for line in text_table([head, *rows], right=(2, 3, 4, 5)))


def _not_fired(texts: Sequence[str]) -> str:
    if not texts:
        return ""
    some = ", ".join(texts[:4]) + (f" and {len(texts) - 4} more" if len(texts) > 4 else "")
    return f"  not fired, the run was over: {some}"


def _verdicts(result: DrillResult) -> str:
    rows = [(verdict.word, verdict.name, verdict.evidence) for verdict in result.verdicts]
    wide = max((len(word) for word, _, _ in rows), default=0)
    return "\n".join(
        ["verdicts", *(f"  {word:<{max(6, wide)}} {name:<29} {evidence}" for word, name, evidence in rows)]
    )


def _beside(numbers: DrillNumbers) -> str:
    """Prediction beside measurement."""
    measured = f"{_seconds(numbers.recovery_s)}, at worst {_seconds(numbers.recovery_worst_s)}"
    lines = []
    if numbers.recovery_s is not None:
        lines.append(f"recovery: {measured}; the plan counts with {format_seconds(numbers.planned_recovery_s)}")
    if numbers.effective is not None:
        lines.append(
            f"effective training time: {numbers.effective:.1%}; "
            f"the plan says {numbers.planned_effective:.1%} at this rate of failures"
        )
    return "\n".join(lines)


def _seconds(value: float | None) -> str:
    return "" if value is None else format_seconds(value)
