"""Profile likelihood of a loss surface: which values of E, α and β the points allow, whatever the other four are.

For each value the others are fitted anew, from the best of a grid of exponents and from the best surface of all, so
that a second surface far from the first counts too. An end that the points leave open is told as open.
"""

from __future__ import annotations

import math

import numpy as np
from scipy import stats

from phalanx.scale.surface import (
    GRID_EXPONENTS,
    LEAST_EXPONENT,
    MOST_EXPONENT,
    Array,
    SurfaceData,
    polish_surface,
    project_pairs,
)

VALUES = 25  # tried over the whole range
FINER = 6  # tried between two of them, where the cost passes the limit,
ZOOMS = 2  # and then between two of those
COARSE = GRID_EXPONENTS[::2]
LEAST_LEVEL = 1e-4  # nats: an E that is none
Ends = tuple[float, float | None]  # the lower end is 0 where none is found, the upper end None


def profile_intervals(
    data: SurfaceData, theta: Array, objective: float, *, share: float, free: int, tied: bool
) -> dict[str, Ends]:
    """Where the cost, minimised over the others, stays below what Student's t allows for `share` of outcomes.

    `theta` and `objective` are the least squares and their cost, `free` the degrees of freedom. The widest interval
    where there are several.
    """
    limit = objective * (1.0 + float(stats.t.ppf(0.5 + share / 2, free)) ** 2 / free)
    exponents = np.geomspace(LEAST_EXPONENT, MOST_EXPONENT, VALUES)
    tried = {
        "E": (0, np.concatenate([[LEAST_LEVEL], np.linspace(0.0, float(data.loss.min()), VALUES)[1:]])),
        "alpha": (3, exponents),
        **({} if tied else {"beta": (4, exponents)}),
    }
    found = {}
    for name, (place, values) in tried.items():
        # The best value is one of those tried: without it a narrow interval would lie between two of them.
        values = np.unique(np.clip([*values, math.exp(theta[place])], values[0], values[-1]))
        cost = _least_costs(data, theta, place, values, tied=tied)
        allowed = np.flatnonzero(cost <= max(limit, float(cost.min()) * (1.0 + 1e-9)))
        ends: list[float | None] = []
        for inner, outer in ((allowed[0], allowed[0] - 1), (allowed[-1], allowed[-1] + 1)):
            if not 0 <= outer < len(values):
                ends.append(None)
                continue
            near, far = float(values[inner]), float(values[outer])
            for _ in range(ZOOMS):
                finer = np.linspace(near, far, FINER)
                costs = _least_costs(data, theta, place, finer, tied=tied)
                last = max(int(np.flatnonzero(costs > limit)[0]), 1) if (costs > limit).any() else FINER - 1
                near, far = float(finer[last - 1]), float(finer[last])
            ends.append(_crossing(finer[last - 1 : last + 1], costs[last - 1 : last + 1], limit))
        found[name] = (ends[0] or 0.0, ends[1])
    return found


def _least_costs(data: SurfaceData, theta: Array, place: int, values: Array, *, tied: bool) -> Array:
    """Half the least sum of squares with one number held at each of the values."""
    starts = np.repeat(theta[None, :], len(values), axis=0)
    starts[:, place] = np.log(values)
    grid = _grid_starts(data, place, values, tied=tied)
    _, cost = polish_surface(data, np.vstack([starts, grid]), fixed=(place,), tied=tied, iterations=80)
    return np.asarray(cost.reshape(2, len(values)).min(axis=0))


def _grid_starts(data: SurfaceData, place: int, values: Array, *, tied: bool) -> Array:
    """For each value the best of a grid of the exponents that are not held, with its E, A and B."""
    made = np.empty((len(values), 5))
    for row, value in enumerate(values):
        alpha = COARSE if place != 3 else np.array([value])
        beta = COARSE if place != 4 else np.array([value])
        alpha, beta = (alpha, alpha) if tied else (one.ravel() for one in np.meshgrid(alpha, beta))
        linear, cost = project_pairs(data, alpha, beta, level=float(value) if place == 0 else None)
        best = int(np.argmin(cost))
        made[row] = np.log([*np.maximum(linear[best], LEAST_LEVEL), alpha[best], beta[best]])
    return made


def _crossing(values: Array, costs: Array, limit: float) -> float:
    """Where the cost passes the limit, between a value that is allowed and one that is not, by its root."""
    low, high = (math.sqrt(float(one)) for one in costs)
    share = (math.sqrt(limit) - low) / (high - low) if high > low else 0.5
    return float(values[0] + min(max(share, 0.0), 1.0) * (values[1] - values[0]))
