"""Fits of the loss surface with their intervals: vpnls, huber3 and overtrain (α = β).

Values of vpnls are the median of the posterior (median_surface.py), or the least squares without draws; its intervals
are draws of the posterior (surface_posterior.py). Intervals of overtrain come from a wild bootstrap: the design stays
as it is, every residual, divided by √(1 - leverage), keeps its size and gets a random sign, and deviations are
widened by Student's t for the few degrees of freedom; resampling the rows of such small designs would lose whole
curves. huber3 resamples rows, as its authors and their replication do.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from scipy import stats

from phalanx.scale.fit_result import FitEstimate
from phalanx.scale.huber import fit_huber, grid_starts
from phalanx.scale.median_surface import median_surface
from phalanx.scale.stray_rows import MOST_SHARE, find_stray_row, residual_slopes, with_strays
from phalanx.scale.surface import (
    LEAST_EXPONENT,
    MOST_EXPONENT,
    Array,
    Surface,
    SurfaceData,
    polish_surface,
    project_grid,
    surface_values,
)
from phalanx.scale.surface_posterior import CONSTANT_ODDS, sample_posterior
from phalanx.scale.surface_profile import Ends, profile_intervals

NAMES = ("E", "A", "B", "alpha", "beta")
SHARE = 0.8  # share of outcomes that an interval holds
STARTS = 48
# More steps for the best surfaces; where the search converges it needs only a few of them.
FINISHING = 200
FINISHED = 2  # surfaces that get the extra steps
AGREE = 0.01  # exponents that differ by less count as the same
# Ratio of the ends of an interval of a or 1 - a above which the runs leave the optimum open.
OPEN_EXPONENT = 1.5
NEGLIGIBLE = 1e-3  # share of the loss below which a term counts as absent


@dataclass(frozen=True, kw_only=True, slots=True)
class SurfaceFit:
    """A fitted surface, its resamples, and diagnostics of the search."""

    law: Surface
    theta: Array
    objective: float
    draws: tuple[Surface, ...]
    residuals: Array  # of ln loss: measured over fitted
    starts: int
    agreeing: float
    condition_number: float  # of the problem that the optimizer solves
    raw_condition_number: float  # of a fit of E, A, B, α and β at once
    profiles: dict[str, Ends]
    # "proportional" to the loss, or "constant": which of them the residuals support.
    noise: str
    is_degenerate: bool = False  # True if N or D does not matter in the least squares
    strays: tuple[int, ...] = ()  # rows that contradict the others: not fitted


def fit_surface(
    params: Array,
    tokens: Array,
    loss: Array,
    *,
    method: str,
    draws: int,
    rng: np.random.Generator,
    weight: Array | None = None,
    starts: int = STARTS,
    profile: bool = True,
) -> SurfaceFit:
    """Fit the best surface to the points, with `draws` resamples for its intervals.

    The squared residual of a row is multiplied by its `weight`. Rows that the others contradict are removed (vpnls
    only).
    """
    tied = method == "overtrain"
    rows = np.arange(len(loss))
    strays: list[int] = []
    while True:
        weighted = None if weight is None else weight[rows]
        solutions = _solve_noises(params[rows], tokens[rows], loss[rows], weighted, method=method, tied=tied)
        if method != "vpnls" or len(strays) >= int(MOST_SHARE * len(loss)):
            break
        row = find_stray_row([(data, thetas[int(np.argmin(cost))]) for _, _, data, thetas, cost in solutions])
        if row is None:
            break
        strays.append(int(rows[row]))
        rows = np.delete(rows, row)
    _, relative, data, thetas, cost = max(solutions, key=lambda solution: _noise_evidence(solution[2], solution[0]))
    is_degenerate = False
    if method == "huber3":
        candidates, costs = fit_huber(data, np.vstack([thetas, grid_starts(data, starts, rng)]))
        theta, objective = candidates[int(np.argmin(costs))], float(costs.min())
        agreeing = _share_agreeing(candidates[len(thetas) :], theta)
        resampled = _draw_rows(data, theta, draws, rng)
    else:
        random_starts = grid_starts(data, starts, rng) if starts else np.empty((0, 5))
        squares, least, agreeing = least_squares(data, thetas[np.argsort(cost)[:FINISHED]], random_starts, tied=tied)
        theta, objective = squares, least
        posterior = None
        if draws and not tied:
            noises = [with_strays(solution[2], solution[0], len(strays)) for solution in solutions]
            posterior = sample_posterior(noises, draws=draws, rng=rng)
        if posterior is None:
            resampled = _flip_residuals(data, theta, draws, rng, tied=tied)
        else:
            is_degenerate = _is_degenerate(data, theta)
            theta, objective = median_surface(posterior, data)
            resampled = posterior.pick(draws, rng)
    raw, projected = condition_numbers(data, theta, tied=tied)
    law = data.to_surface(theta)
    fitted = law.E + law.A * params**-law.alpha + law.B * tokens**-law.beta
    return SurfaceFit(
        law=law,
        theta=theta,
        objective=objective,
        draws=tuple(data.to_surface(draw) for draw in resampled),
        residuals=np.log(loss / fitted),
        starts=starts,
        agreeing=agreeing,
        condition_number=raw if method == "huber3" else projected,
        raw_condition_number=raw,
        profiles={}
        if method == "huber3" or not profile
        else profile_intervals(
            data, squares, least, share=SHARE, free=max(len(data.loss) - (4 if tied else 5), 1), tied=tied
        ),
        noise="proportional" if relative else "constant",
        is_degenerate=is_degenerate,
        strays=tuple(strays),
    )


def _solve_noises(
    params: Array, tokens: Array, loss: Array, weight: Array | None, *, method: str, tied: bool
) -> list[tuple[float, bool, SurfaceData, Array, Array]]:
    """Return the least squares under each kind of noise.

    Each entry is the cost, True if noise is relative, the data, the surfaces and their costs.
    """
    solutions = []
    for relative in {"vpnls": (True, False), "huber3": (True,), "overtrain": (False,)}[method]:
        data = SurfaceData.of(params, tokens, loss, relative=relative, weight=weight)
        thetas, cost = polish_surface(data, project_grid(data, tied=tied), tied=tied)
        if relative and method == "vpnls":
            data = data.with_fitted_noise(thetas[int(np.argmin(cost))])
            thetas, cost = polish_surface(data, thetas, tied=tied)
        data = replace(data, log_odds=0.0 if relative else math.log(CONSTANT_ODDS))
        solutions.append((float(cost.min()), relative, data, thetas, cost))
    return solutions


def least_squares(data: SurfaceData, found: Array, starts: Array, *, tied: bool) -> tuple[Array, float, float]:
    """Return the best of the given surfaces and of random starts, its cost, and the share of starts that agree with it.

    The grid search stops after few steps, in curved valleys before the minimum: enough for comparing noise and
    finding strays, but values, profiles and the share of starts need the extra steps.
    """
    near, near_cost = polish_surface(data, found, tied=tied, iterations=FINISHING)
    candidates, cost = (
        polish_surface(data, starts, tied=tied, iterations=FINISHING) if len(starts) else (starts, near_cost)
    )
    if len(candidates) and cost.min() < near_cost.min():
        best = candidates[np.argsort(cost)[:FINISHED]]
        near, near_cost = polish_surface(data, best, tied=tied, iterations=FINISHING)
    theta = near[int(np.argmin(near_cost))]
    return theta, float(near_cost.min()), _share_agreeing(candidates, theta)


def _noise_evidence(data: SurfaceData, cost: float) -> float:
    """Return ln of the likelihood of normal noise with this variance function, and of its prior odds.

    The smaller sum of squares is the more likely, since both noises have the same geometric mean.
    """
    free = max(len(data.loss) - 5, 1)
    return data.log_odds - 0.5 * free * math.log(max(cost, np.finfo(float).tiny))


def is_open_exponent(a: FitEstimate) -> bool:
    """Return True if the interval of a, or of 1 - a, is too wide for an optimum far beyond the data."""
    if a.low is None or a.high is None:
        return False
    return a.high > OPEN_EXPONENT * a.low or 1.0 - a.low > OPEN_EXPONENT * (1.0 - a.high)


def _is_degenerate(data: SurfaceData, theta: Array) -> bool:
    """Return True if in the least squares N or D does not matter, or an exponent is at its bound.

    Points so few or noisy do not determine the best size of a budget; the posterior shows this uncertainty.
    """
    level, term_n, term_d = (term[0] for term in surface_values(theta[None, :], data))
    least = min(float((term / (level + term_n + term_d)).max()) for term in (term_n, term_d))
    bounds = np.log([LEAST_EXPONENT, MOST_EXPONENT])
    return least < NEGLIGIBLE or bool((np.abs(theta[3:, None] - bounds) < 1e-6).any())


def _share_agreeing(tried: Array, theta: Array) -> float:
    """Return the share of starts that ended at these exponents."""
    return float((np.abs(tried[:, 3:] - theta[3:]).max(axis=1) < AGREE).mean()) if len(tried) else 1.0


def _draw_rows(data: SurfaceData, theta: Array, draws: int, rng: np.random.Generator) -> Array:
    """Return fits to rows that are drawn with replacement."""
    if not draws:
        return np.empty((0, 5))
    count = len(data.loss)
    weights = rng.multinomial(count, np.full(count, 1.0 / count), size=draws).astype(float)
    return fit_huber(data, np.repeat(theta[None, :], draws, axis=0), weights=weights)[0]


def _flip_residuals(data: SurfaceData, theta: Array, draws: int, rng: np.random.Generator, *, tied: bool) -> Array:
    """Wild bootstrap: return fits to the fitted losses with residuals of random sign, widened by Student's t."""
    if not draws:
        return np.empty((0, 5))
    fitted, slopes = residual_slopes(data, theta, tied=tied)
    free = len(data.loss) - slopes.shape[1]
    basis, _ = np.linalg.qr(slopes)
    # Leverage below 1, or the division below would blow up residuals of points that the fit passes through.
    leverage = np.minimum((basis**2).sum(axis=1), 1.0 - 1.0 / (4.0 * len(data.loss)))
    residual = (data.loss - fitted) / np.sqrt(1.0 - leverage)
    signs = rng.choice((-1.0, 1.0), size=(draws, len(residual)))
    losses = np.maximum(fitted + signs * residual, 1e-3)
    start = np.repeat(theta[None, :], draws, axis=0)
    thetas, _ = polish_surface(data, start, losses=losses, tied=tied, iterations=40)
    wider = float(stats.t.ppf(0.5 + SHARE / 2, max(free, 1)) / stats.norm.ppf(0.5 + SHARE / 2))
    return theta + wider * (thetas - theta)


