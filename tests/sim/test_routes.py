"""Links as numbers and paths over them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from phalanx.errors import UserError
from phalanx.network.fabric.fabric_file import parse_fabric
from phalanx.network.fabric.fabric_types import Fabric
from phalanx.sim import fabric_links, routes, traffic_matrix

FABRICS = (
    "clos1:16x100G/1p/64",
    "clos2:64x100G/1p/16",
    "clos2:40x800G/8p/16",  # partly filled: parallel cables to fewer T1s
    "clos2:64x400G/4p/16/8r",
    "clos3:100x100G/1p/8",
    "clos2:96x100G/1p/16/3:1",
)


def fabric(text: str = "clos2:64x100G/1p/16") -> Fabric:
    return parse_fabric(text)


@pytest.mark.parametrize("text", FABRICS)
def test_every_path_leaves_the_source_and_reaches_the_target(text: str) -> None:
    one = fabric_links.links_of(fabric(text))
    flows = traffic_matrix.permutation(one.fabric.hosts, 1.0, seed=3)
    found = routes.route_flows(one, flows, routes.by_qp(6, seed=5))
    first = found.links[:, 0] % one.per_plane
    last = found.links[:, -1] % one.per_plane - one.fabric.hosts
    assert first.tolist() == flows.source[found.flow].tolist()
    assert last.tolist() == flows.target[found.flow].tolist()
    assert found.links.max() < one.count
    # All links of a path lie in one plane: planes meet only in the NIC.
    plane = np.where(found.links >= 0, found.links // one.per_plane, found.links[:, :1] // one.per_plane)
    assert (plane == plane[:, :1]).all()


@pytest.mark.parametrize("text", FABRICS[1:])
def test_up_and_down_meet_at_the_same_switch(text: str) -> None:
    one = fabric_links.links_of(fabric(text))
    f = one.fabric
    found = routes.route_flows(one, traffic_matrix.permutation(f.hosts, 1.0), routes.by_qp(6))
    far = found.links[found.links[:, 1] >= 0] % one.per_plane
    up, down = far[:, 1] - 2 * f.hosts, far[:, -2] - 2 * f.hosts - f.t0 * f.t0_up
    rises = one.t1_of(up // f.t0_up, up % f.t0_up)
    falls = one.t1_of(down // f.t0_up, down % f.t0_up)
    if f.tiers == 2:
        assert (rises == falls).all()
    else:  # through T2: the same place in another pod
        assert (rises % one.t1_per_pod == falls % one.t1_per_pod).all()
    assert (rises < f.t1).all()


def test_hosts_under_one_t0_do_not_go_up() -> None:
    one = fabric_links.links_of(fabric())
    found = routes.route_flows(one, traffic_matrix.make_flows([0, 0], [1, 63], 1.0), routes.by_flow())
    assert found.hops.tolist() == [2, 4]


def test_rails_put_a_servers_nics_on_different_t0s() -> None:
    one = fabric_links.links_of(fabric("clos2:64x400G/4p/16/8r"))
    assert one.host_t0(np.arange(8)).tolist() == list(range(8))
    assert one.host_t0(np.array([3, 11])).tolist() == [3, 3]  # rail 3 of two servers: one switch away
    flows = traffic_matrix.make_flows([0], [11], 1.0)
    aligned = routes.route_flows(one, flows, replace(routes.by_flow(), rails=True))
    assert aligned.hops.tolist() == [2]
    assert routes.route_flows(one, flows, routes.by_flow()).hops.tolist() == [4]


def test_choices_are_even_and_repeatable() -> None:
    one = fabric_links.links_of(fabric("clos2:2048x100G/1p/64"))
    flows = traffic_matrix.shift(2048, 1.0)
    found = routes.route_flows(one, flows, routes.by_qp(32, seed=1))
    assert (found.links == routes.route_flows(one, flows, routes.by_qp(32, seed=1)).links).all()
    assert (found.links != routes.route_flows(one, flows, routes.by_qp(32, seed=2)).links).any()
    port = (found.links[:, 1] - 2 * 2048) % 32
    count = np.bincount(port, minlength=32)
    # 65,536 draws over 32 ports: chi-square with 31 degrees of freedom stays below 70 but for 1 case in 10,000.
    assert ((count - 2048) ** 2 / 2048).sum() < 70


def test_spraying_gives_every_plane_the_same() -> None:
    one = fabric_links.links_of(fabric("clos2:40x800G/8p/16"))
    found = routes.route_flows(one, traffic_matrix.ring(40, 1.0), routes.spray_routing(16))
    plane = (found.links[:, 0] // one.per_plane).reshape(40, 16)
    assert all(np.bincount(row, minlength=8).tolist() == [2] * 8 for row in plane)


def test_dead_paths_are_left_by_those_who_may() -> None:
    one = fabric_links.links_of(fabric("clos2:64x400G/4p/16"))
    left = fabric_links.link_shares(one, fabric_links.BrokenParts(nics=((1, 0),), t1=((0, 2), (2, 1))))
    flows = traffic_matrix.make_flows([0, 8], [63, 1], 1.0)
    for recovery, cut in (("none", True), ("edge", False)):
        routing = routes.spray_routing(64, recovery=recovery)  # type: ignore[arg-type]
        assert routes.route_flows(one, flows, routing, left).cut.any() == cut
    # Switches cannot change the plane that the sender chose: with a dead NIC port its share stays lost.
    conventional = routes.route_flows(one, flows, routes.spray_routing(64, recovery="conventional"), left)
    assert conventional.cut[:64].sum() == 16
    assert conventional.cut[64:].sum() == 0


@pytest.mark.parametrize("made", [routes.by_flow, lambda **words: routes.by_qp(8, **words)])
def test_switches_keep_the_plane_that_a_hash_gave(made: Callable[..., routes.Routing]) -> None:
    one = fabric_links.links_of(fabric("clos2:128x800G/8p/32/wide"))
    flows = traffic_matrix.shift(128, 1.0)
    ports = fabric_links.link_shares(one, fabric_links.BrokenParts(t0=((0, 0), (1, 0)), t1=((2, 0), (3, 1))))
    first = routes.route_flows(one, flows, made(seed=4))
    later = routes.route_flows(one, flows, made(seed=4, recovery="conventional"), ports)
    assert (first.links[:, 0] == later.links[:, 0]).all()  # the port of the NIC names the plane
    assert (first.links != later.links).any()  # T1s are gone around
    # What left or was meant for a host of the dead T0s in planes 0 and 1, and nothing else, is cut off.
    works = np.append(ports, 1.0)[first.links[:, [0, -1]]].min(axis=1) > 0
    assert (later.cut == ~works).all()
    assert later.cut.any()
    assert not routes.route_flows(
        one, flows, made(seed=4, recovery="edge"), ports
    ).cut.any()  # a sender leaves by another


def test_a_cable_fails_in_both_directions_and_a_switch_takes_its_cables() -> None:
    one = fabric_links.links_of(fabric("clos2:64x400G/4p/16"))
    assert (fabric_links.link_shares(one, fabric_links.BrokenParts(uplinks=((0, 1, 2),))) == 0).sum() == 2
    assert (fabric_links.link_shares(one, fabric_links.BrokenParts(t0=((3, 7),))) == 0).sum() == 16
    assert (
        fabric_links.link_shares(one, fabric_links.BrokenParts(t1=((0, 0),), left=0.1)) == 0.1
    ).sum() == 2 * 8 * 8 // one.fabric.t1
    assert (
        fabric_links.link_shares(one, fabric_links.BrokenParts(nics=fabric_links.transceiver_lanes(4, 5))) == 0
    ).sum() == 8


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"tiers": 4}, "4 tiers"),
        ({"t0": 3}, "cannot carry 64 NICs"),
        ({"t1": 0}, "the fabric is disconnected"),
        ({"hosts": 0}, "0 hosts"),
        ({"hosts": 10**12, "t0": 10**12}, "links are more than"),
    ],
)
def test_what_is_no_fabric_is_refused(change: dict[str, int], text: str) -> None:
    with pytest.raises(UserError) as caught:
        fabric_links.links_of(replace(fabric(), **change))  # type: ignore[arg-type]
    assert text in str(caught.value)


def test_hosts_and_parts_that_do_not_exist_are_named() -> None:
    one = fabric_links.links_of(fabric())
    with pytest.raises(UserError, match="host 64 is not on"):
        routes.route_flows(one, traffic_matrix.make_flows([0], [64], 1.0), routes.by_flow())
    with pytest.raises(UserError, match=r"there is no plane 0, T1 99"):
        fabric_links.link_shares(one, fabric_links.BrokenParts(t1=((0, 99),)))
    with pytest.raises(UserError, match="sub-flows"):
        routes.route_flows(one, traffic_matrix.ring(64, 1.0), routes.spray_routing(1 << 20))
    with pytest.raises(UserError, match="0 paths per flow"):
        routes.spray_routing(0)
