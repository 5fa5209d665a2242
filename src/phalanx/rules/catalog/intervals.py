"""One checkpoint interval that every rule accepts: what CKP001, CKP004 and CKP005 propose is the same.

CKP001 wants it within twice Daly's optimum, CKP004 wants saves to stop the training for a small share of it and to be
written within it, CKP005 wants copies in memory to be younger than the disk's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from phalanx.plan.reliability import daly_interval, predict_reliability
from phalanx.rules.evidence import Evidence
from phalanx.rules.outcome import Edit

KEY = "checkpoint.interval_s"
COPIES = "checkpoint.memory_every"
ALONE = "no interval suits CKP001 and CKP004 at once: "


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveCost:
    """What a save takes, and how often something fails."""

    blocked_s: float  # training stands still
    persist_s: float  # until it is on the disk
    mtbf_s: float
    lag_s: float  # no optimum is shorter: the checkpoint before must be on disk

    @property
    def best_s(self) -> float:
        """Daly's optimum."""
        return max(daly_interval(self.blocked_s, self.mtbf_s), self.lag_s)


def planned_cost(evidence: Evidence, *, asynchronous: bool | None = None) -> SaveCost:
    """By the plan; of the job as it is, or as it would be if it saved (a)synchronously."""
    plan, job = evidence.the_plan, evidence.the_job
    r, aside = plan.reliability, job.checkpoint.asynchronous
    if asynchronous is not None and asynchronous != aside:
        aside = asynchronous
        r = predict_reliability(
            plan.cluster,
            checkpoint=replace(job.checkpoint, asynchronous=asynchronous),
            fault=job.fault,
            state_bytes=r.checkpoint_bytes,
            devices=plan.layout.devices,
            step_s=plan.prediction.step_s,
        )
    lag_s = r.persist_s if aside else 0.0
    return SaveCost(blocked_s=r.blocking_s, persist_s=r.persist_s, mtbf_s=r.mtbf_s, lag_s=lag_s)


def suits_rules(evidence: Evidence, cost: SaveCost, interval_s: float) -> bool:
    """Whether an interval is near the optimum, cheap, and leaves time to write."""
    ratio = interval_s / cost.best_s if cost.best_s > 0 else math.inf
    near = _rule_limit(evidence, "CKP001", "warn_ratio")
    return 1 / near <= ratio <= near and interval_s >= _least_s(evidence, cost)


def interval_edits(evidence: Evidence, cost: SaveCost, note: str) -> tuple[Edit, ...]:
    """The edits to the interval nearest to the optimum that all rules accept; none where there is no such interval."""
    best_s, least_s = cost.best_s, _least_s(evidence, cost)
    if not (0 < best_s < math.inf and math.isfinite(least_s)):
        return ()
    # Whole seconds, or three digits of a few.
    value = round(best_s) if best_s >= 10 else float(f"{best_s:.3g}")
    if value < least_s:
        value = math.ceil(least_s) if least_s >= 10 else math.ceil(1000 * least_s) / 1000
        note = f"{note}, and as long as CKP004 asks"
    if not suits_rules(evidence, cost, value):
        return ()
    return (Edit(key=KEY, value=value, safe=True, note=note), *_younger_copies(evidence, value))


def _least_s(evidence: Evidence, cost: SaveCost) -> float:
    """The shortest interval that CKP004 accepts."""
    stall, persist = _rule_limit(evidence, "CKP004", "most_stall"), _rule_limit(evidence, "CKP004", "most_persist")
    return max(cost.blocked_s / stall, cost.persist_s / persist)


def _younger_copies(evidence: Evidence, interval_s: float) -> tuple[Edit, ...]:
    """Copies in memory that would be older than the disk's with this interval are made as often as it pays."""
    every, step_s = evidence.the_job.checkpoint.memory_every, evidence.the_plan.prediction.step_s
    if isinstance(every, str) or every * step_s <= _rule_limit(evidence, "CKP005", "memory_ratio") * interval_s:
        return ()
    return (Edit(key=COPIES, value="auto", safe=True, note="younger than the checkpoint on disk"),)


def _rule_limit(evidence: Evidence, rule: str, name: str) -> float:
    from phalanx.rules.edition import find_rule  # the rules import this file

    value = find_rule(rule).limits[name].resolve(evidence.profile.name, evidence.scaling)
    assert isinstance(value, int | float)
    return float(value)
