"""Approach 3 of Hoffmann et al. (arXiv:2203.15556): the surface by Huber's loss of ln L, δ = 1e-3.

Their optimizer stopped early: as it minimised the mean instead of the sum over points, its tolerance was met far from
the optimum (arXiv:2404.10102). This one minimises the sum on scaled axes and stops by relative gain, so that a
constant factor has no effect.
"""

from __future__ import annotations

import itertools

import numpy as np

from phalanx.scale.minimize import Array, Rows, minimize_batch
from phalanx.scale.surface import Surface, SurfaceData, surface_values

DELTA = 1e-3
# The 4,500 starts of approach 3 (appendix D.3 of arXiv:2203.15556), on raw axes: e, a, b, α, β.
GRID_STARTS = (
    (-1.0, -0.5, 0.0, 0.5, 1.0),
    (0.0, 5.0, 10.0, 15.0, 20.0, 25.0),
    (0.0, 5.0, 10.0, 15.0, 20.0, 25.0),
    (0.0, 0.5, 1.0, 1.5, 2.0),
    (0.0, 0.5, 1.0, 1.5, 2.0),
)


def huber_objective(data: SurfaceData, theta_K5: Array, weights: Array | None, *, delta: float) -> tuple[Array, Array]:
    """Return the sum over points of Huber's loss of ln(predicted / measured), and its gradient.

    `weights` (K, P) of resamples are multiplied with the weights of the rows.
    """
    level, term_n, term_d = surface_values(theta_K5, data)
    predicted = level + term_n + term_d
    residual = np.log(predicted) - np.log(data.loss)
    size = np.abs(residual)
    cost = np.where(size < delta, 0.5 * residual**2, delta * (size - 0.5 * delta))
    pull = np.clip(residual, -delta, delta) / predicted
    counts = data.wider**-2 * (1.0 if weights is None else weights)
    cost, pull = cost * counts, pull * counts
    alpha, beta = np.exp(theta_K5[:, 3]), np.exp(theta_K5[:, 4])
    pull_n, pull_d = pull * term_n, pull * term_d
    slope = np.stack(
        [
            level[:, 0] * pull.sum(axis=1),
            pull_n.sum(axis=1),
            pull_d.sum(axis=1),
            -alpha * (pull_n * data.x).sum(axis=1),
            -beta * (pull_d * data.y).sum(axis=1),
        ],
        axis=1,
    )
    return cost.sum(axis=1), slope


def fit_huber(
    data: SurfaceData, start_K5: Array, *, weights: Array | None = None, delta: float = DELTA, scale: float = 1.0
) -> tuple[Array, Array]:
    """Minimise from K starts, or K resamples given by `weights` (K, P); returns parameters and costs.

    `scale` multiplies the objective during the search, and has no effect on the result.
    """

    # Bounds of ln E, ln A and ln B, then of ln α and ln β.
    lowest, highest = np.array([-40.0] * 3 + [-6.0] * 2), np.array([40.0] * 3 + [1.5] * 2)

    def objective(theta: Array, rows: Rows) -> tuple[Array, Array]:
        bounded = np.clip(theta, lowest, highest)
        cost, slope = huber_objective(data, bounded, None if weights is None else weights[rows], delta=delta)
        return scale * cost, scale * slope

    theta, cost = minimize_batch(objective, start_K5)
    return np.clip(theta, lowest, highest), cost / scale


def grid_starts(data: SurfaceData, count: int, rng: np.random.Generator) -> Array:
    """Draw `count` of the 4,500 published starts at random, converted to the scaled axes of `data`."""
    every = np.array(list(itertools.product(*GRID_STARTS)))
    picked = every[rng.choice(len(every), size=count, replace=False)]
    alpha, beta = np.maximum(picked[:, 3], 0.02), np.maximum(picked[:, 4], 0.02)
    return np.column_stack(
        [
            picked[:, 0],
            picked[:, 1] - alpha * data.middle[0],
            picked[:, 2] - beta * data.middle[1],
            np.log(alpha),
            np.log(beta),
        ]
    )


def score_law(data: SurfaceData, law: Surface, *, delta: float = DELTA) -> float:
    """Return the Huber objective of a given law on these points."""
    return float(huber_objective(data, data.from_surface(law)[None, :], None, delta=delta)[0][0])
