"""What the points leave open about the loss surface: draws of (E, A, B, α, β), given normal noise of unknown size.

For each pair of exponents the law is linear in E, A and B, so that these three and the size of the noise are integrated
out in closed form, and a grid of two dimensions holds the whole posterior of α and β. A bootstrap around the best fit
is too narrow where few points leave the law nearly open, as where E could as well be 0; this is not.

    prior      Jeffreys': √det(JᵀJ) of the derivatives by all five, the one whose intervals hold about as often as they
               say. With a flat prior for E and ln β those of extrapolated losses held 65 % instead of 80
    noise      proportional to the loss or the same everywhere, each weighted by its likelihood

    # G exponents of each kind, P points
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from phalanx.scale.surface import LEAST_EXPONENT, MOST_EXPONENT, Array, SurfaceData

GRID = 56  # exponents of each kind
FAINT = 14.0  # nats below the peak: the grid need not reach further
CROWDED = 0.3  # share of the grid that the posterior must span, or it is made finer
MOST_ZOOMS = 14
EXACT = 1e-13  # of the sum of squares: what rounding leaves
RIDGE = 1e-13  # of the trace: keeps columns apart that are nearly the same
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


def sample_posterior(kinds: Sequence[SurfaceData], *, draws: int, rng: np.random.Generator) -> Array | None:
    """Draws (K, 5) of the logarithms that `SurfaceData.to_surface` takes, of the same points under each noise model.

    None where hardly any law without negative terms is left.
    """
    grids = [_find_grid(data) for data in kinds]
    masses = np.array([one.log_mass for one in grids])
    shares = np.exp(masses - masses.max())
    counts = np.round(TRIES * draws * shares / shares.sum()).astype(int)
    every = np.concatenate([_draw_surfaces(grid, count, rng) for grid, count in zip(grids, counts, strict=True)])
    return every[rng.choice(len(every), size=draws, replace=False)] if len(every) >= draws else None


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
    """JᵀJ (G, G, 5, 5), Xᵀy (G, G, 3) and yᵀy. X are the law's columns 1, N^-α, D^-β over the noise, J those and their
    derivatives by ln α and ln β, for A = B = 1.
    """
    alpha, beta = np.exp(log_alpha)[:, None], np.exp(log_beta)[:, None]
    ones = 1.0 / data.noise
    of_size, of_data = np.exp(-alpha * data.x) * ones, np.exp(-beta * data.y) * ones
    # Columns of the exponents' grid rows, and of its columns: each pair of them is one product of matrices.
    rows = {1: of_size, 3: -alpha * data.x * of_size}
    columns = {2: of_data, 4: -beta * data.y * of_data}
    measured = data.loss * ones
    normal = np.empty((len(alpha), len(beta), 5, 5))
    right = np.empty((len(alpha), len(beta), 3))
    normal[..., 0, 0], right[..., 0] = ones @ ones, ones @ measured
    right[..., 1], right[..., 2] = (of_size @ measured)[:, None], (of_data @ measured)[None, :]
    for one, values in rows.items():
        normal[..., 0, one] = normal[..., one, 0] = (values @ ones)[:, None]
        for other, more in rows.items():
            normal[..., one, other] = np.einsum("gp,gp->g", values, more)[:, None]
        for other, more in columns.items():
            normal[..., one, other] = normal[..., other, one] = values @ more.T
    for one, values in columns.items():
        normal[..., 0, one] = normal[..., one, 0] = (values @ ones)[None, :]
        for other, more in columns.items():
            normal[..., one, other] = np.einsum("gp,gp->g", values, more)[None, :]
    return normal, right, float(measured @ measured)


def _solve_three(normal: Array, right: Array) -> tuple[Array, Array, Array]:
    """Solutions (…, 3), diagonals of the inverses (…, 3) and ln determinants of symmetric 3x3 systems, by cofactors."""
    normal = normal + RIDGE * np.einsum("...ii->...", normal)[..., None, None] * np.eye(3)
    a, b, c = normal[..., 0, 0], normal[..., 0, 1], normal[..., 0, 2]
    d, e, f = normal[..., 1, 1], normal[..., 1, 2], normal[..., 2, 2]
    aa, ab, ac = d * f - e * e, c * e - b * f, b * e - c * d
    bb, bc, cc = a * f - c * c, b * c - a * e, a * d - b * b
    determinant = np.maximum(a * aa + b * ab + c * ac, np.finfo(float).tiny)
    x, y, z = right[..., 0], right[..., 1], right[..., 2]
    solved = np.stack([aa * x + ab * y + ac * z, ab * x + bb * y + bc * z, ac * x + bc * y + cc * z], axis=-1)
    inverse = np.maximum(np.stack([aa, bb, cc], axis=-1), 0.0)
    return solved / determinant[..., None], inverse / determinant[..., None], np.log(determinant)


def _log_density(data: SurfaceData, log_alpha: Array, log_beta: Array) -> Array:
    """ln p(α, β | points): E, A, B and the noise's size integrated out, times the prior."""
    normal, right, total = _normal_equations(data, log_alpha, log_beta)
    linear, inverse, determinant = _solve_three(normal[..., :3, :3], right)
    # Cancellation leaves about 1e-13 of yᵀy: below that points are exact.
    rest = np.maximum(total - np.einsum("abi,abi->ab", linear, right), EXACT * total)
    free = max(len(data.loss) - 3, 1)
    errors = np.sqrt(inverse * (rest / free)[..., None])
    _, every = np.linalg.slogdet(normal + RIDGE * np.einsum("abii->ab", normal)[..., None, None] * np.eye(5))
    largest = np.maximum(np.maximum(linear, errors), np.finfo(float).tiny)
    terms = np.log(largest[..., 1:]).sum(axis=-1)  # A·B of Jeffreys' prior
    density = -0.5 * free * np.log(rest) - 0.5 * determinant + 0.5 * np.where(np.isfinite(every), every, -700.0) + terms
    # A surface with a negative term is none; where the best of a pair is slightly negative there are still draws.
    return np.asarray(np.where((linear < -4.0 * errors).any(axis=-1), density.min() - 10.0 * FAINT, density))


