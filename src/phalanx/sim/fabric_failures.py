"""Failures of fabric parts, from the words of `phalanx fabric simulate --fail`, for both engines."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from phalanx.errors import mistake, nearest
from phalanx.network.fabric.fabric_types import Fabric
from phalanx.sim.fabric_links import NOTHING, BrokenParts, Ints, Links
from phalanx.sim.packets.link_faults import FabricFault, Part, link_changes
from phalanx.sim.traffic_matrix import SENDERS

# Each word, the count of numbers after it, and the packet engine's name of the part.
PARTS: dict[str, tuple[int, Part]] = {
    "nic": (2, "nic"),
    "link": (3, "link"),
    "t0": (2, "t0"),
    "t1": (2, "t1"),
    "t1link": (3, "t1_link"),
    "transceiver": (1, "transceiver"),
    "all": (0, "traffic"),
}
FORMS = (
    "nic:PLANE/HOST, link:PLANE/T0/PORT, t0:PLANE/N, t1:PLANE/N, t1link:PLANE/T1/PORT, transceiver:HOST or all, "
    "and @50us or @50us..2ms for when"
)
PER_SECOND = {"s": 1, "ms": 1000, "us": 1_000_000, "µs": 1_000_000}
_PART = re.compile(r"^(?P<kind>[a-z0-9]+)(?::(?P<numbers>\d{1,9}(?:/\d{1,9})*))?$")
_TIME = re.compile(r"^(\d{1,9}(?:\.\d{1,9})?)(s|ms|us|µs)$")


@dataclass(frozen=True, kw_only=True, slots=True)
class FabricBreak:
    """The failures of a simulation: `failed` are words such as t1:0/3, t1:0/3@50us or t1:0/3@50us..2ms."""

    failed: tuple[str, ...] = ()
    left: float = 0.0  # share of the capacity that failed parts keep
    loss: float = 0.0  # above 0 the parts keep their speed and lose this share of packets
    denied: tuple[str, ...] = ()  # parts that senders at the edge avoid from the start

    @property
    def healthy(self) -> FabricBreak:
        """The same traffic conditions without the failure."""
        return FabricBreak(denied=self.denied)

    @property
    def timed(self) -> bool:
        """True if time matters: a failure occurs after the start, or packets are lost."""
        return self.loss > 0 or any("@" in text for text in self.failed)


UNBROKEN = FabricBreak()


def faults_of(broken: FabricBreak) -> tuple[FabricFault, ...]:
    """Parse the faults; raises UserError."""
    if not 0 <= broken.left < 1:
        raise mistake("--left", f"{broken.left:g} of the capacity is left", fix="use 0 (dead) to below 1")
    if not 0 <= broken.loss <= 1:
        raise mistake("--loss", f"{broken.loss:g} of the packets are lost", fix="use a share: 0.01 is one in a hundred")
    if broken.loss and broken.left:
        raise mistake("--loss", "a part is either slow or loses packets", fix="leave --left or --loss out")
    if (broken.loss or broken.left) and not broken.failed:
        option, symptom = ("--loss", "loses packets") if broken.loss else ("--left", "is slow")
        raise mistake(option, f"nothing is named that {symptom}", fix="add --fail link:0/0/0")
    return tuple(_parse_fault(text, broken) for text in broken.failed)


def denied_of(broken: FabricBreak) -> tuple[FabricFault, ...]:
    """Parse the parts of a denylist, as dead parts; raises UserError."""
    for text in broken.denied:
        if "@" in text:
            raise mistake("--deny", f'"{text[:60]}" has a time', fix="a denylist holds from the start: leave it out")
        if text.strip().lower() == "all":
            raise mistake("--deny", "nothing would be left", fix="name parts: --deny link:0/0/0")
    return tuple(_parse_fault(text, UNBROKEN, "--deny") for text in broken.denied)


def broken_of(links: Links, broken: FabricBreak) -> BrokenParts:
    """Return the remaining capacity of each link for failures without times; denied parts count as dead."""
    faults = (*faults_of(broken), *denied_of(broken))
    if not faults:
        return NOTHING
    shares = np.ones(links.count)
    for fault in faults:
        shares[fault_links(links, fault)] = fault.left
    return BrokenParts(links=shares)


def fault_links(links: Links, fault: FabricFault) -> Ints:
    """Return the directed links that a fault affects."""
    return link_changes(links, (fault,), slot_s=1.0, converge_s=None)[0].links


def too_late(broken: FabricBreak, faults: Sequence[FabricFault], simulated_s: float) -> list[str]:
    """Return the failures that came after the last packet."""
    return [text for text, fault in zip(broken.failed, faults, strict=True) if fault.at_s > simulated_s]


def _parse_fault(text: str, broken: FabricBreak, option: str = "--fail") -> FabricFault:
    """Parse one word such as t1:0/3@50us..2ms; raises UserError."""
    word, _, when = text.strip().lower().partition("@")
    kind, numbers = _parse_part(word, text, option)
    part = PARTS[kind][1]
    if part == "traffic" and broken.loss in (0, 1) and not broken.left:
        raise mistake("--fail all", "nothing would be left", fix="add --loss 0.01, or name parts")
    plane, number, port = (0, *numbers, 0) if kind == "transceiver" else (*numbers, 0, 0, 0)[:3]
    at_s, until_s = _parse_time(when, text)
    return FabricFault(
        part=part,
        plane=plane,
        number=number,
        port=port,
        at_s=at_s,
        until_s=until_s,
        left=broken.left,
        loss=broken.loss,
    )


def _parse_part(word: str, text: str, option: str) -> tuple[str, tuple[int, ...]]:
    match = _PART.match(word)
    numbers = tuple(int(digits) for digits in match["numbers"].split("/")) if match and match["numbers"] else ()
    if match is None or match["kind"] not in PARTS or PARTS[match["kind"]][0] != len(numbers):
        kind = word.partition(":")[0]
        close = kind if kind in PARTS else nearest(kind, PARTS)
        form = next(
            (
                option_form
                for option_form in FORMS.replace(" or ", ", ").split(", ")
                if option_form.split(":")[0] == close
            ),
            FORMS,
        )
        raise mistake(option, f'"{text[:60]}" names no part of a fabric', fix=f"write {form}")
    return match["kind"], numbers


def _parse_time(when: str, text: str) -> tuple[float, float]:
    begin, dots, end = when.partition("..")
    at_s = _parse_seconds(begin, text) if begin or "@" in text else 0.0
    until_s = _parse_seconds(end, text) if dots else math.inf
    if until_s <= at_s:
        raise mistake("--fail", f'"{text[:60]}" ends before it begins', fix="write t1:0/3@50us..2ms")
    return at_s, until_s


def _parse_seconds(text: str, whole: str) -> float:
    match = _TIME.match(text)
    if match is None:
        raise mistake("--fail", f'"{whole[:60]}" has no time after @', fix="write t1:0/3@50us or t1:0/3@50us..2ms")
    return float(match[1]) / PER_SECOND[match[2]]


# Named failures, each on traffic that lasts a little longer than the time to notice them.


# Duration of a host's traffic at line rate, so that a failure after 50 µs hits it.
LASTS_S = 200e-6


@dataclass(frozen=True, kw_only=True, slots=True)
class Scenario:
    """A named failure."""

    name: str
    what: str
    broken: FabricBreak = UNBROKEN
    tiers: int = 1  # fewest tiers of a fabric for it
    incast: bool = False


SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        Scenario(
            name="link-flap",
            what="a T0-T1 link is down for a millisecond",
            broken=FabricBreak(failed=("link:0/0/0@50us..1ms",)),
            tiers=2,
        ),
        # Forwarding was back after two minutes (arXiv:2605.04333 section 5.1): longer than any transfer here.
        Scenario(name="t1-reboot", what="a T1 switch stops", broken=FabricBreak(failed=("t1:0/0@50us",)), tiers=2),
        Scenario(name="t0-loss", what="a T0 switch stops", broken=FabricBreak(failed=("t0:0/0@50us",))),
        Scenario(name="nic-port", what="one port of a NIC dies", broken=FabricBreak(failed=("nic:0/0@50us",))),
        Scenario(
            name="transceiver",
            what="all lanes of a NIC are down for a millisecond",
            broken=FabricBreak(failed=("transceiver:0@50us..1ms",)),
        ),
        Scenario(  # one entropy value given 20 % loss: section 5.2.4
            name="grey-path",
            what="a T0-T1 link loses 20 % of its packets, and stays up",
            broken=FabricBreak(failed=("link:0/0/0@50us",), loss=0.2),
            tiers=2,
        ),
        Scenario(  # section 5.2.7
            name="grey-all", what="every path loses 1 % of its packets", broken=FabricBreak(failed=("all",), loss=0.01)
        ),
        Scenario(name="incast", what="7 hosts send to one, beside a victim", incast=True),
    )
}
ALL = "all"


def chosen_scenarios(name: str, fabric: Fabric) -> tuple[Scenario, ...]:
    """Return the scenario of a name, or all that fit a fabric; raises UserError."""
    if name == ALL:
        crowded = fabric.hosts >= SENDERS + 3
        return tuple(
            scenario
            for scenario in SCENARIOS.values()
            if scenario.tiers <= fabric.tiers and (crowded or not scenario.incast)
        )
    if name not in SCENARIOS:
        guess = nearest(name, [*SCENARIOS, ALL])
        fix = f"use {guess}" if guess else f"use {', '.join(SCENARIOS)} or {ALL}"
        raise mistake("--scenario", f'there is no "{name[:40]}"', fix=fix)
    scenario = SCENARIOS[name]
    if scenario.tiers > fabric.tiers:
        problem = f"{fabric.name} has one tier: it has neither T0-T1 links nor T1 switches"
        raise mistake("--scenario", problem, fix="use nic-port, t0-loss or transceiver, or a fabric of two tiers")
    return (scenario,)


def usual_bytes(fabric: Fabric) -> float:
    """Return the bytes a host sends at line rate during a scenario."""
    return float(round(fabric.nic_gbps * 1e9 / 8 * LASTS_S))
