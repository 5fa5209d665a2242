"""Named failures, each on traffic that lasts a little longer than it takes to notice them."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.errors import mistake, nearest
from phalanx.network.fabric.types import Fabric
from phalanx.sim.failures import UNBROKEN, Break
from phalanx.sim.matrices import SENDERS

LASTS_S = 200e-6  # of a host's traffic at line rate, so that a failure after 50 µs meets it


@dataclass(frozen=True, kw_only=True, slots=True)
class Scenario:
    """A failure by name."""

    name: str
    what: str
    broken: Break = UNBROKEN
    tiers: int = 1  # that a fabric must have
    incast: bool = False


SCENARIOS = {
    one.name: one
    for one in (
        Scenario(
            name="link-flap",
            what="a T0-T1 link is down for a millisecond",
            broken=Break(failed=("link:0/0/0@50us..1ms",)),
            tiers=2,
        ),
        # Forwarding was back after two minutes (arXiv:2605.04333 section 5.1): longer than any transfer here.
        Scenario(name="t1-reboot", what="a T1 switch stops", broken=Break(failed=("t1:0/0@50us",)), tiers=2),
        Scenario(name="t0-loss", what="a T0 switch stops", broken=Break(failed=("t0:0/0@50us",))),
        Scenario(name="nic-port", what="one port of a NIC dies", broken=Break(failed=("nic:0/0@50us",))),
        Scenario(
            name="transceiver",
            what="all lanes of a NIC are down for a millisecond",
            broken=Break(failed=("transceiver:0@50us..1ms",)),
        ),
        Scenario(  # one entropy value given 20 % loss: section 5.2.4
            name="grey-path",
            what="a T0-T1 link loses 20 % of its packets, and stays up",
            broken=Break(failed=("link:0/0/0@50us",), loss=0.2),
            tiers=2,
        ),
        Scenario(  # section 5.2.7
            name="grey-all", what="every path loses 1 % of its packets", broken=Break(failed=("all",), loss=0.01)
        ),
        Scenario(name="incast", what="7 hosts send to one, beside a victim", incast=True),
    )
}
ALL = "all"


def chosen(name: str, fabric: Fabric) -> tuple[Scenario, ...]:
    """The scenario of a name, or all that a fabric can have; raises UserError."""
    if name == ALL:
        crowded = fabric.hosts >= SENDERS + 3
        return tuple(one for one in SCENARIOS.values() if one.tiers <= fabric.tiers and (crowded or not one.incast))
    if name not in SCENARIOS:
        guess = nearest(name, [*SCENARIOS, ALL])
        fix = f"use {guess}" if guess else f"use {', '.join(SCENARIOS)} or {ALL}"
        raise mistake("--scenario", f'there is no "{name[:40]}"', fix=fix)
    one = SCENARIOS[name]
    if one.tiers > fabric.tiers:
        what = f"{fabric.name} has one tier: it has neither T0-T1 links nor T1 switches"
        raise mistake("--scenario", what, fix="use nic-port, t0-loss or transceiver, or a fabric of two tiers")
    return (one,)


def usual_bytes(fabric: Fabric) -> float:
    """What a host sends in the time that scenarios last."""
    return float(round(fabric.nic_gbps * 1e9 / 8 * LASTS_S))
