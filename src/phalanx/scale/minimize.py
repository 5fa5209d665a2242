"""BFGS for many small problems at once: starts, resamples and profiles of one law are rows of one array."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Rows = NDArray[np.intp]
# (parameters of K problems (K, M), the numbers of these problems) -> costs (K) and gradients (K, M)
Objective = Callable[[Array, Rows], tuple[Array, Array]]


def minimize_batch(
    objective: Objective, start_KM: Array, *, iterations: int = 200, tolerance: float = 1e-9, longest: float = 1.0
) -> tuple[Array, Array]:
    """Minimise K problems of M parameters each; returns parameters (K, M) and costs (K).

    A problem ends when a step gains less than `tolerance` of its cost twice in a row. `longest` limits the change of
    a parameter in one step.
    """
    theta = np.array(start_KM, dtype=float)
    count, size = theta.shape
    every = np.arange(count)
    cost, slope = objective(theta, every)
    # The first step has length 0.1 along the gradient.
    inverse = np.tile(np.eye(size), (count, 1, 1)) * (0.1 / (np.linalg.norm(slope, axis=1) + 1e-300))[:, None, None]
    idle = np.zeros(count, dtype=int)
    active = every
    for _ in range(iterations):
        direction = -np.einsum("kij,kj->ki", inverse[active], slope[active])
        down = np.einsum("ki,ki->k", direction, slope[active])
        uphill = down >= 0.0
        # Rounding spoilt the curvature: start again with the gradient.
        if uphill.any():
            lost = active[uphill]
            direction[uphill] = -slope[lost] * (0.1 / (np.linalg.norm(slope[lost], axis=1) + 1e-300))[:, None]
            inverse[lost] = np.eye(size) * (0.1 / (np.linalg.norm(slope[lost], axis=1) + 1e-300))[:, None, None]
            down = np.einsum("ki,ki->k", direction, slope[active])
        direction *= np.minimum(1.0, longest / (np.abs(direction).max(axis=1) + 1e-300))[:, None]
        new, new_cost, new_slope = _search_line(objective, theta[active], cost[active], direction, down, active)
        moved, turned = new - theta[active], new_slope - slope[active]
        gain = cost[active] - new_cost
        theta[active], slope[active] = new, new_slope
        idle[active] = np.where(gain <= tolerance * np.abs(new_cost), idle[active] + 1, 0)
        cost[active] = new_cost
        bend = np.einsum("ki,ki->k", moved, turned)
        # Update only where the curvature is positive, which keeps the inverse Hessian positive definite.
        good = bend > 1e-12 * np.linalg.norm(moved, axis=1) * np.linalg.norm(turned, axis=1) + 1e-300
        rows = active[good]
        if len(rows):
            s, y, rho = moved[good], turned[good], 1.0 / bend[good]
            projector = np.eye(size) - rho[:, None, None] * np.einsum("ki,kj->kij", s, y)
            inverse[rows] = projector @ inverse[rows] @ projector.transpose(0, 2, 1) + rho[:, None, None] * np.einsum(
                "ki,kj->kij", s, s
            )
        active = active[idle[active] < 2]
        if not len(active):
            break
    return theta, cost


def _search_line(
    objective: Objective, theta: Array, cost: Array, way: Array, down: Array, rows: Rows
) -> tuple[Array, Array, Array]:
    """Halve each problem's step until it gains enough (Armijo); a problem without such a step does not move."""
    length = np.ones(len(theta))
    new, new_cost = theta.copy(), cost.copy()
    new_slope = np.zeros_like(theta)
    open_ = np.arange(len(theta))
    for trial in range(30):
        trial_theta = theta[open_] + length[open_, None] * way[open_]
        value, slope = objective(trial_theta, rows[open_])
        enough = value <= cost[open_] + 1e-4 * length[open_] * down[open_]
        if trial == 29:
            trial_theta[~enough], enough = theta[open_[~enough]], np.ones(len(open_), dtype=bool)
            value, slope = objective(trial_theta, rows[open_])
        accepted = open_[enough]
        new[accepted], new_cost[accepted], new_slope[accepted] = trial_theta[enough], value[enough], slope[enough]
        open_ = open_[~enough]
        if not len(open_):
            break
        length[open_] *= 0.4
    return new, new_cost, new_slope
