"""What a finding is said to cost: a chance is counted as one, and a waiting that is certain in full."""

from __future__ import annotations

from dataclasses import replace

import pytest
from rules.cases.review import lasting
from rules.kit import answers, evidence

from phalanx.rules.evidence import Evidence
from phalanx.rules.facts.trainers import PHALANX, Practice
from phalanx.rules.run_rules import Finding


def finding(rule: str, found: Evidence) -> Finding:
    return next(one for one in answers(rule, found) if one.verdict == "fail")


def points(rule: str, found: Evidence) -> float | None:
    return finding(rule, found).outcome.impact.points


def spared(have: int, *, hosts: int = 128, rate: float = 3.8e-3) -> Evidence:
    """A job that waits for a host to be repaired."""
    found = evidence("fault.spares=0", "fault.recovery=replace", practice=PHALANX)
    plan = found.the_plan
    changed = replace(
        plan.reliability, hosts=hosts, failures_per_host_day=rate, mtbf_s=86_400 / (hosts * rate), spares=have
    )
    return replace(found, plan=replace(plan, reliability=changed))


def test_without_a_spare_every_failure_waits_out_the_repair() -> None:
    mtbf_s = 86_400 / (128 * 3.8e-3)
    assert points("FLT003", spared(0)) == pytest.approx(100 * 86_400 / (mtbf_s + 86_400))
    assert points("FLT003", spared(0, hosts=8)) == pytest.approx(3.0, rel=0.03)


def test_a_spare_more_is_a_smaller_loss() -> None:
    lost = [points("FLT003", spared(have)) or 0.0 for have in (0, 1, 2)]
    assert lost[0] > 3 * lost[1] > 9 * lost[2] > 0


def test_a_warning_of_what_may_happen_does_not_claim_the_job() -> None:
    short = lasting(3_600.0, interval_s=86_400.0, optimal_interval_s=100.0, mtbf_s=1e6)()
    assert points("CKP005", short) is None or points("CKP005", short) < 0.5
    stranger = Practice(trainer="megatron", step_transaction=False, preflight=False)
    assert points("FLT006", replace(short, practice=stranger)) is None
    plan = replace(short.the_plan, duration=replace(short.the_plan.duration, wall_s=3_600.0))
    once = points("FLT005", replace(short, practice=stranger, plan=plan))
    assert once == pytest.approx(100 * 0.10 * short.the_job.fault.restart_s / 3_600.0)
    assert points("PRC004", evidence("train.skipped_steps=1000000")) is None


def test_a_grace_is_not_a_safe_edit() -> None:
    """No edit of a job file makes a scheduler wait."""
    found = finding("CKP001", evidence("fault.grace_s=1"))
    (edit,) = found.outcome.edits
    assert (edit.key, edit.safe) == ("fault.grace_s", False)
    assert "tell the scheduler too" in edit.note
    assert found.outcome.impact.points is None


def test_a_small_job_is_told_the_rate_of_small_jobs() -> None:
    def told(*sets: str, **changes: object) -> str:
        return " ".join(line for one in answers("CKP001", evidence(*sets, **changes)) for line in one.outcome.formula)

    assert "3.5 times as many failures, with which τ* = 660 s" in told()
    assert "3.5 times" not in told("fault.failures_per_host_day=0.0038")
    assert "3.5 times" not in told("batch.global_sequences=2048", cluster="8xH100:256")


def test_what_is_there_is_not_advised() -> None:
    sets = ("fault.failures_per_host_day=0.2", "checkpoint.interval_s=4000")
    copied = finding("EFF001", evidence(*sets)).outcome.fix
    assert "checkpoint every" in copied
    assert "copies" not in copied
    assert "copies" in finding("EFF001", evidence(*sets, "checkpoint.memory_every=0")).outcome.fix
