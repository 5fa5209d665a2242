"""Rows about the shape of a fabric: exact arithmetic."""

from __future__ import annotations

import re
from fractions import Fraction

from phalanx.network.fabric.bill import bill, loss, tier_links
from phalanx.network.fabric.catalogue import unnamed
from phalanx.network.fabric.decisions import decisions, harmonic, late_step
from phalanx.network.fabric.loads import idle_share, max_to_mean
from phalanx.network.fabric.sizing import Shape, most_hosts, size, split_t0
from phalanx.network.fabric.types import Fabric
from phalanx.sim.validate.outcome import Context, Outcome, Reader, reproduced
from phalanx.sim.validate.table import Row
from phalanx.sim.validate.words import count, number, pair

BOX_GBPS = 51_200  # the boxes of arXiv:2605.04333: 512 ports of 100G, 64 of 800G
NIC_GBPS = 800.0
REFERENCE_GPUS = 131_072
EXACT = 1e-3  # exact values are printed with four digits
SAMPLED = 0.02  # the rows' own Monte Carlo error
MOST_PORTS = 4096  # of one switch: none has more than 1,024
MOST_UNITS = 10**8  # per link: a slip beyond, and an array of every load up to there


def _planes(row: Row) -> int:
    return count(f"{row.quantity}, {row.conditions}", "planes?") or 1


def _radix(row: Row) -> int | None:
    text = f"{row.quantity}, {row.conditions}"
    ports = count(text, "ports?")
    if ports is None and (found := pair(text, "G")):
        ports = found[0]
    if ports is None and (speed := number(text, r"(\d+)G plane")):
        ports = int(BOX_GBPS / speed)
    if ports is None and count(text, "planes?"):
        ports = int(BOX_GBPS * _planes(row) / NIC_GBPS)
    return ports if ports is not None and ports <= MOST_PORTS else None


def _fabric(row: Row) -> Fabric | None:
    """The fabric a row describes; full when it names no hosts, of 51.2T boxes when it names no ports."""
    radix, planes = _radix(row), _planes(row)
    if radix is None:
        return None
    shape = Shape(planes=planes, tiers=count(row.conditions, "tiers?") or 2)
    hosts = count(row.conditions, "hosts?") or most_hosts(radix, shape)
    return size(hosts, NIC_GBPS, unnamed(radix, NIC_GBPS / planes), shape)


def hosts(row: Row, _: Context) -> Outcome | None:
    """2·(k/2)^L."""
    tiers = count(f"{row.quantity}, {row.conditions}", "tiers?")
    radix = _radix(row)
    if tiers is None or radix is None or not 1 <= tiers <= 4:
        return None
    return reproduced(row, most_hosts(radix, Shape(planes=_planes(row), tiers=tiers)), "fabric/sizing", tolerance=EXACT)


def switch_ratio(row: Row, _: Context) -> Outcome:
    """Switches per host against three tiers, of the reference fabric."""
    return reproduced(row, float(Fraction(decisions(REFERENCE_GPUS).switch_ratio)), "fabric/decisions", tolerance=EXACT)


def optics_ratio(row: Row, _: Context) -> Outcome:
    """Optics per host against three tiers."""
    return reproduced(row, float(Fraction(decisions(REFERENCE_GPUS).optics_ratio)), "fabric/decisions", tolerance=EXACT)


def hops(row: Row, _: Context) -> Outcome | None:
    """Switches on the longest path."""
    tiers = count(row.conditions, "tiers?")
    if tiers is None or not 1 <= tiers <= 4:
        return None
    fabric = size(64, NIC_GBPS, unnamed(64, NIC_GBPS), Shape(planes=1, tiers=tiers))
    return reproduced(row, fabric.hops, "fabric/types", tolerance=EXACT)


def under_t0(row: Row, _: Context) -> Outcome | None:
    """Ports of a T0 that go down."""
    radix = _radix(row)
    ratio = number(row.conditions, r"(\d+(?:\.\d+)?):1\b") or 1.0
    return None if radix is None else reproduced(row, split_t0(radix, 2, ratio)[0], "fabric/sizing", tolerance=EXACT)


def uplink_loss(row: Row, _: Context) -> Outcome | None:
    """Share of a T0's uplinks that one is."""
    speed = number(row.quantity, r"(\d+)G plane")
    if not speed or speed > NIC_GBPS:
        return None
    planes, radix = int(NIC_GBPS / speed), int(BOX_GBPS / speed)
    shape = Shape(planes=planes, tiers=2)
    fabric = size(most_hosts(radix, shape), NIC_GBPS, unnamed(radix, NIC_GBPS / planes), shape)
    return reproduced(row, 100 * loss(fabric).t0_t1_link, "fabric/bill; the row is rounded")


def nic_loss(row: Row, _: Context) -> Outcome | None:
    """Share of a NIC that a plane is."""
    fabric = _fabric(row)
    return None if fabric is None else reproduced(row, 100 * loss(fabric).nic_link, "fabric/bill; the row is rounded")


