"""The network's side of a slot: packets enter queues, ports send the head of theirs, and full queues trim packets.

It is compiled into the loop of `kernel.py`, whose module docstring describes the conventions.
"""

from __future__ import annotations

from phalanx.sim.packets.engine_state import (
    ARRIVED,
    DELAY_BIT,
    DELIVERED,
    FLOW_BITS,
    FLOW_MASK,
    IN_FLIGHT,
    KIND_BIT,
    LAST_BIT,
    LOSSES,
    LOSSES_SEEN,
    LOST,
    MARK,
    MARK_BIT,
    MARKS,
    MOST_DELAY,
    NUMBER_BIT,
    OVERFLOW,
    PATH_MASK,
    SEEN_BIT,
    STAMP_BIT,
    TOUCHED,
    TRIMMED,
    TRIMMED_LAST_HOP,
    TRIMS,
    UNACKED,
    WHO_MASK,
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
from phalanx.sim.packets.parts import draw, nth, part, power_of_two_for, shuffled

MOST_DOUBLINGS = 4  # of a timeout


@part
def spread(seed: int, flow: int, path: int, salt: int, ways: int) -> int:
    """Return which of `ways` ports a path takes at one switch: an even hash that varies with the seed."""
    x = (flow * 2654435761 + path * 40503 + salt * 97531 + seed) & 0x7FFFFFFFFFFFFFF
    x ^= x >> 29
    x = (x * 0x1CE4E5B9BF58476D) & 0x7FFFFFFFFFFFFFF
    x ^= x >> 32
    x = (x * 0x133111EB94D049BB) & 0x7FFFFFFFFFFFFFF
    x ^= x >> 31
    # The product's high bits instead of a remainder, which takes 20 to 40 cycles.
    return ((x & 0xFFFFFFFF) * ways) >> 32


@part
def tell(
    first: Ints32, words: Ints, following: Ints32, free: Ints32, totals: Ints, ring: int, slot: int, word: int
) -> None:
    """Schedule an event for the sender in a later slot."""
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
    """Record a packet that disappears; the sender notices after its timeout.

    Without recovery at the edge, the timeout doubles with each loss in a row.
    """
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
    """Trim a packet at a full queue to its header.

    The header passes the remaining `left` links without waiting, and the report returns to the sender.
    """
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
    """Return the first T1 uplink from `turn` on whose T2 reaches the goal's pod, as routing knows it; or -1."""
    ups = shape.t0 * shape.t0_up
    over = base + 2 * (shape.hosts + ups)
    down = over + (shape.per_plane - 2 * (shape.hosts + ups)) // 2
    source_uplinks = ((t0 // shape.t0_per_pod) * shape.t1_per_pod + place) * shape.t1_up
    goal_uplinks = ((goal // shape.t0_per_pod) * shape.t1_per_pod + place) * shape.t1_up
    for _ in range(shape.t1_up):
        if not (avoided[over + source_uplinks + turn] or avoided[down + goal_uplinks + turn]):
            return turn
        turn = (turn + 1) % shape.t1_up
    return -1


@part
def living(shape: Shape, avoided: Bytes, base: int, t0: int, goal: int, port: int) -> int:
    """Return the first uplink from `port` on over which the goal is reachable, as routing knows it."""
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
    """Forward the packets that reach the T0s from NICs."""
    wire, ring, head, count, host_t0 = net.wire, net.ring, net.head, net.waiting, net.host_t0
    avoided, target, links, seed = net.avoided, traffic.target, traffic.links, knobs.seed
    now, hosts, queue, ports = slot % shape.wire, shape.hosts, shape.queue, shape.t0_up
    word, room = shuffled(slot), power_of_two_for(min(shape.block, hosts))
    for start in range(0, hosts, shape.block):
        # The hosts of a T0 take turns at being first, otherwise the last ones would find its queues full.
        size = min(shape.block, hosts - start)
        for index in range(room):
            host = start + nth(index, word, room)
            if host >= start + size:
                continue
            packet = wire[now, base + host]
            if packet == 0:
                continue
            flow = packet & FLOW_MASK
            goal_host = target[flow]
            t0, goal = host_t0[host], host_t0[goal_host]
            if t0 == goal:
                link, links_left = base + hosts + goal_host, 1
            else:
                port = spread(seed, flow, (packet >> FLOW_BITS) & PATH_MASK, 1, ports)
                if routed:
                    port = living(shape, avoided, base, t0, goal, port)
                link, links_left = base + 2 * hosts + t0 * ports + port, links[flow] - 1
            if not push(ring, head, count, queue, link, packet):
                trim(shape, knobs, net, traffic, calendar, totals, slot, link, packet, links_left)


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
    """Forward the packets that reach the T1s from below: down again within the pod, else up to a T2."""
    wire, ring, head, count, host_t0, target = net.wire, net.ring, net.head, net.waiting, net.host_t0, traffic.target
    now, queue, ports, per_pod = slot % shape.wire, shape.queue, shape.t0_up, shape.t0_per_pod
    ups, avoided, seed = shape.t0 * ports, net.avoided, knobs.seed
    up = base + 2 * shape.hosts
    word, room = shuffled(slot), power_of_two_for(shape.t0)
    for index in range(room):
        t0 = nth(index, word, room)
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
                link, links_left = up + ups + goal * ports + port, 2
            else:
                t1 = (t0 // per_pod) * shape.t1_per_pod + port % shape.t1_per_pod
                turn = spread(seed, flow, (packet >> FLOW_BITS) & PATH_MASK, 2, shape.t1_up)
                # Without an alternative, use the dead link.
                if routed:
                    turn = max(crossing(shape, avoided, base, t0, goal, port % shape.t1_per_pod, turn), 0)
                link, links_left = up + 2 * ups + t1 * shape.t1_up + turn, 4
            if not push(ring, head, count, queue, link, packet):
                trim(shape, knobs, net, traffic, calendar, totals, slot, link, packet, links_left)


@part
def from_t1(
    shape: Shape, knobs: Knobs, net: Net, traffic: Traffic, calendar: Calendar, totals: Ints, slot: int, base: int
) -> None:
    """Forward the packets that reach the T0s from above."""
    wire, ring, head, count, target = net.wire, net.ring, net.head, net.waiting, traffic.target
    now, queue, ports = slot % shape.wire, shape.queue, shape.t0_up
    fall, down = base + 2 * shape.hosts + shape.t0 * ports, base + shape.hosts
    word, room = shuffled(slot), power_of_two_for(ports)
    for start in range(fall, fall + shape.t0 * ports, ports):
        for index in range(room):
            port = nth(index, word, room)
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
    """Forward the packets that reach the T2s from below, and the T1s from above."""
    wire, ring, head, count, host_t0, target = net.wire, net.ring, net.head, net.waiting, net.host_t0, traffic.target
    now, queue, per_pod, seed = slot % shape.wire, shape.queue, shape.t1_per_pod, knobs.seed
    avoided, source = net.avoided, traffic.source
    fall = base + 2 * shape.hosts + shape.t0 * shape.t0_up
    over = fall + shape.t0 * shape.t0_up
    half = (base + shape.per_plane - over) // 2
    word, room = shuffled(slot), power_of_two_for(half)
    for turn_index in range(room):
        index = nth(turn_index, word, room)
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
    """Receive packets; acknowledge every few, and at once where one is marked or asks for it."""
    wire, tally, packets, links, debt = net.wire, traffic.tally, traffic.packets, traffic.links, traffic.debt
    first, words, following, free = calendar.first, calendar.word, calendar.next, calendar.free
    now, first_debt = slot % shape.wire, base // shape.per_plane * shape.hosts
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
        # Where every packet in flight has arrived, a sender limited by its window would wait forever.
        is_last = number == tally[flow, IN_FLIGHT]
        is_urgent = (packet >> MARK_BIT) & 7 or arrived == 1 or arrived == packets[flow] or is_last
        if is_urgent or number >= knobs.ack_every:
            tally[flow, UNACKED] = 0
            waited = min(slot - (packet >> STAMP_BIT) - links[flow] * shape.wire, MOST_DELAY)
            word = (packet & WHO_MASK) | (marks << SEEN_BIT) | (number << NUMBER_BIT) | (waited << DELAY_BIT)
            at = slot + links[flow] * shape.back + shape.host_slots
            tell(first, words, following, free, totals, shape.ring, at, word)
            debt[first_debt + host] += knobs.ack_share


@part
def serve(
    shape: Shape, knobs: Knobs, net: Net, traffic: Traffic, calendar: Calendar, totals: Ints, slot: int, base: int
) -> None:
    """Send the head of the queue of every switch port of a plane, marked when the remaining queue is long."""
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
    """Trim the packets that exceed a shortened queue; checked here, as a check of every entering packet costs more."""
    ups = shape.t0 * shape.t0_up
    link_index = link - base - 2 * shape.hosts
    while net.waiting[link] > max(1, int(shape.queue * net.room[link])):
        net.waiting[link] -= 1
        packet = net.ring[link, (net.head[link] + net.waiting[link]) % shape.queue]
        links_left = 1
        # Beyond T0-T1: up to a T2, then down.
        if link_index >= 2 * ups:
            links_left = 4 if link_index - 2 * ups < (shape.per_plane - 2 * shape.hosts - 2 * ups) // 2 else 3
        elif link_index >= ups:
            links_left = 2
        elif link_index >= 0:
            links_left = traffic.links[packet & FLOW_MASK] - 1
        trim(shape, knobs, net, traffic, calendar, totals, slot, link, packet, links_left)


@part
def held(share: Floats, trouble: Bytes, link: int, slot: int) -> bool:
    """Return True if a port does not send in this slot: it owes it to headers, or its link is slow."""
    if trouble[link] & 2:
        trouble[link] &= 1
        return True
    return bool(0.0 < share[link] < 1.0 and int((slot + 1) * share[link]) == int(slot * share[link]))
