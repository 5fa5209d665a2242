"""What the rules on telemetry and efficiency share: numbers that can be compared, and runs too young to judge."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from phalanx.plan.layout import Layout
from phalanx.rules.evidence import Evidence
from phalanx.rules.outcome import Outcome, Spot, exempt, unknown
from phalanx.units import format_seconds

if TYPE_CHECKING:
    from phalanx.rules.facts.log_facts import LogFacts


def finite_value(value: float | None) -> float | None:
    """A number that can be compared: a damaged log may hold infinities."""
    return value if value is not None and math.isfinite(value) else None


def wall_s(log: LogFacts) -> float:
    """How long the run has gone on, as far as its log tells; 0 where it does not."""
    return max(0.0, finite_value(log.wall_s) or 0.0)


def training_s(log: LogFacts) -> float:
    """How long the ranks have been at work: the time without the launch, which on a busy host takes half a minute."""
    init_s = finite_value(log.ledger.accounts.init) if log.ledger is not None else None
    return max(0.0, wall_s(log) - (init_s or 0.0))


def file_of(log: LogFacts, rank: int | None = None) -> Spot:
    """The events of a rank, of the lowest on record where none is named: what a finding about the log points at."""
    number = rank if rank is not None else min(log.ranks, default=0)
    return Spot(file=f"{log.folder}/events-{number:05d}.jsonl")


def still_reading(log: LogFacts, what: str) -> Outcome | None:
    """`unknown` where what is missing may stand in the part of the log that was not read."""
    if log.bytes_left <= 0:
        return None
    return unknown(f"{what} may stand in the {log.bytes_left:,} bytes not read yet", fix="check again in a moment")


def too_young(log: LogFacts, what: str, due_s: float) -> Outcome | None:
    """`exempt` for a run whose ranks were at work for less than the time within which something is due."""
    worked_s = training_s(log)
    if worked_s > due_s:
        return None
    lasted = f"{format_seconds(worked_s)}{'' if log.is_over else ' so far'}"
    return exempt(f"{what} is due within {format_seconds(due_s)} of the launch's end; the run has {lasted}")


def steps_of(log: LogFacts) -> int:
    """Steps that stayed."""
    return log.steps.count if log.steps is not None else 0


def why_no_noise(evidence: Evidence) -> str:
    """Why the gradient noise scale cannot be had from this layout; empty where it can (docs/telemetry.md)."""
    layout: Layout | None = evidence.plan.layout if evidence.plan is not None else None
    if layout is None:
        return ""
    if layout.context > 1:
        return f"{layout.context} context ranks share each sequence: no part of the batch has a gradient of its own"
    if layout.data * layout.accumulation < 2:
        return "one micro-batch on one data rank: there are no two gradients to compare"
    return ""
