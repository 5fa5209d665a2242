"""Throughput over time."""

from __future__ import annotations

import numpy as np
import pytest

from phalanx.sim.course import Course

COURSE = Course(end_s=np.array([1.0, 2.0, 4.0]), bits=np.array([8e9, 0.0, 8e9]))


def test_means_between_times() -> None:
    assert COURSE.gbps(0.0, 1.0) == pytest.approx(8.0)
    assert COURSE.gbps(0.5, 1.5) == pytest.approx(4.0)
    assert COURSE.gbps(3.0, 99.0) == pytest.approx(4.0)
    assert COURSE.gbps(4.0, 5.0) is None


def test_bars_are_of_equal_time_and_the_highest_is_full() -> None:
    assert COURSE.bars(4) == "█▁▄▄"
    assert Course(end_s=np.empty(0), bits=np.empty(0)).bars() == ""


def test_a_series_keeps_the_sum() -> None:
    many = Course(end_s=np.arange(1.0, 1001.0), bits=np.arange(1000.0))
    series = many.series(50)
    assert len(series) == 50
    widths = np.diff([0.0, *(one["until_s"] for one in series)])
    assert sum(width * one["gbps"] for width, one in zip(widths, series, strict=True)) == pytest.approx(499500e-9)
    assert COURSE.series()[1] == {"until_s": 2.0, "gbps": 0.0}
