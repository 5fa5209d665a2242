"""The loss surface for repeated data: tokens read again count for less (Muennighoff et al., arXiv:2305.16264).

D' = U + U·R*·(1 - e^(-R/R*)) with U unique tokens read 1 + R times: repetition is worth at most R* times the unique
tokens. The paper's fit has R* = 15.4 and discounts excess parameters too, by a constant that needs models far above
the optimum of their unique data; that part is not implemented. At U ≥ D the law is the plain surface.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from phalanx.errors import mistake
from phalanx.scale.points import ScalingPoints
from phalanx.scale.surface import Array, SurfaceData, polish_surface, project_grid, surface_values
from phalanx.scale.surface_posterior import sample_posterior

NAMES = ("E", "A", "B", "alpha", "beta", "R_D")
# Range of R*: outside it, repeated data is worth nothing, or as much as fresh data.
LEAST_WORTH, MOST_WORTH = 0.1, 1000.0
LEAST_REPEATED = 2  # rows that read their data more than once
GRID = 41


@dataclass(frozen=True, kw_only=True, slots=True)
class RepeatedFit:
    """The surface with R*, its draws in the order of NAMES, and residuals of ln loss."""

    values: dict[str, float]
    draws: Array  # (K, 6)
    residuals: Array
    objective: float


def effective_tokens(tokens: Array, unique: Array, worth: float) -> Array:
    """Return the number of fresh tokens that are worth as much as `tokens` tokens of repeated data.

    >>> effective_tokens(np.array([50.0, 100.0, 400.0]), np.array([100.0, 100.0, 100.0]), 15.4).round(1).tolist()
    [50.0, 100.0, 372.6]
    """
    repeats = np.maximum(tokens / unique - 1.0, 0.0)
    return np.where(repeats > 0.0, unique * (1.0 - worth * np.expm1(-repeats / worth)), tokens)


def fit_repeated(points: ScalingPoints, *, draws: int, rng: np.random.Generator) -> RepeatedFit:
    """Fit the surface and R*; raises UserError without a complete column unique_tokens, or where no data repeats."""
    unique = points.unique_tokens
    if unique is None or not (np.isfinite(unique) & (unique > 0.0)).all():
        fix = "add it: tokens of the data before they repeat, for every row"
        raise mistake(points.source, "has no whole column unique_tokens, which data-constrained needs", fix=fix)
    repeated = int((points.tokens > 1.05 * unique).sum())
    if repeated < LEAST_REPEATED:
        problem = f"{repeated} of {len(points)} rows read their data more than once; data-constrained needs more"
        raise mistake(points.source, problem, fix="use --method vpnls, or add runs of several epochs")
    worths = np.geomspace(LEAST_WORTH, MOST_WORTH, GRID)
    costs = np.array([_fit_worth(points, unique, worth)[0] for worth in worths])
    step = np.log(worths[1] / worths[0])
    # A second, finer search around the best.
    near = worths[int(np.argmin(costs))] * np.exp(np.linspace(-step, step, GRID // 2))
    worths = np.concatenate([worths, near])
    costs = np.concatenate([costs, [_fit_worth(points, unique, worth)[0] for worth in near]])
    best = int(np.argmin(costs))
    objective, data, theta = _fit_worth(points, unique, float(worths[best]))
    law = data.to_surface(theta)
    level, term_n, term_d = surface_values(theta[None, :], data)
    return RepeatedFit(
        values=dict(zip(NAMES, (law.E, law.A, law.B, law.alpha, law.beta, float(worths[best])), strict=True)),
        draws=_draw_laws(points, unique, worths, costs, draws=draws, rng=rng),
        residuals=np.log(points.loss) - np.log((level + term_n + term_d)[0]),
        objective=objective,
    )


def _surface_data(points: ScalingPoints, unique: Array, worth: float, *, relative: bool) -> SurfaceData:
    tokens = effective_tokens(points.tokens, unique, worth)
    return SurfaceData.of(points.params, tokens, points.loss, relative=relative)


def _fit_worth(points: ScalingPoints, unique: Array, worth: float) -> tuple[float, SurfaceData, Array]:
    """Return half the sum of squares of the best surface for one R*, its data and its parameters."""
    data = _surface_data(points, unique, worth, relative=True)
    thetas, cost = polish_surface(data, project_grid(data, keep=3))
    return float(cost.min()), data, thetas[int(np.argmin(cost))]


def _draw_laws(
    points: ScalingPoints, unique: Array, worths: Array, costs: Array, *, draws: int, rng: np.random.Generator
) -> Array:
    """Draw R* from its profile likelihood (flat in ln R*), and the surface from its posterior given R*."""
    if not draws:
        return np.empty((0, 6))
    order = np.argsort(worths)
    worths, costs = worths[order], costs[order]
    width = np.gradient(np.log(worths))
    free = max(len(points) - len(NAMES), 1)
    weight = np.exp(-0.5 * free * np.log(costs / costs.min())) * width
    counts = rng.multinomial(draws, weight / weight.sum())
    laws = []
    for worth, count in zip(worths, counts, strict=True):
        data_sets = [_surface_data(points, unique, float(worth), relative=relative) for relative in (True, False)]
        drawn = sample_posterior(data_sets, draws=int(count), rng=rng) if count else None
        for theta in drawn.pick(int(count), rng) if drawn is not None else ():
            law = data_sets[0].to_surface(theta)
            laws.append((law.E, law.A, law.B, law.alpha, law.beta, float(worth)))
    return np.array(laws).reshape(len(laws), len(NAMES))