def _draw_surfaces(grid: ExponentGrid, count: int, rng: np.random.Generator) -> Array:
    """At most `count` draws of the five logarithms: those whose E, A and B are positive, weighted by the prior."""
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
    normal, right = normal[rows, columns, :3, :3], right[rows, columns]
    best, inverse, _ = _solve_three(normal, right)
    rest = np.maximum(total - np.einsum("ki,ki->k", best, right), EXACT * total)
    free = max(len(grid.data.loss) - 3, 1)
    spread = np.sqrt(rest / rng.chisquare(free, size=count))
    # XᵀX = LLᵀ: L⁻ᵀz has its inverse as covariance.
    lower = np.linalg.cholesky(normal + RIDGE * np.einsum("kii->k", normal)[:, None, None] * np.eye(3))
    linear = best + spread[:, None] * np.linalg.solve(lower.transpose(0, 2, 1), rng.normal(size=(count, 3, 1)))[..., 0]
    kept = (linear > 0.0).all(axis=1)
    if not kept.any():
        return np.empty((0, 5))
    # The grid took A·B of the best surface of each pair into the prior: draws are weighted by their own instead.
    usual = np.maximum(np.maximum(best, np.sqrt(inverse * (rest / free)[:, None])), np.finfo(float).tiny)
    prior = (linear[kept, 1:] / usual[kept, 1:]).prod(axis=1)
    found = np.column_stack([np.log(linear[kept]), log_alpha[kept], log_beta[kept]])
    return found[rng.choice(len(found), size=len(found), p=prior / prior.sum())]
