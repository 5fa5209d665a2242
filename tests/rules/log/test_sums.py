"""Few numbers for many: as exact as they say."""

from __future__ import annotations

import numpy as np
import pytest

from phalanx.rules.log import sums
from phalanx.rules.log.steps import Jump
from phalanx.rules.log.sums import Histogram, Hours, SeriesSample


def test_quantiles_are_within_two_percent():
    rng = np.random.default_rng(0)
    values = rng.lognormal(0.0, 2.0, 20_000)
    found = Histogram()
    for part in np.array_split(values, 77):
        found.add(part.tolist())
    spread = found.spread()
    for share, value in ((0.5, spread.p50), (0.95, spread.p95), (0.99, spread.p99)):
        assert value == pytest.approx(np.quantile(values, share), rel=0.02)
    assert spread.mean == pytest.approx(values.mean())
    assert spread.most == values.max()
    assert spread.count == 20_000


def test_what_is_no_number_is_left_out():
    found = Histogram()
    found.add([float("nan"), float("inf"), -1.0, 1e300])
    assert found.spread() is None
    assert found.quantile(0.5) is None
    found.add([0.0, 0.0, 5.0])
    assert found.spread().count == 3
    assert found.spread().p50 == 0.0
    assert found.spread().p99 == pytest.approx(5.0, rel=0.01)


def test_a_sample_stays_small_and_evenly_spread(monkeypatch):
    monkeypatch.setattr(sums, "MOST_SAMPLE", 64)
    found = SeriesSample()
    for part in np.array_split(np.arange(10_000.0), 33):
        found.add(part)
    assert 32 <= len(found.values) <= 64
    assert len(set(np.diff(found.values))) == 1
    assert found.median(0.0, 0.25) < 2600
    assert found.median(0.75, 1.0) > 7400


def test_the_lowest_hour_is_not_a_cut_one():
    hours = Hours()
    times = [1_794_700_800.0 + 60 * minute for minute in range(300)]
    hours.add(times, [0.1 if 120 <= minute < 180 else 0.9 for minute in range(300)])
    assert hours.lowest() == pytest.approx(0.1, abs=0.01)
    assert hours.mean == pytest.approx(0.74, abs=0.01)
    hours.add([1_794_800_000.0], [0.0])
    assert hours.lowest() == pytest.approx(0.1, abs=0.01)


def test_a_jump_is_measured_against_what_came_before():
    values = np.full(300, 2.0)
    values[200] = 11.0
    values[250] = 30.0
    whole, parts = Jump("loss"), Jump("loss")
    skipped = [place == 250 for place in range(300)]
    whole.take(values, skipped, "f", range(1, 301))
    for begin in range(0, 300, 7):
        part = slice(begin, begin + 7)
        parts.take(values[part], skipped[part], "f", range(begin + 1, begin + 8))
    assert whole.worst == pytest.approx(5.5) == parts.worst
    assert whole.spot.line == parts.spot.line == 201
