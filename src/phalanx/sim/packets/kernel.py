"""The compiled loop: one slot is the time of one packet on a port.

Imported only when a simulation runs, because importing it compiles with numba.
In every slot: packets that reach the end of a wire enter the next queue or are delivered, events reach the senders,
every port sends the head of its queue, every NIC port sends a packet of a connection whose window allows it.
Whatever competes for the same thing in a slot (packets for a queue, planes for a connection's window) comes in an order
that changes from slot to slot, or in turn: see `nth`.
What it takes from other files is in the key of its cache: see `parts.py`.
Arrays are taken out of their groups before a loop and handed on one by one: reading a group inside a loop, or a row of
a table as an array of its own, costs an atomic reference count each time (9x on 131,072 hosts).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from phalanx.sim.fair_rates import compile_loop
from phalanx.sim.packets import parts, state
from phalanx.sim.packets.parts import draw, nth, part, room_for, shuffled, stamp_of
from phalanx.sim.packets.state import (
    ACHIEVED,
    ACK,
    ACKED,
    ACTIVE,
    ALARM,
    ARRIVED,
    ASK_BIT,
    ASSUMED_BAD,
    AVERAGE,
    BAD_PATHS,
    BASE,
    CALM,
    CREDIT,
    DELIVERED,
    DENIED,
    FAST,
    FLOW_BITS,
    FRESH,
    GOOD,
    IGNORE,
    IGNORED,
    IN_FLIGHT,
    JUDGE_AT,
    KEPT,
    KEPT_AT,
    LAST_ADD,
    LAST_BIT,
    LAST_CUT,
    LAST_LOSS,
    LOSSES,
    LOSSES_SEEN,
    LOST,
    MARK_BIT,
    MARKS,
    MOST,
    MOST_SKIP,
    NOW,
    OVERFLOW,
    PATH_BITS,
    PLANE,
    RETIRED,
    SENT,
    STAMP_BIT,
    TOUCHED,
    TRIMMED,
    TRIMMED_LAST_HOP,
    TRIMS,
    UNACKED,
    UNSENT,
    WINDOW,
    Bytes,
    Calendar,
    Floats,
    Ints,
    Ints32,
    Knobs,
    Net,
    Shape,
    Shorts,
    Traffic,
)

FLOW_MASK = (1 << FLOW_BITS) - 1
PATH_MASK = (1 << PATH_BITS) - 1
MARK = 1 << MARK_BIT
# Bits of an event word: connection and path as in a packet, then kind, both marks, packets and queueing delay.
KIND_BIT, SEEN_BIT, NUMBER_BIT, DELAY_BIT = MARK_BIT, 38, 40, 50
MOST_DELAY = (1 << 13) - 1
MOST_NUMBER = (1 << 10) - 1
WHO_MASK = (1 << MARK_BIT) - 1
MOST_DOUBLINGS = 4  # of a timeout


@part
def spread(seed: int, flow: int, path: int, salt: int, ways: int) -> int:
    """Which of `ways` ports a path of a connection takes at one switch: an even hash, another one with each seed."""
    x = (flow * 2654435761 + path * 40503 + salt * 97531 + seed) & 0x7FFFFFFFFFFFFFF
    x ^= x >> 29
    x = (x * 0x1CE4E5B9BF58476D) & 0x7FFFFFFFFFFFFFF
    x ^= x >> 32
    x = (x * 0x133111EB94D049BB) & 0x7FFFFFFFFFFFFFF
    x ^= x >> 31
    # The product's high bits in place of a remainder, which takes 20 to 40 cycles.
    return ((x & 0xFFFFFFFF) * ways) >> 32


@part
def tell(
    first: Ints32, words: Ints, following: Ints32, free: Ints32, totals: Ints, ring: int, slot: int, word: int
) -> None:
    """Have the sender learn something in a later slot."""
    event = free[0]
    if event < 0:
        totals[OVERFLOW] += 1
        return
    free[0] = following[event]
    at = slot % ring
    words[event] = word
    following[event] = first[at]
    first[at] = event


@part
def lose(
    shape: Shape, knobs: Knobs, traffic: Traffic, calendar: Calendar, totals: Ints, slot: int, packet: int
) -> None:
    """A packet disappears: the sender knows after its timeout; without another path, it doubles with each in a row."""
    flow = packet & FLOW_MASK
    totals[LOSSES_SEEN] += 1
    traffic.tally[flow, TOUCHED] |= 1
    wait = shape.timeout if knobs.edge else shape.timeout << min(traffic.tally[flow, LOSSES], MOST_DOUBLINGS)
    at = min(max((packet >> STAMP_BIT) + wait, slot + 1), slot + shape.ring - 1)
    word = (packet & WHO_MASK) | (LOST << KIND_BIT)
    tell(calendar.first, calendar.word, calendar.next, calendar.free, totals, shape.ring, at, word)


@part
def push(ring: Ints, head: Shorts, count: Shorts, queue: int, link: int, packet: int) -> bool:
    """Put a packet into a port's queue; False when it is full."""
    waiting = count[link]
    if waiting >= queue:
        return False
    at = head[link] + waiting
    if at >= queue:
        at -= queue
    ring[link, at] = packet
    count[link] = waiting + 1
    return True


