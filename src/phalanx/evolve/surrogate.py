"""Linear surrogate model of a search problem, fitted to its archive, that ranks children before they are evaluated.

Surrogate-assisted illumination (Gaier, Asteroth and Mouret, arXiv:1702.03713) with ridge regression instead of
Gaussian processes: thousands of children are ranked in milliseconds by the fitness they are expected to add to the
grid.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from phalanx.evolve.archive import Archive
from phalanx.evolve.problem import Floats, SearchAxis

RIDGE = 1e-2
FITTED = 1500  # newest evaluations that the model is fitted to, with all elites
TINY = 1e-12


@dataclass(frozen=True, kw_only=True, slots=True)
class Surrogate:
    """Ridge regression from features to [log fitness, first axis, second axis, probability of being valid]."""

    mean: Floats
    scale: Floats
    weights: Floats  # [feature, target]
    spread: Floats  # [target], standard deviation of the residuals
    axes: tuple[SearchAxis, SearchAxis]

    def predict(self, features: Floats) -> Floats:
        """Predict all targets of candidates, [candidate, target]; fitness and logarithmic axes as their logarithms."""
        table = np.hstack(((features - self.mean) / self.scale, np.ones((len(features), 1))))
        predicted: Floats = table @ self.weights
        return predicted


def _axis_value(axis: SearchAxis, value: float) -> float:
    """Return a value as the regression uses it: its natural logarithm on a logarithmic axis."""
    return math.log(max(value, TINY)) if axis.logarithmic else value


def fit_surrogate(archive: Archive, features: Floats) -> Surrogate | None:
    """Fit the model to an archive; `features` holds one row per entry, in order.

    Returns None with fewer than 30 valid evaluations. Fitness and axes are fitted to the valid entries only, validity
    to all.
    """
    rows = list(range(max(0, len(archive.entries) - FITTED), len(archive.entries)))
    rows = sorted({*rows, *archive.elites.values()})
    valid_rows = [row for row in rows if archive.entries[row].outcome.place is not None]
    if len(valid_rows) < 30:
        return None
    table = features[rows]
    mean, scale = table.mean(axis=0), table.std(axis=0)
    # A feature that never varies would divide by zero.
    scale[scale < TINY] = 1.0
    table = np.hstack(((table - mean) / scale, np.ones((len(rows), 1))))
    outcomes = [archive.entries[row].outcome for row in rows]
    is_valid = np.array([outcome.place is not None and outcome.fitness is not None for outcome in outcomes])
    targets = np.array(
        [
            [
                math.log(max(outcome.fitness, TINY)),
                _axis_value(archive.axes[0], outcome.place[0]),
                _axis_value(archive.axes[1], outcome.place[1]),
            ]
            for outcome in outcomes
            if outcome.place is not None and outcome.fitness is not None
        ]
    )
    valid_weights, valid_spread = _solve(table, is_valid[:, None].astype(np.float64))
    weights, spread = _solve(table[is_valid], targets)
    return Surrogate(
        mean=mean,
        scale=scale,
        weights=np.hstack((weights, valid_weights)),
        spread=np.concatenate((spread, valid_spread)),
        axes=archive.axes,
    )


def _solve(table: Floats, targets: Floats) -> tuple[Floats, Floats]:
    """Solve the ridge regression; return the weights and the standard deviation of each target's residuals."""
    gram = table.T @ table + RIDGE * len(table) * np.eye(table.shape[1]) / 10.0
    weights: Floats = np.asarray(np.linalg.solve(gram, table.T @ targets), dtype=np.float64)
    spread: Floats = np.maximum((targets - table @ weights).std(axis=0), TINY).astype(np.float64)
    return weights, spread


def expected_gain(model: Surrogate, archive: Archive, features: Floats) -> tuple[Floats, list[tuple[int, int]]]:
    """Estimate by how much each candidate would raise the sum of all cells' fitness, and the cell it would fall into.

    Gains are relative to the best fitness of the archive, and weighted with the probability that the candidate is
    valid.
    """
    predicted = model.predict(features)
    best = archive.best()
    best_log_fitness = math.log(max(best.fitness, TINY)) if best else 0.0
    cells = list(zip(_cells(model, predicted, 0), _cells(model, predicted, 1), strict=True))
    elites = [archive.elites.get(cell) for cell in cells]
    held_fitness = np.array([archive.entries[number].fitness if number is not None else 0.0 for number in elites])
    held_log_fitness = np.log(np.maximum(held_fitness, TINY))
    sigma = float(model.spread[0])
    # Expected improvement over the holder in log fitness; an empty cell is worth what the candidate is expected to be.
    gap = (predicted[:, 0] - held_log_fitness) / sigma
    density = np.exp(-0.5 * np.minimum(gap * gap, 100.0)) / math.sqrt(2 * math.pi)
    cumulative = 0.5 * (1.0 + np.vectorize(math.erf, otypes=[np.float64])(gap / math.sqrt(2)))
    improvement = sigma * (gap * cumulative + density)
    level = np.exp(np.clip(predicted[:, 0] - best_log_fitness, -50.0, 1.0))
    gain = np.where(
        held_fitness > 0,
        np.clip(improvement, 0.0, 1.0) * np.exp(np.clip(held_log_fitness - best_log_fitness, -50.0, 0.0)),
        level,
    )
    return gain * np.clip(predicted[:, 3], 0.02, 1.0), cells


def _cells(model: Surrogate, predicted: Floats, which: int) -> Sequence[int]:
    """Return the cell of each candidate's prediction along one axis."""
    axis = model.axes[which]
    edges = np.array([_axis_value(axis, edge) for edge in axis.edges])
    return [int(cell) for cell in np.searchsorted(edges, predicted[:, 1 + which], side="right")]
