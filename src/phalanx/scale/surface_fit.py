"""Fits of the loss surface with their intervals: vpnls, huber3 and overtrain (α = β).

Values of vpnls: the median of the posterior (median_surface.py); without draws, the least squares. Its intervals: draws
of the posterior (surface_posterior.py). Of overtrain: wild bootstrap. The design stays as it is, every residual,
divided by √(1 - leverage), keeps its size and gets a random sign, and deviations are widened by Student's t for the few
degrees of freedom; drawing rows of such small designs would lose whole curves. huber3 draws rows, as its authors and
their replication do.
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
SHARE = 0.8  # of outcomes that an interval holds
STARTS = 48
FINISHING = 200  # more steps for the best surfaces; where the search converges it takes a few of them
FINISHED = 2  # surfaces that go on so
AGREE = 0.01  # exponents that differ by less are the same answer
OPEN_EXPONENT = 1.5  # ratio of the ends of an interval of a or 1 - a, from which the runs leave the optimum open
NEGLIGIBLE = 1e-3  # of the loss: a term that never reaches it is none


@dataclass(frozen=True, kw_only=True, slots=True)
class SurfaceFit:
    """A surface, resampled surfaces, and how hard it was to find."""

    law: Surface
    theta: Array
    objective: float
    draws: tuple[Surface, ...]
    residuals: Array  # of ln loss: measured over fitted
    starts: int
    agreeing: float
    condition_number: float  # of the problem that is searched
    raw_condition_number: float  # of E, A, B, α and β at once
    profiles: dict[str, Ends]
    noise: str  # "proportional" to the loss, or "constant": what the residuals speak for
    is_degenerate: bool = False  # by least squares N or D does not matter
    strays: tuple[int, ...] = ()  # rows that the others exclude: not fitted


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
    """The best surface of the points; `draws` resamples for its intervals.

    The squared residual of a row counts `weight` times.
    """
    tied = method == "overtrain"
    kept = np.arange(len(loss))
    strays: list[int] = []
    while True:
        weighted = None if weight is None else weight[kept]
        solved = _solve_noises(params[kept], tokens[kept], loss[kept], weighted, method=method, tied=tied)
        if method != "vpnls" or len(strays) >= int(MOST_SHARE * len(loss)):
            break
        row = find_stray_row([(data, found[int(np.argmin(cost))]) for _, _, data, found, cost in solved])
        if row is None:
            break
        strays.append(int(kept[row]))
        kept = np.delete(kept, row)
    _, relative, data, found, cost = max(solved, key=lambda one: _noise_evidence(one[2], one[0]))
    is_degenerate = False
    if method == "huber3":
        tried, costs = fit_huber(data, np.vstack([found, grid_starts(data, starts, rng)]))
        theta, objective = tried[int(np.argmin(costs))], float(costs.min())
        agreeing = _share_agreeing(tried[len(found) :], theta)
        resampled = _draw_rows(data, theta, draws, rng)
    else:
        first = grid_starts(data, starts, rng) if starts else np.empty((0, 5))
        squares, least, agreeing = least_squares(data, found[np.argsort(cost)[:FINISHED]], first, tied=tied)
        theta, objective = squares, least
        posterior = None
        if draws and not tied:
            noises = [with_strays(one[2], one[0], len(strays)) for one in solved]
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
        draws=tuple(data.to_surface(one) for one in resampled),
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
    """Least squares under each kind of noise: the cost, whether it is relative, the data, surfaces and their costs."""
    solved = []
    for relative in {"vpnls": (True, False), "huber3": (True,), "overtrain": (False,)}[method]:
        data = SurfaceData.of(params, tokens, loss, relative=relative, weight=weight)
        found, cost = polish_surface(data, project_grid(data, tied=tied), tied=tied)
        if relative and method == "vpnls":
            data = data.with_fitted_noise(found[int(np.argmin(cost))])
            found, cost = polish_surface(data, found, tied=tied)
        data = replace(data, log_odds=0.0 if relative else math.log(CONSTANT_ODDS))
        solved.append((float(cost.min()), relative, data, found, cost))
    return solved


def least_squares(data: SurfaceData, found: Array, starts: Array, *, tied: bool) -> tuple[Array, float, float]:
    """The least of the surfaces found and of random starts, its cost, and the share of starts that agree with it.

    The grid's surfaces are where a bent valley let them after few steps: noise and strays need no more, but values,
    profiles and the count of starts do.
    """
    near, near_cost = polish_surface(data, found, tied=tied, iterations=FINISHING)
    tried, cost = polish_surface(data, starts, tied=tied, iterations=FINISHING) if len(starts) else (starts, near_cost)
    if len(tried) and cost.min() < near_cost.min():
        best = tried[np.argsort(cost)[:FINISHED]]
        near, near_cost = polish_surface(data, best, tied=tied, iterations=FINISHING)
    theta = near[int(np.argmin(near_cost))]
    return theta, float(near_cost.min()), _share_agreeing(tried, theta)


def _noise_evidence(data: SurfaceData, cost: float) -> float:
    """ln of the likelihood of normal noise with this variance function, and of the odds before.

    The smaller sum of squares is the likelier, since both noises have the same geometric mean.
    """
    free = max(len(data.loss) - 5, 1)
    return data.log_odds - 0.5 * free * math.log(max(cost, np.finfo(float).tiny))


def is_open_exponent(a: FitEstimate) -> bool:
    """Whether the interval of a, or of 1 - a, is so wide that an optimum far beyond the data means nothing."""
    if a.low is None or a.high is None:
        return False
    return a.high > OPEN_EXPONENT * a.low or 1.0 - a.low > OPEN_EXPONENT * (1.0 - a.high)


def _is_degenerate(data: SurfaceData, theta: Array) -> bool:
    """Whether the least squares say that N or D does not matter, or an exponent stands at its bound.

    So few or noisy points tell nothing of a size that is best for a budget; the posterior knows how little.
    """
    level, term_n, term_d = (one[0] for one in surface_values(theta[None, :], data))
    least = min(float((term / (level + term_n + term_d)).max()) for term in (term_n, term_d))
    bounds = np.log([LEAST_EXPONENT, MOST_EXPONENT])
    return least < NEGLIGIBLE or bool((np.abs(theta[3:, None] - bounds) < 1e-6).any())


def _share_agreeing(tried: Array, theta: Array) -> float:
    """Of starts, how many ended at these exponents."""
    return float((np.abs(tried[:, 3:] - theta[3:]).max(axis=1) < AGREE).mean()) if len(tried) else 1.0


def _draw_rows(data: SurfaceData, theta: Array, draws: int, rng: np.random.Generator) -> Array:
    """Fits to as many rows, drawn with replacement."""
    if not draws:
        return np.empty((0, 5))
    count = len(data.loss)
    weights = rng.multinomial(count, np.full(count, 1.0 / count), size=draws).astype(float)
    return fit_huber(data, np.repeat(theta[None, :], draws, axis=0), weights=weights)[0]


def _flip_residuals(data: SurfaceData, theta: Array, draws: int, rng: np.random.Generator, *, tied: bool) -> Array:
    """Wild bootstrap: fits to the fitted losses with residuals of random sign, deviations widened by Student's t."""
    if not draws:
        return np.empty((0, 5))
    fitted, slopes = residual_slopes(data, theta, tied=tied)
    free = len(data.loss) - slopes.shape[1]
    basis, _ = np.linalg.qr(slopes)
    leverage = np.minimum((basis**2).sum(axis=1), 1.0 - 1.0 / (4.0 * len(data.loss)))
    residual = (data.loss - fitted) / np.sqrt(1.0 - leverage)
    signs = rng.choice((-1.0, 1.0), size=(draws, len(residual)))
    losses = np.maximum(fitted + signs * residual, 1e-3)
    start = np.repeat(theta[None, :], draws, axis=0)
    found, _ = polish_surface(data, start, losses=losses, tied=tied, iterations=40)
    wider = float(stats.t.ppf(0.5 + SHARE / 2, max(free, 1)) / stats.norm.ppf(0.5 + SHARE / 2))
    return theta + wider * (found - theta)


