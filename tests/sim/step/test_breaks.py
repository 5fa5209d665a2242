"""A step on a broken fabric."""

import math

import pytest

from phalanx.errors import UserError
from phalanx.network.fabric.parse import parse_fabric
from phalanx.sim.step.breaks import CONVERGE_S, REMAP_S, aftermath, broken
from phalanx.sim.step.paths import derived_fabric
from phalanx.sim.step.text import render_break

PLANES = "clos2:32x400G/4p/8"


@pytest.mark.parametrize("kind", ["link", "t1"])
def test_a_lost_way_up_stalls_a_conventional_fabric_for_seconds_and_the_edge_for_microseconds(piped, kind):
    fabric = parse_fabric(PLANES)
    routed, edge = (aftermath(piped, fabric, kind, edge=one) for one in (False, True))
    assert edge.touched > 0
    assert edge.during_s - edge.after_s < 1e-3
    assert routed.touched > 0
    assert routed.during_s - routed.healthy_s >= CONVERGE_S
    assert (routed.stalled, edge.stalled) == (0, 0)
    assert edge.after_s >= edge.healthy_s


@pytest.mark.parametrize("kind", ["nic", "t0"])
def test_a_lost_port_stops_the_conventional_job_and_slows_the_other(piped, kind):
    fabric = parse_fabric(PLANES)
    routed, edge = (aftermath(piped, fabric, kind, edge=one) for one in (False, True))
    assert math.isinf(routed.after_s)
    assert routed.restart_s == piped.reliability.lost_s
    assert edge.share == pytest.approx(0.75, abs=0.02)
    assert edge.restart_s == 0
    assert edge.during_s - edge.after_s == pytest.approx(REMAP_S, abs=0.1)
    page = render_break(kind, [routed, edge])
    assert "job stops" in page
    assert page.splitlines()[1].split() == ["conventional", "edge"]


def test_one_plane_cannot_lose_its_port(piped):
    assert math.isinf(aftermath(piped, parse_fabric("clos2:32x400G/1p/8"), "nic", edge=True).after_s)


def test_one_tier_has_no_uplink_to_break():
    with pytest.raises(UserError) as caught:
        broken(derived_fabric(32, 50e9), "t1")
    assert str(caught.value) == (
        "phalanx sim --break: non-blocking has one tier, and a T1 switch belongs to two or more\n"
        "  use --break nic or --break t0, or name a --fabric of two tiers"
    )
