"""Faults of links and switches during a simulation, with their times, and denied parts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from phalanx.errors import mistake
from phalanx.sim.fabric_links import BrokenParts, Ints, Links, link_shares
from phalanx.sim.packets.engine_state import DENIED
from phalanx.sim.packets.simulation_arrays import PacketWorld

# "t1_link" is an uplink of a T1 both ways, "t1_fall" only from its T2 downwards: the links that uet-htsim's `-failed`
# slows.
Part = Literal["link", "t1_link", "t1_fall", "t0", "t1", "nic", "transceiver", "traffic"]


@dataclass(frozen=True, kw_only=True, slots=True)
class FabricFault:
    """A part that loses its speed (`left` of it remains) or some of its packets (`loss`) from `at_s` to `until_s`."""

    part: Part
    number: int = 0  # of the switch below the link, of the switch, or of the host
    port: int = 0  # uplink of that switch, for a link
    plane: int = 0
    at_s: float = 0.0
    until_s: float = math.inf
    left: float = 0.0
    loss: float = 0.0  # above 0 the part keeps its speed: a grey failure
    # The queue and its marking threshold shrink with the speed, as for slow links of uet-htsim.
    short: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """Links that change in a slot; `routed` changes affect only what routing knows."""

    slot: int
    links: Ints
    share: float
    loss: float
    room: float = 1.0  # of the queue
    # 1: routing avoids them from now on; 0: uses them again; None: the links themselves change.
    routed: int | None = None


def link_changes(
    links: Links,
    faults: tuple[FabricFault, ...],
    *,
    slot_s: float,
    converge_s: float | None,
    denied: tuple[FabricFault, ...] = (),
) -> list[Change]:
    """Return faults as changes of links in order of time; with `converge_s` routing follows that much later.

    With routing, `denied` parts are out of service from the start; MRC's senders deny paths instead.
    """
    changes: list[Change] = []
    gone = denied_links(links, denied) if converge_s is not None else np.empty(0, dtype=np.int64)
    if len(gone):
        changes += [Change(slot=0, links=gone, share=0.0, loss=0.0, routed=routed) for routed in (None, 1)]
    for fault in faults:
        _check_fault(fault)
        hit_links = np.setdiff1d(fault_links(links, fault), gone)
        grey = fault.loss > 0
        begin, end = _fault_slot(fault.at_s, slot_s), _fault_slot(fault.until_s, slot_s)
        share, room = 1.0 if grey else fault.left, fault.left if fault.short else 1.0
        changes.append(Change(slot=begin, links=hit_links, share=share, loss=fault.loss, room=room))
        # Routing follows a dead link, never a slow or a grey one: the port is up.
        if converge_s is not None and not grey and fault.left == 0:
            known_slot = begin + _fault_slot(converge_s, slot_s)
            if known_slot < end:
                changes.append(Change(slot=known_slot, links=hit_links, share=0.0, loss=0.0, routed=1))
            if math.isfinite(fault.until_s):
                changes.append(Change(slot=end, links=hit_links, share=1.0, loss=0.0, routed=0))
        if math.isfinite(fault.until_s):
            changes.append(Change(slot=end, links=hit_links, share=1.0, loss=0.0))
    return sorted(changes, key=lambda change: change.slot)


def _fault_slot(time_s: float, slot_s: float) -> int:
    return 1 + int(min(time_s / slot_s, 2**60))


def denied_links(links: Links, denied: tuple[FabricFault, ...]) -> Ints:
    """Return the directed links that no path may use; times and shares of the denied parts do not matter."""
    if any(fault.part == "traffic" for fault in denied):
        raise mistake("denied parts", "all traffic was named", fix="name links, T1s, T0s or NIC ports")
    return np.unique(np.concatenate([np.empty(0, dtype=np.int64), *(fault_links(links, fault) for fault in denied)]))


def fault_links(links: Links, fault: FabricFault) -> Ints:
    """Return the directed links that a fault affects."""
    switch, hosts = (fault.plane, fault.number), np.arange(links.fabric.hosts)
    # Every packet passes one link from its NIC.
    if fault.part == "traffic":
        return np.concatenate([plane * links.per_plane + hosts for plane in range(links.fabric.planes)])
    if fault.part in ("t1_link", "t1_fall"):
        return _t1_link(links, fault)
    broken = {
        "link": BrokenParts(uplinks=((fault.plane, fault.number, fault.port),)),
        "t0": BrokenParts(t0=(switch,)),
        "t1": BrokenParts(t1=(switch,)),
        "nic": BrokenParts(nics=(switch,)),
        "transceiver": BrokenParts(nics=tuple((plane, fault.number) for plane in range(links.fabric.planes))),
    }[fault.part]
    return np.flatnonzero(link_shares(links, broken) < 1)


def _t1_link(links: Links, fault: FabricFault) -> Ints:
    """Return the directed links of an uplink of a T1; raises UserError where the fabric has none."""
    if not (
        0 <= fault.plane < links.fabric.planes and 0 <= fault.number < links.fabric.t1 and 0 <= fault.port < links.t1_up
    ):
        raise mistake(
            f"fault of T1 {fault.number}",
            f"there is no uplink {fault.port} of it in plane {fault.plane}",
            fix=f"the fabric has {links.fabric.t1} T1 switches per plane with {links.t1_up} uplinks each",
        )
    port = np.array([fault.plane]), np.array([fault.number]), np.array([fault.port])
    if fault.part == "t1_fall":
        return links.t1_down_link(*port)
    return np.concatenate([links.t1_up_link(*port), links.t1_down_link(*port)])


def _check_fault(fault: FabricFault) -> None:
    where = f"fault of {fault.part} {fault.number}"
    if not 0 <= fault.at_s < fault.until_s:
        raise mistake(where, f"from {fault.at_s:g} s until {fault.until_s:g} s", fix="let it end after it begins")
    if not (0 <= fault.left < 1 and 0 <= fault.loss <= 1):
        raise mistake(where, f"left = {fault.left:g}, loss = {fault.loss:g}", fix="both are shares: 0 to 1")


# A controller's denylist: paths that senders never use, whatever probes find.


def deny_paths(world: PacketWorld, denied: tuple[FabricFault, ...]) -> None:
    """Deny every path over the links of the parts; raises UserError where a connection has no other path."""
    from phalanx.sim.packets import kernel

    share = np.ones(world.links.count)
    share[denied_links(world.links, denied)] = 0.0
    net = world.net._replace(share=share, loss=np.zeros(world.links.count))
    kernel.deny(world.shape, world.knobs, net, world.traffic, world.totals)
    cut_off = np.flatnonzero((world.traffic.path == DENIED).all(axis=1))
    if len(cut_off):
        source, target = (int(column[cut_off[0]]) for column in (world.traffic.source, world.traffic.target))
        raise mistake(
            "denied parts",
            f"connections without a path: {len(cut_off):,}, the first from host {source:,} to host {target:,}",
            why="a denied path is never used, and all of theirs are",
            fix="deny fewer parts, or give connections more paths",
        )