@part
def trim(
    shape: Shape,
    knobs: Knobs,
    net: Net,
    traffic: Traffic,
    calendar: Calendar,
    totals: Ints,
    slot: int,
    link: int,
    packet: int,
    left: int,
) -> None:
    """A full queue cuts a packet to its header, which passes the `left` links of its way without waiting, and back."""
    flow = packet & FLOW_MASK
    totals[TRIMS] += 1
    traffic.tally[flow, TOUCHED] |= 2
    net.owed[link] += knobs.ack_share
    if net.owed[link] >= 1.0:
        net.owed[link] -= 1.0
        net.trouble[link] |= 2
    word = (packet & WHO_MASK) | ((TRIMMED_LAST_HOP if left == 1 else TRIMMED) << KIND_BIT)
    at = slot + (left + traffic.links[flow]) * shape.back + shape.host_slots
    tell(calendar.first, calendar.word, calendar.next, calendar.free, totals, shape.ring, at, word)


@part
def crossing(shape: Shape, avoided: Bytes, base: int, t0: int, goal: int, place: int, turn: int) -> int:
    """The first T1 uplink from `turn` on whose T2 routing holds for reachable, and the goal's pod from it; or -1."""
    ups = shape.t0 * shape.t0_up
    over = base + 2 * (shape.hosts + ups)
    down = over + (shape.per_plane - 2 * (shape.hosts + ups)) // 2
    here = ((t0 // shape.t0_per_pod) * shape.t1_per_pod + place) * shape.t1_up
    there = ((goal // shape.t0_per_pod) * shape.t1_per_pod + place) * shape.t1_up
    for _ in range(shape.t1_up):
        if not (avoided[over + here + turn] or avoided[down + there + turn]):
            return turn
        turn = (turn + 1) % shape.t1_up
    return -1


@part
def living(shape: Shape, avoided: Bytes, base: int, t0: int, goal: int, port: int) -> int:
    """The first uplink from `port` on by which routing holds the goal for reachable."""
    up = base + 2 * shape.hosts
    down = up + shape.t0 * shape.t0_up
    across = shape.t1_up > 0 and t0 // shape.t0_per_pod != goal // shape.t0_per_pod
    for _ in range(shape.t0_up):
        dead = avoided[up + t0 * shape.t0_up + port] or avoided[down + goal * shape.t0_up + port]
        if not dead and not (across and crossing(shape, avoided, base, t0, goal, port % shape.t1_per_pod, 0) < 0):
            break
        port = (port + 1) % shape.t0_up
    return port


@part
def from_nics(
    shape: Shape,
    knobs: Knobs,
    net: Net,
    traffic: Traffic,
    calendar: Calendar,
    totals: Ints,
    slot: int,
    base: int,
    routed: int,
) -> None:
    """What reaches the T0s from NICs."""
    wire, ring, head, count, host_t0 = net.wire, net.ring, net.head, net.waiting, net.host_t0
    avoided, target, links, seed = net.avoided, traffic.target, traffic.links, knobs.seed
    now, hosts, queue, ports = slot % shape.wire, shape.hosts, shape.queue, shape.t0_up
    word, room = shuffled(slot), room_for(min(shape.block, hosts))
    for start in range(0, hosts, shape.block):
        # The hosts of a T0 take turns at being first, or the last ones would find its queues full.
        size = min(shape.block, hosts - start)
        for place in range(room):
            host = start + nth(place, word, room)
            if host >= start + size:
                continue
            packet = wire[now, base + host]
            if packet == 0:
                continue
            flow = packet & FLOW_MASK
            goal_host = target[flow]
            t0, goal = host_t0[host], host_t0[goal_host]
            if t0 == goal:
                link, left = base + hosts + goal_host, 1
            else:
                port = spread(seed, flow, (packet >> FLOW_BITS) & PATH_MASK, 1, ports)
                if routed:
                    port = living(shape, avoided, base, t0, goal, port)
                link, left = base + 2 * hosts + t0 * ports + port, links[flow] - 1
            if not push(ring, head, count, queue, link, packet):
                trim(shape, knobs, net, traffic, calendar, totals, slot, link, packet, left)


@part
def from_t0(
    shape: Shape,
    knobs: Knobs,
    net: Net,
    traffic: Traffic,
    calendar: Calendar,
    totals: Ints,
    slot: int,
    base: int,
    routed: int,
) -> None:
    """What reaches the T1s from below: down again within the pod, else up to a T2."""
    wire, ring, head, count, host_t0, target = net.wire, net.ring, net.head, net.waiting, net.host_t0, traffic.target
    now, queue, ports, per_pod = slot % shape.wire, shape.queue, shape.t0_up, shape.t0_per_pod
    ups, avoided, seed = shape.t0 * ports, net.avoided, knobs.seed
    up = base + 2 * shape.hosts
    word, room = shuffled(slot), room_for(shape.t0)
    for place in range(room):
        t0 = nth(place, word, room)
        if t0 >= shape.t0:
            continue
        port = word % ports
        for _ in range(ports):
            port = port + 1 if port + 1 < ports else 0
            packet = wire[now, up + t0 * ports + port]
            if packet == 0:
                continue
            flow = packet & FLOW_MASK
            goal = host_t0[target[flow]]
            if shape.t1_up == 0 or t0 // per_pod == goal // per_pod:
                link, left = up + ups + goal * ports + port, 2
            else:
                t1 = (t0 // per_pod) * shape.t1_per_pod + port % shape.t1_per_pod
                turn = spread(seed, flow, (packet >> FLOW_BITS) & PATH_MASK, 2, shape.t1_up)
                if routed:  # without a way, on into the dead link
                    turn = max(crossing(shape, avoided, base, t0, goal, port % shape.t1_per_pod, turn), 0)
                link, left = up + 2 * ups + t1 * shape.t1_up + turn, 4
            if not push(ring, head, count, queue, link, packet):
                trim(shape, knobs, net, traffic, calendar, totals, slot, link, packet, left)


@part
def from_t1(
    shape: Shape, knobs: Knobs, net: Net, traffic: Traffic, calendar: Calendar, totals: Ints, slot: int, base: int
) -> None:
    """What reaches the T0s from above."""
    wire, ring, head, count, target = net.wire, net.ring, net.head, net.waiting, traffic.target
    now, queue, ports = slot % shape.wire, shape.queue, shape.t0_up
    fall, down = base + 2 * shape.hosts + shape.t0 * ports, base + shape.hosts
    word, room = shuffled(slot), room_for(ports)
    for start in range(fall, fall + shape.t0 * ports, ports):
        for place in range(room):
            port = nth(place, word, room)
            if port >= ports:
                continue
            packet = wire[now, start + port]
            if packet == 0:
                continue
            link = down + target[packet & FLOW_MASK]
            if not push(ring, head, count, queue, link, packet):
                trim(shape, knobs, net, traffic, calendar, totals, slot, link, packet, 1)


@part
def over_t2(
    shape: Shape,
    knobs: Knobs,
    net: Net,
    traffic: Traffic,
    calendar: Calendar,
    totals: Ints,
    slot: int,
    base: int,
    routed: int,
) -> None:
    """What reaches the T2s from below, and the T1s from them."""
    wire, ring, head, count, host_t0, target = net.wire, net.ring, net.head, net.waiting, net.host_t0, traffic.target
    now, queue, per_pod, seed = slot % shape.wire, shape.queue, shape.t1_per_pod, knobs.seed
    avoided, source = net.avoided, traffic.source
    fall = base + 2 * shape.hosts + shape.t0 * shape.t0_up
    over = fall + shape.t0 * shape.t0_up
    half = (base + shape.per_plane - over) // 2
    word, room = shuffled(slot), room_for(half)
    for place in range(room):
        index = nth(place, word, room)
        if index >= half:
            continue
        t1, turn = index // shape.t1_up, index % shape.t1_up
        packet = wire[now, over + index]
        if packet != 0:
            goal = host_t0[target[packet & FLOW_MASK]]
            link = over + half + ((goal // shape.t0_per_pod) * per_pod + t1 % per_pod) * shape.t1_up + turn
            if not push(ring, head, count, queue, link, packet):
                trim(shape, knobs, net, traffic, calendar, totals, slot, link, packet, 3)
        packet = wire[now, over + half + index]
        if packet != 0:
            flow = packet & FLOW_MASK
            goal = host_t0[target[flow]]
            port = spread(seed, flow, (packet >> FLOW_BITS) & PATH_MASK, 1, shape.t0_up)
            if routed:
                port = living(shape, avoided, base, host_t0[source[flow]], goal, port)
            link = fall + goal * shape.t0_up + port - port % per_pod + t1 % per_pod
            if not push(ring, head, count, queue, link, packet):
                trim(shape, knobs, net, traffic, calendar, totals, slot, link, packet, 2)


@part
def deliver(
    shape: Shape, knobs: Knobs, net: Net, traffic: Traffic, calendar: Calendar, totals: Ints, slot: int, base: int
) -> None:
    """Receivers take packets, and acknowledge every few, and at once what is marked or asks for it."""
    wire, tally, packets, links, debt = net.wire, traffic.tally, traffic.packets, traffic.links, traffic.debt
    first, words, following, free = calendar.first, calendar.word, calendar.next, calendar.free
    now, owes = slot % shape.wire, base // shape.per_plane * shape.hosts
    for host in range(shape.hosts):
        packet = wire[now, base + shape.hosts + host]
        if packet == 0:
            continue
        flow = packet & FLOW_MASK
        totals[DELIVERED] += 1
        tally[flow, ARRIVED] += 1
        tally[flow, UNACKED] += 1
        number, arrived = tally[flow, UNACKED], tally[flow, ARRIVED]
        marks = (packet >> MARK_BIT) & 3
        # Where all that is under way has arrived, a sender held by its window would wait for ever.
        alone = number == tally[flow, IN_FLIGHT]
        prompt = (packet >> MARK_BIT) & 7 or arrived == 1 or arrived == packets[flow] or alone
        if prompt or number >= knobs.ack_every:
            tally[flow, UNACKED] = 0
            waited = min(slot - (packet >> STAMP_BIT) - links[flow] * shape.wire, MOST_DELAY)
            word = (packet & WHO_MASK) | (marks << SEEN_BIT) | (number << NUMBER_BIT) | (waited << DELAY_BIT)
            at = slot + links[flow] * shape.back + shape.host_slots
            tell(first, words, following, free, totals, shape.ring, at, word)
            debt[owes + host] += knobs.ack_share


@part
def serve(
    shape: Shape, knobs: Knobs, net: Net, traffic: Traffic, calendar: Calendar, totals: Ints, slot: int, base: int
) -> None:
    """Every switch port of a plane sends the head of its queue, marked when the queue behind it is long."""
    wire, ring, head, counts, trouble = net.wire, net.ring, net.head, net.waiting, net.trouble
    share, loss, room = net.share, net.loss, net.room
    now, queue, low, high = slot % shape.wire, shape.queue, knobs.mark_low, knobs.mark_high
    last_hop = base + 2 * shape.hosts
    for link in range(base + shape.hosts, base + shape.per_plane):
        count = counts[link]
        packet = 0
        if count > 0:
            troubled = trouble[link]
            if troubled and room[link] < 1.0:
                shorten(shape, knobs, net, traffic, calendar, totals, slot, base, link)
                count = counts[link]
            if troubled and held(share, trouble, link, slot):
                wire[now, link] = 0
                continue
            at = head[link]
            packet = ring[link, at]
            head[link] = at + 1 if at + 1 < queue else 0
            count -= 1
            counts[link] = count
            if troubled and (share[link] == 0.0 or draw(totals) < loss[link]):
                lose(shape, knobs, traffic, calendar, totals, slot, packet)
                packet = 0
            elif count > (low * room[link] if troubled else low) and (knobs.mark_last_hop or link >= last_hop):
                over = (count / room[link] - low) / (high - low) if troubled else (count - low) / (high - low)
                if over >= 1.0 or draw(totals) < over:
                    packet |= MARK if link >= last_hop else 1 << LAST_BIT
                    totals[MARKS] += 1
        wire[now, link] = packet


@part
def shorten(
    shape: Shape,
    knobs: Knobs,
    net: Net,
    traffic: Traffic,
    calendar: Calendar,
    totals: Ints,
    slot: int,
    base: int,
    link: int,
) -> None:
    """Trim what a short queue has no room for. Here, not where packets enter: there it would cost every one of them."""
    ups = shape.t0 * shape.t0_up
    place = link - base - 2 * shape.hosts
    while net.waiting[link] > max(1, int(shape.queue * net.room[link])):
        net.waiting[link] -= 1
        packet = net.ring[link, (net.head[link] + net.waiting[link]) % shape.queue]
        left = 1
        if place >= 2 * ups:  # beyond T0-T1: up to a T2, then down
            left = 4 if place - 2 * ups < (shape.per_plane - 2 * shape.hosts - 2 * ups) // 2 else 3
        elif place >= ups:
            left = 2
        elif place >= 0:
            left = traffic.links[packet & FLOW_MASK] - 1
        trim(shape, knobs, net, traffic, calendar, totals, slot, link, packet, left)


@part
def held(share: Floats, trouble: Bytes, link: int, slot: int) -> bool:
    """Whether a port lets this slot pass: it owes it to headers, or its link is slow."""
    if trouble[link] & 2:
        trouble[link] &= 1
        return True
    return bool(0.0 < share[link] < 1.0 and int((slot + 1) * share[link]) == int(slot * share[link]))


@part
def judge(knobs: Knobs, w: Floats, flow: int, in_flight: int, slot: int, bad: bool, marked: int, waited: float) -> bool:
    """Quick adapt: when a round trip delivered next to nothing, the window becomes what was delivered."""
    settled = False
    if w[flow, IGNORED] < w[flow, IGNORE] and marked:
        settled = True
    elif slot > w[flow, JUDGE_AT]:
        # The gate of 1/8 of the window and four target delays: uet-htsim's defaults.
        alarmed = w[flow, ALARM] > 0 or bad or waited > 4 * knobs.target
        if w[flow, JUDGE_AT] > 0 and alarmed and w[flow, ACHIEVED] < w[flow, MOST] / 8:
            w[flow, WINDOW] = max(w[flow, ACHIEVED], 1.0)
            w[flow, IGNORE] = in_flight
            w[flow, IGNORED] = 0.0
            w[flow, ALARM] = 0.0
            settled = True
        w[flow, ACHIEVED] = 0.0
        w[flow, JUDGE_AT] = slot + w[flow, BASE] + knobs.target
    if settled:
        w[flow, CREDIT] = 0.0
        w[flow, FRESH] = 0.0
    return settled


@part
def quadrant(knobs: Knobs, w: Floats, flow: int, slot: int, marked: int, number: int, waited: float) -> None:
    """The four quadrants of mark and delay (NSCC): grow by the distance to the target, grow fairly, cut, or hold."""
    if marked:
        if waited >= knobs.target:
            w[flow, FAST] = 0.0
            w[flow, CALM] = 0.0
            if w[flow, AVERAGE] > knobs.target and slot - w[flow, LAST_CUT] > w[flow, BASE]:
                w[flow, WINDOW] *= max(1 - 0.8 * (w[flow, AVERAGE] - knobs.target) / w[flow, AVERAGE], 0.5)
                w[flow, LAST_CUT] = slot
        return
    if waited >= knobs.target:
        w[flow, CREDIT] += 5 * knobs.scale * number
        return
    if waited < knobs.idle:
        w[flow, CALM] += number
        if w[flow, CALM] > w[flow, WINDOW] or w[flow, FAST] > 0:
            w[flow, WINDOW] += number * 0.25 * knobs.scale
            w[flow, FAST] = 1.0
            return
    else:
        w[flow, CALM] = 0.0
    w[flow, FAST] = 0.0
    w[flow, CREDIT] += knobs.gain * number * (1 - waited / knobs.target)


@part
def grow(
    knobs: Knobs, w: Floats, flow: int, in_flight: int, slot: int, marked: int, number: int, waited: float
) -> None:
    """What an acknowledgement does to the window."""
    # A long wait without a mark is a path that is draining: it counts as a quarter of a round trip.
    sample = w[flow, BASE] / 4 if waited > knobs.target and not marked else waited
    w[flow, AVERAGE] += knobs.smoothing * (sample - w[flow, AVERAGE])
    if judge(knobs, w, flow, in_flight, slot, False, marked, waited):
        return
    quadrant(knobs, w, flow, slot, marked, number, waited)
    w[flow, WINDOW] = min(max(w[flow, WINDOW], 1.0), w[flow, MOST])
    since = slot - w[flow, LAST_ADD]
    if w[flow, FRESH] > knobs.fresh or since > knobs.rtt:
        w[flow, WINDOW] += w[flow, CREDIT] / w[flow, WINDOW]
        if since >= knobs.rtt:
            w[flow, WINDOW] += 0.15 * knobs.scale
            w[flow, LAST_ADD] = slot
        w[flow, CREDIT] = 0.0
        w[flow, FRESH] = 0.0
    w[flow, WINDOW] = min(max(w[flow, WINDOW], 1.0), w[flow, MOST])


@part
def acknowledged(
    knobs: Knobs, tally: Ints32, w: Floats, state: Bytes, kept: Shorts, flow: int, path: int, slot: int, word: int
) -> None:
    """A sender hears that packets arrived."""
    number, marks = (word >> NUMBER_BIT) & MOST_NUMBER, (word >> SEEN_BIT) & 3
    if number == 0:  # the answer to a sender that asked what had arrived
        number = tally[flow, UNACKED]
        tally[flow, UNACKED] = 0
    tally[flow, IN_FLIGHT] -= number
    tally[flow, ACKED] += number
    tally[flow, LOSSES] = 0
    w[flow, ACHIEVED] += number
    w[flow, IGNORED] += number
    w[flow, FRESH] += number
    if marks & 1 and knobs.skip and state[flow, path] < MOST_SKIP:
        state[flow, path] += 1
    if knobs.kept and marks == 0 and tally[flow, KEPT] < knobs.kept:
        kept[flow, (tally[flow, KEPT_AT] + tally[flow, KEPT]) % knobs.kept] = path
        tally[flow, KEPT] += 1
    if knobs.controlled:
        waited = float((word >> DELAY_BIT) & MOST_DELAY)
        grow(knobs, w, flow, tally[flow, IN_FLIGHT], slot, marks, number, waited)


@part
def missing(
    knobs: Knobs, tally: Ints32, w: Floats, state: Bytes, totals: Ints, flow: int, path: int, slot: int, kind: int
) -> None:
    """A sender hears that a packet was trimmed, or concludes that it was lost: it is sent again, elsewhere."""
    tally[flow, IN_FLIGHT] -= 1
    tally[flow, UNSENT] += 1
    settled = False
    if kind == LOST:
        settled = knobs.edge == 1  # full queues trim, so a silent loss speaks of the path, not of congestion
        if slot - w[flow, LAST_LOSS] > knobs.rtt:  # what one burst lost counts once
            tally[flow, LOSSES] += 1
        w[flow, LAST_LOSS] = slot
        left = knobs.paths - tally[flow, RETIRED]
        if knobs.edge and state[flow, path] < ASSUMED_BAD and left > knobs.least_paths:
            state[flow, path] = ASSUMED_BAD
            tally[flow, RETIRED] += 1
            totals[BAD_PATHS] += 1
    else:
        if kind == TRIMMED and knobs.skip and state[flow, path] < ASSUMED_BAD:
            state[flow, path] = min(state[flow, path] + 4, MOST_SKIP)
        w[flow, IGNORED] += 1
        w[flow, ALARM] = 1.0
        w[flow, AVERAGE] += knobs.smoothing * (knobs.rtt - w[flow, AVERAGE])
        settled = knobs.controlled == 1 and judge(knobs, w, flow, tally[flow, IN_FLIGHT], slot, True, 1, 0.0)
    if knobs.controlled and not settled:
        w[flow, WINDOW] = max(w[flow, WINDOW] - 1.0, 1.0)


@part
def fire(traffic: Traffic, trigger: int, slot: int) -> None:
    """A trigger hears of an end; with the last that it needs, the connections that wait for it start."""
    traffic.needed[trigger] -= 1
    if traffic.needed[trigger] != 0:
        return
    for place in range(traffic.first_waiting[trigger], traffic.first_waiting[trigger + 1]):
        flow = traffic.waiting[place]
        traffic.tally[flow, UNSENT] = traffic.packets[flow]
        traffic.began[flow] = slot


@part
def events(shape: Shape, knobs: Knobs, traffic: Traffic, calendar: Calendar, totals: Ints, slot: int) -> None:
    """What senders learn in this slot."""
    tally, w, state, packets, done = traffic.tally, traffic.window, traffic.path, traffic.packets, traffic.done
    words, following, free, kept = calendar.word, calendar.next, calendar.free, traffic.kept
    at = slot % shape.ring
    event = calendar.first[at]
    calendar.first[at] = -1
    while event >= 0:
        word = words[event]
        flow, path, kind = word & FLOW_MASK, (word >> FLOW_BITS) & PATH_MASK, (word >> KIND_BIT) & 3
        if kind == ACK:
            acknowledged(knobs, tally, w, state, kept, flow, path, slot, word)
            if tally[flow, ACKED] == packets[flow]:
                done[flow] = slot
                totals[ACTIVE] -= 1
                if traffic.fires[flow] >= 0:
                    fire(traffic, traffic.fires[flow], slot)
        else:
            missing(knobs, tally, w, state, totals, flow, path, slot, kind)
        after = following[event]
        following[event] = free[0]
        free[0] = event
        event = after
        flying = tally[flow, IN_FLIGHT]
        if 0 < flying == tally[flow, UNACKED] and flying + 1 > w[flow, WINDOW]:
            # The window shrank below what has arrived unacknowledged: the sender asks after its timeout.
            tell(calendar.first, words, following, free, totals, shape.ring, slot + shape.timeout, word & WHO_MASK)


@part
def choose(state: Bytes, turns: Ints32, totals: Ints, flow: int, plane: int, planes: int, paths: int) -> int:
    """The next path of a connection on a plane, or -1: rotation from a random start, without what is to be skipped."""
    spare, own = -1, (plane - flow) % planes if planes > 1 else 0
    # Path p is on plane (p + connection) % planes: equally many on each, and single paths on different ones.
    ways = (paths - own + planes - 1) // planes if planes > 1 else paths
    at = turns[flow, plane]
    turn, offset = at & 0xFFFF, at >> 16
    for _ in range(ways):
        place = turn + offset
        path = (place if place < ways else place - ways) * planes + own
        turn += 1
        if turn >= ways:
            turn, offset = 0, int(draw(totals) * ways)
        if state[flow, path] == GOOD:
            spare = path
            break
        if state[flow, path] <= MOST_SKIP and spare < 0:
            state[flow, path] -= 1
            spare = path
    turns[flow, plane] = (offset << 16) | turn
    return spare


@part
def again(knobs: Knobs, shape: Shape, tally: Ints32, state: Bytes, kept: Shorts, flow: int, plane: int) -> int:
    """The oldest path that was acknowledged without a mark, or -1: none, on another plane, or bad since."""
    if knobs.kept == 0 or tally[flow, KEPT] == 0:
        return -1
    at = tally[flow, KEPT_AT]
    path = kept[flow, at]
    if (path + flow) % shape.planes != plane:
        return -1
    tally[flow, KEPT] -= 1
    tally[flow, KEPT_AT] = at + 1 if at + 1 < knobs.kept else 0
    return path if state[flow, path] < ASSUMED_BAD else -1


@part
def launch(tally: Ints32, w: Floats, sent: Ints, totals: Ints, flow: int, plane: int, path: int, slot: int) -> int:
    """A connection sends a packet: its word."""
    flying = tally[flow, IN_FLIGHT]
    tally[flow, UNSENT] -= 1
    tally[flow, IN_FLIGHT] = flying + 1
    totals[SENT] += 1
    sent[plane] += 1
    # The last that the window or the work allows asks, or both ends would wait for each other.
    ask = tally[flow, UNSENT] == 0 or flying + 2 >= w[flow, WINDOW]
    return flow | (path << FLOW_BITS) | (int(ask) << ASK_BIT) | (slot << STAMP_BIT)


@part
def inject(shape: Shape, knobs: Knobs, net: Net, traffic: Traffic, calendar: Calendar, totals: Ints, slot: int) -> None:
    """Where a NIC has one port, it sends a packet of the next of its connections that may."""
    wire, trouble, share, loss, sent = net.wire, net.trouble, net.share, net.loss, net.sent
    firsts, mines, nexts, debt = traffic.first, traffic.mine, traffic.next, traffic.debt
    tally, w, state, turns, kept = traffic.tally, traffic.window, traffic.path, traffic.turn, traffic.kept
    now = slot % shape.wire
    for host in range(shape.hosts):
        wire[now, host] = 0
        first = firsts[host]
        mine = firsts[host + 1] - first
        if debt[host] >= 1.0:
            debt[host] -= 1.0
            continue
        if trouble[host] and held(share, trouble, host, slot):
            continue
        at = nexts[host]
        for _ in range(mine):
            flow = mines[first + at]
            at = at + 1 if at + 1 < mine else 0
            if tally[flow, UNSENT] == 0 or tally[flow, IN_FLIGHT] + 1 > w[flow, WINDOW]:
                continue
            path = again(knobs, shape, tally, state, kept, flow, 0)
            if path < 0:
                path = choose(state, turns, totals, flow, 0, 1, knobs.paths)
            if path < 0:
                continue
            packet = launch(tally, w, sent, totals, flow, 0, path, slot)
            if trouble[host] and (share[host] == 0.0 or draw(totals) < loss[host]):
                lose(shape, knobs, traffic, calendar, totals, slot, packet)
            else:
                wire[now, host] = packet
            break
        nexts[host] = at


@part
def inject_in_turn(
    shape: Shape, knobs: Knobs, net: Net, traffic: Traffic, calendar: Calendar, totals: Ints, slot: int
) -> None:
    """Where a NIC has a port on each of several planes, connections take turns, and so do the planes of each.

    With a plane that always comes first, a connection that is held by its window would use that one most (41 % of the
    packets on the first of four, 14 % on the last), where MRC keeps planes equal (arXiv:2605.04333 section 2.1).
    """
    wire, trouble, share, loss, ready, sent = net.wire, net.trouble, net.share, net.loss, net.ready, net.sent
    firsts, mines, nexts, debt = traffic.first, traffic.mine, traffic.next, traffic.debt
    tally, w, state, turns, kept = traffic.tally, traffic.window, traffic.path, traffic.turn, traffic.kept
    now, planes = slot % shape.wire, shape.planes
    for host in range(shape.hosts):
        ports = 0
        for plane in range(planes):
            link, owes = plane * shape.per_plane + host, plane * shape.hosts + host
            wire[now, link] = 0
            ready[plane] = 0
            if debt[owes] >= 1.0:
                debt[owes] -= 1.0
            elif not (trouble[link] and held(share, trouble, link, slot)):
                ready[plane] = 1
                ports += 1
        first = firsts[host]
        mine = firsts[host + 1] - first
        at, idle = nexts[host], 0
        while ports > 0 and idle < mine:
            flow = mines[first + at]
            at = at + 1 if at + 1 < mine else 0
            idle += 1
            if tally[flow, UNSENT] == 0 or tally[flow, IN_FLIGHT] + 1 > w[flow, WINDOW]:
                continue
            plane, path = tally[flow, PLANE], -1
            for _ in range(planes):
                if ready[plane]:
                    path = again(knobs, shape, tally, state, kept, flow, plane)
                    if path < 0:
                        path = choose(state, turns, totals, flow, plane, planes, knobs.paths)
                    if path >= 0:
                        break
                plane = plane + 1 if plane + 1 < planes else 0
            if path < 0:
                continue
            idle = ready[plane] = 0
            ports -= 1
            tally[flow, PLANE] = plane + 1 if plane + 1 < planes else 0
            packet = launch(tally, w, sent, totals, flow, plane, path, slot)
            link = plane * shape.per_plane + host
            if trouble[link] and (share[link] == 0.0 or draw(totals) < loss[link]):
                lose(shape, knobs, traffic, calendar, totals, slot, packet)
            else:
                wire[now, link] = packet
        nexts[host] = at


@part
def arrive(
    shape: Shape, knobs: Knobs, net: Net, traffic: Traffic, calendar: Calendar, totals: Ints, slot: int, routed: int
) -> None:
    """Everything that reaches the end of a wire in this slot; below a T0 and above it take turns at being first.

    So do planes: of packets acknowledged together the last one tells its path and its delay, and its port answers.
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
    """Whether a probe passes a link."""
    return bool(net.share[link] > 0 and (net.loss[link] == 0 or draw(totals) >= net.loss[link]))


@part
def alive(shape: Shape, knobs: Knobs, net: Net, traffic: Traffic, totals: Ints, flow: int, path: int) -> bool:
    """Whether a probe over a path comes through."""
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
    turn, place = spread(knobs.seed, flow, path, 2, shape.t1_up), port % shape.t1_per_pod
    here = ((t0 // shape.t0_per_pod) * shape.t1_per_pod + place) * shape.t1_up + turn
    there = ((goal // shape.t0_per_pod) * shape.t1_per_pod + place) * shape.t1_up + turn
    ok = carries(net, totals, up + 2 * ups + here) and carries(net, totals, up + 2 * ups + pods_up + there)
    return bool(ok)


def loops(stamp: int) -> tuple[Callable[..., Any], ...]:
    """What Python calls. `stamp` stands in each, because numba keys its cache on the variables around a function."""

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
            # Nothing moves and nobody may send: on to the next thing that a sender hears.
            if totals[SENT] == before == totals[DELIVERED] + totals[TRIMS] + totals[LOSSES_SEEN]:
                while slot < end and calendar.first[slot % shape.ring] < 0:
                    slot += 1
        totals[NOW] = slot
        return slot

    @compile_loop
    def probe(shape: Shape, knobs: Knobs, net: Net, traffic: Traffic, totals: Ints, phase: int, phases: int) -> None:
        """Every `phases`-th connection tries its retired paths; one whose links all carry the probe is good again."""
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
        """Take the paths over links without a share out of use, for good."""
        _ = stamp
        for flow in range(traffic.path.shape[0]):
            for path in range(knobs.paths):
                if not alive(shape, knobs, net, traffic, totals, flow, path):
                    traffic.path[flow, path] = DENIED
                    traffic.tally[flow, RETIRED] += 1

    return advance, probe, deny


advance, probe, deny = loops(stamp_of(__file__, parts.__file__, state.__file__))
