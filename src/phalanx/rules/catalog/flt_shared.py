"""What the rules about faults share: the cost of a second per failure, quantiles of drills, and which drills count."""

from __future__ import annotations

import math
from collections.abc import Sequence

from phalanx.rules.evidence import Evidence
from phalanx.rules.facts.drill_facts import DrillFacts, counted_records, newest_record, why_none
from phalanx.rules.outcome import Impact
from phalanx.units import format_seconds, plural

DRILL = "phalanx drill JOB --suite measures it"
OURS = "phalanx"  # a drill breaks a run of Phalanx, and says nothing of another trainer


def per_failure(evidence: Evidence, seconds: float, note: str) -> Impact:
    """So many seconds of all devices lost at every failure, at the plan's rate of failures."""
    mtbf_s = evidence.plan.reliability.mtbf_s if evidence.plan is not None else math.inf
    if not math.isfinite(mtbf_s) or mtbf_s <= 0 or not math.isfinite(seconds):
        return Impact(note=f"{note}: {format_seconds(seconds)} of all devices at every failure")
    return evidence.loses(seconds / mtbf_s, f"{note}, at a failure every {format_seconds(mtbf_s)}")


def high_percentile(values: Sequence[float]) -> float | None:
    """The 95th percentile of a few numbers (nearest rank: of fewer than 20 the largest); None without any.

    >>> high_percentile([3.0, 1.0]), high_percentile([]), high_percentile(list(range(1, 101)))
    (3.0, None, 95)
    """
    known = sorted(value for value in values if math.isfinite(value))
    return known[math.ceil(0.95 * len(known)) - 1] if known else None


def counted_drills(evidence: Evidence) -> tuple[DrillFacts, ...]:
    """Drills that count for this job."""
    return counted_records(_own_drills(evidence), profile=evidence.profile.name)


def newest_drill(evidence: Evidence, *kinds: str) -> DrillFacts | None:
    """The newest drill that counts and in which a fault of one of these kinds happened."""
    found = [newest_record(_own_drills(evidence), profile=evidence.profile.name, kind=kind) for kind in kinds]
    known = [one for one in found if one is not None]
    return min(known, key=evidence.drills.index) if known else None


def with_ranks(evidence: Evidence, drills: Sequence[DrillFacts]) -> str:
    """How large the drills were, after "drills": a few ranks do not show what ten thousand take.

    Where their times are within the bound, those of a larger job may not be; the answer says so and is not withheld.
    """
    largest = max((one.world for one in drills), default=0)
    if not largest:
        return ""
    size = f" with {plural(largest, 'rank')}"
    return f"{size} (this job has {evidence.devices:,})" if evidence.devices > largest else size


def which_drills(drills: Sequence[DrillFacts]) -> str:
    """The records that an answer rests on, for its formula: the newest three."""
    statement = ", ".join(one.statement for one in drills[:3])
    return f"drills that count: {statement}" + (f" and {len(drills) - 3} more" if len(drills) > 3 else "")


def no_drill(evidence: Evidence) -> str:
    """Why no drill answers, as the end of a sentence."""
    return why_none(_own_drills(evidence), profile=evidence.profile.name) or "no drill is on record"


def how_to_see(evidence: Evidence) -> str:
    """How a recovery is seen, for the trainer there is."""
    return DRILL if evidence.practice.trainer == OURS else "check the log of a run with a failure"


def _own_drills(evidence: Evidence) -> tuple[DrillFacts, ...]:
    return evidence.drills if evidence.practice.trainer == OURS else ()
