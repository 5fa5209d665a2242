"""What of a fabric does not work: links and switches, whole or in part."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from phalanx.errors import mistake
from phalanx.sim.links import Floats, Ints, Links


@dataclass(frozen=True, kw_only=True, slots=True)
class Broken:
    """Failed parts, each named as (plane, number): a share of the capacity is what is left of them, 0 by default.

    A cable fails in both directions. `nics` are (plane, host), `uplinks` (plane, T0, port), switches (plane, number).
    """

    nics: tuple[tuple[int, int], ...] = ()
    uplinks: tuple[tuple[int, int, int], ...] = ()
    t0: tuple[tuple[int, int], ...] = ()
    t1: tuple[tuple[int, int], ...] = ()
    left: float = 0.0  # share of the capacity that every part above keeps
    links: Floats | None = field(default=None, compare=False)  # share of each link that is left, in place of names

    @property
    def nothing(self) -> bool:
        """Whether all works."""
        return not (self.nics or self.uplinks or self.t0 or self.t1) and self.links is None


NOTHING = Broken()


def transceiver(fabric_planes: int, host: int) -> tuple[tuple[int, int], ...]:
    """All lanes of a NIC's transceiver, for `Broken.nics`."""
    return tuple((plane, host) for plane in range(fabric_planes))


def shares(links: Links, broken: Broken) -> Floats:
    """Share of its capacity that each link still has."""
    left = np.ones(links.count) if broken.links is None else np.array(broken.links, dtype=np.float64)
    if left.shape != (links.count,):
        raise mistake("broken links", f"{left.size:,} shares were given for {links.count:,} links")
    for found in (_nics(links, broken), _uplinks(links, broken), _t0(links, broken), _t1(links, broken)):
        left[found] = broken.left
    return left


def _table(rows: tuple[tuple[int, ...], ...], limits: dict[str, int], what: str) -> Ints:
    """Rows of numbers below their limits, which are by name."""
    table = np.array(rows, dtype=np.int64).reshape(-1, len(limits))
    wrong = (table < 0) | (table >= np.array(list(limits.values())))
    if wrong.any():
        row = tuple(int(value) for value in table[wrong.any(axis=1)][0])
        given = " ".join(f"{name} {value:,}," for name, value in zip(limits, row, strict=True)).rstrip(",")
        there = [f"{name}s are 0 to {most - 1:,}" if most else f"there are no {name}s" for name, most in limits.items()]
        raise mistake(f"broken {what}", f"there is no {given}", fix=", ".join(there))
    return table


def _nics(links: Links, broken: Broken) -> Ints:
    table = _table(broken.nics, {"plane": links.fabric.planes, "host": links.fabric.hosts}, "NIC port")
    return np.concatenate([links.nic_up(table[:, 0], table[:, 1]), links.nic_down(table[:, 0], table[:, 1])])


def _uplinks(links: Links, broken: Broken) -> Ints:
    f = links.fabric
    table = _table(
        broken.uplinks, {"plane": f.planes, "T0": f.t0, "uplink": f.t0_up if f.tiers > 1 else 0}, "T0-T1 link"
    )
    plane, t0, port = table[:, 0], table[:, 1], table[:, 2]
    return np.concatenate([links.t0_up(plane, t0, port), links.t0_down(plane, t0, port)])


def _t0(links: Links, broken: Broken) -> Ints:
    f = links.fabric
    table = _table(broken.t0, {"plane": f.planes, "T0": f.t0}, "T0 switch")
    home = links.host_t0(np.arange(f.hosts))
    found = [np.empty(0, dtype=np.int64)]
    for plane, t0 in table:
        hosts = np.flatnonzero(home == t0)
        found += [links.nic_up(plane, hosts), links.nic_down(plane, hosts)]
    return np.concatenate(found)


def _t1(links: Links, broken: Broken) -> Ints:
    f = links.fabric
    table = _table(broken.t1, {"plane": f.planes, "T1": f.t1 if f.tiers > 1 else 0}, "T1 switch")
    t0, port = (grid.ravel() for grid in np.meshgrid(np.arange(f.t0), np.arange(f.t0_up), indexing="ij"))
    home = links.t1_of(t0, port)
    found = [np.empty(0, dtype=np.int64)]
    for plane, t1 in table:
        mine = home == t1
        found += [links.t0_up(plane, t0[mine], port[mine]), links.t0_down(plane, t0[mine], port[mine])]
    return np.concatenate(found)
