"""Aggregation of the updates of a round: the weighted mean, and kinds that a minority of liars cannot steer.

    mean           weighted by the tokens that each update was computed from
    clipped-mean   every norm is cut to the median norm, every weight to the median weight, and of each piece of the
                   vector, updates that point away from most others are left out
    trimmed-mean   of each value, the largest and the smallest third are left out
    median         of each value, the middle one
    sign           of each value, the sign of more than half of the updates with their median magnitude, or zero

The last three count every update alike: a weight is a claim. All use elementwise float64 arithmetic in the order of the
peers' ids, so that every member computes the same bits.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from phalanx.network.slow_codecs import GATHERED_CODECS
from phalanx.peers.facts import Vector

AGGREGATIONS = ("mean", "clipped-mean", "trimmed-mean", "median", "sign")
BY_VALUE = ("trimmed-mean", "median", "sign")  # each value is decided by itself
NOISE = 3  # standard deviations of the agreement of updates that have nothing in common
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Factor:
    """The share of an update in the mean, of 1, and what its values are multiplied by before."""

    share: float
    clip: float = 1.0


def mean_factors(kind: str, weights: Mapping[str, float], norms: Mapping[str, float]) -> dict[str, Factor]:
    """Return the factor of each update in the round's mean or clipped mean.

    >>> mean_factors("mean", {"a": 1.0, "b": 3.0}, {"a": 1.0, "b": 9.0})
    {'a': Factor(share=0.25, clip=1.0), 'b': Factor(share=0.75, clip=1.0)}
    >>> mean_factors("clipped-mean", {"a": 1.0, "b": 3.0}, {"a": 1.0, "b": 10.0})
    {'a': Factor(share=0.5, clip=1.0), 'b': Factor(share=0.5, clip=0.1)}
    """
    # fsum: the same bits whatever the version of Python; its own sum has compensated rounding since 3.12.
    if kind == "mean":
        total = math.fsum(weights.values())
        return {peer: Factor(share=weight / total) for peer, weight in weights.items()}
    # Of an even number the lower median: of two, a liar cannot raise it.
    usual_weight = statistics.median_low(weights.values())
    usual_norm = statistics.median_low(norms[peer] for peer in weights)
    limited = {peer: min(weight, usual_weight) for peer, weight in weights.items()}
    total = math.fsum(limited.values())
    return {
        peer: Factor(share=limited[peer] / total, clip=usual_norm / norms[peer] if norms[peer] > usual_norm else 1.0)
        for peer in weights
    }


def aggregate(kind: str, updates: Sequence[Vector], factors: Sequence[Factor]) -> npt.NDArray[np.float64]:
    """Return the aggregate of equally long updates, which every member gives in the same order.

    `factors` are those of `mean_factors`; kinds that decide by value do not look at them.

    >>> three = [np.array([1.0, 5.0]), np.array([2.0, -4.0]), np.array([-90.0, 6.0])]
    >>> factors = [Factor(share=0.25), Factor(share=0.25), Factor(share=0.5)]
    >>> [aggregate(kind, three, factors).tolist() for kind in ("mean", "median", "trimmed-mean", "sign")]
    [[-44.25, 3.25], [1.0, 5.0], [1.0, 5.0], [1.0, 5.0]]
    """
    if kind not in BY_VALUE:
        agree = agreeing(updates) if kind == "clipped-mean" else [True] * len(updates)
        kept_share = math.fsum(factor.share for factor, is_kept in zip(factors, agree, strict=True) if is_kept)
        scale = 1.0 if all(agree) else 1.0 / kept_share
        total = np.zeros(len(updates[0]), dtype=np.float64)
        for update, factor, is_kept in zip(updates, factors, agree, strict=True):
            if is_kept:
                total += (factor.share * factor.clip * scale) * update
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


def agreeing(updates: Sequence[Vector]) -> list[bool]:
    """Return which updates point where most of the others point; all of them where that cannot be seen.

    An update agrees with another in the values that have the same sign in both, less those that have not: whole
    numbers, so that every member decides alike. Its agreement with the middle one of the others is held against what
    is usual; below half of it, it is left out. Colluding liars, a minority, agree only with each other.

    >>> draw = np.random.default_rng(0)
    >>> common = draw.standard_normal(4096)
    >>> honest = [common + draw.standard_normal(4096) for _ in range(4)]
    >>> agreeing([*honest, -3 * honest[0], -3 * honest[0]]), agreeing([*honest, draw.standard_normal(4096)])
    ([True, True, True, True, False, False], [True, True, True, True, False])
    """
    count = len(updates)
    if count < 3:
        return [True] * count
    signs = [np.sign(update).astype(np.int8) for update in updates]
    scores, common = {}, []
    for first, second in itertools.combinations(range(count), 2):
        products = signs[first] * signs[second]
        scores[first, second] = scores[second, first] = int(products.sum(dtype=np.int64))
        common.append(int(np.count_nonzero(products)))
    middle = [
        statistics.median_high(scores[peer, other] for other in range(count) if other != peer) for peer in range(count)
    ]
    usual = statistics.median_low(sorted(middle)[count // TRIMMED :])
    # Updates without anything in common differ from zero by the square root of the values compared.
    if usual <= 0 or usual**2 < NOISE**2 * statistics.median_low(common):
        return [True] * count
    return [2 * score >= usual for score in middle]


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
