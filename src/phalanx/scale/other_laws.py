"""Kaplan's scaling law of N and D, fitted by least squares."""

from __future__ import annotations

import math

import numpy as np

from phalanx.scale.minimize import Array, Rows, minimize_batch
from phalanx.scale.points import ScalingPoints

KAPLAN_NAMES = ("N_c", "alpha_N", "D_c", "alpha_D")
# Bounds of ln u0, ln k, ln v0 and ln αD: few points that cannot separate N from D would drive the search to infinity.
LOWEST, HIGHEST = np.array([-60.0, -5.0, -60.0, -8.0]), np.array([300.0, 5.0, 300.0, 3.0])
FARTHEST = 300.0  # bound of ln Nc


def fit_kaplan(points: ScalingPoints, *, draws: int, rng: np.random.Generator) -> tuple[Array, Array, Array, float]:
    """Fit L = ((Nc/N)^(αN/αD) + Dc/D)^αD by least squares of ln L.

    Returns values, resamples (K, 4), residuals and objective. Equation 1.5 of arXiv:2001.08361. It has no irreducible
    loss, so its predictions at large scale are too low.
    """
    log_n, log_d, log_l = np.log(points.params), np.log(points.tokens), np.log(points.loss)
    x0, y0 = float(log_n.mean()), float(log_d.mean())
    x, y = log_n - x0, log_d - y0

    def predict(theta: Array) -> tuple[Array, Array, Array]:
        """Return ln L and its two summands, for parameters ln u0, ln k, ln v0, ln αD with k = αN/αD."""
        size = np.exp(np.clip(theta[:, 0:1] - np.exp(theta[:, 1:2]) * x, -60, 60))
        data = np.exp(np.clip(theta[:, 2:3] - y, -60, 60))
        return np.exp(theta[:, 3:4]) * np.log(size + data), size, data

    def solve(start: Array, weights: Array | None) -> tuple[Array, Array]:
        def objective(theta: Array, rows: Rows) -> tuple[Array, Array]:
            theta = np.clip(theta, LOWEST, HIGHEST)
            value, size, data = predict(theta)
            residual = value - log_l
            pull = residual if weights is None else residual * weights[rows]
            share = np.exp(theta[:, 3:4]) / (size + data)
            slope = np.stack(
                [
                    (pull * share * size).sum(axis=1),
                    -np.exp(theta[:, 1]) * (pull * share * size * x).sum(axis=1),
                    (pull * share * data).sum(axis=1),
                    (pull * value).sum(axis=1),
                ],
                axis=1,
            )
            return 0.5 * (pull * residual).sum(axis=1), slope

        theta, cost = minimize_batch(objective, start, iterations=400)
        return np.clip(theta, LOWEST, HIGHEST), cost

    level = float(log_l.mean())
    starts = np.array(
        [
            [level / decay - 0.7, math.log(ratio), level / decay - 0.7, math.log(decay)]
            for decay in (0.05, 0.1, 0.2, 0.4)
            for ratio in (0.5, 1.0, 2.0)
        ]
    )
    thetas, cost = solve(starts, None)
    best = thetas[int(np.argmin(cost))]
    count = len(points)
    weights = rng.multinomial(count, np.full(count, 1.0 / count), size=draws).astype(float)
    resampled = solve(np.repeat(best[None, :], draws, axis=0), weights)[0] if draws else np.empty((0, 4))

    def natural(theta: Array) -> Array:
        ratio, decay = np.exp(theta[:, 1]), np.exp(theta[:, 3])
        size = np.exp(np.clip(theta[:, 0] / ratio + x0, -FARTHEST, FARTHEST))
        return np.stack([size, ratio * decay, np.exp(theta[:, 2] + y0), decay], axis=1)

    return natural(best[None, :])[0], natural(resampled), log_l - predict(best[None, :])[0][0], float(cost.min())
