"""A partly filled Clos still joins everybody with equal links, and no port is used twice."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.network.fabric.fabric_bill import fabric_bill
from phalanx.network.fabric.sizing import ClosShape, fill_plane, most_hosts, size_fabric
from phalanx.network.fabric.switch_catalogue import unnamed_switch


def test_half_of_the_hosts_need_half_of_the_switches() -> None:
    assert fill_plane(256, 256, 512, tiers=2).switches == (256, 128)


def test_a_t1_has_equally_many_links_to_every_t0() -> None:
    # a T1 of 512 ports has 5 for each of 100 T0s, so 256 uplinks need 52; to each of 300 T0s it has one
    assert fill_plane(100, 256, 512, tiers=2).switches == (100, 52)
    assert fill_plane(300, 256, 512, tiers=2).switches == (300, 256)


def test_pods_stay_equal_whatever_that_costs() -> None:
    # 7,813 T0s are 62 pods of 127; their 127 uplinks per T1 go to 32 T2s of 256 ports, 4 for each pod
    counts = fill_plane(7813, 128, 256, tiers=3)
    assert (counts.pods, counts.up) == (62, (128, 127, 0))
    assert counts.switches == (62 * 127, 62 * 128, 32 * 128)


def test_a_few_more_t0s_per_pod_where_they_save_switches_above() -> None:
    # two pods of 5 leave each T1 5 uplinks, a prime; pods of 6 share theirs among far fewer T2s and T3s
    assert fill_plane(9, 8, 16, tiers=4).switches == (12, 16, 16, 16)


def test_paths_count_the_uplinks_that_are_there() -> None:
    fabric = size_fabric(96, 800, unnamed_switch(64, 800), ClosShape(planes=1, tiers=3))
    assert (fabric.t0, fabric.t1, fabric.t1_up) == (3, 4, 24)
    assert fabric.paths == 32 * 24


def test_wide_has_a_t1_for_every_uplink() -> None:
    assert fill_plane(32, 32, 64, tiers=2, wide=True).switches == (32, 32)
    assert fill_plane(32, 32, 64, tiers=2).switches == (32, 16)


@settings(deadline=None, max_examples=150)
@given(
    radix=st.sampled_from([4, 6, 16, 63, 64, 144, 320, 512]),
    tiers=st.sampled_from([2, 3, 4]),
    ratio=st.sampled_from([1.0, 1.5, 2.0, 4.0]),
    rails=st.sampled_from([1, 2, 8]),
    share=st.floats(0, 1),
)
def test_every_port_is_accounted_for(radix: int, tiers: int, ratio: float, rails: int, share: float) -> None:
    shape = ClosShape(planes=1, tiers=tiers, oversubscription=ratio, rails=rails)
    groups = min(most_hosts(radix, shape), 10**9) // rails
    hosts = rails * max(1, int(share * groups))
    if groups == 0 or hosts < 2:
        return
    fabric = size_fabric(hosts, 800, unnamed_switch(radix, 800), shape)
    assert fabric.t0 * fabric.t0_down >= hosts
    assert fabric.t0 % fabric.pods == fabric.t1 % fabric.pods == 0
    most = math.ceil(fabric.t0_up / fabric.t1_per_pod)  # links from a T0 to a T1
    down = fabric.t0 // fabric.pods * most
    assert down + fabric.t1_up <= radix
    if tiers > 2:
        assert fabric.t0_up % fabric.t1_per_pod == 0
        assert fabric.t1_up == down  # nothing is oversubscribed above T0
        assert fabric.t1 * fabric.t1_up <= fabric.t2 * (radix if tiers == 3 else radix // 2)
    if tiers == 3:
        most = math.ceil(fabric.t1_up / (fabric.t2 // fabric.t1_per_pod))
        assert fabric.pods * most <= radix  # ports of a T2
    if tiers == 4:
        assert fabric.t2 * fabric.t2_up == fabric.t1 * fabric.t1_up
        assert fabric.t2 * fabric.t2_up <= fabric.t3 * radix
    assert fabric_bill(fabric).spare_ports >= 0
