"""Failures per day at 131,072 GPUs as published rates have them, and what recovery at the edge saves."""

from __future__ import annotations

from dataclasses import replace

import pytest

from phalanx.errors import UserError
from phalanx.network.fabric.fabric_file import parse_fabric
from phalanx.network.fabric.failure_budget import (
    CONVERGE_S,
    GIVE_UP_S,
    LINK_BACK_S,
    REMAP_S,
    SHIELD_S,
    SWITCH_BACK_S,
    FailureAnswer,
    bypass_cost,
    failure_budget,
    flap_share,
    part_s,
    poisson_interval,
    poisson_spread,
)

PLANES = parse_fabric("clos2:131072x800G/8p/512")
PARTS = ("NIC-T0 cables", "T0-T1 cables", "T0 switches", "T1 switches")


def test_failures_per_day() -> None:
    one = failure_budget(PLANES)
    assert one.cable_failures_per_day == pytest.approx(4.92, abs=0.01)
    assert one.interruptions_per_day == pytest.approx(5.19, abs=0.01)
    low, high = one.interruptions_interval
    assert low < one.interruptions_per_day < high
    three = failure_budget(parse_fabric("clos3:131072x800G/2p/128"))
    assert three.cable_failures_per_day == pytest.approx(7.37, abs=0.01)


def test_parts_are_all_counted() -> None:
    counts = {one.part: one.count for one in failure_budget(PLANES).parts}
    assert counts == {"NIC-T0 cables": 131072, "T0-T1 cables": 131072, "T0 switches": 4096, "T1 switches": 2048}


def test_restarts_cost_3_6_to_5_4_percent_and_the_edge_next_to_nothing() -> None:
    one = failure_budget(PLANES)
    quick, slow = one.restart
    assert (round(100 * quick.lost_share, 1), round(100 * slow.lost_share, 1)) == (3.6, 5.4)
    assert quick.lost_gpu_hours_per_day == pytest.approx(quick.lost_share * 131072 * 24)
    assert one.edge.lost_share == pytest.approx(0.0009, rel=0.02)


def test_what_a_failed_part_costs_by_hand() -> None:
    busy = FailureAnswer(waits=1.0)  # does nothing but communicate
    cost_s = {part: part_s(PLANES, part, busy) for part in PARTS}
    assert cost_s == pytest.approx(
        {
            "NIC-T0 cables": REMAP_S + LINK_BACK_S / 8,  # until all QPs have moved, then a plane of eight less
            "T0-T1 cables": 30e-6 + LINK_BACK_S / 256 / 8,
            "T0 switches": REMAP_S + SWITCH_BACK_S / 8,
            "T1 switches": 30e-6 + SWITCH_BACK_S / 256 / 8,
        }
    )
    calm = FailureAnswer(waits=0.0)  # never waits: only stalls are left
    assert [part_s(PLANES, part, calm) for part in PARTS] == pytest.approx([REMAP_S, 30e-6, REMAP_S, 30e-6])
    slow = FailureAnswer(waits=0.0, recovery_s=10.0)  # slower than moving QPs
    assert [part_s(PLANES, part, slow) for part in PARTS] == pytest.approx([10.0] * 4)


def test_without_the_edge_a_nic_is_lost_with_its_cable_and_a_message_waits_for_its_plane() -> None:
    routed = FailureAnswer(waits=1.0, recovery_s=CONVERGE_S, edge=False)
    cost_s = [part_s(PLANES, part, routed) for part in PARTS]
    back_s = (LINK_BACK_S / 256, SWITCH_BACK_S / 256)
    assert cost_s == pytest.approx([600, 10 + back_s[0], 600 + SWITCH_BACK_S, 10 + back_s[1]])
    assert failure_budget(PLANES).conventional.lost_share == pytest.approx(0.027, abs=0.001)


def test_infiniband_has_no_senders_that_choose() -> None:
    ethernet = parse_fabric("clos3:8192x800G/4p/128")
    band = replace(ethernet, switch=replace(ethernet.switch, kind="infiniband"))
    answer = FailureAnswer(waits=0.0)
    assert part_s(band, "NIC-T0 cables", answer) == answer.restart_s
    assert part_s(band, "T0 switches", answer) == answer.restart_s + SWITCH_BACK_S
    assert part_s(band, "T0-T1 cables", answer) == pytest.approx(SHIELD_S)
    assert failure_budget(band).edge.lost_share > 5 * failure_budget(ethernet).edge.lost_share


def test_a_day_is_the_sum_of_its_parts() -> None:
    one = failure_budget(PLANES)
    lost_s = sum(part.failures_per_day * part_s(PLANES, part.part, FailureAnswer()) for part in one.parts)
    assert one.edge.lost_share * 86400 == pytest.approx(lost_s)
    assert one.edge.seconds_per_event * one.failures_per_day == pytest.approx(lost_s)


@pytest.mark.parametrize("planes", [1, 8])
def test_more_tiers_never_lose_less(planes: int) -> None:
    fabrics = [parse_fabric(f"clos{tiers}:50000x800G/{planes}p/512") for tiers in (2, 3, 4)]
    narrow = [parse_fabric(f"clos{tiers}:50000x800G/{planes}p/64") for tiers in (3, 4)]
    for rows in (fabrics, narrow):
        for way in ("edge", "edge_lanes", "edge_whole", "conventional"):
            lost = [getattr(failure_budget(one), way).lost_gpu_hours_per_day for one in rows]
            assert lost == sorted(lost)


def test_what_else_a_cable_may_take_is_told() -> None:
    one = failure_budget(PLANES)
    cables, switches = FailureAnswer(), FailureAnswer(cable="lanes")
    assert part_s(PLANES, "NIC-T0 cables", cables) == part_s(PLANES, "NIC-T0 cables", switches)  # more, not dearer
    more = one.edge_lanes.lost_share - one.edge.lost_share
    by_cables_s = sum(
        part.failures_per_day * part_s(PLANES, part.part, cables) for part in one.parts if "cables" in part.part
    )
    assert more * 86400 == pytest.approx(7 * by_cables_s)
    # A NIC without any plane is a restart; a cable above T0 has eight lanes of 256.
    whole = FailureAnswer(cable="whole", waits=1.0)
    assert part_s(PLANES, "NIC-T0 cables", whole) == 600
    assert part_s(PLANES, "T0-T1 cables", whole) == pytest.approx(30e-6 + LINK_BACK_S / 256)
    assert one.edge_whole.lost_share == pytest.approx(0.0174, abs=0.0003)


def test_one_plane_must_restart_for_a_nic_link_whatever_the_edge_does() -> None:
    flat = parse_fabric("clos3:65536x800G/1p/64")
    assert part_s(flat, "NIC-T0 cables", FailureAnswer()) == 600
    assert part_s(PLANES, "NIC-T0 cables", FailureAnswer()) < 60


def test_a_stall_that_outlasts_the_connection_is_a_restart() -> None:
    late, soon = (bypass_cost(PLANES, FailureAnswer(recovery_s=GIVE_UP_S * by)) for by in (1.01, 0.99))
    assert late.seconds_per_event == pytest.approx(600)
    assert soon.seconds_per_event < 60


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
        failure_budget(PLANES, recovery_s=value)