def total(row: Row, _: Context) -> Outcome | None:
    """Switches or links of a whole fabric."""
    fabric = _fabric(row)
    if fabric is None:
        return None
    boxes = {"switches": fabric.switches, "T0 switches": fabric.planes * fabric.t0}
    boxes["T1 switches"] = fabric.planes * fabric.t1
    name = row.quantity.rpartition(" total")[0]
    if name in boxes:
        return reproduced(row, boxes[name], "fabric/sizing", tolerance=EXACT)
    tier = 0 if name.startswith("NIC") else 1
    return reproduced(row, tier_links(fabric)[tier], "fabric/bill", tolerance=EXACT)


def per_host(row: Row, _: Context) -> Outcome | None:
    """Switches or 800G-class optics for one NIC of a full fabric."""
    tiers, radix = count(f"{row.quantity}, {row.conditions}", "tiers?"), _radix(row)
    if tiers is None or radix is None or not 2 <= tiers <= 4:
        return None
    shape = Shape(planes=_planes(row), tiers=tiers)
    fabric = size(most_hosts(radix, shape), NIC_GBPS, unnamed(radix, NIC_GBPS / shape.planes), shape)
    whole = fabric.switches if row.quantity.startswith("switches") else bill(fabric).optics_800g
    return reproduced(row, whole / fabric.hosts, "fabric/bill", tolerance=EXACT)


def paths(row: Row, _: Context) -> Outcome | None:
    """Paths between hosts under different T0s."""
    fabric = _fabric(row)
    return None if fabric is None else reproduced(row, fabric.paths, "fabric/types", tolerance=EXACT)


def touched(row: Row, _: Context) -> Outcome | None:
    """Chance that a connection has a path over one given T1."""
    found = re.search(r"(\d+) EVs of (\d+) paths", row.quantity)
    if found is None:
        return None
    entropy, ways = int(found[1]), int(found[2])
    return reproduced(row, 100 * (1 - (1 - 1 / ways) ** entropy), "1-(1-1/paths)^EVs", tolerance=5e-3)


def link_load(row: Row, _: Context) -> Outcome | None:
    """Balls into bins."""
    units, links = count(row.conditions, "units? per link"), count(row.conditions, "links")
    if not units or not links or units > MOST_UNITS:
        return None
    return reproduced(row, max_to_mean(units, links), "fabric/loads, no sampling", tolerance=SAMPLED)


def spray_load(row: Row, _: Context) -> Outcome | None:
    """The busiest of all T0-T1 links, both ways, when every connection draws its paths at random."""
    entropy, fabric = count(row.conditions, "EVs? per QP"), _fabric(row)
    if not entropy or fabric is None:
        return None
    units = fabric.t0_down * entropy / fabric.planes / fabric.t0_up
    if units > MOST_UNITS:
        return None
    ours = max_to_mean(units, fabric.t0_up, groups=2 * fabric.planes * fabric.t0)
    return reproduced(row, ours, "fabric/loads over all T0s, planes and directions")


def idle_links(row: Row, _: Context) -> Outcome | None:
    """Links on which nothing falls."""
    units = count(row.conditions, "(?:units?|flows?) per link")
    scale = 100.0 if row.unit == "percent" else 1.0
    return None if not units else reproduced(row, scale * idle_share(units), "fabric/loads", tolerance=SAMPLED)


def late(row: Row, _: Context) -> Outcome | None:
    """Chance that one of N transfers is late."""
    words = f"{row.quantity}, {row.conditions}"
    chance, flows = number(words, r"p ?= ?([\d.]+(?:e-?\d+)?)"), number(words, r"N ?= ?([\d,]+)")
    if chance is None or not flows or not 0 <= chance < 1:
        return None
    scale = 100.0 if row.unit == "percent" else 1.0
    return reproduced(row, scale * late_step(chance, int(flows)), "fabric/decisions")


def slowest(row: Row, _: Context) -> Outcome | None:
    """The harmonic number."""
    flows = number(row.conditions, r"N ?= ?([\d,]+)")
    if not flows:
        return None
    return reproduced(row, harmonic(int(flows)), "fabric/decisions", tolerance=EXACT)


READERS: tuple[tuple[str, Reader], ...] = (
    (r"^hosts at full bisection|^hosts, \d tiers", hosts),
    (r"^switch count ratio", switch_ratio),
    (r"^optics ratio", optics_ratio),
    (r"^max switch hops", hops),
    (r"^hosts under one T0", under_t0),
    (r"^capacity lost per T0-T1 link", uplink_loss),
    (r"^NIC bandwidth lost per NIC-T0 link", nic_loss),
    (r"^(switches|T0 switches|T1 switches|T0-T1 links|NIC-T0 links) total", total),
    (r"^(switches|optics) per host", per_host),
    (r"^(links|share of links) idle|^idle links", idle_links),
    (r"\bstep\b.*\blate\b|^late steps", late),
    (r"^paths between hosts", paths),
    (r"^QPs touched by one T1", touched),
    (r"^max link load", link_load),
    (r"^worst T0-T1 link load", spray_load),
    (r"^E\[max\]/mean", slowest),
)
