"""The choice of a checkpoint interval that CKP001, CKP004 and CKP005 all accept, so that their edits agree.

CKP001 requires an interval within twice Daly's optimum. CKP004 requires that saves stop the training for a small
share of the interval and are written within it. CKP005 requires copies in memory to be younger than the checkpoint
on disk.
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
    """The duration of a save, and the mean time between failures."""

    blocked_s: float  # seconds that training stands still
    persist_s: float  # seconds until the checkpoint is on disk
    mtbf_s: float
    lag_s: float  # lower bound of the optimum: the checkpoint before must be on disk

    @property
    def best_s(self) -> float:
        """Daly's optimal interval in seconds, at least `lag_s`."""
        return max(daly_interval(self.blocked_s, self.mtbf_s), self.lag_s)


def planned_cost(evidence: Evidence, *, asynchronous: bool | None = None) -> SaveCost:
    """Return the planned cost of a save; `asynchronous` overrides the job's setting."""
    plan, job = evidence.the_plan, evidence.the_job
    r, is_async = plan.reliability, job.checkpoint.asynchronous
    if asynchronous is not None and asynchronous != is_async:
        is_async = asynchronous
        r = predict_reliability(
            plan.cluster,
            checkpoint=replace(job.checkpoint, asynchronous=asynchronous),
            fault=job.fault,
            state_bytes=r.checkpoint_bytes,
            devices=plan.layout.devices,
            step_s=plan.prediction.step_s,
        )
    lag_s = r.persist_s if is_async else 0.0
    return SaveCost(blocked_s=r.blocking_s, persist_s=r.persist_s, mtbf_s=r.mtbf_s, lag_s=lag_s)


def suits_rules(evidence: Evidence, cost: SaveCost, interval_s: float) -> bool:
    """Return whether an interval is near the optimum, cheap enough, and long enough to write a checkpoint."""
    ratio = interval_s / cost.best_s if cost.best_s > 0 else math.inf
    max_ratio = _rule_limit(evidence, "CKP001", "warn_ratio")
    return 1 / max_ratio <= ratio <= max_ratio and interval_s >= _least_s(evidence, cost)


def interval_edits(evidence: Evidence, cost: SaveCost, note: str) -> tuple[Edit, ...]:
    """Return the edits to the interval nearest to the optimum that all rules accept; empty if there is none."""
    best_s, least_s = cost.best_s, _least_s(evidence, cost)
    if not (0 < best_s < math.inf and math.isfinite(least_s)):
        return ()
    # Whole seconds, or three digits below ten seconds.
    value = round(best_s) if best_s >= 10 else float(f"{best_s:.3g}")
    if value < least_s:
        value = math.ceil(least_s) if least_s >= 10 else math.ceil(1000 * least_s) / 1000
        note = f"{note}, and as long as CKP004 asks"
    if not suits_rules(evidence, cost, value):
        return ()
    return (Edit(key=KEY, value=value, safe=True, note=note), *_younger_copies(evidence, value))


def _least_s(evidence: Evidence, cost: SaveCost) -> float:
    """Return the shortest interval that CKP004 accepts, in seconds."""
    stall, persist = _rule_limit(evidence, "CKP004", "most_stall"), _rule_limit(evidence, "CKP004", "most_persist")
    return max(cost.blocked_s / stall, cost.persist_s / persist)


def _younger_copies(evidence: Evidence, interval_s: float) -> tuple[Edit, ...]:
    """Return an edit to "auto" for copies in memory that would be older than the checkpoints on disk."""
    every, step_s = evidence.the_job.checkpoint.memory_every, evidence.the_plan.prediction.step_s
    if isinstance(every, str) or every * step_s <= _rule_limit(evidence, "CKP005", "memory_ratio") * interval_s:
        return ()
    return (Edit(key=COPIES, value="auto", safe=True, note="younger than the checkpoint on disk"),)


def _rule_limit(evidence: Evidence, rule: str, name: str) -> float:
    # Deferred: the rules that `edition` imports import this file.
    from phalanx.rules.edition import find_rule

    value = find_rule(rule).limits[name].resolve(evidence.profile.name, evidence.scaling)
    assert isinstance(value, int | float)
    return float(value)
