"""Chaos: the gaps between faults are exponential, the seed decides everything, and a failing schedule gets small."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter

import pytest

from phalanx.errors import UserError
from phalanx.train.drill.faults import Fault
from phalanx.train.drill.schedule import DrillTarget, draw_faults, poisson_times, shrink_schedule


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
