"""Which faults are injected: drawn by chance, the standard drills, and the smallest schedule that fails."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from synthetic import write_run

from phalanx.errors import UserError
from phalanx.job.load import load
from phalanx.rules.edition import all_rules
from phalanx.train.drill import schedule
from phalanx.train.drill.faults import FAULT_KINDS, SAVE_POINTS, Fault
from phalanx.train.drill.judge import Verdict
from phalanx.train.drill.outcomes import FaultOutcome
from phalanx.train.drill.perform import DrillNumbers, DrillResult
from phalanx.train.drill.schedule import (
    DrillTarget,
    SuitePart,
    claims_shown,
    draw_faults,
    judge_slow_rank,
    poisson_times,
    shrink_schedule,
    suite_faults,
    suite_parts,
)


def test_gaps_are_exponential() -> None:
    """Mean, spread and tail of a Poisson process; a sleeper that waits the mean each time would fail all three."""
    moments = poisson_times(random.Random(1), rate_per_min=60.0, until_s=20_000.0)
    gaps = [later - earlier for earlier, later in itertools.pairwise([0.0, *moments])]
    mean = sum(gaps) / len(gaps)
    spread = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps))
    assert mean == pytest.approx(1.0, rel=0.03)  # 20,000 gaps: the standard error is 0.7 %
    assert spread == pytest.approx(1.0, rel=0.05)
    assert sum(gap > 1.0 for gap in gaps) / len(gaps) == pytest.approx(math.exp(-1), rel=0.05)


def test_no_rate_no_fault() -> None:
    assert poisson_times(random.Random(0), rate_per_min=0.0, until_s=60.0) == []


def test_the_same_seed_gives_the_same_faults() -> None:
    target = DrillTarget(world=4, hosts=2)
    first = draw_faults(rate_per_min=20, minutes=5, seed=3, target=target)
    assert first == draw_faults(rate_per_min=20, minutes=5, seed=3, target=target)
    assert first != draw_faults(rate_per_min=20, minutes=5, seed=4, target=target)
    assert [fault.id for fault in first] == list(range(len(first)))
    assert all(fault.at_s is not None and 0 < fault.at_s < 300 for fault in first)
    assert all(rank < 4 for fault in first for rank in fault.rank)
    assert [Fault.from_dict(fault.to_dict()) for fault in first] == list(first)


def test_one_host_is_never_lost() -> None:
    kinds = Counter(
        fault.kind for fault in draw_faults(rate_per_min=100, minutes=10, seed=0, target=DrillTarget(world=4))
    )
    assert "host" not in kinds
    assert kinds["kill"] > kinds["hang"] > 0


def test_a_host_is_lost_as_often_as_it_comes_back() -> None:
    faults = draw_faults(rate_per_min=100, minutes=10, seed=0, target=DrillTarget(world=4, hosts=2))
    assert Counter(fault.host for fault in faults if fault.kind == "host") == {0: 3, 1: 3}


def test_too_much_is_refused() -> None:
    with pytest.raises(UserError) as caught:
        draw_faults(rate_per_min=1e6, minutes=1, seed=0, target=DrillTarget(world=4))
    assert str(caught.value) == "--chaos: 1e+06 per minute for 1 minutes is too much\n  ask for less"


@pytest.mark.parametrize("guilty", [{0}, {99}, {13, 14}, {3, 50, 97}])
def test_shrinking_finds_the_guilty(guilty: set[int]) -> None:
    calls = []

    def fails(some: object) -> bool:
        calls.append(some)
        return guilty <= set(some)  # type: ignore[call-overload]

    assert set(shrink_schedule(range(100), fails, budget_s=60)) == guilty
    assert len(calls) < 150


def test_shrinking_ends_with_its_time() -> None:
    clock = itertools.count()
    assert (
        len(shrink_schedule(range(64), lambda some: len(some) >= 8, budget_s=3, clock=lambda: float(next(clock)))) >= 8
    )


RECOVERY, LIMITS = suite_parts(0.05)
EXAMPLE = Path(__file__).parents[3] / "examples" / "drill.toml"


def test_every_point_of_a_save_is_hit() -> None:
    points = [fault.point for fault in suite_faults(RECOVERY) if fault.point.startswith("save-")]
    assert points == [f"save-{point}" for point in SAVE_POINTS]


def test_the_checkpoint_that_is_damaged_is_the_one_that_is_read() -> None:
    """Both hosts are down by then, so that nobody saves a newer one; and long ago the last save was cut short."""
    faults = suite_faults(RECOVERY)
    [damage] = [fault for fault in faults if fault.kind == "damage"]
    hosts = [fault for fault in faults if fault.kind == "host"]
    assert {fault.host for fault in hosts} == {0, 1}
    assert max(fault.id for fault in hosts) < damage.id
    assert {fault.step for fault in hosts} == {damage.step}
    assert max(fault.step for fault in faults if fault.point.startswith("save-")) + 30 < damage.step


@pytest.mark.parametrize("part", suite_parts(0.05), ids=lambda part: part.name)
def test_parts(part: SuitePart) -> None:
    kinds = {fault.kind for fault in suite_faults(part)}
    assert kinds <= set(FAULT_KINDS)
    known = {rule.id for rule in all_rules()}
    for proof in part.proofs:
        assert set(proof.kinds) & kinds, proof.claim
        assert set(proof.rules) <= known, proof.rules
    last = max(fault.step or 0 for fault in suite_faults(part))
    assert part.steps > last + 10
    load(EXAMPLE, overrides=part.overrides)


def test_the_slow_rank_sleeps_longer_where_steps_are_long() -> None:
    assert [suite_faults(suite_parts(step_s)[1])[0].sleep_s for step_s in (0.05, 3.0)] == [0.2, 6.0]


def test_the_slow_rank_is_named(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", steps=60, incidents=0, straggler=2)
    assert judge_slow_rank(run, slow_rank=2, world=4).ok
    assert judge_slow_rank(run, slow_rank=6, world=4).ok, "ranks count modulo the world"
    wrong = judge_slow_rank(run, slow_rank=1, world=4)
    assert not wrong.ok
    assert wrong.evidence.startswith("rank 1 was slow; named: rank 2 (")
    assert judge_slow_rank(write_run(tmp_path / "b", steps=60, incidents=0), slow_rank=2, world=4).evidence.endswith(
        "nobody"
    )
    assert not judge_slow_rank(write_run(tmp_path / "c", steps=2, incidents=0, straggler=2), slow_rank=2, world=4).ok


def test_nobody_else_may_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write_run(tmp_path / "a", steps=60, incidents=0, straggler=2)
    first = schedule.straggler_scores(schedule.RunHistory.open(run))
    both = replace(first, named=(*first.named, replace(first.named[0], rank=3)))
    monkeypatch.setattr(schedule, "straggler_scores", lambda history: both)
    assert not judge_slow_rank(run, slow_rank=2, world=4).ok


def outcome(fault: str) -> FaultOutcome:
    return FaultOutcome(
        fault=fault, kind=fault.partition(":")[0], fired_s=0.0, rank=0, generation=1, step=1, note="", detected_s=None,
        blamed=None, recovered_s=None, steps_lost=None, steps_redone=None, source="", world=None,
    )  # fmt: skip


def test_only_what_happened_is_shown_as_proved() -> None:
    numbers = DrillNumbers(
        wall_s=1.0, steps=1, faults=1, recovery_s=None, recovery_worst_s=None, planned_recovery_s=1.0, effective=None,
        planned_effective=1.0,
    )  # fmt: skip
    unread = Verdict(name="damaged files were refused", ok=True, evidence="no restore read one")
    result = DrillResult(
        run=None,
        state="done",
        message="",
        outcomes=(outcome("kill:rank=2,step=5"), outcome("damage:step=60")),
        not_fired=(),
        verdicts=(unread,),
        numbers=numbers,
    )
    seen = {claim for claim, _, happened in claims_shown(RECOVERY, result) if happened}
    assert seen == {"a lost rank is noticed and replaced", "steps go on with the same bits"}
    met = replace(result, verdicts=(replace(unread, evidence="generation 2 refused step-00000009 and went back"),))
    assert "a damaged checkpoint is refused" in {
        claim for claim, _, happened in claims_shown(RECOVERY, met) if happened
    }
