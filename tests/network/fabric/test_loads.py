"""Balls into bins: against seeded sampling, and against what can be counted by hand."""

from __future__ import annotations

import numpy as np
import pytest

from phalanx.errors import UserError
from phalanx.network.fabric.decisions import idle_share, max_to_mean


def test_by_hand() -> None:
    assert max_to_mean(1, 2) == pytest.approx(1.5)  # two balls: together or apart
    assert max_to_mean(1, 3) == pytest.approx((3 * 3 + 18 * 2 + 6 * 1) / 27)
    assert max_to_mean(7, 1) == 1
    assert idle_share(1) == pytest.approx(0.3679, abs=1e-4)


@pytest.mark.parametrize(("units", "links"), [(1, 32), (1, 512), (4, 256), (16, 256), (64, 64)])
def test_against_sampling(units: int, links: int) -> None:
    source = np.random.default_rng(7)
    draws = [np.bincount(source.integers(0, links, units * links), minlength=links).max() for _ in range(3000)]
    assert max_to_mean(units, links) == pytest.approx(np.mean(draws) / units, rel=0.01)


def test_over_all_t0s_of_a_fabric() -> None:
    source = np.random.default_rng(7)
    draws = [np.bincount(source.integers(0, 64, 8 * 64), minlength=64).max() for _ in range(100 * 100)]
    worst = np.array(draws).reshape(100, 100).max(axis=1)
    assert max_to_mean(8, 64, groups=100) == pytest.approx(worst.mean() / 8, rel=0.01)


def test_the_exact_sum_and_the_approximation_meet() -> None:
    assert max_to_mean(1, 512) == pytest.approx(max_to_mean(1, 513), rel=0.003)


def test_more_and_smaller_units_are_more_even_and_it_never_falls_below_the_mean() -> None:
    ratios = [max_to_mean(2.0**power, 256) for power in range(-3, 21)]
    assert ratios == sorted(ratios, reverse=True)
    assert ratios[-1] > 1


@pytest.mark.parametrize(("units", "links"), [(0, 256), (1, 0), (float("nan"), 4), (-1, 4), (float("inf"), 4)])
def test_nonsense(units: float, links: int) -> None:
    with pytest.raises(UserError, match="is no load"):
        max_to_mean(units, links)
