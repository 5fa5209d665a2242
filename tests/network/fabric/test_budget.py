"""Failures per day at 131,072 GPUs as published rates have them, and what recovery at the edge saves."""

from __future__ import annotations

import pytest

from phalanx.errors import UserError
from phalanx.network.fabric.budget import GIVE_UP_S, budget, event_s, flap_share, poisson_interval, poisson_spread
from phalanx.network.fabric.parse import parse_fabric

PLANES = parse_fabric("clos2:131072x800G/8p/512")


def test_failures_per_day() -> None:
    one = budget(PLANES)
    assert one.cable_failures_per_day == pytest.approx(4.92, abs=0.01)
    assert one.interruptions_per_day == pytest.approx(5.19, abs=0.01)
    low, high = one.interruptions_interval
    assert low < one.interruptions_per_day < high
    three = budget(parse_fabric("clos3:131072x800G/2p/128"))
    assert three.cable_failures_per_day == pytest.approx(7.37, abs=0.01)


def test_parts_are_all_counted() -> None:
    counts = {one.part: one.count for one in budget(PLANES).parts}
    assert counts == {"NIC-T0 cables": 131072, "T0-T1 cables": 131072, "T0 switches": 4096, "T1 switches": 2048}


def test_restarts_cost_3_6_to_5_4_percent_and_the_edge_next_to_nothing() -> None:
    one = budget(PLANES)
    quick, slow = one.restart
    assert (round(100 * quick.lost_share, 1), round(100 * slow.lost_share, 1)) == (3.6, 5.4)
    assert quick.lost_gpu_hours_per_day == pytest.approx(quick.lost_share * 131072 * 24)
    assert one.edge.lost_share < 0.0005


def test_one_plane_must_restart_for_a_nic_link_whatever_the_edge_does() -> None:
    one = parse_fabric("clos3:65536x800G/1p/64")
    assert event_s(one, 30e-6, restart_s=600) > 600 / 3
    assert event_s(PLANES, 30e-6, restart_s=600) < 10


def test_a_stall_that_outlasts_the_connection_is_a_restart() -> None:
    assert event_s(PLANES, GIVE_UP_S * 1.01, restart_s=600) == 600
    assert event_s(PLANES, GIVE_UP_S * 0.99, restart_s=600) < 60


def test_flaps_cost_in_proportion_to_the_recovery() -> None:
    assert flap_share(PLANES, 1.0) == pytest.approx(1000 * flap_share(PLANES, 1e-3))
    assert flap_share(PLANES, 30e-6) < 1e-6


def test_intervals() -> None:
    assert poisson_interval(0)[0] == 0
    assert poisson_interval(0)[1] == pytest.approx(3.689, abs=1e-3)
    assert poisson_spread(1000) == (938, 1062)


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_times_that_are_none(value: float) -> None:
    with pytest.raises(UserError, match="a recovery of"):
        budget(PLANES, recovery_s=value)
