"""The posterior of the loss surface: draws of (E, A, B, α, β), given normal noise of unknown size.

For each pair of exponents the law is linear in E, A and B, so that these three and the size of the noise are
integrated out in closed form, and a two-dimensional grid holds the whole posterior of α and β. A bootstrap around the
best fit is too narrow where few points leave the law nearly open, for example where E could be 0; the posterior is
not.

    prior      Jeffreys': √det(JᵀJ) of the derivatives by all five parameters, as its intervals hold about as often as
               stated. With a flat prior for E and ln β, 80 % intervals of extrapolated losses held only 65 %
    noise      proportional to the loss or the same everywhere, each weighted by its likelihood and `CONSTANT_ODDS`
    grid       rotated along the posterior: α and β are so strongly correlated that cells along their own axes are
               wider than the ridge. Draws are spread over the cells, and weighted by the density where they land

    # K pairs of exponents, P points, G exponents of each kind
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from phalanx.scale.surface import LEAST_EXPONENT, MOST_EXPONENT, Array, SurfaceData

GRID = 28  # pairs of exponents along each axis
FAINT = 14.0  # nats below the peak beyond which the grid need not reach
# Share of the grid that the posterior must span; below it the grid is made finer.
CROWDED = 0.6
MOST_ZOOMS = 14
EXACT = 1e-26  # of the sum of squares: the rounding error
# Constant noise, with which variable projection was published, is the default until the points contradict it: these
# are the odds from which Jeffreys calls evidence substantial. Twenty runs of a table decide by far more (public ones
# for proportional noise, by e^3 to e^31); where few points cannot, the law is that of plain least squares.
CONSTANT_ODDS = math.sqrt(10.0)
# Weighted draws made for each draw wanted: those with negative E, A or B are discarded.
TRIES = 8
_TINY = np.finfo(float).tiny
_LOWEST, _HIGHEST = math.log(LEAST_EXPONENT), math.log(MOST_EXPONENT)


@dataclass(frozen=True, kw_only=True, slots=True)
class ExponentGrid:
    """The posterior of one noise model on a rotated grid of (ln α, ln β)."""

    data: SurfaceData
    pairs: Array  # (K, 2)
    cell: Array  # (2, 2): the two edges of a cell, as columns
    # (K,), up to a constant that is the same for all noise models of the same points.
    log_density: Array

    @property
    def log_mass(self) -> float:
        """ln of the integral of the density."""
        top = float(self.log_density.max())
        area = abs(float(np.linalg.det(self.cell)))
        return top + math.log(float(np.exp(self.log_density - top).sum()) * max(area, _TINY))


@dataclass(frozen=True, kw_only=True, slots=True)
class ProjectedLaws:
    """Least squares of E, A and B at pairs of exponents."""

    linear: Array  # (K, 3): E, A and B
    inverse: Array  # (K, 3, 3): R⁻¹ of X = QR, so that (XᵀX)⁻¹ = R⁻¹R⁻ᵀ
    rest: Array  # (K,): residual sum of squares
    # (K,): ln det of the derivatives by ln α and ln β, orthogonal to X, for A = B = 1.
    log_bent: Array
    free: int  # number of points less three

    @property
    def errors(self) -> Array:
        """Standard errors of E, A and B."""
        return np.asarray(np.sqrt((self.inverse**2).sum(axis=-1) * (self.rest / self.free)[:, None]))

    @property
    def terms(self) -> Array:
        """A and B (K, 2), or their errors where these are larger: the factor A·B of Jeffreys' prior on the grid."""
        return np.asarray(np.maximum(np.maximum(self.linear, self.errors), _TINY)[:, 1:])

    @property
    def log_density(self) -> Array:
        """ln p(α, β | points): E, A, B and the noise's size integrated out, times the prior."""
        density = -0.5 * self.free * np.log(self.rest) + 0.5 * self.log_bent + np.log(self.terms).sum(axis=-1)
        # A surface with a negative term is invalid; but where the best of a pair is slightly negative, valid draws
        # exist.
        return np.asarray(np.where((self.linear < -4.0 * self.errors).any(axis=-1), -np.inf, density))


