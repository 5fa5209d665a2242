"""Helpers of the fault rules: the cost of a second per failure, quantiles of drills, and the drills that count."""

from __future__ import annotations

import math
from collections.abc import Sequence

from phalanx.rules.evidence import Evidence
from phalanx.rules.facts.drill_facts import DrillFacts, counted_records, newest_record, why_none
from phalanx.rules.outcome import Impact
from phalanx.units import format_seconds, plural

DRILL = "phalanx drill JOB --suite measures it"
OURS = "phalanx"  # drills test Phalanx and prove nothing about another trainer


def per_failure(evidence: Evidence, seconds: float, note: str) -> Impact:
    """Return the impact of losing this many seconds of all devices at every failure, at the plan's failure rate."""
    mtbf_s = evidence.plan.reliability.mtbf_s if evidence.plan is not None else math.inf
    if not math.isfinite(mtbf_s) or mtbf_s <= 0 or not math.isfinite(seconds):
        return Impact(note=f"{note}: {format_seconds(seconds)} of all devices at every failure")
    return evidence.loses(seconds / mtbf_s, f"{note}, at a failure every {format_seconds(mtbf_s)}")


def high_percentile(values: Sequence[float]) -> float | None:
    """Return the 95th percentile (nearest rank: with fewer than 20 numbers the largest); None without numbers.

    >>> high_percentile([3.0, 1.0]), high_percentile([]), high_percentile(list(range(1, 101)))
    (3.0, None, 95)
    """
    numbers = sorted(value for value in values if math.isfinite(value))
    return numbers[math.ceil(0.95 * len(numbers)) - 1] if numbers else None


def counted_drills(evidence: Evidence) -> tuple[DrillFacts, ...]:
    """Return the drills that count for this job."""
    return counted_records(_own_drills(evidence), profile=evidence.profile.name)


def newest_drill(evidence: Evidence, *kinds: str) -> DrillFacts | None:
    """Return the newest drill that counts and in which a fault of one of these kinds happened."""
    newest_by_kind = [newest_record(_own_drills(evidence), profile=evidence.profile.name, kind=kind) for kind in kinds]
    drills = [drill for drill in newest_by_kind if drill is not None]
    return min(drills, key=evidence.drills.index) if drills else None


def with_ranks(evidence: Evidence, drills: Sequence[DrillFacts]) -> str:
    """Return the size of the largest drill as a phrase to follow "drills": few ranks do not show the times of many.

    A time within the bound may be longer in a larger job; the phrase names both sizes.
    """
    largest = max((drill.world for drill in drills), default=0)
    if not largest:
        return ""
    size = f" with {plural(largest, 'rank')}"
    return f"{size} (this job has {evidence.devices:,})" if evidence.devices > largest else size


def which_drills(drills: Sequence[DrillFacts]) -> str:
    """Return the newest three records that a verdict rests on, as a line of its formula."""
    statement = ", ".join(drill.statement for drill in drills[:3])
    return f"drills that count: {statement}" + (f" and {len(drills) - 3} more" if len(drills) > 3 else "")


def no_drill(evidence: Evidence) -> str:
    """Return why no drill counts, as the end of a sentence."""
    return why_none(_own_drills(evidence), profile=evidence.profile.name) or "no drill is on record"


def how_to_see(evidence: Evidence) -> str:
    """Return how to observe a recovery with this trainer, as an instruction."""
    return DRILL if evidence.practice.trainer == OURS else "check the log of a run with a failure"


def _own_drills(evidence: Evidence) -> tuple[DrillFacts, ...]:
    return evidence.drills if evidence.practice.trainer == OURS else ()
