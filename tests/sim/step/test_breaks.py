"""A step on a broken fabric."""

import math
from dataclasses import replace

import pytest

from phalanx.errors import UserError
from phalanx.network.fabric.fabric_file import parse_fabric
from phalanx.network.fabric.failure_budget import CONVERGE_S, GIVE_UP_S, REMAP_S, SHIELD_S
from phalanx.sim.step.axis_paths import PathTransport, derived_fabric
from phalanx.sim.step.breaks import (
    ACK_TIMEOUT_S,
    GREY_LOSS,
    OUTAGE_S,
    broken_parts,
    failure_aftermath,
    go_back_n,
    quiet_moments,
)
from phalanx.sim.step.step_report import step_report
from phalanx.sim.step.step_text import break_text

PLANES = "clos2:32x400G/4p/8"


@pytest.mark.parametrize("kind", ["link", "t1"])
def test_a_lost_way_up_stalls_a_conventional_fabric_for_seconds_and_the_edge_for_microseconds(piped, kind):
    fabric = parse_fabric(PLANES)
    routed, edge = (failure_aftermath(piped, fabric, kind, edge=one) for one in (False, True))
    assert edge.touched > 0
    assert edge.during_s - edge.after_s < 1e-3
    assert routed.touched > 0
    assert routed.during_s - routed.healthy_s >= CONVERGE_S
    assert (routed.stalled, edge.stalled) == (0, 0)
    assert edge.after_s >= edge.healthy_s


@pytest.mark.parametrize("kind", ["nic", "t0"])
def test_a_lost_port_stops_the_conventional_job_and_slows_the_other(piped, kind):
    fabric = parse_fabric(PLANES)
    routed, edge = (failure_aftermath(piped, fabric, kind, edge=one) for one in (False, True))
    assert math.isinf(routed.after_s)
    assert routed.restart_s == piped.reliability.lost_s
    assert edge.share == pytest.approx(0.75, abs=0.02)
    assert edge.restart_s == 0
    assert edge.during_s - edge.after_s == pytest.approx(REMAP_S, abs=0.1)
    page = break_text(kind, [routed, edge])
    assert "job stops" in page
    assert page.splitlines()[1].split() == ["conventional", "edge"]


def test_one_plane_cannot_lose_its_port_for_longer_than_connections_wait(piped):
    alone = parse_fabric("clos2:32x400G/1p/8")
    gone = failure_aftermath(piped, alone, "nic", edge=True)
    assert math.isinf(gone.after_s)
    assert gone.minute == 0.0
    flap = failure_aftermath(piped, alone, "nic", edge=True, outage_s=20.0)
    assert (flap.stall_s, flap.after_s, flap.restart_s) == (20.0 + REMAP_S, flap.healthy_s, 0.0)
    assert math.isinf(failure_aftermath(piped, alone, "nic", edge=True, outage_s=GIVE_UP_S).after_s)


def test_a_transceiver_takes_all_planes_and_a_quarter_of_the_minute(piped):
    """A calibration: arXiv:2605.04333 section 5.1 has -25 % for the minute in which four NIC-T0 links flapped."""
    routed, edge = (failure_aftermath(piped, parse_fabric(PLANES), "transceiver", edge=one) for one in (False, True))
    assert edge.minute == pytest.approx(0.75)
    assert (edge.share, edge.restart_s) == (0.0, 0.0)
    assert edge.stalled == edge.touched > 0
    assert routed.stall_s == OUTAGE_S["transceiver"] + CONVERGE_S
    assert routed.minute == pytest.approx(1 - routed.stall_s / 60)


def test_the_minute_of_a_lost_t1_is_hardly_touched_at_the_edge(piped):
    routed, edge = (failure_aftermath(piped, parse_fabric(PLANES), "t1", edge=one) for one in (False, True))
    assert edge.minute > 0.97  # "largely unaffected"
    assert routed.minute == pytest.approx(1 - CONVERGE_S / 60, abs=0.03)
    port = failure_aftermath(piped, parse_fabric(PLANES), "nic", edge=True)
    expected = (60 - REMAP_S) / 60 * port.healthy_s / port.after_s  # slower for the rest of the minute
    assert port.minute == pytest.approx(expected)
    flap = failure_aftermath(piped, parse_fabric(PLANES), "nic", edge=True, outage_s=30.0)
    slow_s = 30.0 - REMAP_S
    assert flap.minute == pytest.approx((slow_s * flap.healthy_s / flap.after_s + 30.0) / 60)


