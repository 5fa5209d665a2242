"""What the points leave open about the loss surface: draws of (E, A, B, α, β), given normal noise of unknown size.

For each pair of exponents the law is linear in E, A and B, so that these three and the size of the noise are integrated
out in closed form, and a grid of two dimensions holds the whole posterior of α and β. A bootstrap around the best fit
is too narrow where few points leave the law nearly open, as where E could as well be 0; this is not.

    prior      Jeffreys': √det(JᵀJ) of the derivatives by all five, the one whose intervals hold about as often as they
               say. With a flat prior for E and ln β those of extrapolated losses held 65 % instead of 80
    noise      proportional to the loss or the same everywhere, each weighted by its likelihood and `CONSTANT_ODDS`
    grid       turned along the posterior: α and β go together so closely that cells along their own axes are wider
               than the ridge. Draws leave the lines of the grid, and are weighted by the density where they land

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
FAINT = 14.0  # nats below the peak: the grid need not reach further
CROWDED = 0.6  # share of the grid that the posterior must span, or it is made finer
MOST_ZOOMS = 14
EXACT = 1e-26  # of the sum of squares: what rounding leaves
# Constant noise, which variable projection was published with, stands until the points speak against it: the odds from
# which Jeffreys calls evidence substantial. Twenty runs of a table decide by far more (public ones for proportional
# noise, by e^3 to e^31); where few points cannot, the law is that of plain least squares.
CONSTANT_ODDS = math.sqrt(10.0)
TRIES = 8  # weighted draws made for each one wanted: negative E, A and B are thrown away
_TINY = np.finfo(float).tiny
_LOWEST, _HIGHEST = math.log(LEAST_EXPONENT), math.log(MOST_EXPONENT)


@dataclass(frozen=True, kw_only=True, slots=True)
class ExponentGrid:
    """The posterior of one noise model on a turned grid of (ln α, ln β)."""

    data: SurfaceData
    pairs: Array  # (K, 2)
    cell: Array  # (2, 2): the two edges of a cell, as columns
    log_density: Array  # (K,), up to a constant that all noise models of the same points share

    @property
    def log_mass(self) -> float:
        """The integral."""
        top = float(self.log_density.max())
        area = abs(float(np.linalg.det(self.cell)))
        return top + math.log(float(np.exp(self.log_density - top).sum()) * max(area, _TINY))


@dataclass(frozen=True, kw_only=True, slots=True)
class ProjectedLaws:
    """Least squares of E, A and B at pairs of exponents."""

    linear: Array  # (K, 3): E, A and B
    inverse: Array  # (K, 3, 3): R⁻¹ of X = QR, so that (XᵀX)⁻¹ = R⁻¹R⁻ᵀ
    rest: Array  # (K,): sum of squares that is left
    log_bent: Array  # (K,): ln det of what the derivatives by ln α and ln β leave outside of X, for A = B = 1
    free: int  # points less three

    @property
    def errors(self) -> Array:
        """Standard errors of E, A and B."""
        return np.asarray(np.sqrt((self.inverse**2).sum(axis=-1) * (self.rest / self.free)[:, None]))

    @property
    def terms(self) -> Array:
        """A and B (K, 2), or their errors where these are larger: the A·B of Jeffreys' prior that the grid takes."""
        return np.asarray(np.maximum(np.maximum(self.linear, self.errors), _TINY)[:, 1:])

    @property
    def log_density(self) -> Array:
        """ln p(α, β | points): E, A, B and the noise's size integrated out, times the prior."""
        density = -0.5 * self.free * np.log(self.rest) + 0.5 * self.log_bent + np.log(self.terms).sum(axis=-1)
        # A surface with a negative term is none; where the best of a pair is slightly negative there are still draws.
        return np.asarray(np.where((self.linear < -4.0 * self.errors).any(axis=-1), -np.inf, density))


@dataclass(frozen=True, kw_only=True, slots=True)
class PosteriorDraws:
    """Draws of the logarithms that `SurfaceData.to_surface` takes, each with its weight."""

    theta: Array  # (K, 5)
    weight: Array  # (K,)

    def pick(self, count: int, rng: np.random.Generator) -> Array:
        """So many draws that count alike."""
        return np.asarray(self.theta[_pick_evenly(self.weight, count, rng)])


def sample_posterior(kinds: Sequence[SurfaceData], *, draws: int, rng: np.random.Generator) -> PosteriorDraws | None:
    """At most `TRIES` weighted draws for each of the `draws` wanted, of the same points under each noise model.

    None where hardly any law without negative terms is left.
    """
    grids = [_find_grid(data) for data in kinds]
    masses = np.array([one.log_mass + one.data.log_odds for one in grids])
    shares = np.exp(masses - masses.max())
    counts = np.round(TRIES * draws * shares / shares.sum()).astype(int)
    made = [_draw_surfaces(grid, int(count), rng) for grid, count in zip(grids, counts, strict=True)]
    every, weight = np.concatenate([one[0] for one in made]), np.concatenate([one[1] for one in made])
    if len(every) < draws or not weight.sum() > 0.0:
        return None
    return PosteriorDraws(theta=every, weight=weight)


def _pick_evenly(weight: Array, count: int, rng: np.random.Generator) -> NDArray[np.intp]:
    """Rows in proportion to their weight, at even distances along the sum: less noisy than independent picks."""
    total = np.cumsum(weight)
    places = (np.arange(count) + rng.random()) / count * total[-1]
    return np.asarray(np.minimum(np.searchsorted(total, places, side="right"), len(weight) - 1))


