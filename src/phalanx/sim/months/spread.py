"""A number over many runs: how sure its mean is, and how far runs lie apart."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

CONFIDENCE = 0.90  # of a mean
RUNS = 0.80  # that the range of runs holds: the same share as of sites (hardware.failures.COVERAGE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """A number over all runs: its mean with a 90 % confidence interval, and the range that 80 % of runs fall in."""

    mean: float
    low: float
    high: float
    run_low: float
    run_high: float


def spread(values: Sequence[float], *, least: float = 0.0, most: float = math.inf) -> Spread:
    """Student's interval of the mean, within `least` and `most`, and the middle 80 % of the values.

    One value says nothing about how sure it is: its interval is NaN.

    >>> one = spread([1.0, 2.0, 3.0])
    >>> one.mean, round(one.high - one.mean, 2), round(one.run_low, 2)
    (2.0, 1.69, 1.2)
    """
    numbers = np.asarray(values, dtype=float)
    mean, low, high = float(numbers.mean()), math.nan, math.nan
    if len(numbers) > 1:
        from scipy.special import stdtrit  # Student's quantile; scipy.stats would take a second to import

        half = float(stdtrit(len(numbers) - 1, (1 + CONFIDENCE) / 2) * numbers.std(ddof=1) / math.sqrt(len(numbers)))
        low, high = max(least, mean - half), min(most, mean + half)
    run_low, run_high = np.quantile(numbers, [(1 - RUNS) / 2, (1 + RUNS) / 2])
    return Spread(mean=mean, low=low, high=high, run_low=float(run_low), run_high=float(run_high))