@dataclass(frozen=True, kw_only=True, slots=True)
class PosteriorDraws:
    """Draws of the logarithms that `SurfaceData.to_surface` takes, each with its weight."""

    theta: Array  # (K, 5)
    weight: Array  # (K,)

    def pick(self, count: int, rng: np.random.Generator) -> Array:
        """Return `count` draws of equal weight."""
        return np.asarray(self.theta[_pick_evenly(self.weight, count, rng)])


def sample_posterior(kinds: Sequence[SurfaceData], *, draws: int, rng: np.random.Generator) -> PosteriorDraws | None:
    """Draw from the posterior of the same points under each noise model: up to `TRIES` weighted draws per draw wanted.

    None where hardly any law without negative terms remains.
    """
    grids = [_find_grid(data) for data in kinds]
    masses = np.array([grid.log_mass + grid.data.log_odds for grid in grids])
    shares = np.exp(masses - masses.max())
    counts = np.round(TRIES * draws * shares / shares.sum()).astype(int)
    samples = [_draw_surfaces(grid, int(count), rng) for grid, count in zip(grids, counts, strict=True)]
    theta, weight = np.concatenate([sample[0] for sample in samples]), np.concatenate([sample[1] for sample in samples])
    if len(theta) < draws or not weight.sum() > 0.0:
        return None
    return PosteriorDraws(theta=theta, weight=weight)


def _pick_evenly(weight: Array, count: int, rng: np.random.Generator) -> NDArray[np.intp]:
    """Return rows in proportion to their weight, evenly spaced along the cumulated weight, which has less noise."""
    total = np.cumsum(weight)
    positions = (np.arange(count) + rng.random()) / count * total[-1]
    return np.asarray(np.minimum(np.searchsorted(total, positions, side="right"), len(weight) - 1))


def _find_grid(data: SurfaceData) -> ExponentGrid:
    """Return the grid that just covers the posterior: all exponents at first, then rotated and narrowed."""
    origin = np.full(2, 0.5 * (_LOWEST + _HIGHEST))
    axes = np.eye(2) * 0.5 * (_HIGHEST - _LOWEST)
    line = np.linspace(-1.0, 1.0, GRID)
    positions = np.stack([axis.ravel() for axis in np.meshgrid(line, line)], axis=1)
    for zoom in range(MOST_ZOOMS):
        pairs = origin + positions @ axes.T
        density = _log_density(data, pairs)
        is_near_peak = density > density.max() - FAINT
        cell = axes * (line[1] - line[0])
        spans = np.ptp(positions[is_near_peak], axis=0) / 2.0
        if (spans.min() > CROWDED and zoom) or np.abs(cell).max() < 1e-9 or not np.isfinite(density.max()):
            break
        weight = np.exp(np.where(is_near_peak, density - density.max(), -np.inf))
        middle = weight @ pairs / weight.sum()
        # A minimum of one cell: a posterior within a single cell has no direction yet.
        spread = ((pairs - middle) * weight[:, None]).T @ (pairs - middle) / weight.sum() + cell @ cell.T
        _, directions = np.linalg.eigh(spread)
        along = (pairs[is_near_peak] - origin) @ directions
        # The posterior may reach one cell beyond the outermost pairs near the peak.
        margin = np.abs(directions.T @ cell).sum(axis=1)
        low, high = along.min(axis=0) - margin, along.max(axis=0) + margin
        origin = origin + directions @ (0.5 * (low + high))
        axes = directions * (0.5 * (high - low))
    return ExponentGrid(data=data, pairs=pairs, cell=cell, log_density=density)


def _log_density(data: SurfaceData, pairs: Array) -> Array:
    inside = ((pairs >= _LOWEST) & (pairs <= _HIGHEST)).all(axis=1)
    density = np.full(len(pairs), -np.inf)
    if inside.any():
        density[inside] = _project_laws(data, pairs[inside]).log_density
    return density


