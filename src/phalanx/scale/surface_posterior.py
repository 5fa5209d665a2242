"""What the points leave open about the loss surface: draws of (E, A, B, α, β), given normal noise of unknown size.

For each pair of exponents the law is linear in E, A and B, so that these three and the size of the noise are integrated
out in closed form, and a grid of two dimensions holds the whole posterior of α and β. Unlike a bootstrap around the best
fit it stays right where few points leave the law nearly open: where E could as well be 0, the interval says so.

    prior      ln α and ln β normal around ln 0.35 with standard deviation 0.8: 0.07 to 1.7 for 95 %. Published fits lie
               between 0.15 and 0.75, so that only data that say next to nothing are moved by it. E, A, B: not negative
    noise      proportional to the loss or the same everywhere, each weighted by its likelihood

    # G exponents of each kind, P points
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from phalanx.scale.surface import LEAST_EXPONENT, MOST_EXPONENT, Array, SurfaceData

GRID = 72  # exponents of each kind
PRIOR_MIDDLE, PRIOR_SD = math.log(0.35), 0.8
FAINT = 14.0  # nats below the peak: the grid need not reach further
CROWDED = 0.3  # share of the grid that the posterior must span, or it is made finer
MOST_ZOOMS = 14
TRIES = 12  # draws of E, A and B made for each one wanted: negative ones are thrown away


@dataclass(frozen=True, kw_only=True, slots=True)
class ExponentGrid:
    """The posterior of one noise model on a grid of ln α (rows) and ln β (columns)."""

    data: SurfaceData
    log_alpha: Array  # (G,)
    log_beta: Array  # (G,)
    log_density: Array  # (G, G), up to a constant that all noise models of the same points share

    @property
    def log_mass(self) -> float:
        """The integral."""
        cell = (self.log_alpha[1] - self.log_alpha[0]) * (self.log_beta[1] - self.log_beta[0])
        top = float(self.log_density.max())
        return top + math.log(float(np.exp(self.log_density - top).sum()) * cell)


@dataclass(frozen=True, kw_only=True, slots=True)
class SurfacePosterior:
    """Draws of the five logarithms that `SurfaceData.to_surface` takes, and the mean of the exponents' logarithms."""

    draws: Array  # (K, 5)
    log_exponents: tuple[float, float]


def sample_posterior(kinds: Sequence[SurfaceData], *, draws: int, rng: np.random.Generator) -> SurfacePosterior | None:
    """Of the same points under each noise model; None where hardly any law without negative terms is left."""
    grids = [_find_grid(data) for data in kinds]
    masses = np.array([one.log_mass for one in grids])
    shares = np.exp(masses - masses.max())
    shares /= shares.sum()
    mean = np.zeros(2)
    for grid, share in zip(grids, shares, strict=True):
        weight = np.exp(grid.log_density - grid.log_density.max())
        weight /= weight.sum()
        mean += share * np.array([weight.sum(axis=1) @ grid.log_alpha, weight.sum(axis=0) @ grid.log_beta])
    found = [
        _draw_surfaces(grid, round(TRIES * max(draws, 1) * share), rng)
        for grid, share in zip(grids, shares, strict=True)
    ]
    every = np.concatenate(found)
    if len(every) < max(draws, 1):
        return None
    picked = rng.choice(len(every), size=draws, replace=False)
    return SurfacePosterior(draws=every[picked], log_exponents=(float(mean[0]), float(mean[1])))


def _find_grid(data: SurfaceData) -> ExponentGrid:
    """The grid that just holds the posterior: from all exponents there are, narrowed until it fills its grid."""
    widest = (math.log(LEAST_EXPONENT), math.log(MOST_EXPONENT))
    boxes = [widest, widest]
    for _ in range(MOST_ZOOMS):
        axes = [np.linspace(low, high, GRID) for low, high in boxes]
        density = _log_density(data, axes[0], axes[1])
        held = density > density.max() - FAINT
        narrowed, spans = [], []
        for axis, inside in zip(axes, (held.any(axis=1), held.any(axis=0)), strict=True):
            places = np.flatnonzero(inside)
            spans.append((places[-1] - places[0] + 1) / GRID)
            low, high = max(places[0] - 1, 0), min(places[-1] + 1, GRID - 1)
            narrowed.append((float(axis[low]), float(axis[high])))
        if min(spans) > CROWDED or max(high - low for low, high in narrowed) < 1e-7:
            break
        boxes = narrowed
    return ExponentGrid(data=data, log_alpha=axes[0], log_beta=axes[1], log_density=density)