def condition_numbers(data: SurfaceData, theta: Array, *, tied: bool) -> tuple[float, float]:
    """Return the condition numbers of the full problem and of the projected one.

    The full problem is the normal equations in E, A, B, α, β on raw axes; the projected one is what variable
    projection leaves for α and β.
    """
    law = data.to_surface(theta)
    log_n, log_d = data.x + data.middle[0], data.y + data.middle[1]
    term_n, term_d = np.exp(-law.alpha * log_n), np.exp(-law.beta * log_d)
    linear = np.stack([np.ones_like(term_n), term_n, term_d], axis=1) / data.noise[:, None]
    bent = np.stack([-law.A * log_n * term_n, -law.B * log_d * term_d], axis=1) / data.noise[:, None]
    if tied:
        bent = bent.sum(axis=1, keepdims=True)
    full = np.linalg.svd(np.hstack([linear, bent]), compute_uv=False)
    basis, _ = np.linalg.qr(linear / np.linalg.norm(linear, axis=0))
    projected = np.linalg.svd(bent - basis @ (basis.T @ bent), compute_uv=False)
    tiny = np.finfo(float).tiny
    return float((full[0] / max(full[-1], tiny)) ** 2), float((projected[0] / max(projected[-1], tiny)) ** 2)


def estimate_interval(value: float, draws: Array, profile: Ends | None = None) -> FitEstimate:
    """Return a number with the interval of its resamples."""
    if not len(draws):
        return FitEstimate(value=value)
    # Weibull's positions, p·(K + 1): the range holds the exact share, also for few draws.
    low, high = np.quantile(draws, [0.5 - SHARE / 2, 0.5 + SHARE / 2], method="weibull")
    # Where the points leave a number nearly open, the best fit may lie outside most draws; the interval includes it.
    return FitEstimate(
        value=value,
        low=min(float(low), value),
        high=max(float(high), value),
        standard_error=float(np.std(draws)),
        profile_low=profile[0] if profile else None,
        profile_high=profile[1] if profile else None,
    )
