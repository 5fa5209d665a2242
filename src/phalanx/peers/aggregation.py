"""Aggregation of a round's updates: the weighted mean, and kinds that a minority of liars cannot steer.

    mean           weighted by the tokens that each update was computed from
    clipped-mean   every norm is limited to the median norm, every weight to the median weight; in each segment of
                   the vector, updates that point away from most others are left out
    trimmed-mean   for each value, the largest and the smallest third of the updates are left out
    median         for each value, the middle one of the updates
    sign           for each value, the sign of more than half of the updates with their median magnitude, or zero

The last three give every update the same weight, as a weight is only a claim. All use elementwise float64 arithmetic
in the order of the peers' ids, so that every member computes the same bits.
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
BY_VALUE = ("trimmed-mean", "median", "sign")  # each value is aggregated independently
NOISE = 3  # standard deviations of the agreement of unrelated updates
# A third of the updates is left out at either end: as many liars as the others can outvote.
TRIMMED = 3


def choose_aggregation(wanted: str, *, codec: str, counted: int) -> tuple[str, str]:
    """Return the aggregation for a round of `counted` updates, and the reason if it is not the `wanted` one.

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
    """An update's share of the mean, of 1, and the factor that its values are multiplied by first."""

    share: float
    clip: float = 1.0


def mean_factors(kind: str, weights: Mapping[str, float], norms: Mapping[str, float]) -> dict[str, Factor]:
    """Return the factor of each update in the round's mean or clipped mean.

    >>> mean_factors("mean", {"a": 1.0, "b": 3.0}, {"a": 1.0, "b": 9.0})
    {'a': Factor(share=0.25, clip=1.0), 'b': Factor(share=0.75, clip=1.0)}
    >>> mean_factors("clipped-mean", {"a": 1.0, "b": 3.0}, {"a": 1.0, "b": 10.0})
    {'a': Factor(share=0.5, clip=1.0), 'b': Factor(share=0.5, clip=0.1)}
    """
    # fsum gives the same bits in every Python version; the built-in sum compensates rounding since 3.12.
    if kind == "mean":
        total = math.fsum(weights.values())
        return {peer: Factor(share=weight / total) for peer, weight in weights.items()}
    # The lower median of an even number: with two updates, a liar cannot raise it.
    usual_weight = statistics.median_low(weights.values())
    usual_norm = statistics.median_low(norms[peer] for peer in weights)
    limited = {peer: min(weight, usual_weight) for peer, weight in weights.items()}
    total = math.fsum(limited.values())
    return {
        peer: Factor(share=limited[peer] / total, clip=usual_norm / norms[peer] if norms[peer] > usual_norm else 1.0)
        for peer in weights
    }


def aggregate(kind: str, updates: Sequence[Vector], factors: Sequence[Factor]) -> npt.NDArray[np.float64]:
    """Return the aggregate of equally long updates, which every member passes in the same order.

    `factors` are those of `mean_factors`; kinds that decide by value ignore them.

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
    # From here on each value is decided by itself. With two reversed updates of six it lies at the low end of the
    # honest values, which cost 0.10 to 0.15 nats (decision 0070).
    if kind == "sign":
        return _elected(table)
    table.sort(axis=0)
    count = len(table)
    trimmed = count // TRIMMED if kind == "trimmed-mean" else (count - 1) // 2
    middle_rows = table[trimmed : count - trimmed]
    total = np.zeros(table.shape[1], dtype=np.float64)
    # Row by row, because the order of NumPy's sum may differ between machines.
    for row in middle_rows:
        total += row
    total /= len(middle_rows)
    return total


def agreeing(updates: Sequence[Vector]) -> list[bool]:
    """Return, for each update, if it points where most of the others point; all True if that cannot be seen.

    The agreement of two updates is the number of values with the same sign in both, less those with opposite signs: a
    whole number, so that every member decides alike. An update whose median agreement with the others is below half of
    the usual one is left out. Colluding liars, being a minority, agree only with each other.

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
        statistics.median_high(scores[peer, other_peer] for other_peer in range(count) if other_peer != peer)
        for peer in range(count)
    ]
    usual = statistics.median_low(sorted(middle)[count // TRIMMED :])
    # The agreement of unrelated updates has a standard deviation of the square root of the values compared.
    if usual <= 0 or usual**2 < NOISE**2 * statistics.median_low(common):
        return [True] * count
    return [2 * score >= usual for score in middle]


def _elected(table: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the sign of more than half of each column, times the lower median of its magnitudes there, or zero."""
    half = len(table) / 2
    signs = (np.count_nonzero(table > 0, axis=0) > half).astype(np.float64)
    signs -= np.count_nonzero(table < 0, axis=0) > half
    agree = (np.sign(table) == signs) & (signs != 0)
    magnitudes = np.sort(np.where(agree, np.abs(table), np.inf), axis=0)
    middle = np.maximum(np.count_nonzero(agree, axis=0) - 1, 0) // 2
    chosen = np.take_along_axis(magnitudes, middle[None], axis=0)[0]
    elected: npt.NDArray[np.float64] = np.where(signs != 0, signs * np.where(np.isfinite(chosen), chosen, 0.0), 0.0)
    return elected
