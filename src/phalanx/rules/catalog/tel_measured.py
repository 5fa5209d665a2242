"""Helpers of the telemetry and efficiency rules: finite numbers, and runs too young to judge."""

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
    """Return a number that can be compared, or None; a damaged log may hold infinities."""
    return value if value is not None and math.isfinite(value) else None


def wall_s(log: LogFacts) -> float:
    """Return the wall time of the run in seconds, as far as its log shows; 0 where it does not."""
    return max(0.0, finite_value(log.wall_s) or 0.0)


def training_s(log: LogFacts) -> float:
    """Return the seconds for which the ranks have worked.

    The launch does not count: on a busy host it takes half a minute.
    """
    init_s = finite_value(log.ledger.accounts.init) if log.ledger is not None else None
    return max(0.0, wall_s(log) - (init_s or 0.0))


def file_of(log: LogFacts, rank: int | None = None) -> Spot:
    """Return the event file of a rank (default: the lowest on record), where findings about the log point."""
    number = rank if rank is not None else min(log.ranks, default=0)
    return Spot(file=f"{log.folder}/events-{number:05d}.jsonl")


def still_reading(log: LogFacts, what: str) -> Outcome | None:
    """Return `unknown` where a missing item may be in the unread part of the log, else None."""
    if log.bytes_left <= 0:
        return None
    return unknown(f"{what} may stand in the {log.bytes_left:,} bytes not read yet", fix="check again in a moment")


def too_young(log: LogFacts, what: str, due_s: float) -> Outcome | None:
    """Return `exempt` for a run whose ranks have not worked long enough for something to be due, else None."""
    worked_s = training_s(log)
    if worked_s > due_s:
        return None
    lasted = f"{format_seconds(worked_s)}{'' if log.is_over else ' so far'}"
    return exempt(f"{what} is due within {format_seconds(due_s)} of the launch's end; the run has {lasted}")


def steps_of(log: LogFacts) -> int:
    """Return the number of steps that stayed."""
    return log.steps.count if log.steps is not None else 0


def why_no_noise(evidence: Evidence) -> str:
    """Return why this layout has no gradient noise scale; empty where it has one (docs/telemetry.md)."""
    layout: Layout | None = evidence.plan.layout if evidence.plan is not None else None
    if layout is None:
        return ""
    if layout.context > 1:
        return f"{layout.context} context ranks share each sequence: no part of the batch has a gradient of its own"
    if layout.data * layout.accumulation < 2:
        return "one micro-batch on one data rank: there are no two gradients to compare"
    return ""
