"""A linear model of a problem, fitted to its archive: which children are worth an evaluation.

Surrogate-assisted illumination (Gaier, Asteroth and Mouret, arXiv:1702.03713) with ridge regression in the place of
Gaussian processes: thousands of children are ranked in milliseconds by what they would add to the grid.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from phalanx.evolve.archive import Archive
from phalanx.evolve.problem import Floats, SearchAxis

RIDGE = 1e-2
FITTED = 1500  # newest evaluations, and all elites, that the model is fitted to
TINY = 1e-12


@dataclass(frozen=True, kw_only=True, slots=True)
class Surrogate:
    """Predicts [fitness, first axis, second axis] and whether there is any, with the spread of its errors."""

    mean: Floats
    scale: Floats
    weights: Floats  # [feature, target]
    spread: Floats  # of each target
    axes: tuple[SearchAxis, SearchAxis]

    def predict(self, features: Floats) -> Floats:
        """[candidate, target], in the scale of `_targets`."""
        table = np.hstack(((features - self.mean) / self.scale, np.ones((len(features), 1))))
        found: Floats = table @ self.weights
        return found


def _axis_value(axis: SearchAxis, value: float) -> float:
    return math.log(max(value, TINY)) if axis.logarithmic else value


def fit_surrogate(archive: Archive, features: Floats) -> Surrogate | None:
    """The model of all evaluations, whose features are given in order; None while there are too few."""
    rows = list(range(max(0, len(archive.entries) - FITTED), len(archive.entries)))
    rows = sorted({*rows, *archive.elites.values()})
    known = [row for row in rows if archive.entries[row].outcome.place is not None]
    if len(known) < 30:
        return None
    table = features[rows]
    mean, scale = table.mean(axis=0), table.std(axis=0)
    scale[scale < TINY] = 1.0
    table = np.hstack(((table - mean) / scale, np.ones((len(rows), 1))))
    outcomes = [archive.entries[row].outcome for row in rows]
    found = np.array([one.place is not None and one.fitness is not None for one in outcomes])
    targets = np.array(
        [
            [
                math.log(max(one.fitness, TINY)),
                _axis_value(archive.axes[0], one.place[0]),
                _axis_value(archive.axes[1], one.place[1]),
            ]
            for one in outcomes
            if one.place is not None and one.fitness is not None
        ]
    )
    valid, spread_valid = _solve(table, found[:, None].astype(np.float64))
    weights, spread = _solve(table[found], targets)
    return Surrogate(
        mean=mean,
        scale=scale,
        weights=np.hstack((weights, valid)),
        spread=np.concatenate((spread, spread_valid)),
        axes=archive.axes,
    )


def _solve(table: Floats, targets: Floats) -> tuple[Floats, Floats]:
    gram = table.T @ table + RIDGE * len(table) * np.eye(table.shape[1]) / 10.0
    weights: Floats = np.asarray(np.linalg.solve(gram, table.T @ targets), dtype=np.float64)
    spread: Floats = np.maximum((targets - table @ weights).std(axis=0), TINY).astype(np.float64)
    return weights, spread


def expected_gain(model: Surrogate, archive: Archive, features: Floats) -> tuple[Floats, list[tuple[int, int]]]:
    """What each candidate would add to the sum of all cells, relative to the best; and the cell it would fall into."""
    predicted = model.predict(features)
    best = archive.best()
    top = math.log(max(best.fitness, TINY)) if best else 0.0
    cells = list(zip(_cells(model, predicted, 0), _cells(model, predicted, 1), strict=True))
    holders = [archive.elites.get(cell) for cell in cells]
    held = np.array([archive.entries[one].fitness if one is not None else 0.0 for one in holders])
    held_log = np.log(np.maximum(held, TINY))
    sigma = float(model.spread[0])
    # Expected improvement over the holder in log fitness; an empty cell is worth what the candidate is expected to be.
    gap = (predicted[:, 0] - held_log) / sigma
    density = np.exp(-0.5 * np.minimum(gap * gap, 100.0)) / math.sqrt(2 * math.pi)
    below = 0.5 * (1.0 + np.vectorize(math.erf, otypes=[np.float64])(gap / math.sqrt(2)))
    improvement = sigma * (gap * below + density)
    level = np.exp(np.clip(predicted[:, 0] - top, -50.0, 1.0))
    gain = np.where(held > 0, np.clip(improvement, 0.0, 1.0) * np.exp(np.clip(held_log - top, -50.0, 0.0)), level)
    return gain * np.clip(predicted[:, 3], 0.02, 1.0), cells


def _cells(model: Surrogate, predicted: Floats, which: int) -> Sequence[int]:
    axis = model.axes[which]
    edges = np.array([_axis_value(axis, edge) for edge in axis.edges])
    return [int(one) for one in np.searchsorted(edges, predicted[:, 1 + which], side="right")]
