"""A partly filled Clos still joins everybody with equal links, and no port is used twice."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.network.fabric.bill import bill
from phalanx.network.fabric.catalogue import unnamed
from phalanx.network.fabric.filling import fill
from phalanx.network.fabric.sizing import Shape, most_hosts, size


def test_half_of_the_hosts_need_half_of_the_switches() -> None:
    assert fill(256, 256, 512, tiers=2).switches == (256, 128)


def test_switches_above_divide_the_uplinks_even_if_fewer_would_have_the_ports() -> None:
    # 300 T0s x 256 uplinks fill 150 T1s, but 150 does not divide 256
    assert fill(300, 256, 512, tiers=2).switches == (300, 256)


def test_a_few_more_t0s_save_many_switches_above() -> None:
    # 7,813 T0s in 62 pods of 127 would give each T1 127 uplinks, a prime: 127 T2s per group instead of 32
    counts = fill(7813, 128, 256, tiers=3)
    assert counts.pods == 62
    assert counts.switches == (62 * 128, 62 * 128, 32 * 128)


def test_wide_has_a_t1_for_every_uplink() -> None:
    assert fill(32, 32, 64, tiers=2, wide=True).switches == (32, 32)
    assert fill(32, 32, 64, tiers=2).switches == (32, 16)


@settings(deadline=None, max_examples=150)
@given(
    radix=st.sampled_from([4, 6, 16, 63, 64, 144, 320, 512]),
    tiers=st.sampled_from([2, 3, 4]),
    ratio=st.sampled_from([1.0, 1.5, 2.0, 4.0]),
    rails=st.sampled_from([1, 2, 8]),
    share=st.floats(0, 1),
)
def test_every_port_is_accounted_for(radix: int, tiers: int, ratio: float, rails: int, share: float) -> None:
    shape = Shape(planes=1, tiers=tiers, oversubscription=ratio, rails=rails)
    groups = min(most_hosts(radix, shape), 10**9) // rails
    hosts = rails * max(1, int(share * groups))
    if groups == 0 or hosts < 2:
        return
    fabric = size(hosts, 800, unnamed(radix, 800), shape)
    assert fabric.t0 * fabric.t0_down >= hosts
    assert fabric.t0 % fabric.pods == fabric.t1 % fabric.pods == 0
    assert fabric.t0_up % fabric.t1_per_pod == 0  # the same number of links from a T0 to each T1
    down = fabric.t0 // fabric.pods * fabric.t0_up // fabric.t1_per_pod
    assert down + fabric.t1_up <= radix
    if tiers > 2:
        assert fabric.t1_up == down  # nothing is oversubscribed above T0
        assert fabric.t1 * fabric.t1_up <= fabric.t2 * (radix if tiers == 3 else radix // 2)
    if tiers == 3:
        assert fabric.t1_up % (fabric.t2 // fabric.t1_per_pod) == 0
    if tiers == 4:
        assert fabric.t2 * fabric.t2_up == fabric.t1 * fabric.t1_up
        assert fabric.t2 * fabric.t2_up <= fabric.t3 * radix
    assert bill(fabric).spare_ports >= 0
