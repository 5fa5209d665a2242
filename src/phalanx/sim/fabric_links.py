"""The links of a fabric as numbers, so that paths are arrays of integers.

Links are directed. A plane's links follow each other in blocks: NIC up, NIC down, T0 up, T0 down and, with three
tiers, T1 up, T1 down; planes follow each other. A switch never blocks internally, so a path is the links it takes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from phalanx.errors import mistake
from phalanx.network.fabric.fabric_types import Fabric

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

MOST_TIERS = 3
# Capacities take 8 bytes a link and the filling about 30 more: 50 million links are 2 GB. 131,072 NICs in 8 planes
# have 4.2 million.
MOST_LINKS = 50_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Links:
    """The numbering of a fabric's links.

    T0s fill with NICs in rank order; with rails, NIC j of a server is on rail j.
    """

    fabric: Fabric
    t0_per_pod: int
    t1_per_pod: int
    t1_up: int  # ports; 0 in two tiers
    t2_per_t1: int  # T2s that a T1 connects to

    @property
    def per_plane(self) -> int:
        """The number of directed links of a plane."""
        f = self.fabric
        up = f.t0 * f.t0_up if f.tiers > 1 else 0
        return 2 * (f.hosts + up + f.t1 * self.t1_up)

    @property
    def count(self) -> int:
        """The number of directed links of all planes."""
        return self.fabric.planes * self.per_plane

    def host_t0(self, host: Ints) -> Ints:
        """Return the T0 switch, within a plane, of each NIC."""
        f = self.fabric
        if f.rails == 1:
            return host // f.t0_down
        server, rail = host // f.rails, host % f.rails
        return (server // f.t0_down) * f.rails + rail

    def nic_up(self, plane: Ints, host: Ints) -> Ints:
        """Return the links from NICs to their T0."""
        return plane * self.per_plane + host

    def nic_down(self, plane: Ints, host: Ints) -> Ints:
        """Return the links from a T0 to its NICs."""
        return plane * self.per_plane + self.fabric.hosts + host

    def t0_up(self, plane: Ints, t0: Ints, port: Ints) -> Ints:
        """Return the links from a T0 to the T1 at its uplink `port`."""
        return plane * self.per_plane + 2 * self.fabric.hosts + t0 * self.fabric.t0_up + port

    def t0_down(self, plane: Ints, t0: Ints, port: Ints) -> Ints:
        """Return the links from the T1 at a T0's uplink `port` back to the T0."""
        return self.t0_up(plane, t0, port) + self.fabric.t0 * self.fabric.t0_up

    def t1_up_link(self, plane: Ints, t1: Ints, port: Ints) -> Ints:
        """Return the links from a T1 to the T2 at its uplink `port`."""
        base = 2 * (self.fabric.hosts + self.fabric.t0 * self.fabric.t0_up)
        return plane * self.per_plane + base + t1 * self.t1_up + port

    def t1_down_link(self, plane: Ints, t1: Ints, port: Ints) -> Ints:
        """Return the links from the T2 at a T1's uplink `port` back to the T1."""
        return self.t1_up_link(plane, t1, port) + self.fabric.t1 * self.t1_up

    def t1_of(self, t0: Ints, port: Ints) -> Ints:
        """Return the T1 of a T0's uplink; with fewer T1s than ports several ports go to the same one."""
        return (t0 // self.t0_per_pod) * self.t1_per_pod + port % self.t1_per_pod

    def t2_of(self, t1: Ints, port: Ints) -> Ints:
        """Return the T2 of a T1's uplink: T1s at the same position in their pods share a group of T2s."""
        return (t1 % self.t1_per_pod) * self.t2_per_t1 + port % self.t2_per_t1

    def capacity(self) -> Floats:
        """Return the bits per second of every link when nothing is broken."""
        return np.full(self.count, self.fabric.port_gbps * 1e9)

    def bundled(self, capacity: Floats) -> Floats:
        """Return capacities where a T0's uplinks, and a pod's, are one link each, at the number of their first link."""
        f, joined = self.fabric, capacity.reshape(self.fabric.planes, self.per_plane).copy()
        first, pod = 2 * f.hosts, self.t1_per_pod * self.t1_up
        for size, blocks in ((f.t0_up, 2 * f.t0), (pod, 2 * f.pods)):
            if f.tiers > 1 and size:
                block_links = joined[:, first : first + size * blocks].reshape(f.planes, blocks, size)
                block_links[:, :, 0] = block_links.sum(axis=2)
                first += size * blocks
        return joined.reshape(-1)


def links_of(fabric: Fabric) -> Links:
    """Return the links of a fabric; raises UserError for a fabric that cannot exist or is too large."""
    _check_failures(fabric)
    deep = fabric.tiers == 3
    t1_per_pod = max(1, fabric.t1_per_pod)
    links = Links(
        fabric=fabric,
        t0_per_pod=math.ceil(fabric.t0 / fabric.pods),
        t1_per_pod=t1_per_pod,
        t1_up=(fabric.t1_up or fabric.switch.radix // 2) if deep else 0,
        t2_per_t1=max(1, fabric.t2 // t1_per_pod),
    )
    if links.count > MOST_LINKS:
        raise mistake(
            fabric.name,
            f"{links.count:,} links are more than the {MOST_LINKS:,} the fluid engine holds in 2 GB",
            fix="simulate one plane (planes behave alike), or fewer hosts: the shares hardly change with the size",
        )
    return links


def _check_failures(f: Fabric) -> None:
    """Raise UserError for a fabric that the fluid engine cannot represent, or whose hosts are not connected."""
    if not 1 <= f.tiers <= MOST_TIERS:
        raise mistake(f.name, f"{f.tiers} tiers: the fluid engine knows 1 to {MOST_TIERS}", fix="use 2 or 3 tiers")
    if f.hosts < 1 or f.planes < 1 or f.t0_down < 1 or f.port_gbps <= 0:
        raise mistake(f.name, f"{f.hosts} hosts in {f.planes} planes of {f.port_gbps:g}G: each must be at least 1")
    servers = math.ceil(f.hosts / f.rails)
    needed = math.ceil(servers / f.t0_down) * f.rails
    if f.t0 < needed:
        raise mistake(
            f.name,
            f"{f.t0} T0 switches with {f.t0_down} ports down cannot carry {f.hosts:,} NICs on {f.rails} rails",
            why="some hosts would be connected to nothing",
            fix=f"use {needed} T0 switches, or at most {f.t0 // f.rails * f.t0_down * f.rails:,} hosts",
        )
    if f.t0 > 1 and (f.tiers == 1 or f.t0_up < 1 or f.t1 < 1 or (f.tiers == 3 and f.t2 < 1)):
        raise mistake(
            f.name,
            f"{f.t0} T0 switches, but no switches above that join them: the fabric is disconnected",
            fix="use two tiers with at least one uplink per T0, or hosts that fit one switch",
        )


# Failed links and switches of a fabric, in whole or in part.


@dataclass(frozen=True, kw_only=True, slots=True)
class BrokenParts:
    """Failed parts, each named as (plane, number), and the share of capacity that they keep, 0 by default.

    A cable fails in both directions. `nics` are (plane, host), `uplinks` (plane, T0, port), switches (plane, number).
    """

    nics: tuple[tuple[int, int], ...] = ()
    uplinks: tuple[tuple[int, int, int], ...] = ()
    t0: tuple[tuple[int, int], ...] = ()
    t1: tuple[tuple[int, int], ...] = ()
    left: float = 0.0  # share of the capacity that every part above keeps
    # Remaining share of each link, instead of named parts.
    links: Floats | None = field(default=None, compare=False)

    @property
    def nothing(self) -> bool:
        """True if no part is broken."""
        return not (self.nics or self.uplinks or self.t0 or self.t1) and self.links is None


NOTHING = BrokenParts()


def transceiver_lanes(fabric_planes: int, host: int) -> tuple[tuple[int, int], ...]:
    """Return all lanes of a NIC's transceiver, for `BrokenParts.nics`."""
    return tuple((plane, host) for plane in range(fabric_planes))


def link_shares(links: Links, broken: BrokenParts) -> Floats:
    """Return the share of its capacity that each link still has."""
    shares = np.ones(links.count) if broken.links is None else np.array(broken.links, dtype=np.float64)
    if shares.shape != (links.count,):
        raise mistake("broken links", f"{shares.size:,} shares were given for {links.count:,} links")
    for broken_links in (
        _nic_links(links, broken),
        _uplink_links(links, broken),
        _t0_links(links, broken),
        _t1_links(links, broken),
    ):
        shares[broken_links] = broken.left
    return shares


def _number_rows(rows: tuple[tuple[int, ...], ...], limits: dict[str, int], what: str) -> Ints:
    """Return a table of the rows; raises UserError for a number beyond its limit, which `limits` has by name."""
    table = np.array(rows, dtype=np.int64).reshape(-1, len(limits))
    is_wrong = (table < 0) | (table >= np.array(list(limits.values())))
    if is_wrong.any():
        row = tuple(int(value) for value in table[is_wrong.any(axis=1)][0])
        row_text = " ".join(f"{name} {value:,}," for name, value in zip(limits, row, strict=True)).rstrip(",")
        ranges = [
            f"{name}s are 0 to {most - 1:,}" if most else f"there are no {name}s" for name, most in limits.items()
        ]
        raise mistake(f"broken {what}", f"there is no {row_text}", fix=", ".join(ranges))
    return table


def _nic_links(links: Links, broken: BrokenParts) -> Ints:
    table = _number_rows(broken.nics, {"plane": links.fabric.planes, "host": links.fabric.hosts}, "NIC port")
    return np.concatenate([links.nic_up(table[:, 0], table[:, 1]), links.nic_down(table[:, 0], table[:, 1])])


def _uplink_links(links: Links, broken: BrokenParts) -> Ints:
    f = links.fabric
    table = _number_rows(
        broken.uplinks, {"plane": f.planes, "T0": f.t0, "uplink": f.t0_up if f.tiers > 1 else 0}, "T0-T1 link"
    )
    plane, t0, port = table[:, 0], table[:, 1], table[:, 2]
    return np.concatenate([links.t0_up(plane, t0, port), links.t0_down(plane, t0, port)])


def _t0_links(links: Links, broken: BrokenParts) -> Ints:
    f = links.fabric
    table = _number_rows(broken.t0, {"plane": f.planes, "T0": f.t0}, "T0 switch")
    home = links.host_t0(np.arange(f.hosts))
    broken_links = [np.empty(0, dtype=np.int64)]
    for plane, t0 in table:
        hosts = np.flatnonzero(home == t0)
        broken_links += [links.nic_up(plane, hosts), links.nic_down(plane, hosts)]
    return np.concatenate(broken_links)


def _t1_links(links: Links, broken: BrokenParts) -> Ints:
    f = links.fabric
    table = _number_rows(broken.t1, {"plane": f.planes, "T1": f.t1 if f.tiers > 1 else 0}, "T1 switch")
    t0, port = (grid.ravel() for grid in np.meshgrid(np.arange(f.t0), np.arange(f.t0_up), indexing="ij"))
    home = links.t1_of(t0, port)
    broken_links = [np.empty(0, dtype=np.int64)]
    for plane, t1 in table:
        is_attached = home == t1
        broken_links += [
            links.t0_up(plane, t0[is_attached], port[is_attached]),
            links.t0_down(plane, t0[is_attached], port[is_attached]),
        ]
    return np.concatenate(broken_links)