def condition_numbers(data: SurfaceData, theta: Array, *, tied: bool) -> tuple[float, float]:
    """Of the normal equations in E, A, B, α, β on raw axes, and of those that variable projection leaves for α, β."""
    law = data.to_surface(theta)
    log_n, log_d = data.x + data.middle[0], data.y + data.middle[1]
    term_n, term_d = np.exp(-law.alpha * log_n), np.exp(-law.beta * log_d)
    linear = np.stack([np.ones_like(term_n), term_n, term_d], axis=1) / data.noise[:, None]
    bent = np.stack([-law.A * log_n * term_n, -law.B * log_d * term_d], axis=1) / data.noise[:, None]
    if tied:
        bent = bent.sum(axis=1, keepdims=True)
    every = np.linalg.svd(np.hstack([linear, bent]), compute_uv=False)
    basis, _ = np.linalg.qr(linear / np.linalg.norm(linear, axis=0))
    rest = np.linalg.svd(bent - basis @ (basis.T @ bent), compute_uv=False)
    tiny = np.finfo(float).tiny
    return float((every[0] / max(every[-1], tiny)) ** 2), float((rest[0] / max(rest[-1], tiny)) ** 2)


def estimate_interval(value: float, draws: Array, profile: Ends | None = None) -> FitEstimate:
    """A number with the interval of its resamples."""
    if not len(draws):
        return FitEstimate(value=value)
    # Weibull's positions, p·(K + 1): between two of K draws lies just the share that is asked for, also of few draws.
    low, high = np.quantile(draws, [0.5 - SHARE / 2, 0.5 + SHARE / 2], method="weibull")
    # Where the points leave a number nearly open the best fit may lie outside of most draws: it is not excluded.
    return FitEstimate(
        value=value,
        low=min(float(low), value),
        high=max(float(high), value),
        standard_error=float(np.std(draws)),
        profile_low=profile[0] if profile else None,
        profile_high=profile[1] if profile else None,
    )
