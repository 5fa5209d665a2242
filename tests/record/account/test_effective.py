"""Effective training time: cumulative, and over a window that shows what happens now."""

from __future__ import annotations

from pathlib import Path

import pytest
from synthetic import write_run

from phalanx.record.account.ledger import read_ledger, walk_ledger
from phalanx.record.account.time_accounts import MOST_POINTS, EffectiveTrail, from_trail
from phalanx.units import format_seconds


def test_of_a_run(tmp_path: Path) -> None:
    run = write_run(tmp_path, steps=60)
    found = from_trail(walk_ledger(run).trail, points=50)
    t, cumulative, last_hour = found
    assert len(t) == len(cumulative) == len(last_hour) <= 50
    assert list(t) == sorted(t)
    assert cumulative[-1] == pytest.approx(read_ledger(run).effective)
    assert max(last_hour) > cumulative[-1] > min(last_hour)  # it fell and came back
    assert found.window_s == pytest.approx(read_ledger(run).wall_s / 4)  # of a run of less than four hours
    assert found.window == f"the last {format_seconds(found.window_s)}"


def test_the_last_hour_is_an_hour() -> None:
    """Ten hours of which the sixth was lost: the cumulative share hardly shows it, the last hour does."""
    trail = [(0.0, 0.0, 0.0), (18000.0, 18000.0, 18000.0), (21600.0, 21600.0, 18000.0), (36000.0, 36000.0, 32400.0)]
    found = from_trail(trail)
    assert found.window == "the last hour"
    assert found.cumulative == pytest.approx((1.0, 18000 / 21600, 0.9))
    assert found.last_hour == pytest.approx((1.0, 0.0, 1.0))


def test_half_an_hour_into_a_gap() -> None:
    trail = [(0.0, 0.0, 0.0), (9000.0, 9000.0, 9000.0), (10800.0, 10800.0, 9000.0), (20000.0, 20000.0, 18200.0)]
    assert from_trail(trail).last_hour[1] == pytest.approx(0.5)


def test_of_nothing() -> None:
    found = from_trail([])
    assert (found.t, found.cumulative, found.last_hour) == ((), (), ())


def test_a_trail_stays_bounded_and_keeps_its_end() -> None:
    trail = EffectiveTrail()
    for number in range(10_000):
        trail.add((float(number), float(number), 0.5 * number))
    points = trail.close()
    assert len(points) <= MOST_POINTS + 1
    assert (points[0][0], points[-1][0]) == (0.0, 9999.0)
