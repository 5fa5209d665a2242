"""Throughput over time: bits delivered per interval, with means and a short series."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from phalanx.io.tables import sparkline
from phalanx.sim.fabric_links import Floats

POINTS = 200  # of a series in JSON


@dataclass(frozen=True, kw_only=True, slots=True)
class Course:
    """Consecutive time intervals from 0 on, and the bits delivered in each."""

    end_s: Floats
    bits: Floats

    @property
    def over_s(self) -> float:
        """The end of the last interval, in seconds."""
        return float(self.end_s[-1]) if len(self.end_s) else 0.0

    def gbps(self, begin_s: float, end_s: float) -> float | None:
        """Return the mean rate between two times, up to the end of the series; None after it."""
        end_s = min(end_s, self.over_s)
        if end_s <= begin_s:
            return None
        return float(self._delivered_bits(end_s) - self._delivered_bits(begin_s)) / (end_s - begin_s) / 1e9

    def series(self, points: int = POINTS) -> list[dict[str, float]]:
        """Return means over equal numbers of neighbouring intervals, at most `points` of them."""
        if not len(self.end_s):
            return []
        last = np.unique(np.linspace(0, len(self.end_s) - 1, min(points, len(self.end_s))).astype(int))
        ends, cumulated_bits = self.end_s[last], np.cumsum(self.bits)[last]
        rates = np.diff(cumulated_bits, prepend=0.0) / np.maximum(np.diff(ends, prepend=0.0), 1e-12) / 1e9
        return [{"until_s": float(t), "gbps": float(g)} for t, g in zip(ends, rates, strict=True)]

    def bars(self, width: int = 24) -> str:
        """Return a line of bars for equal intervals; the highest rate has a full bar."""
        if not self.over_s:
            return ""
        grid = np.linspace(0.0, self.over_s, width + 1)
        rates = np.diff(self._delivered_bits(grid))
        return sparkline(rates.tolist(), width, from_zero=True)

    def _delivered_bits(self, time_s: Floats | float) -> Floats:
        ends, cumulated_bits = np.concatenate([[0.0], self.end_s]), np.concatenate([[0.0], np.cumsum(self.bits)])
        return np.asarray(np.interp(time_s, ends, cumulated_bits))
