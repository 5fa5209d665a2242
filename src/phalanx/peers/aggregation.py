"""Aggregation of the updates of a round: the weighted mean, and kinds that a minority of liars cannot steer.

    mean           weighted by the tokens that each update was computed from
    clipped-mean   every norm is cut to the median norm, and every weight to the median weight
    trimmed-mean   of each value, the largest and the smallest third are left out
    median         of each value, the middle one
    sign           of each value, the sign of more than half of the updates with their median magnitude, or zero

The last three count every update alike: a weight is a claim. All use elementwise float64 arithmetic in the order of the
peers' ids, so that every member computes the same bits.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from phalanx.network.slow_codecs import GATHERED_CODECS
from phalanx.peers.facts import Vector

AGGREGATIONS = ("mean", "clipped-mean", "trimmed-mean", "median", "sign")
BY_VALUE = ("trimmed-mean", "median", "sign")  # each value is decided by itself
TRIMMED = 3  # one of so many updates is left out at either end: as many liars as the others can outvote


def choose_aggregation(wanted: str, *, codec: str, counted: int) -> tuple[str, str]:
    """Return the aggregation of a round of `counted` updates, and the reason where it is not the one `wanted`.

    >>> choose_aggregation("median", codec="fp32", counted=3)
    ('median', '')
    >>> choose_aggregation("sign", codec="int8", counted=2)
    ('clipped-mean', 'two updates have no majority: "sign" becomes "clipped-mean"')
    """
    if wanted not in BY_VALUE:
        return wanted, ""
    if codec in GATHERED_CODECS:
        return "clipped-mean", f'peers send different values in {codec}: "{wanted}" becomes "clipped-mean"'
    if counted == 2:
        return "clipped-mean", f'two updates have no majority: "{wanted}" becomes "clipped-mean"'
    return wanted, ""


def mean_factors(kind: str, weights: Mapping[str, float], norms: Mapping[str, float]) -> dict[str, float]:
    """Return the factor of each update in the sum that is the round's mean or clipped mean.

    >>> mean_factors("mean", {"a": 1.0, "b": 3.0}, {"a": 1.0, "b": 9.0})
    {'a': 0.25, 'b': 0.75}
    >>> mean_factors("clipped-mean", {"a": 1.0, "b": 3.0}, {"a": 1.0, "b": 10.0})
    {'a': 0.5, 'b': 0.05}
    """
    if kind == "mean":
        total = sum(weights.values())
        return {peer: weight / total for peer, weight in weights.items()}
    # Of an even number the lower median: of two, a liar cannot raise it.
    usual_weight = statistics.median_low(weights.values())
    usual_norm = statistics.median_low(norms[peer] for peer in weights)
    limited = {peer: min(weight, usual_weight) for peer, weight in weights.items()}
    total = sum(limited.values())
    return {
        peer: limited[peer] / total * (usual_norm / norms[peer] if norms[peer] > usual_norm else 1.0)
        for peer in weights
    }


def aggregate(kind: str, updates: Sequence[Vector], factors: Sequence[float]) -> npt.NDArray[np.float64]:
    """Return the aggregate of equally long updates, which every member gives in the same order.

    `factors` are those of `mean_factors`; kinds that decide by value do not look at them.

    >>> three = [np.array([1.0, 5.0]), np.array([2.0, -4.0]), np.array([-90.0, 6.0])]
    >>> [aggregate(kind, three, [0.25, 0.25, 0.5]).tolist() for kind in ("mean", "median", "trimmed-mean", "sign")]
    [[-44.25, 3.25], [1.0, 5.0], [1.0, 5.0], [1.0, 5.0]]
    """
    if kind not in BY_VALUE:
        total = np.zeros(len(updates[0]), dtype=np.float64)
        for update, factor in zip(updates, factors, strict=True):
            total += factor * update
        return total
    table = np.stack([update.astype(np.float64, copy=False) for update in updates])
    if kind == "sign":
        return _elected(table)
    table.sort(axis=0)
    count = len(table)
    trimmed = count // TRIMMED if kind == "trimmed-mean" else (count - 1) // 2
    kept = table[trimmed : count - trimmed]
    total = np.zeros(table.shape[1], dtype=np.float64)
    for row in kept:  # row by row: NumPy's own sum may take another order on another machine
        total += row
    total /= len(kept)
    return total


def _elected(table: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the sign of more than half of each column with the lower median of its magnitudes there, or zero."""
    half = len(table) / 2
    signs = (np.count_nonzero(table > 0, axis=0) > half).astype(np.float64)
    signs -= np.count_nonzero(table < 0, axis=0) > half
    agree = (np.sign(table) == signs) & (signs != 0)
    magnitudes = np.sort(np.where(agree, np.abs(table), np.inf), axis=0)
    middle = np.maximum(np.count_nonzero(agree, axis=0) - 1, 0) // 2
    chosen = np.take_along_axis(magnitudes, middle[None], axis=0)[0]
    elected: npt.NDArray[np.float64] = np.where(signs != 0, signs * np.where(np.isfinite(chosen), chosen, 0.0), 0.0)
    return elected