def _project_laws(data: SurfaceData, pairs: Array) -> ProjectedLaws:
    """Return the least squares at pairs of exponents.

    The columns of X are the law's terms 1, N^-α and D^-β over the noise. They are orthogonalised one after the other,
    which preserves digits where they are nearly equal.
    """
    alpha, beta = np.exp(pairs[:, :1]), np.exp(pairs[:, 1:])
    ones = 1.0 / data.noise
    size, tokens = np.exp(-alpha * data.x) * ones, np.exp(-beta * data.y) * ones
    measured = np.broadcast_to(data.loss * ones, size.shape)
    bent_size, bent_tokens = -alpha * data.x * size, -beta * data.y * tokens

    def without(column: Array, unit: Array) -> tuple[Array, Array]:
        """Return the component of a column orthogonal to a unit vector, and its coefficient along it (K,)."""
        coefficient = np.einsum("kp,kp->k", column, unit)
        return column - coefficient[:, None] * unit, coefficient

    count = len(pairs)
    upper = np.zeros((count, 3, 3))
    coefficients = np.empty((count, 3))
    columns = [np.broadcast_to(ones, size.shape), size, tokens]
    remainders = [measured, bent_size, bent_tokens]
    for row in range(3):
        length = np.sqrt(np.maximum(np.einsum("kp,kp->k", columns[row], columns[row]), _TINY))
        unit = columns[row] / length[:, None]
        upper[:, row, row] = length
        for column in range(row + 1, 3):
            columns[column], upper[:, row, column] = without(columns[column], unit)
        remainders[0], coefficients[:, row] = without(remainders[0], unit)
        remainders[1:] = [without(remainder, unit)[0] for remainder in remainders[1:]]
    residual, first, second = remainders
    gram = [
        np.einsum("kp,kp->k", first_slope, second_slope)
        for first_slope, second_slope in ((first, first), (first, second), (second, second))
    ]
    # The inverse of the upper triangular 3x3 matrices, written out.
    inverse = np.zeros((count, 3, 3))
    for row in range(3):
        inverse[:, row, row] = 1.0 / upper[:, row, row]
    inverse[:, 0, 1] = -upper[:, 0, 1] * inverse[:, 0, 0] * inverse[:, 1, 1]
    inverse[:, 1, 2] = -upper[:, 1, 2] * inverse[:, 1, 1] * inverse[:, 2, 2]
    inverse[:, 0, 2] = -inverse[:, 0, 0] * (upper[:, 0, 1] * inverse[:, 1, 2] + upper[:, 0, 2] * inverse[:, 2, 2])
    total = float(((data.loss * ones) ** 2).sum())
    return ProjectedLaws(
        linear=np.einsum("kij,kj->ki", inverse, coefficients),
        inverse=inverse,
        rest=np.maximum(np.einsum("kp,kp->k", residual, residual), EXACT * total) + data.stray_squares,
        log_bent=np.log(np.maximum(gram[0] * gram[2] - gram[1] ** 2, _TINY)),
        free=max(len(data.loss) + data.strays - 3, 1),
    )


def _draw_surfaces(grid: ExponentGrid, count: int, rng: np.random.Generator) -> tuple[Array, Array]:
    """Return at most `count` draws of the five logarithms, those whose E, A and B are positive, and their weights."""
    no_draws = np.empty((0, 5)), np.empty(0)
    if count < 1:
        return no_draws
    picked = _pick_evenly(np.exp(grid.log_density - grid.log_density.max()), count, rng)
    pairs = grid.pairs[picked] + (rng.random((count, 2)) - 0.5) @ grid.cell.T
    inside = ((pairs >= _LOWEST) & (pairs <= _HIGHEST)).all(axis=1)
    pairs, picked = pairs[inside], picked[inside]
    if not len(pairs):
        return no_draws
    laws = _project_laws(grid.data, pairs)
    spread = np.sqrt(laws.rest / rng.chisquare(laws.free, size=len(pairs)))
    linear = laws.linear + spread[:, None] * np.einsum("kij,kj->ki", laws.inverse, rng.normal(size=(len(pairs), 3)))
    # Cells were picked by the density in their middle, with A·B of the best surface of each pair in the prior: the
    # weights correct both for the actual draws.
    with np.errstate(invalid="ignore"):
        weight = np.exp(laws.log_density - grid.log_density[picked]) * (linear[:, 1:] / laws.terms).prod(axis=1)
    is_valid = (linear > 0.0).all(axis=1) & np.isfinite(weight)
    return np.column_stack([np.log(linear[is_valid]), pairs[is_valid]]), weight[is_valid]
