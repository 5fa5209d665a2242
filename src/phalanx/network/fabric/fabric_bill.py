"""The parts of a fabric and their cost, and the bandwidth that one failure takes: links, optics, power, money."""

from __future__ import annotations

import math
from dataclasses import dataclass

from phalanx.network.fabric.fabric_types import Fabric

# Optics are counted as 800G modules, whatever the port speed: a module carries several lanes.
OPTIC_GBPS = 800.0
# 800G DR8 in volume, and an MPO trunk: luxoptx.com, "800G optical module cost analysis". List prices of one seller.
OPTIC_USD = (1100.0, 1400.0)
TRUNK_USD = (50.0, 150.0)
# 15 to 17 W per 800G module (AIDC Studio catalogue); 17 to 19 W measured under load (100gmodules.com).
OPTIC_WATTS = 16.0


@dataclass(frozen=True, kw_only=True, slots=True)
class FabricBill:
    """The parts of a whole fabric. Links are counted at port speed; all are assumed to be optical."""

    links: tuple[int, ...]  # by tier: NIC-T0, T0-T1, T1-T2, T2-T3
    cables: int  # links as wide as a NIC: the unit that is laid and that fails
    optics: int  # link ends at port speed
    optics_800g: float  # the same capacity in 800G modules
    watts: float | None  # switches and optics; None where the switch's power is unknown
    usd: tuple[float, float] | None  # switches, optics and trunks, low and high
    spare_ports: int  # unused ports of all switches


@dataclass(frozen=True, kw_only=True, slots=True)
class Loss:
    """Shares of bandwidth that one failure takes away until it is repaired."""

    nic_link: float  # of the NIC: 1 cuts the GPU off, and the job with it
    t0_t1_link: float  # of the uplink bandwidth of its T0 in that plane
    t0: float  # of the bandwidth of the hosts under it
    t0_hosts: int  # the number of those hosts
    t1: float  # of the bandwidth of its pod's hosts beyond their T0
    # Share of a pod's bandwidth to other pods; None where T2 is not the top of three tiers.
    t2: float | None


def fabric_bill(fabric: Fabric) -> FabricBill:
    """Count the parts of a fabric, with their power and price."""
    links = tier_links(fabric)
    total = sum(links)
    modules = 2 * total * fabric.port_gbps / OPTIC_GBPS
    return FabricBill(
        links=links,
        cables=total // fabric.planes,
        optics=2 * total,
        optics_800g=modules,
        watts=fabric.switches * fabric.switch.watts + modules * OPTIC_WATTS if fabric.switch.watts else None,
        usd=_price_range(fabric, modules),
        spare_ports=fabric.switches * fabric.switch.radix - 2 * total + links[0],
    )


def tier_links(fabric: Fabric) -> tuple[int, ...]:
    """Return the links of all planes by tier.

    Above T0 no tier is oversubscribed, so every tier has as many links as T0-T1.

    >>> from phalanx.network.fabric.fabric_file import parse_fabric
    >>> tier_links(parse_fabric("mrc-131k"))
    (1048576, 1048576)
    """
    up = fabric.planes * fabric.t0 * fabric.t0_up
    return (fabric.planes * fabric.hosts, *([up] * (fabric.tiers - 1)))


def failure_loss(fabric: Fabric) -> Loss:
    """Return the shares of bandwidth that the failure of one part takes away."""
    has_uplinks = fabric.tiers > 1
    return Loss(
        nic_link=1 / fabric.planes,
        t0_t1_link=1 / fabric.t0_up if has_uplinks else 0.0,
        t0=1 / fabric.planes,
        t0_hosts=fabric.hosts_per_t0,
        t1=math.ceil(fabric.t0_up / fabric.t1_per_pod) / fabric.t0_up / fabric.planes if has_uplinks else 0.0,
        t2=_t2_optics(fabric) if fabric.tiers == 3 else None,
    )


def _t2_optics(fabric: Fabric) -> float:
    """Return the share of a pod's bandwidth that one T2 carries, where T2 is the top of three tiers."""
    up = fabric.t1_up or fabric.switch.radix // 2
    per_t1 = max(1, fabric.t2 // fabric.t1_per_pod)  # T2s that a T1 connects to
    links = math.ceil(up / per_t1)  # from the one T1 of a pod that connects to it
    return links / (up * fabric.t1_per_pod) / fabric.planes


def _price_range(fabric: Fabric, modules: float) -> tuple[float, float] | None:
    if fabric.switch.usd is None:
        return None
    trunks = modules / 2
    low, high = (
        fabric.switches * box + modules * optic + trunks * trunk
        for box, optic, trunk in zip(fabric.switch.usd, OPTIC_USD, TRUNK_USD, strict=True)
    )
    return low, high
