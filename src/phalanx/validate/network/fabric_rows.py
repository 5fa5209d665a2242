"""Rows about the shape of a fabric: exact arithmetic."""

from __future__ import annotations

import re

from phalanx.network.fabric.bill import bill, loss, tier_links
from phalanx.network.fabric.catalogue import unnamed
from phalanx.network.fabric.decisions import harmonic, late_step
from phalanx.network.fabric.loads import idle_share, max_to_mean
from phalanx.network.fabric.sizing import Shape, most_hosts, size, split_t0
from phalanx.network.fabric.types import Fabric
from phalanx.validate.network import shapes
from phalanx.validate.network.outcome import Context, Outcome, Reader, reproduced
from phalanx.validate.network.table import Row
from phalanx.validate.network.words import NotSaid, count, number, said

EXACT = 1e-3  # exact values are printed with four digits
SAMPLED = 0.02  # the rows' own Monte Carlo error
MOST_UNITS = 10**8  # per link: a slip beyond, and an array of every load up to there
# The two ends of the comparison in arXiv:2605.04333 section 2: 8 planes on two tiers of 512x100G, one plane of 64x800G.
MULTI_PLANE, MULTI_RADIX, SINGLE_RADIX = Shape(planes=8, tiers=2), 512, 64
TIER_OF = {"NIC-T0": 0, "T0-T1": 1, "T1-T2": 2}


def hosts(row: Row, _: Context) -> Outcome:
    """2·(k/2)^L."""
    found = most_hosts(shapes.radix(row), shapes.shape(row))
    return reproduced(row, found, "fabric/sizing", tolerance=EXACT)


def _full(radix: int, shape: Shape) -> Fabric:
    gbps = shapes.NIC_GBPS if shapes.NIC_GBPS % shape.planes == 0 else 100.0 * shape.planes
    return size(most_hosts(radix, shape), gbps, unnamed(radix, gbps / shape.planes), shape)


def per_host_ratio(row: Row, _: Context) -> Outcome:
    """Switches or optics per host of eight planes against one plane of so many tiers."""
    against = count(row.quantity, "tiers?") or 3
    many = _full(MULTI_RADIX, MULTI_PLANE)
    one = _full(SINGLE_RADIX, Shape(planes=1, tiers=against))
    if row.quantity.startswith("optics"):
        ours = bill(many).optics_800g / many.hosts / (bill(one).optics_800g / one.hosts)
        return reproduced(row, ours, "fabric/bill", tolerance=EXACT)
    return reproduced(row, many.switches / many.hosts / (one.switches / one.hosts), "fabric/bill", tolerance=EXACT)


def hops(row: Row, _: Context) -> Outcome:
    """Switches on the longest path."""
    made = size(64, 800.0, unnamed(64, 800.0), Shape(planes=1, tiers=shapes.tiers(row)))
    return reproduced(row, made.hops, "fabric/types", tolerance=EXACT)


def under_t0(row: Row, _: Context) -> Outcome:
    """Ports of a T0 that go down."""
    return reproduced(row, split_t0(shapes.radix(row), 2, shapes.ratio(row))[0], "fabric/sizing", tolerance=EXACT)


def uplink_loss(row: Row, _: Context) -> Outcome:
    """Share of a T0's uplinks that one is."""
    made = _full(shapes.radix(row), Shape(planes=shapes.planes(row), tiers=2))
    return reproduced(row, 100 * loss(made).t0_t1_link, "fabric/bill; the row is rounded")


def nic_loss(row: Row, _: Context) -> Outcome:
    """Share of a NIC that a plane is."""
    made = _full(SINGLE_RADIX, Shape(planes=shapes.said_planes(row), tiers=2))
    return reproduced(row, 100 * loss(made).nic_link, "fabric/bill; the row is rounded")


def total(row: Row, _: Context) -> Outcome:
    """Switches or links of a whole fabric."""
    made = shapes.fabric(row)
    boxes = {"switches": made.switches, "T0 switches": made.planes * made.t0, "T1 switches": made.planes * made.t1}
    boxes["T2 switches"] = made.planes * made.t2
    name = row.quantity.rpartition(" total")[0]
    if name in boxes:
        return reproduced(row, boxes[name], "fabric/sizing", tolerance=EXACT)
    tier = TIER_OF[name.split(" ")[0]]
    links = tier_links(made)
    if tier >= len(links):
        raise NotSaid(f"a fabric with {name}: it has {made.tiers} tiers")
    return reproduced(row, links[tier], "fabric/bill", tolerance=EXACT)


def per_host(row: Row, _: Context) -> Outcome:
    """Switches or 800G-class optics for one NIC of a full fabric."""
    made = _full(shapes.radix(row), shapes.shape(row))
    whole = made.switches if row.quantity.startswith("switches") else bill(made).optics_800g
    return reproduced(row, whole / made.hosts, "fabric/bill", tolerance=EXACT)


