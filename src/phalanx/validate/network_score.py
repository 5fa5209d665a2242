"""Score the rows of a table of network claims: reproduced, in a range, calibrated, or not attempted."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from phalanx.errors import PhalanxError
from phalanx.io.tables import text_table
from phalanx.io.visible import one_line
from phalanx.validate.network_claims import (
    NOT_ATTEMPTED,
    Claim,
    ClaimContext,
    ClaimOutcome,
    NeededSimulation,
    NotStated,
    SimulationNeed,
    skipped,
)
from phalanx.validate.network_collectives import COLLECTIVE_READERS, NCCL_READERS
from phalanx.validate.network_fabric import FABRIC_READERS, GIVEN_READERS, PAPER_READERS
from phalanx.validate.network_htsim import HTSIM_NEEDS, HTSIM_READERS
from phalanx.validate.network_simulated import (
    FLUID_READERS,
    INCAST_NEEDS,
    INCAST_READERS,
    LOSS_NEEDS,
    LOSS_READERS,
    RING_READERS,
    SLOTTED_NEEDS,
    SLOTTED_READERS,
)

READERS = (
    *FABRIC_READERS,
    *GIVEN_READERS,
    *PAPER_READERS,
    *NCCL_READERS,
    *COLLECTIVE_READERS,
    *FLUID_READERS,
    *RING_READERS,
    *HTSIM_READERS,
    *LOSS_READERS,
    *INCAST_READERS,
    *SLOTTED_READERS,
    *NOT_ATTEMPTED,
)
NEEDS = (*HTSIM_NEEDS, *LOSS_NEEDS, *INCAST_NEEDS, *SLOTTED_NEEDS)
FAILURES = (PhalanxError, OverflowError, ZeroDivisionError, ValueError)
# CPU seconds of simulations that run without a request, the cheapest first.
FREE_S = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ClaimCounts:
    """Counts and errors of the rows of one source."""

    source: str
    rows: int
    reproduced: int
    within: int  # of the reproduced rows
    ranged: int  # rows judged by a range of computed numbers, because an input is not published
    covered: int  # of those, rows whose value is in the range
    calibrated: int
    not_attempted: int
    median_error: float | None  # of the reproduced rows, absolute
    worst_error: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class NetworkCard:
    """The outcomes of a table."""

    total: ClaimCounts
    sources: tuple[ClaimCounts, ...]
    outcomes: tuple[ClaimOutcome, ...]
    interrupted: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulationPlan:
    """The simulations to run, and those left out because they take too long."""

    keys: frozenset[Hashable]
    cpu_s: float
    left_out: int
    left_out_cpu_s: float


def plan_simulations(rows: Sequence[Claim], *, simulate: bool = False) -> SimulationPlan:
    """Plan all simulations with `simulate`, otherwise the cheapest ones up to FREE_S together."""
    costs: dict[Hashable, float] = {}
    for row in rows:
        if (needed := simulation_of(row)) is not None:
            costs[needed.key] = needed.cpu_s
    keys: list[Hashable] = []
    total = 0.0
    for key, cpu_s in sorted(costs.items(), key=lambda item: item[1]):
        if simulate or total + cpu_s <= FREE_S:
            keys.append(key)
            total += cpu_s
    left_out_s = sum(costs.values()) - total
    return SimulationPlan(keys=frozenset(keys), cpu_s=total, left_out=len(costs) - len(keys), left_out_cpu_s=left_out_s)


def simulation_of(row: Claim) -> NeededSimulation | None:
    """Return the simulation that a row needs, if any."""
    needs = (_wanted_simulation(wanted, row) for pattern, wanted in NEEDS if re.search(pattern, row.quantity))
    return next((need for need in needs if need is not None), None)


def _wanted_simulation(wanted: SimulationNeed, row: Claim) -> NeededSimulation | None:
    try:
        return wanted(row)
    except (NotStated, *FAILURES):
        return None  # reported when the row is read


def score_claims(
    rows: Sequence[Claim],
    *,
    simulate: bool = False,
    planned: SimulationPlan | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> NetworkCard:
    """Attempt every row, those without simulations first; after an interrupt, the rest counts as not attempted."""
    chosen = planned or plan_simulations(rows, simulate=simulate)
    context = ClaimContext(rows=tuple(rows), simulate=simulate, allowed=chosen.keys)
    outcomes_by_row: dict[int, ClaimOutcome] = {}
    interrupted = False
    try:
        needs = [simulation_of(row) for row in rows]
        for index in sorted(range(len(rows)), key=lambda index: needed.cpu_s if (needed := needs[index]) else 0.0):
            outcomes_by_row[index] = attempt_claim(rows[index], context)
            if progress is not None:
                progress(len(outcomes_by_row), len(rows))
    except KeyboardInterrupt:
        interrupted = True
    outcomes = [outcomes_by_row.get(index) or skipped(row, "interrupted") for index, row in enumerate(rows)]
    return count_outcomes(outcomes, interrupted=interrupted)


def attempt_claim(row: Claim, context: ClaimContext) -> ClaimOutcome:
    """Return the outcome of the first reader that knows the quantity and finds what it needs in the conditions."""
    if row.value is None:
        return skipped(row, "its value is no number")
    has_reader = False
    for pattern, reader in READERS:
        if not re.search(pattern, row.quantity):
            continue
        has_reader = True
        try:
            outcome = reader(row, context)
        except NotStated as missing:
            return skipped(row, f"its words do not say {missing}")
        except FAILURES as error:
            first_line = (
                error.problems[0].what if isinstance(error, PhalanxError) else str(error).partition("\n")[0][:100]
            )
            return skipped(row, f"cannot be computed: {first_line}")
        if outcome is not None:
            return outcome
    if has_reader:
        return skipped(row, "its conditions do not say enough")
    return skipped(row, f"no reader for '{row.quantity[:60]}'{_unknown_words(row.quantity)}")


def _unknown_words(quantity: str) -> str:
    """Return the words of a quantity that no reader knows."""
    known_words = set(re.findall(r"[a-z]{3,}", " ".join(pattern for pattern, _ in READERS).lower()))
    odd = [word for word in re.findall(r"[A-Za-z]{3,}", quantity) if word.lower() not in known_words]
    return f": not understood: {', '.join(dict.fromkeys(odd))[:80]}" if odd else ""


def count_outcomes(outcomes: Sequence[ClaimOutcome], *, interrupted: bool = False) -> NetworkCard:
    """Count outcomes by source, in the order of the table."""
    names = list(dict.fromkeys(outcome.row.source for outcome in outcomes))
    by_source = {name: [outcome for outcome in outcomes if outcome.row.source == name] for name in names}
    return NetworkCard(
        total=_claim_counts("all", outcomes),
        sources=tuple(_claim_counts(name, source_outcomes) for name, source_outcomes in by_source.items()),
        outcomes=tuple(outcomes),
        interrupted=interrupted,
    )


def _claim_counts(name: str, outcomes: Sequence[ClaimOutcome]) -> ClaimCounts:
    reproduced = [outcome for outcome in outcomes if outcome.status == "reproduced"]
    ranged = [outcome for outcome in outcomes if outcome.status == "range"]
    errors = sorted(abs(outcome.error) for outcome in reproduced if outcome.error is not None)
    return ClaimCounts(
        source=name,
        rows=len(outcomes),
        reproduced=len(reproduced),
        within=sum(1 for outcome in reproduced if outcome.within),
        ranged=len(ranged),
        covered=sum(1 for outcome in ranged if outcome.within),
        calibrated=sum(1 for outcome in outcomes if outcome.status == "calibrated"),
        not_attempted=sum(1 for outcome in outcomes if outcome.status == "not attempted"),
        median_error=errors[len(errors) // 2] if errors else None,
        worst_error=errors[-1] if errors else None,
    )


# ---- text for a terminal ---------------------------------------------------------------------------------------------


WIDTH = 58  # characters of a quantity with its conditions


def network_card_text(card: NetworkCard) -> str:
    """Format the rows by source, then the summary."""
    lines: list[str] = []
    for score in card.sources:
        lines += [one_line(score.source) or "(no source)"]
        outcomes = [outcome for outcome in card.outcomes if outcome.row.source == score.source]
        lines += ["  " + line for line in text_table([_claim_cells(outcome) for outcome in outcomes], right=(1, 2, 3))]
        lines += [""]
    return "\n".join(lines + network_card_summary(card))


def network_card_summary(card: NetworkCard) -> list[str]:
    """Format the counts and errors by source."""
    counts = ("rows", "reproduced", "within", "by range", "covered", "calibrated", "not attempted")
    head = ("source", *counts, "median error", "worst")
    rows = [head, *(_count_cells(source_counts) for source_counts in (*card.sources, card.total))]
    return [*text_table(rows, right=range(1, len(head))), "", *_card_lines(card)]


def _card_lines(card: NetworkCard) -> list[str]:
    total = card.total
    return [
        f"{total.rows:,} rows: {total.reproduced:,} reproduced ({total.within:,} within their tolerance), "
        f"{total.ranged:,} by range ({total.covered:,} covered; an input is not published), "
        f"{total.calibrated:,} calibrated (we took the number from there: no evidence), "
        f"{total.not_attempted:,} not attempted",
    ]


def _claim_cells(one: ClaimOutcome) -> tuple[str, ...]:
    row = one.row
    claim_text = _cut_words(f"{row.quantity} | {row.conditions}" if row.conditions else row.quantity)
    published = f"{_number_text(row.value)} {row.unit}".strip()
    if one.status == "not attempted":
        return claim_text, published, "", "", f"not attempted: {one.note}"
    return claim_text, published, _number_text(one.ours), _error_text(one), f"{_claim_verdict(one)}: {one.note}"


def _claim_verdict(one: ClaimOutcome) -> str:
    if one.status == "range":
        return "range covers it" if one.within else "range misses it"
    where = "within" if one.within else "outside"
    if one.tolerance is None:
        return f"{one.status}, {where} what the row allows"
    if (
        one.within
        and _claim_error(one) > one.tolerance
        and _claim_error(one) * abs(one.row.value or 0.0) <= one.row.rounding
    ):
        return f"{one.status}, rounds to it"
    allowed = f"{100 * one.tolerance:.3g} %" if one.row.value else f"{one.tolerance:g} {one.row.unit}"
    return f"{one.status}, {where} ±{allowed}"


def _claim_error(one: ClaimOutcome) -> float:
    return abs(one.error or 0.0)


def _cut_words(words: str) -> str:
    return words if len(words) <= WIDTH else words[: WIDTH - 1] + "…"


def _number_text(value: float | None) -> str:
    if value is None:
        return "?"
    return f"{value:,.0f}" if value == int(value) and abs(value) < 1e12 else f"{value:.4g}"


def _error_text(one: ClaimOutcome) -> str:
    if one.error is None:
        return ""
    return f"{100 * one.error:+.1f} %" if one.row.value else f"{one.error:+.3g}"


def _count_cells(one: ClaimCounts) -> tuple[str, ...]:
    errors = (f"{100 * value:.1f} %" if value is not None else "" for value in (one.median_error, one.worst_error))
    counts = (one.rows, one.reproduced, one.within, one.ranged, one.covered, one.calibrated, one.not_attempted)
    return (_cut_words(one.source), *(f"{number:,}" for number in counts), *errors)
