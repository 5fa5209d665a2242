"""Many numbers in little memory: histograms, thinned samples, hours."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from phalanx.rules.facts.log_facts import Spread
from phalanx.units import HOUR_S

LOWEST, HIGHEST = 1e-9, 1e12
# Bins are 1 % wide, so a quantile is off by half of that.
_WIDTH = math.log(1.01)
_BINS = 2 + math.ceil(math.log(HIGHEST / LOWEST) / _WIDTH)
HELD = 1024
MOST_SAMPLE = 4096
MOST_HOURS = 100_000  # 11 years


class Histogram:
    """Numbers from 0 on, in bins of 1 %; what is not finite, or negative, is left out."""

    __slots__ = ("_bins", "_held", "count", "most", "total")

    def __init__(self) -> None:
        self._bins: np.ndarray[tuple[int], np.dtype[np.int64]] | None = None  # made with the first number
        self._held: list[float] = []  # to be put into bins, many at once
        self.count, self.total, self.most = 0, 0.0, 0.0

    def add(self, values: Sequence[float]) -> None:
        """Take some in."""
        self._held += values
        if len(self._held) >= HELD:
            self._settle_bins()

    def _settle_bins(self) -> None:
        known = np.array(self._held, dtype=np.float64)
        self._held = []
        known = known[(known >= 0.0) & (known <= HIGHEST)]  # false for NaN too
        if not len(known):
            return
        if self._bins is None:
            self._bins = np.zeros(_BINS, dtype=np.int64)
        places = np.log(np.maximum(known, LOWEST) / LOWEST) / _WIDTH
        self._bins += np.bincount(1 + places.astype(np.int64), minlength=_BINS)[:_BINS]
        self.count += len(known)
        self.total += float(known.sum())
        self.most = max(self.most, float(known.max()))

    def quantile(self, share: float) -> float | None:
        """The smallest number that this share of them does not exceed; None where there is none."""
        self._settle_bins()
        if self._bins is None:
            return None
        place = int(np.searchsorted(np.cumsum(self._bins), share * self.count))
        middle = LOWEST * math.exp((place - 0.5) * _WIDTH)
        return 0.0 if middle <= 2 * LOWEST else min(middle, self.most)

    def spread(self) -> Spread | None:
        """As the rules see it."""
        self._settle_bins()
        if not self.count:
            return None
        p50, p95, p99 = (self.quantile(share) or 0.0 for share in (0.5, 0.95, 0.99))
        return Spread(count=self.count, mean=self.total / self.count, p50=p50, p95=p95, p99=p99, most=self.most)


class SeriesSample:
    """Every n-th of a series, n doubling when there are too many: evenly spread over all of it."""

    __slots__ = ("_count", "_every", "values")

    def __init__(self) -> None:
        self.values: list[float] = []
        self._every, self._count = 1, 0

    def add(self, values: np.ndarray[Any, np.dtype[np.float64]]) -> None:
        """The next ones, in order."""
        first = -self._count % self._every
        self._count += len(values)
        self.values += values[first :: self._every].tolist()
        while len(self.values) > MOST_SAMPLE:
            self.values, self._every = self.values[::2], 2 * self._every

    def median(self, begin: float, end: float) -> float | None:
        """Of the part from share `begin` of the series to share `end`."""
        count = len(self.values)
        some = self.values[int(begin * count) : max(int(begin * count) + 1, int(end * count))]
        return float(np.median(some)) if some else None


class Hours:
    """Means by the hour, of numbers that come with a Unix time."""

    __slots__ = ("_hours",)

    def __init__(self) -> None:
        self._hours: dict[int, list[float]] = {}

    def add(self, times: Sequence[float], values: Iterable[float | None]) -> None:
        """Take some in; None is no number."""
        for time_s, value in zip(times, values, strict=True):
            if value is None or not 0.0 <= time_s < 1e11:
                continue
            hour = int(time_s // HOUR_S)
            held = self._hours.get(hour)
            if held is not None:
                held[0] += value
                held[1] += 1
            elif len(self._hours) < MOST_HOURS:
                self._hours[hour] = [value, 1]

    @property
    def mean(self) -> float | None:
        """Of all."""
        count = sum(held[1] for held in self._hours.values())
        return sum(held[0] for held in self._hours.values()) / count if count else None

    def lowest(self) -> float | None:
        """The lowest mean of an hour that has half as many numbers as the fullest; of all, where that is all there is.

        The first and the last hour of a run are cut: a few numbers of a start are no hour.
        """
        if len(self._hours) < 3:
            return self.mean
        full = max(count for _, count in self._hours.values())
        return min(total / count for total, count in self._hours.values() if 2 * count >= full)
