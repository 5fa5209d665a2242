"""Every row of a table of network claims: reproduced, in a range, calibrated, or not attempted with the reason."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from phalanx.errors import PhalanxError
from phalanx.validate.network import (
    collective_rows,
    fabric_rows,
    fluid_rows,
    given_rows,
    incast_rows,
    loss_rows,
    nccl_rows,
    packet_rows,
    paper_rows,
    reasons,
    ring_rows,
    slotted_rows,
)
from phalanx.validate.network.outcome import Context, Outcome, Simulation, Wanted, skipped
from phalanx.validate.network.table import Row
from phalanx.validate.network.words import NotSaid

READERS = (
    *fabric_rows.READERS,
    *given_rows.READERS,
    *paper_rows.READERS,
    *nccl_rows.READERS,
    *collective_rows.READERS,
    *fluid_rows.READERS,
    *ring_rows.READERS,
    *packet_rows.READERS,
    *loss_rows.READERS,
    *incast_rows.READERS,
    *slotted_rows.READERS,
    *reasons.READERS,
)
WANTED = (*packet_rows.WANTED, *loss_rows.WANTED, *incast_rows.WANTED, *slotted_rows.WANTED)
FAILURES = (PhalanxError, OverflowError, ZeroDivisionError, ValueError)
FREE_S = 60.0  # of CPU: what is simulated without being asked for, the cheapest first


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceScore:
    """Counts and errors of one source."""

    source: str
    rows: int
    reproduced: int
    within: int  # of the reproduced
    ranged: int  # our numbers over what is not published
    covered: int  # of them, those whose range has the row's value
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
    interrupted: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What will be simulated, and what is left out because it takes too long."""

    keys: frozenset[Hashable]
    cpu_s: float
    left_out: int
    left_out_cpu_s: float


def plan(rows: Sequence[Row], *, simulate: bool = False) -> Plan:
    """Everything when asked for, else the cheapest simulations up to FREE_S together."""
    costs: dict[Hashable, float] = {}
    for row in rows:
        if (found := simulation_of(row)) is not None:
            costs[found.key] = found.cpu_s
    keys: list[Hashable] = []
    total = 0.0
    for key, cpu_s in sorted(costs.items(), key=lambda item: item[1]):
        if simulate or total + cpu_s <= FREE_S:
            keys.append(key)
            total += cpu_s
    rest = sum(costs.values()) - total
    return Plan(keys=frozenset(keys), cpu_s=total, left_out=len(costs) - len(keys), left_out_cpu_s=rest)


def simulation_of(row: Row) -> Simulation | None:
    """What a row needs simulated, if anything."""
    found = (_wanted(wanted, row) for pattern, wanted in WANTED if re.search(pattern, row.quantity))
    return next((one for one in found if one is not None), None)


def _wanted(wanted: Wanted, row: Row) -> Simulation | None:
    try:
        return wanted(row)
    except (NotSaid, *FAILURES):
        return None  # the reader will say it


def validate(
    rows: Sequence[Row],
    *,
    simulate: bool = False,
    planned: Plan | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> NetworkCard:
    """Attempt every row, those without simulations first; interrupted, the rest counts as not attempted."""
    chosen = planned or plan(rows, simulate=simulate)
    context = Context(rows=tuple(rows), simulate=simulate, allowed=chosen.keys)
    found: dict[int, Outcome] = {}
    interrupted = False
    try:
        for index in _cheapest_first(rows):
            found[index] = attempt(rows[index], context)
            if progress is not None:
                progress(len(found), len(rows))
    except KeyboardInterrupt:
        interrupted = True
    outcomes = [found.get(index) or skipped(row, "interrupted") for index, row in enumerate(rows)]
    return card(outcomes, interrupted=interrupted)


def _cheapest_first(rows: Sequence[Row]) -> list[int]:
    needs = [simulation_of(row) for row in rows]
    return sorted(range(len(rows)), key=lambda index: one.cpu_s if (one := needs[index]) else 0.0)


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
        except NotSaid as missing:
            return skipped(row, f"its words do not say {missing}")
        except FAILURES as error:
            return skipped(row, f"cannot be computed: {_first_line(error)}")
        if found is not None:
            return found
    if known:
        return skipped(row, "its conditions do not say enough")
    return skipped(row, f"no reader for '{row.quantity[:60]}'{_strange(row.quantity)}")


def _strange(quantity: str) -> str:
    """Words that no quantity we know has."""
    known = set(re.findall(r"[a-z]{3,}", " ".join(pattern for pattern, _ in READERS).lower()))
    odd = [word for word in re.findall(r"[A-Za-z]{3,}", quantity) if word.lower() not in known]
    return f": not understood: {', '.join(dict.fromkeys(odd))[:80]}" if odd else ""


def _first_line(error: Exception) -> str:
    return error.problems[0].what if isinstance(error, PhalanxError) else str(error).partition("\n")[0][:100]


def card(outcomes: Sequence[Outcome], *, interrupted: bool = False) -> NetworkCard:
    """Count by source, in the order of the table."""
    names = list(dict.fromkeys(one.row.source for one in outcomes))
    by_source = {name: [one for one in outcomes if one.row.source == name] for name in names}
    return NetworkCard(
        total=_score("all", outcomes),
        sources=tuple(_score(name, found) for name, found in by_source.items()),
        outcomes=tuple(outcomes),
        interrupted=interrupted,
    )


def _score(name: str, outcomes: Sequence[Outcome]) -> SourceScore:
    ours = [one for one in outcomes if one.status == "reproduced"]
    wide = [one for one in outcomes if one.status == "range"]
    errors = sorted(abs(one.error) for one in ours if one.error is not None)
    return SourceScore(
        source=name,
        rows=len(outcomes),
        reproduced=len(ours),
        within=sum(1 for one in ours if one.within),
        ranged=len(wide),
        covered=sum(1 for one in wide if one.within),
        calibrated=sum(1 for one in outcomes if one.status == "calibrated"),
        not_attempted=sum(1 for one in outcomes if one.status == "not attempted"),
        median_error=errors[len(errors) // 2] if errors else None,
        worst_error=errors[-1] if errors else None,
    )
