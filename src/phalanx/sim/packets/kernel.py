"""The compiled loop of the packet engine: one slot is the time of one packet on a port.

It is imported only when a simulation runs, because importing it compiles with numba. In every slot: packets that
reach the end of a wire enter the next queue or are delivered, events reach the senders, every port sends the head of
its queue, every NIC port sends a packet of a connection whose window allows it. Packets that compete for a queue in a
slot, and planes that compete for a connection's window, come in an order that changes from slot to slot, or in turn:
see `nth`.

The key of its cache covers the files it uses: see `parts.py`. Arrays are taken out of their groups before a loop and
passed one by one: reading a group inside a loop, or a row of a table as a separate array, costs an atomic reference
count each time (9x on 131,072 hosts).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from phalanx.sim.fair_rates import compile_loop
from phalanx.sim.packets import engine_state, parts, senders, switches
from phalanx.sim.packets.engine_state import (
    ACTIVE,
    ASSUMED_BAD,
    DELIVERED,
    DENIED,
    GOOD,
    LOSSES_SEEN,
    NOW,
    RETIRED,
    SENT,
    TRIMS,
    Calendar,
    Ints,
    Knobs,
    Net,
    Shape,
    Traffic,
)
from phalanx.sim.packets.parts import draw, part, shuffled, stamp_of
from phalanx.sim.packets.senders import events, inject, inject_in_turn
from phalanx.sim.packets.switches import deliver, from_nics, from_t0, from_t1, over_t2, serve, spread


@part
def arrive(
    shape: Shape, knobs: Knobs, net: Net, traffic: Traffic, calendar: Calendar, totals: Ints, slot: int, routed: int
) -> None:
    """Process everything that reaches the end of a wire in this slot.

    Links below and above the T0s take turns at being first, and so do planes: of packets acknowledged together, the
    last one determines the path and the delay, and its port sends the acknowledgement.
    """
    word = shuffled(slot)
    plane = word % shape.planes
    above_first = shape.t0_up > 0 and word >> 30
    for _ in range(shape.planes):
        plane = plane + 1 if plane + 1 < shape.planes else 0
        base = plane * shape.per_plane
        if above_first:
            from_t1(shape, knobs, net, traffic, calendar, totals, slot, base)
        from_nics(shape, knobs, net, traffic, calendar, totals, slot, base, routed)
        deliver(shape, knobs, net, traffic, calendar, totals, slot, base)
        if shape.t0_up > 0:
            from_t0(shape, knobs, net, traffic, calendar, totals, slot, base, routed)
            if not above_first:
                from_t1(shape, knobs, net, traffic, calendar, totals, slot, base)
        if shape.t1_up > 0:
            over_t2(shape, knobs, net, traffic, calendar, totals, slot, base, routed)


@part
def carries(net: Net, totals: Ints, link: int) -> bool:
    """Return True if a probe passes a link."""
    return bool(net.share[link] > 0 and (net.loss[link] == 0 or draw(totals) >= net.loss[link]))


@part
def alive(shape: Shape, knobs: Knobs, net: Net, traffic: Traffic, totals: Ints, flow: int, path: int) -> bool:
    """Return True if a probe passes all links of a path."""
    base = ((path + flow) % shape.planes) * shape.per_plane
    up = base + 2 * shape.hosts
    source, target = traffic.source[flow], traffic.target[flow]
    t0, goal = net.host_t0[source], net.host_t0[target]
    ok = carries(net, totals, base + source) and carries(net, totals, base + shape.hosts + target)
    if t0 == goal or not ok:
        return bool(ok)
    ups = shape.t0 * shape.t0_up
    port = spread(knobs.seed, flow, path, 1, shape.t0_up)
    ok = carries(net, totals, up + t0 * shape.t0_up + port) and carries(
        net, totals, up + ups + goal * shape.t0_up + port
    )
    if traffic.links[flow] == 4 or not ok:
        return bool(ok)
    pods_up = (shape.per_plane - 2 * shape.hosts - 2 * ups) // 2
    turn, pod_t1 = spread(knobs.seed, flow, path, 2, shape.t1_up), port % shape.t1_per_pod
    source_uplink = ((t0 // shape.t0_per_pod) * shape.t1_per_pod + pod_t1) * shape.t1_up + turn
    target_uplink = ((goal // shape.t0_per_pod) * shape.t1_per_pod + pod_t1) * shape.t1_up + turn
    ok = carries(net, totals, up + 2 * ups + source_uplink) and carries(
        net, totals, up + 2 * ups + pods_up + target_uplink
    )
    return bool(ok)


def loops(stamp: int) -> tuple[Callable[..., Any], ...]:
    """Return the compiled functions; each closes over `stamp`, as numba keys its cache on closure variables."""

    @compile_loop
    def advance(
        shape: Shape,
        knobs: Knobs,
        net: Net,
        traffic: Traffic,
        calendar: Calendar,
        totals: Ints,
        begin: int,
        end: int,
        routed: int,
    ) -> int:
        """Run the slots from `begin` up to `end`; stops early when every connection has finished."""
        _ = stamp
        slot = begin
        while slot < end:
            arrive(shape, knobs, net, traffic, calendar, totals, slot, routed)
            events(shape, knobs, traffic, calendar, totals, slot)
            if totals[ACTIVE] == 0:
                break
            before = totals[SENT]
            for plane in range(shape.planes):
                serve(shape, knobs, net, traffic, calendar, totals, slot, plane * shape.per_plane)
            if shape.planes == 1:
                inject(shape, knobs, net, traffic, calendar, totals, slot)
            else:
                inject_in_turn(shape, knobs, net, traffic, calendar, totals, slot)
            slot += 1
            # Nothing moves and no sender may send: skip to the next event at a sender.
            if totals[SENT] == before == totals[DELIVERED] + totals[TRIMS] + totals[LOSSES_SEEN]:
                while slot < end and calendar.first[slot % shape.ring] < 0:
                    slot += 1
        totals[NOW] = slot
        return slot

    @compile_loop
    def probe(shape: Shape, knobs: Knobs, net: Net, traffic: Traffic, totals: Ints, phase: int, phases: int) -> None:
        """Probe the retired paths of every `phases`-th connection; paths whose links pass the probe are good again."""
        _ = stamp
        for flow in range(phase, traffic.path.shape[0], phases):
            if traffic.done[flow] >= 0 or traffic.tally[flow, RETIRED] == 0:
                continue
            for path in range(knobs.paths):
                if traffic.path[flow, path] == ASSUMED_BAD and alive(shape, knobs, net, traffic, totals, flow, path):
                    traffic.path[flow, path] = GOOD
                    traffic.tally[flow, RETIRED] -= 1

    @compile_loop
    def deny(shape: Shape, knobs: Knobs, net: Net, traffic: Traffic, totals: Ints) -> None:
        """Take the paths over links without a share out of use permanently."""
        _ = stamp
        for flow in range(traffic.path.shape[0]):
            for path in range(knobs.paths):
                if not alive(shape, knobs, net, traffic, totals, flow, path):
                    traffic.path[flow, path] = DENIED
                    traffic.tally[flow, RETIRED] += 1

    return advance, probe, deny


advance, probe, deny = loops(
    stamp_of(__file__, *(module.__file__ for module in (parts, senders, engine_state, switches)))
)