def paths(row: Row, _: Context) -> Outcome:
    """Paths between hosts under different T0s: over every T1 of every plane in two tiers."""
    if t1 := count(row.conditions, "T1s?"):
        return reproduced(row, shapes.planes(row) * t1, "planes x T1", tolerance=EXACT)
    return reproduced(row, shapes.fabric(row).paths, "fabric/types", tolerance=EXACT)


def touched(row: Row, _: Context) -> Outcome:
    """Chance that a connection has a path over one given T1."""
    text = shapes.words(row)
    entropy, ways = said(count(text, "EVs?"), "how many EVs"), said(count(text, "paths?"), "of how many paths")
    return reproduced(row, 100 * (1 - (1 - 1 / ways) ** entropy), "1-(1-1/paths)^EVs", tolerance=5e-3)


def link_load(row: Row, _: Context) -> Outcome:
    """Balls into bins."""
    units = said(count(row.conditions, "(?:units?|flows?|QPs?|EVs?|packets?) per link"), "how many units per link")
    links = said(count(row.conditions, "(?:up)?links"), "how many links")
    if units > MOST_UNITS:
        raise NotSaid(f"a load: {units:,} units per link are none")
    return reproduced(row, max_to_mean(units, links), "fabric/loads, no sampling", tolerance=SAMPLED)


def spray_load(row: Row, _: Context) -> Outcome:
    """The busiest uplink of all T0s when every connection draws its paths at random.

    A T0-T1 link is counted once, as everywhere in the table and in `phalanx fabric decisions`: its way down is another
    draw of the same kind, and the busiest of both ways 1 to 2 % higher.
    """
    entropy, made = said(count(row.conditions, "EVs?(?: per QP)?"), "how many EVs per QP"), shapes.fabric(row)
    units = made.t0_down * entropy / made.planes / made.t0_up
    if units > MOST_UNITS:
        raise NotSaid(f"a load: {units:,.0f} units per link are none")
    ours = max_to_mean(units, made.t0_up, groups=made.planes * made.t0)
    return reproduced(row, ours, "fabric/loads over the uplinks of all T0s and planes")


def idle_links(row: Row, _: Context) -> Outcome:
    """Links on which nothing falls."""
    units = said(count(row.conditions, "(?:units?|flows?|QPs?) per link"), "how many units per link")
    scale = 100.0 if row.unit == "percent" else 1.0
    return reproduced(row, scale * idle_share(units), "fabric/loads", tolerance=SAMPLED)


def late(row: Row, _: Context) -> Outcome:
    """Chance that one of N transfers is late."""
    text = shapes.words(row)
    chance = number(text, r"p ?= ?([\d.]+(?:e-?\d+)?)(?!\d|\^)")
    if power := re.search(r"p ?= ?10\^-?(\d+)", text):
        chance = 10.0 ** -int(power[1][:3])
    flows = number(text, r"N ?= ?([\d,]+)") or count(text, "(?:transfers?|flows?|GPUs?)")
    if chance is None or not 0 <= chance < 1:
        raise NotSaid("the chance p that a transfer is late")
    scale = 100.0 if row.unit == "percent" else 1.0
    return reproduced(row, scale * late_step(chance, int(said(flows, "how many transfers N"))), "fabric/decisions")


def slowest(row: Row, _: Context) -> Outcome:
    """The harmonic number."""
    text = shapes.words(row)
    flows = number(text, r"N ?= ?([\d,]+)") or count(text, "(?:transfers?|flows?)")
    return reproduced(row, harmonic(int(said(flows, "how many transfers N"))), "fabric/decisions", tolerance=EXACT)


READERS: tuple[tuple[str, Reader], ...] = (
    (r"^(max )?hosts( at|,| in| of)|^(max|most) hosts", hosts),
    (r"^(switch|switches|switch count|optics) ratio", per_host_ratio),
    (r"^(max |worst )?switch hops", hops),
    (r"^hosts (under one T0|one switch away)", under_t0),
    (r"^capacity lost per (failed )?T0-T1 link", uplink_loss),
    (r"^NIC bandwidth lost per (failed )?NIC-T0 link", nic_loss),
    (r"^(switches|T[012] switches|T0-T1 links|NIC-T0 links|T1-T2 links) total", total),
    (r"^(switches|optics) per host", per_host),
    (r"^(links|share of links) idle|^idle links", idle_links),
    (r"\bstep\b.*\blate\b|^late steps", late),
    (r"^(distinct )?paths (between hosts|per host pair)", paths),
    (r"^QPs touched by one T1", touched),
    (r"^max link load", link_load),
    (r"^worst T0-T1 link load", spray_load),
    (r"^E\[max\]/mean", slowest),
)
