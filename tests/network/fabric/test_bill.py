"""Parts and losses against the published ratios: 3/5 of the switches, 2/3 of the optics, 0.39 %, 3.1 %, 12.5 %."""

from __future__ import annotations

import pytest

from phalanx.network.fabric.fabric_bill import OPTIC_USD, OPTIC_WATTS, TRUNK_USD, fabric_bill, failure_loss, tier_links
from phalanx.network.fabric.fabric_file import parse_fabric

PLANES = parse_fabric("clos2:131072x800G/8p/512")
CLASSIC = parse_fabric("clos3:65536x800G/1p/64")


def test_links_and_optics() -> None:
    parts = fabric_bill(PLANES)
    assert parts.links == (1048576, 1048576)
    assert parts.cables == 262144
    assert parts.optics_800g / PLANES.hosts == 4
    assert fabric_bill(CLASSIC).optics_800g / CLASSIC.hosts == 6
    assert parts.spare_ports == fabric_bill(CLASSIC).spare_ports == 0


def test_the_ratios_per_host() -> None:
    switches = (PLANES.switches / PLANES.hosts) / (CLASSIC.switches / CLASSIC.hosts)
    assert switches == pytest.approx(3 / 5)
    optics = (fabric_bill(PLANES).optics_800g / PLANES.hosts) / (fabric_bill(CLASSIC).optics_800g / CLASSIC.hosts)
    assert optics == pytest.approx(2 / 3)


def test_one_failure() -> None:
    assert failure_loss(PLANES).nic_link == 1 / 8
    assert failure_loss(PLANES).t0_t1_link == 1 / 256
    assert failure_loss(PLANES).t1 == 1 / 2048
    assert failure_loss(PLANES).t0_hosts == 256
    assert failure_loss(CLASSIC).nic_link == 1
    assert failure_loss(CLASSIC).t0_t1_link == 1 / 32
    assert failure_loss(CLASSIC).t0_hosts == 32
    assert failure_loss(CLASSIC).t1 == 1 / 32  # one of the 32 T1s of its pod
    assert failure_loss(CLASSIC).t2 == 1 / 1024  # one of the 32 x 32 links that leave a pod for as many T2s
    assert failure_loss(PLANES).t2 is None


def test_money_and_power_add_up() -> None:
    fabric = parse_fabric("clos2:2048x800G/1p/Tomahawk 5")
    parts = fabric_bill(fabric)
    assert parts.usd is not None
    modules = 4 * 2048
    assert parts.usd[0] == pytest.approx(96 * 50000 + modules * OPTIC_USD[0] + modules / 2 * TRUNK_USD[0])
    assert parts.watts == pytest.approx(96 * 1066 + modules * OPTIC_WATTS)
    assert fabric_bill(PLANES).usd is None
    assert fabric_bill(PLANES).watts is None


def test_oversubscription_thins_the_links_above() -> None:
    nics, up = tier_links(parse_fabric("clos2:3072x800G/1p/64/3:1"))
    assert nics == 3072
    assert up == 3072 // 3


def test_losses_of_an_oversubscribed_fabric() -> None:
    one = failure_loss(parse_fabric("clos2:3072x800G/2p/64/3:1"))
    assert one.t0_t1_link == 1 / 16
    assert one.t0_hosts == 48
    assert one.t1 == 1 / (2 * 16)


def test_with_rails_a_t0_has_one_nic_of_each_server() -> None:
    # 72 GPUs are 9 servers of 8: nine NICs on each of eight T0s, though a T0 has 32 ports down
    one = failure_loss(parse_fabric("clos2:72x800G/1p/64/8r"))
    assert one.t0_hosts == 9
    assert failure_loss(parse_fabric("clos2:2048x800G/1p/64/8r")).t0_hosts == 32
    assert failure_loss(parse_fabric("clos2:20x800G/1p/64")).t0_hosts == 20


def test_a_single_switch_has_no_links_above() -> None:
    fabric = parse_fabric("clos1:64x400G/1p/64")
    assert fabric_bill(fabric).links == (64,)
    assert failure_loss(fabric).t0_t1_link == failure_loss(fabric).t1 == 0