def test_a_link_that_only_loses_packets_is_left_by_senders_and_kept_by_switches(piped):
    fabric = parse_fabric(PLANES)
    routed, edge = (failure_aftermath(piped, fabric, "grey", edge=one) for one in (False, True))
    dead = failure_aftermath(piped, fabric, "link", edge=True)
    assert (edge.after_s, edge.touched) == (dead.after_s, dead.touched)
    assert routed.touched > 0
    assert (routed.stalled, routed.stall_s) == (0, 0.0)
    assert broken_parts(fabric, "grey", edge=False).left == go_back_n(GREY_LOSS, 100)
    # Two sends of each micro-batch end in a packet whose loss nothing behind it tells.
    waits_s = GREY_LOSS * ACK_TIMEOUT_S * 2 * piped.layout.accumulation
    assert routed.after_s >= routed.healthy_s + waits_s
    assert "LOSES 1% OF ITS PACKETS" in break_text("grey", [routed, edge])


def test_how_often_connections_go_quiet(piped, sharded):
    assert quiet_moments(sharded.layout, 12, "shard") == 3 * 12 * sharded.layout.accumulation
    assert quiet_moments(piped.layout, 12, "shard") == 2
    assert quiet_moments(replace(piped.layout, context=4), 12, "context") == 3 * 3 * 3 * piped.layout.accumulation
    assert quiet_moments(piped.layout, 12, "expert") == 4 * 3 * piped.layout.accumulation


def test_a_known_healthy_step_is_not_run_again(piped):
    fabric = parse_fabric(PLANES)
    known = step_report(piped, fabric)
    assert failure_aftermath(piped, fabric, "t1", edge=True, healthy=known) == failure_aftermath(
        piped, fabric, "t1", edge=True
    )


def test_one_tier_has_no_uplink_to_break():
    with pytest.raises(UserError) as caught:
        broken_parts(derived_fabric(32, 50e9), "t1")
    assert str(caught.value) == (
        "phalanx sim --break: the fabric non-blocking has T0 switches alone, and nothing like a T1 switch\n"
        "  use --break nic or --break t0, or name a fabric of two tiers: --fabric clos2:32x400G/2p/16/4:1"
    )


@pytest.mark.parametrize("kind", ["link", "t1", "grey"])
def test_a_broken_fabric_gives_no_flow_more_than_it_had(sharded, kind):
    """The same flows hash alike with and without the failure, and the page has what prices both steps."""
    fabric = parse_fabric("clos2:32x400G/2p/16/4:1")
    for edge in (False, True):
        one = failure_aftermath(sharded, fabric, kind, edge=edge)
        assert one.share <= one.share_before == step_report(sharded, fabric, PathTransport(edge=edge)).slowest_share
        page = break_text(kind, [one]).splitlines()
        told = [line.split()[-1] for line in page if "slowest flow" in line]
        assert told == [f"{one.share_before:.2f}", f"{one.share:.2f}"]
        assert any("waiting for lost ACKs" in line for line in page) == (kind == "grey" and not edge)


def test_infiniband_bypasses_switches_and_not_ports(piped):
    fabric = parse_fabric(PLANES)
    band = replace(fabric, switch=replace(fabric.switch, kind="infiniband"))
    found = {kind: failure_aftermath(piped, band, kind, edge=True) for kind in ("t1", "nic", "grey")}
    assert {one.recovery for one in found.values()} == {"SHIELD"}
    assert found["t1"].stall_s == SHIELD_S
    assert found["t1"].share <= failure_aftermath(piped, fabric, "t1", edge=True).share  # nothing leaves its plane
    assert math.isinf(found["nic"].after_s)
    assert found["grey"].timeouts_s > 0  # a link that is up is used
