"""The loss surface where data repeats: tokens read again count for less (Muennighoff et al., arXiv:2305.16264).

D' = U + U·R*·(1 - e^(-R/R*)) with U unique tokens read 1 + R times: R* repeats are what repeating can be worth at most.
Their own fit has R* = 15.4 and discounts excess parameters too, by a constant that needs models far above the optimum
of their unique data; that part is left out here. At U ≥ D the law is the plain surface.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from phalanx.errors import mistake
from phalanx.scale.points import ScalingPoints
from phalanx.scale.surface import Array, SurfaceData, polish_surface, project_grid, surface_values
from phalanx.scale.surface_posterior import sample_posterior

NAMES = ("E", "A", "B", "alpha", "beta", "R_D")
LEAST_WORTH, MOST_WORTH = 0.1, 1000.0  # of R*: beyond, repeats are worth nothing, or as much as fresh data
LEAST_REPEATED = 2  # rows
GRID = 41


@dataclass(frozen=True, kw_only=True, slots=True)
class RepeatedFit:
    """The surface with R*, draws of them in the order of NAMES, and residuals of ln loss."""

    values: dict[str, float]
    draws: Array  # (K, 6)
    residuals: Array
    objective: float


def effective_tokens(tokens: Array, unique: Array, worth: float) -> Array:
    """What tokens are worth in fresh ones.

    >>> effective_tokens(np.array([50.0, 100.0, 400.0]), np.array([100.0, 100.0, 100.0]), 15.4).round(1).tolist()
    [50.0, 100.0, 372.6]
    """
    repeats = np.maximum(tokens / unique - 1.0, 0.0)
    return np.where(repeats > 0.0, unique * (1.0 - worth * np.expm1(-repeats / worth)), tokens)


def fit_repeated(points: ScalingPoints, *, draws: int, rng: np.random.Generator) -> RepeatedFit:
    """Fit; raises UserError where the table does not say how much data is unique, or none of it repeats."""
    unique = points.unique_tokens
    if unique is None or not (np.isfinite(unique) & (unique > 0.0)).all():
        fix = "add it: tokens of the data before they repeat, for every row"
        raise mistake(points.source, "has no whole column unique_tokens, which data-constrained needs", fix=fix)
    repeated = int((points.tokens > 1.05 * unique).sum())
    if repeated < LEAST_REPEATED:
        what = f"{repeated} of {len(points)} rows read their data more than once; data-constrained needs more"
        raise mistake(points.source, what, fix="use --method vpnls, or add runs of several epochs")
    worths = np.geomspace(LEAST_WORTH, MOST_WORTH, GRID)
    costs = np.array([_fit_worth(points, unique, one)[0] for one in worths])
    step = np.log(worths[1] / worths[0])
    # Once more, finer, around the best.
    near = worths[int(np.argmin(costs))] * np.exp(np.linspace(-step, step, GRID // 2))
    worths = np.concatenate([worths, near])
    costs = np.concatenate([costs, [_fit_worth(points, unique, one)[0] for one in near]])
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
    """Half the sum of squares of the best surface for one R*, with it."""
    data = _surface_data(points, unique, worth, relative=True)
    found, cost = polish_surface(data, project_grid(data, keep=3))
    return float(cost.min()), data, found[int(np.argmin(cost))]


def _draw_laws(
    points: ScalingPoints, unique: Array, worths: Array, costs: Array, *, draws: int, rng: np.random.Generator
) -> Array:
    """R* by its profile likelihood (flat in ln R*), the surface by its posterior given R*."""
    if not draws:
        return np.empty((0, 6))
    order = np.argsort(worths)
    worths, costs = worths[order], costs[order]
    width = np.gradient(np.log(worths))
    free = max(len(points) - len(NAMES), 1)
    weight = np.exp(-0.5 * free * np.log(costs / costs.min())) * width
    counts = rng.multinomial(draws, weight / weight.sum())
    found = []
    for worth, count in zip(worths, counts, strict=True):
        kinds = [_surface_data(points, unique, float(worth), relative=relative) for relative in (True, False)]
        drawn = sample_posterior(kinds, draws=int(count), rng=rng) if count else None
        for theta in drawn.pick(int(count), rng) if drawn is not None else ():
            law = kinds[0].to_surface(theta)
            found.append((law.E, law.A, law.B, law.alpha, law.beta, float(worth)))
    return np.array(found).reshape(len(found), len(NAMES))