def _normal_equations(data: SurfaceData, log_alpha: Array, log_beta: Array) -> tuple[Array, Array, float]:
    """XᵀX (G, G, 3, 3), Xᵀy (G, G, 3) and yᵀy of the law's three columns 1, N^-α, D^-β over the noise."""
    ones = 1.0 / data.noise
    size = np.exp(-np.exp(log_alpha)[:, None] * data.x) * ones
    data_term = np.exp(-np.exp(log_beta)[:, None] * data.y) * ones
    measured = data.loss * ones
    shape = (len(log_alpha), len(log_beta))
    normal = np.empty((*shape, 3, 3))
    normal[..., 0, 0] = ones @ ones
    normal[..., 0, 1] = normal[..., 1, 0] = (size @ ones)[:, None]
    normal[..., 0, 2] = normal[..., 2, 0] = (data_term @ ones)[None, :]
    normal[..., 1, 1] = (size**2).sum(axis=1)[:, None]
    normal[..., 2, 2] = (data_term**2).sum(axis=1)[None, :]
    normal[..., 1, 2] = normal[..., 2, 1] = size @ data_term.T
    right = np.empty((*shape, 3))
    right[..., 0] = ones @ measured
    right[..., 1] = (size @ measured)[:, None]
    right[..., 2] = (data_term @ measured)[None, :]
    return normal, right, float(measured @ measured)


def _log_density(data: SurfaceData, log_alpha: Array, log_beta: Array) -> Array:
    """ln p(α, β | points): E, A, B and the noise's size integrated out, times the prior."""
    normal, right, total = _normal_equations(data, log_alpha, log_beta)
    ridge = 1e-13 * np.einsum("abii->ab", normal)[..., None, None] * np.eye(3)
    linear = np.linalg.solve(normal + ridge, right[..., None])[..., 0]
    # Cancellation leaves about 1e-13 of yᵀy: below that points are exact.
    rest = np.maximum(total - np.einsum("abi,abi->ab", linear, right), 1e-13 * total)
    free = max(len(data.loss) - 3, 1)
    _, determinant = np.linalg.slogdet(normal + ridge)
    prior = ((log_alpha - PRIOR_MIDDLE)[:, None] ** 2 + (log_beta - PRIOR_MIDDLE)[None, :] ** 2) / (2 * PRIOR_SD**2)
    # A surface with a negative term is none; the best one of a pair may be slightly negative and still leave draws.
    errors = np.sqrt(np.einsum("abii->abi", np.linalg.inv(normal + ridge)) * (rest / free)[..., None])
    absurd = (linear < -4.0 * errors).any(axis=-1)
    density = -0.5 * free * np.log(rest) - 0.5 * determinant - prior
    return np.where(absurd, density.min() - 10.0 * FAINT, density)


def _draw_surfaces(grid: ExponentGrid, count: int, rng: np.random.Generator) -> Array:
    """At most `count` draws of the five logarithms: those whose E, A and B are positive."""
    if count < 1:
        return np.empty((0, 5))
    weight = np.exp(grid.log_density - grid.log_density.max()).ravel()
    cells = rng.choice(len(weight), size=count, p=weight / weight.sum())
    rows, columns = np.unravel_index(cells, grid.log_density.shape)
    steps = [axis[1] - axis[0] for axis in (grid.log_alpha, grid.log_beta)]
    # Within a cell the density is flat: draws need not sit on the grid's lines.
    log_alpha = grid.log_alpha[rows] + steps[0] * (rng.random(count) - 0.5)
    log_beta = grid.log_beta[columns] + steps[1] * (rng.random(count) - 0.5)
    normal, right, total = _normal_equations(grid.data, grid.log_alpha, grid.log_beta)
    normal, right = normal[rows, columns], right[rows, columns]
    normal = normal + 1e-13 * np.einsum("kii->k", normal)[:, None, None] * np.eye(3)
    linear = np.linalg.solve(normal, right[..., None])[..., 0]
    rest = np.maximum(total - np.einsum("ki,ki->k", linear, right), 1e-13 * total)
    free = max(len(grid.data.loss) - 3, 1)
    spread = np.sqrt(rest / rng.chisquare(free, size=count))
    # XᵀX = LLᵀ: L⁻ᵀz has its inverse as covariance.
    lower = np.linalg.cholesky(normal)
    shift = np.linalg.solve(lower.transpose(0, 2, 1), rng.normal(size=(count, 3, 1)))[..., 0]
    linear = linear + spread[:, None] * shift
    kept = (linear > 0.0).all(axis=1)
    return np.column_stack([np.log(linear[kept]), log_alpha[kept], log_beta[kept]])
