"""Summaries of many numbers in little memory: histograms, thinned samples, means by the hour."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from phalanx.rules.facts.log_facts import Spread
from phalanx.units import HOUR_S

LOWEST, HIGHEST = 1e-9, 1e12
# Bins are 1 % wide, so the error of a quantile is at most half of that.
_WIDTH = math.log(1.01)
_BINS = 2 + math.ceil(math.log(HIGHEST / LOWEST) / _WIDTH)
HELD = 1024
MOST_SAMPLE = 4096
MOST_HOURS = 100_000  # 11 years


class Histogram:
    """A histogram of numbers from 0 on, in bins of 1 %; negative and non-finite numbers are ignored."""

    __slots__ = ("_bins", "_held", "count", "most", "total")

    def __init__(self) -> None:
        # Allocated with the first number.
        self._bins: np.ndarray[tuple[int], np.dtype[np.int64]] | None = None
        self._held: list[float] = []  # buffer, put into bins many at once
        self.count, self.total, self.most = 0, 0.0, 0.0

    def add(self, values: Sequence[float]) -> None:
        """Add numbers."""
        self._held += values
        if len(self._held) >= HELD:
            self._settle_bins()

    def _settle_bins(self) -> None:
        numbers = np.array(self._held, dtype=np.float64)
        self._held = []
        # False for NaN too.
        numbers = numbers[(numbers >= 0.0) & (numbers <= HIGHEST)]
        if not len(numbers):
            return
        if self._bins is None:
            self._bins = np.zeros(_BINS, dtype=np.int64)
        places = np.log(np.maximum(numbers, LOWEST) / LOWEST) / _WIDTH
        self._bins += np.bincount(1 + places.astype(np.int64), minlength=_BINS)[:_BINS]
        self.count += len(numbers)
        self.total += float(numbers.sum())
        self.most = max(self.most, float(numbers.max()))

    def quantile(self, share: float) -> float | None:
        """Return the smallest number that this share of all numbers does not exceed; None without numbers."""
        self._settle_bins()
        if self._bins is None:
            return None
        place = int(np.searchsorted(np.cumsum(self._bins), share * self.count))
        # The middle of the bin on the logarithmic scale.
        middle = LOWEST * math.exp((place - 0.5) * _WIDTH)
        # Zeros are in the bin of LOWEST.
        return 0.0 if middle <= 2 * LOWEST else min(middle, self.most)

    def spread(self) -> Spread | None:
        """Return count, mean, quantiles and maximum; None without numbers."""
        self._settle_bins()
        if not self.count:
            return None
        p50, p95, p99 = (self.quantile(share) or 0.0 for share in (0.5, 0.95, 0.99))
        return Spread(count=self.count, mean=self.total / self.count, p50=p50, p95=p95, p99=p99, most=self.most)


class SeriesSample:
    """Every n-th number of a series; n doubles when there are too many, so the sample stays evenly spread."""

    __slots__ = ("_count", "_every", "values")

    def __init__(self) -> None:
        self.values: list[float] = []
        self._every, self._count = 1, 0

    def add(self, values: np.ndarray[Any, np.dtype[np.float64]]) -> None:
        """Add the next numbers of the series, in order."""
        # The index of the next number that is kept.
        first = -self._count % self._every
        self._count += len(values)
        self.values += values[first :: self._every].tolist()
        while len(self.values) > MOST_SAMPLE:
            self.values, self._every = self.values[::2], 2 * self._every

    def median(self, begin: float, end: float) -> float | None:
        """Return the median of the part between two shares of the series, such as 0.75 to 1.0."""
        count = len(self.values)
        part_values = self.values[int(begin * count) : max(int(begin * count) + 1, int(end * count))]
        return float(np.median(part_values)) if part_values else None


class Hours:
    """Means by the hour, of numbers with a Unix time."""

    __slots__ = ("_hours",)

    def __init__(self) -> None:
        self._hours: dict[int, list[float]] = {}

    def add(self, times: Sequence[float], values: Iterable[float | None]) -> None:
        """Add numbers; None is skipped."""
        for time_s, value in zip(times, values, strict=True):
            if value is None or not 0.0 <= time_s < 1e11:
                continue
            hour = int(time_s // HOUR_S)
            sum_count = self._hours.get(hour)
            if sum_count is not None:
                sum_count[0] += value
                sum_count[1] += 1
            elif len(self._hours) < MOST_HOURS:
                self._hours[hour] = [value, 1]

    @property
    def mean(self) -> float | None:
        """The mean of all numbers."""
        count = sum(sum_count[1] for sum_count in self._hours.values())
        return sum(sum_count[0] for sum_count in self._hours.values()) / count if count else None

    def lowest(self) -> float | None:
        """Return the lowest hourly mean; the mean of all numbers where they cover fewer than three hours.

        Hours with less than half as many numbers as the fullest are ignored, such as the cut first and last hour of
        a run.
        """
        if len(self._hours) < 3:
            return self.mean
        full = max(count for _, count in self._hours.values())
        return min(total / count for total, count in self._hours.values() if 2 * count >= full)
