"""Every row of a table of network claims: reproduced, calibrated, or not attempted with the reason."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from phalanx.errors import UserError
from phalanx.sim.validate import (
    collective_rows,
    fabric_rows,
    fluid_rows,
    given_rows,
    loss_rows,
    nccl_rows,
    packet_rows,
    reasons,
)
from phalanx.sim.validate.outcome import Context, Outcome, skipped
from phalanx.sim.validate.table import Row

READERS = (
    *fabric_rows.READERS,
    *given_rows.READERS,
    *nccl_rows.READERS,
    *collective_rows.READERS,
    *fluid_rows.READERS,
    *packet_rows.READERS,
    *loss_rows.READERS,
    *reasons.READERS,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceScore:
    """Counts and errors of one source."""

    source: str
    rows: int
    reproduced: int
    within: int  # of the reproduced
    calibrated: int
    not_attempted: int
    median_error: float | None  # of the reproduced, without sign
    worst_error: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class NetworkCard:
    """What became of a table."""

    total: SourceScore
    sources: tuple[SourceScore, ...]
    outcomes: tuple[Outcome, ...]


def validate(
    rows: Sequence[Row], *, simulate: bool = False, progress: Callable[[int, int], None] | None = None
) -> NetworkCard:
    """Attempt every row, in the order of the table; interrupted, the rest counts as not attempted."""
    context = Context(rows=tuple(rows), simulate=simulate)
    outcomes: list[Outcome] = []
    try:
        for index, row in enumerate(rows):
            outcomes.append(attempt(row, context))
            if progress is not None:
                progress(index + 1, len(rows))
    except KeyboardInterrupt:
        outcomes += [skipped(row, "interrupted") for row in rows[len(outcomes) :]]
    return card(outcomes)


def attempt(row: Row, context: Context) -> Outcome:
    """The first reader that knows the quantity and finds what it needs in the conditions."""
    if row.value is None:
        return skipped(row, "its value is no number")
    known = False
    for pattern, reader in READERS:
        if not re.search(pattern, row.quantity):
            continue
        known = True
        try:
            found = reader(row, context)
        except (UserError, OverflowError, ZeroDivisionError, ValueError) as error:
            return skipped(row, f"cannot be computed: {_first_line(error)}")
        if found is not None:
            return found
    if known:
        return skipped(row, "its conditions do not say enough")
    return skipped(row, f"no reader for '{row.quantity[:60]}'")


def _first_line(error: Exception) -> str:
    return error.problems[0].what if isinstance(error, UserError) else str(error).partition("\n")[0][:100]


def card(outcomes: Sequence[Outcome]) -> NetworkCard:
    """Count by source, in the order of the table."""
    names = list(dict.fromkeys(one.row.source for one in outcomes))
    by_source = {name: [one for one in outcomes if one.row.source == name] for name in names}
    return NetworkCard(
        total=_score("all", outcomes),
        sources=tuple(_score(name, found) for name, found in by_source.items()),
        outcomes=tuple(outcomes),
    )


def _score(name: str, outcomes: Sequence[Outcome]) -> SourceScore:
    ours = [one for one in outcomes if one.status == "reproduced"]
    errors = sorted(abs(one.error) for one in ours if one.error is not None)
    return SourceScore(
        source=name,
        rows=len(outcomes),
        reproduced=len(ours),
        within=sum(1 for one in ours if one.within),
        calibrated=sum(1 for one in outcomes if one.status == "calibrated"),
        not_attempted=sum(1 for one in outcomes if one.status == "not attempted"),
        median_error=errors[len(errors) // 2] if errors else None,
        worst_error=errors[-1] if errors else None,
    )
