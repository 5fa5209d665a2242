"""Every design recounted by other arithmetic: full and partly filled, with rails, oversubscribed, 1 to 16 planes."""

from __future__ import annotations

import math

import pytest

from phalanx.network.fabric.design import Design, DesignRequest, design_fabrics, nominal_ratio

CASES = [
    (8, 400.0), (64, 100.0), (100, 800.0), (1000, 400.0), (2048, 200.0), (16384, 400.0), (24576, 800.0),
    (32768, 800.0), (65536, 800.0), (131072, 800.0), (500000, 1600.0), (1000000, 800.0), (72, 800.0),
]  # fmt: skip


@pytest.mark.parametrize(("gpus", "nic"), CASES)
def test_every_number_of_every_design(gpus: int, nic: float) -> None:
    for one in design_fabrics(DesignRequest(gpus=gpus, nic_gbps=nic)):
        recount(one, gpus, nic)


def recount(one: Design, gpus: int, nic: float) -> None:
    fabric, k, planes = one.fabric, one.fabric.switch.radix, one.fabric.planes
    assert fabric.switch.port_gbps * planes == nic
    up = 0 if fabric.tiers == 1 else math.ceil(k / (1 + nominal_ratio(fabric)))
    down = k - up
    servers = gpus // fabric.rails
    under_a_t0 = min(down, servers)
    t0 = fabric.rails * -(-servers // down)
    if fabric.tiers <= 2:
        # a T1 gives every T0 the same whole number of its ports
        t1 = 0 if fabric.tiers == 1 else -(-up // (k // t0))
        assert (fabric.t0, fabric.t1, fabric.t2, fabric.t3) == (t0, t1, 0, 0)
    else:
        assert fabric.t0 >= t0
    links = [planes * gpus] + [planes * fabric.t0 * up] * (fabric.tiers - 1)
    assert list(one.bill.links) == links
    assert one.bill.cables == sum(links) // planes
    modules = 2 * sum(links) * nic / planes / 800
    assert one.bill.optics_800g == modules
    switches = planes * (fabric.t0 + fabric.t1 + fabric.t2 + fabric.t3)
    assert (fabric.switches, fabric.hops) == (switches, 2 * fabric.tiers - 1)
    assert one.loss.nic_link == one.loss.t0 == 1 / planes
    assert one.loss.t0_hosts == under_a_t0
    if fabric.tiers > 1:
        assert one.loss.t0_t1_link == 1 / up
        per_t1 = math.ceil(up / (fabric.t1 / fabric.pods))
        assert one.loss.t1 == pytest.approx(per_t1 / up / planes)
    if fabric.tiers == 2:
        assert fabric.paths == planes * up
    if fabric.switch.usd is not None:
        low = switches * fabric.switch.usd[0] + 1100 * modules + 50 * modules / 2
        assert one.bill.usd is not None
        assert one.bill.usd[0] == pytest.approx(low)
        assert one.bill.watts == pytest.approx(switches * fabric.switch.watts + 16 * modules)
    assert one.cable_failures_per_day == pytest.approx(sum(links) / planes * 0.00057 / 30.4)
    assert one.interruptions_per_day == pytest.approx(gpus * 35 / 16384 / 54)
