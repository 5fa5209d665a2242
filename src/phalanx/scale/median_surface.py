"""The best-fitting surface among those whose compute-optimal line is the median of the posterior.

Least squares assume one kind of noise. Few points cannot distinguish noise in proportion to the loss from constant
noise: on the published draws of VPNLS the wrong one was chosen by chance, and a was 36 % off where VPNLS's least
squares are 34 (benchmarks/2026-11-18-scaling-laws.md). Draws of the posterior weigh both, and their median is the
estimate of least expected error. Where least squares end anywhere in a wide interval, the median is nearer the truth.

a of N* ∝ C^a and N* of ten times the largest compute are those medians. The rest of the law is linear in E and one
factor for each α + β, so that only one number is searched.

    # K values of α + β, P points
"""

from __future__ import annotations

import math

import numpy as np

from phalanx.scale.surface import LEAST_EXPONENT, MOST_EXPONENT, Array, SurfaceData
from phalanx.scale.surface_posterior import PosteriorDraws

# Multiple of the points' largest compute at which N* is fixed.
BEYOND = 10.0
# Nats: the E of a law without an irreducible loss.
LEAST_LEVEL = 1e-4
LINE = 41  # values of α + β tried at a time
# Each zoom narrows the line by (LINE - 1) / 3: to 1e-5 of its length in total.
ZOOMS = 4


def weighted_median(values: Array, weight: Array) -> float:
    """Return the value with half of the weight on each side, interpolated between two values."""
    order = np.argsort(values)
    below = np.cumsum(weight[order]) - 0.5 * weight[order]
    return float(np.interp(0.5 * weight.sum(), below, values[order]))


def median_optimum(draws: PosteriorDraws, data: SurfaceData) -> tuple[float, float, float]:
    """Return the medians of a and of ln N*, and the ln N·D that N* belongs to, all on the axes of the data.

    They use all weighted draws. A selection of 200 with equal weights, as for intervals, adds noise of 5 % of the
    posterior's standard deviation to a; all of them have 2 % (108 tables of the published design).
    """
    theta = draws.theta
    alpha, beta = np.exp(theta[:, 3]), np.exp(theta[:, 4])
    compute = float((data.x + data.y).max()) + math.log(BEYOND)
    sizes = (theta[:, 1] - theta[:, 2] + theta[:, 3] - theta[:, 4] + beta * compute) / (alpha + beta)
    return weighted_median(beta / (alpha + beta), draws.weight), weighted_median(sizes, draws.weight), compute


def median_surface(draws: PosteriorDraws, data: SurfaceData) -> tuple[Array, float]:
    """Return the logarithms of the law for `SurfaceData.to_surface`, and half its sum of squares."""
    a, size, compute = median_optimum(draws, data)
    # The range of ln(α + β) in which both exponents stay within their bounds.
    low = math.log(LEAST_EXPONENT / min(a, 1.0 - a))
    high = math.log(MOST_EXPONENT / max(a, 1.0 - a))
    ones, measured = 1.0 / data.noise, data.loss / data.noise
    for _ in range(ZOOMS):
        line = np.linspace(low, high, LINE)
        alpha, beta = (1.0 - a) * np.exp(line)[:, None], a * np.exp(line)[:, None]
        # ln A - ln B follows from N*: α·A·N^-α = β·B·D^-β there.
        gap = size * (alpha + beta) - np.log(alpha / beta) - beta * compute
        term = np.logaddexp(gap - alpha * data.x, -beta * data.y)
        top = term.max(axis=1, keepdims=True)
        column = np.exp(term - top) * ones
        # Two normal equations; E is set to its lower bound where it would be negative.
        aa, ab, bb = float(ones @ ones), column @ ones, np.einsum("kp,kp->k", column, column)
        ya, yb = float(ones @ measured), column @ measured
        determinant = np.maximum(aa * bb - ab**2, np.finfo(float).tiny)
        level = (bb * ya - ab * yb) / determinant
        level = np.where(level > LEAST_LEVEL, level, LEAST_LEVEL)
        factor = (yb - level * ab) / bb
        residual = measured - level[:, None] * ones - factor[:, None] * column
        cost = np.where(factor > 0.0, 0.5 * np.einsum("kp,kp->k", residual, residual), np.inf)
        best = int(np.argmin(cost))
        step = line[1] - line[0]
        low, high = max(line[best] - 1.5 * step, low), min(line[best] + 1.5 * step, high)
    log_b = math.log(factor[best]) - float(top[best, 0])
    theta = [
        math.log(level[best]),
        log_b + float(gap[best, 0]),
        log_b,
        math.log(alpha[best, 0]),
        math.log(beta[best, 0]),
    ]
    return np.array(theta), float(cost[best])
