"""Profile intervals of the loss surface: they end where the points say, and are open where they say nothing."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from phalanx.scale.surface import Array, Surface, SurfaceData, polish_surface, project_grid
from phalanx.scale.surface_profile import Ends, profile_intervals

LAW = Surface(E=1.7, A=400.0, B=410.0, alpha=0.34, beta=0.28)
SHARE = 0.8


def noisy_data(sd: float, seed: int, *, budgets: int = 5, sizes: int = 6) -> SurfaceData:
    flops = np.repeat(np.geomspace(1e18, 1e21, budgets), sizes)
    params = np.array([LAW.optimum(float(one))[0] for one in flops]) * np.tile(np.geomspace(0.25, 4.0, sizes), budgets)
    tokens = flops / (6.0 * params)
    exact = np.array([LAW.loss(n, d) for n, d in zip(params, tokens, strict=True)])
    noise = np.random.default_rng(seed).normal(0.0, sd, len(exact))
    return SurfaceData.of(params, tokens, exact + noise, relative=False)


def best_surface(data: SurfaceData) -> tuple[Array, float]:
    found, cost = polish_surface(data, project_grid(data))
    return found[int(np.argmin(cost))], float(cost.min())


def intervals_of(data: SurfaceData) -> dict[str, Ends]:
    theta, cost = best_surface(data)
    return profile_intervals(data, theta, cost, share=SHARE, free=len(data.loss) - 5, tied=False)


def test_they_hold_the_truth_about_as_often_as_they_say() -> None:
    truth = {"E": LAW.E, "alpha": LAW.alpha, "beta": LAW.beta}
    held = dict.fromkeys(truth, 0)
    for seed in range(24):
        for name, (low, high) in intervals_of(noisy_data(0.01, seed)).items():
            held[name] += low <= truth[name] <= (math.inf if high is None else high)
    # 24 fits of 80 %: 19, with a binomial deviation of 2. Intervals of half the width hold 12.
    assert all(15 <= count <= 23 for count in held.values()), held


@pytest.mark.parametrize(("name", "place"), [("E", 0), ("alpha", 3), ("beta", 4)])
def test_at_their_ends_the_cost_is_what_students_t_allows(name: str, place: int) -> None:
    data = noisy_data(0.005, 3)
    theta, cost = best_surface(data)
    free = len(data.loss) - 5
    limit = cost * (1.0 + float(stats.t.ppf(0.5 + SHARE / 2, free)) ** 2 / free)
    low, high = profile_intervals(data, theta, cost, share=SHARE, free=free, tied=False)[name]
    assert high is not None
    for end in (low, high):
        held = theta.copy()
        held[place] = math.log(end)
        _, there = polish_surface(data, held[None, :], fixed=(place,), iterations=300)
        assert there[0] == pytest.approx(limit, rel=0.005)


def test_what_points_leave_open_is_told_as_open() -> None:
    # Two budgets and noise as large as what the sizes differ by: E may be 0, and α anything.
    found = intervals_of(noisy_data(0.6, 2, budgets=2, sizes=4))
    assert found["E"][0] == 0.0
    assert found["alpha"] == (0.0, None)
