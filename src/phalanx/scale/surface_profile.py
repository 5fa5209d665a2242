"""Profile likelihood of a loss surface: the values of E, α and β that the points allow, whatever the other four are.

For each value the others are fitted anew, from the best of a grid of exponents and from the overall best surface, so
that a second surface far from the first counts too. An end that the points leave open is returned as open.
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

VALUES = 25  # values tried over the whole range
# Values tried between two of them where the cost passes the limit, and then between two of those (ZOOMS).
FINER = 6
ZOOMS = 2
COARSE = GRID_EXPONENTS[::2]
LEAST_LEVEL = 1e-4  # nats: an E that counts as 0
Ends = tuple[float, float | None]  # an open lower end is 0, an open upper end None


def profile_intervals(
    data: SurfaceData, theta: Array, objective: float, *, share: float, free: int, tied: bool
) -> dict[str, Ends]:
    """Return for E, α and β the range in which the profile cost is below the limit of Student's t for `share`.

    `theta` and `objective` are the least squares and their cost, `free` the degrees of freedom. Where several ranges
    qualify, the result spans all of them.
    """
    limit = objective * (1.0 + float(stats.t.ppf(0.5 + share / 2, free)) ** 2 / free)
    exponents = np.geomspace(LEAST_EXPONENT, MOST_EXPONENT, VALUES)
    candidates = {
        "E": (0, np.concatenate([[LEAST_LEVEL], np.linspace(0.0, float(data.loss.min()), VALUES)[1:]])),
        "alpha": (3, exponents),
        **({} if tied else {"beta": (4, exponents)}),
    }
    intervals = {}
    for name, (index, values) in candidates.items():
        # Include the best value itself: otherwise a narrow interval could lie between two values.
        values = np.unique(np.clip([*values, math.exp(theta[index])], values[0], values[-1]))
        cost = _least_costs(data, theta, index, values, tied=tied)
        allowed = np.flatnonzero(cost <= max(limit, float(cost.min()) * (1.0 + 1e-9)))
        ends: list[float | None] = []
        for inner, outer in ((allowed[0], allowed[0] - 1), (allowed[-1], allowed[-1] + 1)):
            if not 0 <= outer < len(values):
                ends.append(None)
                continue
            near, far = float(values[inner]), float(values[outer])
            for _ in range(ZOOMS):
                finer = np.linspace(near, far, FINER)
                costs = _least_costs(data, theta, index, finer, tied=tied)
                last = max(int(np.flatnonzero(costs > limit)[0]), 1) if (costs > limit).any() else FINER - 1
                near, far = float(finer[last - 1]), float(finer[last])
            ends.append(_crossing(finer[last - 1 : last + 1], costs[last - 1 : last + 1], limit))
        intervals[name] = (ends[0] or 0.0, ends[1])
    return intervals


def _least_costs(data: SurfaceData, theta: Array, place: int, values: Array, *, tied: bool) -> Array:
    """Return half the least sum of squares with one parameter fixed at each of the values."""
    starts = np.repeat(theta[None, :], len(values), axis=0)
    starts[:, place] = np.log(values)
    grid = _grid_starts(data, place, values, tied=tied)
    _, cost = polish_surface(data, np.vstack([starts, grid]), fixed=(place,), tied=tied, iterations=80)
    return np.asarray(cost.reshape(2, len(values)).min(axis=0))


def _grid_starts(data: SurfaceData, place: int, values: Array, *, tied: bool) -> Array:
    """Return for each value the best of a grid of the free exponents, with its E, A and B."""
    starts = np.empty((len(values), 5))
    for row, value in enumerate(values):
        alpha = COARSE if place != 3 else np.array([value])
        beta = COARSE if place != 4 else np.array([value])
        alpha, beta = (alpha, alpha) if tied else (axis.ravel() for axis in np.meshgrid(alpha, beta))
        linear, cost = project_pairs(data, alpha, beta, level=float(value) if place == 0 else None)
        best = int(np.argmin(cost))
        starts[row] = np.log([*np.maximum(linear[best], LEAST_LEVEL), alpha[best], beta[best]])
    return starts


def _crossing(values: Array, costs: Array, limit: float) -> float:
    """Interpolate where the cost passes the limit, between an allowed value and one that is not, by its square root."""
    low, high = (math.sqrt(float(cost)) for cost in costs)
    share = (math.sqrt(limit) - low) / (high - low) if high > low else 0.5
    return float(values[0] + min(max(share, 0.0), 1.0) * (values[1] - values[0]))