def _find_grid(data: SurfaceData) -> ExponentGrid:
    """The grid that just holds the posterior: from all exponents there are, turned and narrowed until it fills it."""
    origin = np.full(2, 0.5 * (_LOWEST + _HIGHEST))
    axes = np.eye(2) * 0.5 * (_HIGHEST - _LOWEST)
    line = np.linspace(-1.0, 1.0, GRID)
    places = np.stack([one.ravel() for one in np.meshgrid(line, line)], axis=1)
    for zoom in range(MOST_ZOOMS):
        pairs = origin + places @ axes.T
        density = _log_density(data, pairs)
        held = density > density.max() - FAINT
        cell = axes * (line[1] - line[0])
        spans = np.ptp(places[held], axis=0) / 2.0
        if (spans.min() > CROWDED and zoom) or np.abs(cell).max() < 1e-9 or not np.isfinite(density.max()):
            break
        weight = np.exp(np.where(held, density - density.max(), -np.inf))
        middle = weight @ pairs / weight.sum()
        # A floor of a cell's own size: a posterior within one cell has no direction yet.
        spread = ((pairs - middle) * weight[:, None]).T @ (pairs - middle) / weight.sum() + cell @ cell.T
        _, directions = np.linalg.eigh(spread)
        along = (pairs[held] - origin) @ directions
        # Beyond the outermost pairs that are held the posterior may reach by one cell.
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
    """X are the law's columns 1, N^-α, D^-β over the noise: made orthogonal one after the other, which keeps digits
    where they are nearly the same.
    """
    alpha, beta = np.exp(pairs[:, :1]), np.exp(pairs[:, 1:])
    ones = 1.0 / data.noise
    size, tokens = np.exp(-alpha * data.x) * ones, np.exp(-beta * data.y) * ones
    measured = np.broadcast_to(data.loss * ones, size.shape)
    bent_size, bent_tokens = -alpha * data.x * size, -beta * data.y * tokens

    def without(column: Array, unit: Array) -> tuple[Array, Array]:
        """What of a column stands across a unit vector, and its part along it (K,)."""
        part = np.einsum("kp,kp->k", column, unit)
        return column - part[:, None] * unit, part

    count = len(pairs)
    upper = np.zeros((count, 3, 3))
    parts = np.empty((count, 3))
    columns = [np.broadcast_to(ones, size.shape), size, tokens]
    others = [measured, bent_size, bent_tokens]
    for row in range(3):
        length = np.sqrt(np.maximum(np.einsum("kp,kp->k", columns[row], columns[row]), _TINY))
        unit = columns[row] / length[:, None]
        upper[:, row, row] = length
        for column in range(row + 1, 3):
            columns[column], upper[:, row, column] = without(columns[column], unit)
        others[0], parts[:, row] = without(others[0], unit)
        others[1:] = [without(one, unit)[0] for one in others[1:]]
    left, first, second = others
    gram = [np.einsum("kp,kp->k", one, other) for one, other in ((first, first), (first, second), (second, second))]
    inverse = np.zeros((count, 3, 3))
    for row in range(3):
        inverse[:, row, row] = 1.0 / upper[:, row, row]
    inverse[:, 0, 1] = -upper[:, 0, 1] * inverse[:, 0, 0] * inverse[:, 1, 1]
    inverse[:, 1, 2] = -upper[:, 1, 2] * inverse[:, 1, 1] * inverse[:, 2, 2]
    inverse[:, 0, 2] = -inverse[:, 0, 0] * (upper[:, 0, 1] * inverse[:, 1, 2] + upper[:, 0, 2] * inverse[:, 2, 2])
    total = float(((data.loss * ones) ** 2).sum())
    return ProjectedLaws(
        linear=np.einsum("kij,kj->ki", inverse, parts),
        inverse=inverse,
        rest=np.maximum(np.einsum("kp,kp->k", left, left), EXACT * total) + data.stray_squares,
        log_bent=np.log(np.maximum(gram[0] * gram[2] - gram[1] ** 2, _TINY)),
        free=max(len(data.loss) + data.strays - 3, 1),
    )


def _draw_surfaces(grid: ExponentGrid, count: int, rng: np.random.Generator) -> tuple[Array, Array]:
    """At most `count` draws of the five logarithms, those whose E, A and B are positive, and their weights."""
    nothing = np.empty((0, 5)), np.empty(0)
    if count < 1:
        return nothing
    picked = _pick_evenly(np.exp(grid.log_density - grid.log_density.max()), count, rng)
    pairs = grid.pairs[picked] + (rng.random((count, 2)) - 0.5) @ grid.cell.T
    inside = ((pairs >= _LOWEST) & (pairs <= _HIGHEST)).all(axis=1)
    pairs, picked = pairs[inside], picked[inside]
    if not len(pairs):
        return nothing
    found = _project_laws(grid.data, pairs)
    spread = np.sqrt(found.rest / rng.chisquare(found.free, size=len(pairs)))
    linear = found.linear + spread[:, None] * np.einsum("kij,kj->ki", found.inverse, rng.normal(size=(len(pairs), 3)))
    # The cell was picked by the density in its middle, and the grid took A·B of the best surface of each pair into the
    # prior: draws are weighted by what holds for them.
    with np.errstate(invalid="ignore"):
        weight = np.exp(found.log_density - grid.log_density[picked]) * (linear[:, 1:] / found.terms).prod(axis=1)
    kept = (linear > 0.0).all(axis=1) & np.isfinite(weight)
    return np.column_stack([np.log(linear[kept]), pairs[kept]]), weight[kept]
