"""Starts at a time and after others, and schedules in which somebody would wait for ever."""

from __future__ import annotations

import numpy as np
import pytest
from packet_fabrics import FAT_TREE, LEAF_SPINE

from phalanx.errors import UserError
from phalanx.sim.packets.packet_run import run_connections
from phalanx.sim.packets.start_times import Schedule
from phalanx.sim.packets.transport import HTSIM, MRC, ROCE
from phalanx.sim.traffic_matrix import make_flows

# Sources fall, so that the engine's own order is another than the caller's.
FOUR = make_flows([3, 2, 1, 0], [12, 13, 14, 15], 2e6)


def schedule(starts: list[float], waits_for: list[int], fires: list[int], needed: list[int]) -> Schedule:
    columns = (np.array(column, dtype=np.int64) for column in (waits_for, fires, needed))
    return Schedule(start_s=np.array(starts), **dict(zip(("waits_for", "fires", "needed"), columns, strict=True)))


def test_a_barrier_waits_for_all_and_a_oneshot_for_one() -> None:
    # The first two fire the barrier 0, which starts the third; its end starts the fourth.
    when = schedule([0, 1e-3, 0, 0], [-1, -1, 0, 1], [0, 0, 1, -1], [2, 1])
    result = run_connections(FAT_TREE, FOUR, transport=HTSIM, schedule=when)
    end_s = result.start_s + result.fct_s
    assert result.start_s[:2] == pytest.approx([0, 1e-3], abs=1e-6)
    assert result.start_s[2] == end_s[1]
    assert result.start_s[3] == end_s[2]
    assert result.fct_s * 1e6 == pytest.approx(176.2, rel=0.002)  # each alone, as if it were the only one
    assert result.delivered == result.packets


def test_a_later_start_shares_only_what_is_left() -> None:
    both = make_flows([0, 1], [8, 8], 2e6)
    together = run_connections(LEAF_SPINE, both, transport=MRC)
    later = run_connections(LEAF_SPINE, both, transport=MRC, schedule=schedule([0, 300e-6], [-1, -1], [-1, -1], []))
    assert later.fct_s.max() < 0.6 * together.fct_s.max()


def test_nothing_is_said_of_what_never_started() -> None:
    late = schedule([0, 1], [-1, -1], [-1, -1], [])
    result = run_connections(FAT_TREE, make_flows([0, 1], [15, 14], 2e6), transport=HTSIM, schedule=late, limit_s=1e-3)
    assert np.isfinite(result.start_s).tolist() == [True, False]
    assert np.isfinite(result.fct_s).tolist() == [True, False]


@pytest.mark.parametrize(
    ("when", "message"),
    [
        (schedule([0] * 4, [-1, -1, 0, 0], [0, -1, -1, -1], [2]), "2 connections wait for ever: trigger 0 hears"),
        (schedule([0] * 4, [-1, -1, 0, 1], [-1, -1, 1, 0], [1, 1]), "they wait for each other"),
        (schedule([0] * 4, [-1, -1, -1, 2], [-1] * 4, [1]), "there are 1, from 0"),
        (schedule([0] * 4, [-1] * 4, [-1] * 4, [0]), "use 1 .oneshot. or more"),
        (schedule([0, 0, 0, -1e-6], [-1] * 4, [-1] * 4, []), "starts are 0 s or later"),
        (schedule([0] * 3, [-1] * 4, [-1] * 4, []), "3 entries of start_s for 4 connections"),
        (schedule([0, 0, 0, 1e9], [-1] * 4, [-1] * 4, []), "16,777,216 slots"),
    ],
)
def test_schedules_that_cannot_end_are_refused(when: Schedule, message: str) -> None:
    with pytest.raises(UserError, match=message):
        run_connections(FAT_TREE, FOUR, transport=MRC, schedule=when)


def test_the_conventional_transport_has_no_schedule() -> None:
    with pytest.raises(UserError, match="starts everything at once"):
        run_connections(FAT_TREE, FOUR, transport=ROCE, schedule=schedule([0] * 4, [-1] * 4, [-1] * 4, []))
