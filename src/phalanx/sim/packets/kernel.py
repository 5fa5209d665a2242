"""The compiled loop: one slot is the time of one packet on a port.

Imported only when a simulation runs, because importing it compiles with numba.
In every slot: packets that reach the end of a wire enter the next queue or are delivered, events reach the senders,
every port sends the head of its queue, every NIC port sends a packet of a connection whose window allows it.
"""

from __future__ import annotations

from phalanx.sim.compiled import compiled
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
    EVENTS,
    FAST,
    FLOW_BITS,
    FRESH,
    GOOD,
    IGNORE,
    IGNORED,
    IN_FLIGHT,
    JUDGE_AT,
    LAST_ADD,
    LAST_CUT,
    LOSSES,
    LOSSES_SEEN,
    LOST,
    MARK_BIT,
    MARKS,
    MOST,
    MOST_SKIP,
    OVERFLOW,
    PATH_BITS,
    RANDOM,
    SENT,
    STAMP_BIT,
    TODO,
    TOUCHED,
    TRIMMED,
    TRIMMED_LAST_HOP,
    TRIMS,
    TURN,
    UNACKED,
    WINDOW,
    Calendar,
    Floats,
    Ints,
    Knobs,
    Net,
    Shape,
    Traffic,
)

FLOW_MASK = (1 << FLOW_BITS) - 1
PATH_MASK = (1 << PATH_BITS) - 1
MARK = 1 << MARK_BIT
# Bits of an event word: connection and path as in a packet, then kind, mark, packets and queueing delay.
KIND_BIT, SEEN_BIT, NUMBER_BIT, DELAY_BIT = 37, 39, 40, 50
MOST_DELAY = (1 << 13) - 1
MOST_NUMBER = (1 << 10) - 1
SMOOTHING = 0.0125  # of the average delay: uet-htsim @40ccb05


@compiled
def draw(totals: Ints) -> float:
    """A random number in [0, 1): xorshift64."""
    x = totals[RANDOM]
    x ^= x << 13
    x ^= (x >> 7) & 0x1FFFFFFFFFFFFFF
    x ^= x << 17
    totals[RANDOM] = x
    return ((x >> 11) & 0xFFFFFFFFFFFFF) / 4503599627370496.0


@compiled
def spread(flow: int, path: int, salt: int, ways: int) -> int:
    """Which of `ways` ports a path of a connection takes at one switch: an even hash, the same every time."""
    x = (flow * 2654435761 + path * 40503 + salt * 97531 + 12345) & 0x7FFFFFFFFFFFFFF
    x ^= x >> 29
    x = (x * 0x1CE4E5B9BF58476D) & 0x7FFFFFFFFFFFFFF
    x ^= x >> 32
    x = (x * 0x133111EB94D049BB) & 0x7FFFFFFFFFFFFFF
    x ^= x >> 31
    return x % ways


@compiled
def tell(shape: Shape, calendar: Calendar, totals: Ints, slot: int, word: int) -> None:
    """Have the sender learn something in a later slot."""
    free = calendar.free[0]
    if free < 0:
        totals[OVERFLOW] += 1
        return
    calendar.free[0] = calendar.next[free]
    at = slot % shape.ring
    calendar.word[free] = word
    calendar.next[free] = calendar.first[at]
    calendar.first[at] = free
    totals[EVENTS] += 1


@compiled
def lose(shape: Shape, traffic: Traffic, calendar: Calendar, totals: Ints, slot: int, packet: int) -> None:
    """A packet disappears: the sender knows after its timeout, twice as long after each loss in a row."""
    flow = packet & FLOW_MASK
    totals[LOSSES_SEEN] += 1
    traffic.count[flow, TOUCHED] = 1
    wait = shape.timeout << min(traffic.count[flow, LOSSES], 4)
    at = min(max((packet >> STAMP_BIT) + wait, slot + 1), slot + shape.ring - 1)
    tell(shape, calendar, totals, at, (packet & ((1 << KIND_BIT) - 1)) | (LOST << KIND_BIT))


@compiled
def enter(
    shape: Shape, knobs: Knobs, net: Net, traffic: Traffic, calendar: Calendar, totals: Ints, slot: int, link: int,
    packet: int, left: int,
) -> None:
    """Put a packet into a port's queue; a full queue cuts it to its header, which reaches both ends without waiting."""
    count = net.count[link]
    if count < shape.queue:
        at = net.head[link] + count
        if at >= shape.queue:
            at -= shape.queue
        net.ring[link, at] = packet
        net.count[link] = count + 1
        return
    flow = packet & FLOW_MASK
    totals[TRIMS] += 1
    traffic.count[flow, TOUCHED] |= 2
    net.owed[link] += knobs.ack_share
    if net.owed[link] >= 1.0:
        net.owed[link] -= 1.0
        net.trouble[link] |= 2
    kind = TRIMMED_LAST_HOP if left == 1 else TRIMMED
    later = (left + traffic.links[flow]) * shape.back + shape.host_slots
    tell(shape, calendar, totals, slot + later, (packet & ((1 << KIND_BIT) - 1)) | (kind << KIND_BIT))


@compiled
def uplink(shape: Shape, net: Net, base: int, t0: int, goal: int, flow: int, path: int, routed: int) -> int:
    """The T0 uplink of a path; where routing has converged, the next one whose both ends are alive."""
    port = spread(flow, path, 1, shape.t0_up)
    if routed:
        up = base + 2 * shape.hosts
        down = up + shape.t0 * shape.t0_up
        for _ in range(shape.t0_up):
            if not (net.avoided[up + t0 * shape.t0_up + port] or net.avoided[down + goal * shape.t0_up + port]):
                break
            port = (port + 1) % shape.t0_up
    return port


@compiled
def deliver(
    shape: Shape, knobs: Knobs, traffic: Traffic, calendar: Calendar, totals: Ints, slot: int, packet: int
) -> None:
    """The receiver takes a packet, and acknowledges every few, and at once what is marked or asks for it."""
    flow = packet & FLOW_MASK
    count = traffic.count
    totals[DELIVERED] += 1
    count[flow, ARRIVED] += 1
    count[flow, UNACKED] += 1
    marked = (packet >> MARK_BIT) & 1
    number = count[flow, UNACKED]
    arrived = count[flow, ARRIVED]
    asked = (packet >> ASK_BIT) & 1
    if marked or asked or number >= knobs.ack_every or arrived == 1 or arrived == traffic.packets[flow]:
        count[flow, UNACKED] = 0
        links = traffic.links[flow]
        waited = min(slot - (packet >> STAMP_BIT) - links * shape.wire, MOST_DELAY)
        word = packet & ((1 << MARK_BIT) - 1)
        word |= (ACK << KIND_BIT) | (marked << SEEN_BIT) | (number << NUMBER_BIT) | (waited << DELAY_BIT)
        tell(shape, calendar, totals, slot + links * shape.back + shape.host_slots, word)
        traffic.debt[traffic.target[flow]] += knobs.ack_share


@compiled
def arrive(
    shape: Shape, knobs: Knobs, net: Net, traffic: Traffic, calendar: Calendar, totals: Ints, slot: int, routed: int
) -> None:
    """Everything that reaches the end of a wire in this slot."""
    row = net.wire[slot % shape.wire]
    ups = shape.t0 * shape.t0_up
    pods_up = (shape.per_plane - 2 * shape.hosts - 2 * ups) // 2
    for plane in range(shape.planes):
        base = plane * shape.per_plane
        down, up = base + shape.hosts, base + 2 * shape.hosts
        fall, over = up + ups, up + 2 * ups
        turn = slot * 7919
        for i in range(shape.hosts):  # NIC to T0
            host = (i + turn) % shape.hosts
            packet = row[base + host]
            if packet:
                flow = packet & FLOW_MASK
                t0, goal = net.host_t0[host], net.host_t0[traffic.target[flow]]
                if t0 == goal:
                    link, left = down + traffic.target[flow], 1
                else:
                    path = (packet >> FLOW_BITS) & PATH_MASK
                    port = uplink(shape, net, base, t0, goal, flow, path, routed)
                    link, left = up + t0 * shape.t0_up + port, traffic.links[flow] - 1
                enter(shape, knobs, net, traffic, calendar, totals, slot, link, packet, left)
        for host in range(shape.hosts):  # T0 to NIC
            packet = row[down + host]
            if packet:
                deliver(shape, knobs, traffic, calendar, totals, slot, packet)
        for i in range(ups):  # T0 to T1
            index = (i + turn) % ups
            packet = row[up + index]
            if packet:
                flow = packet & FLOW_MASK
                t0, port = index // shape.t0_up, index % shape.t0_up
                goal = net.host_t0[traffic.target[flow]]
                if t0 // shape.t0_per_pod == goal // shape.t0_per_pod:
                    link, left = fall + goal * shape.t0_up + port, 2
                else:
                    path = (packet >> FLOW_BITS) & PATH_MASK
                    t1 = (t0 // shape.t0_per_pod) * shape.t1_per_pod + port % shape.t1_per_pod
                    link, left = over + t1 * shape.t1_up + spread(flow, path, 2, shape.t1_up), 4
                enter(shape, knobs, net, traffic, calendar, totals, slot, link, packet, left)
        for i in range(ups):  # T1 to T0
            index = (i + turn) % ups
            packet = row[fall + index]
            if packet:
                link = down + traffic.target[packet & FLOW_MASK]
                enter(shape, knobs, net, traffic, calendar, totals, slot, link, packet, 1)
        for i in range(pods_up):  # T1 to T2
            index = (i + turn) % pods_up
            packet = row[over + index]
            if packet:
                goal = net.host_t0[traffic.target[packet & FLOW_MASK]]
                t1, port = index // shape.t1_up, index % shape.t1_up
                there = (goal // shape.t0_per_pod) * shape.t1_per_pod + t1 % shape.t1_per_pod
                link = over + pods_up + there * shape.t1_up + port
                enter(shape, knobs, net, traffic, calendar, totals, slot, link, packet, 3)
        for i in range(pods_up):  # T2 to T1
            index = (i + turn) % pods_up
            packet = row[over + pods_up + index]
            if packet:
                flow = packet & FLOW_MASK
                goal = net.host_t0[traffic.target[flow]]
                t1 = index // shape.t1_up
                port = spread(flow, (packet >> FLOW_BITS) & PATH_MASK, 1, shape.t0_up)
                port = port - port % shape.t1_per_pod + t1 % shape.t1_per_pod
                enter(shape, knobs, net, traffic, calendar, totals, slot, fall + goal * shape.t0_up + port, packet, 2)


@compiled
def serve(
    shape: Shape, knobs: Knobs, net: Net, traffic: Traffic, calendar: Calendar, totals: Ints, slot: int
) -> None:
    """Every switch port sends the head of its queue, marked when the queue behind it is long."""
    row = net.wire[slot % shape.wire]
    for plane in range(shape.planes):
        base = plane * shape.per_plane
        last_hop = base + 2 * shape.hosts
        for link in range(base + shape.hosts, base + shape.per_plane):
            row[link] = 0
            count = net.count[link]
            if count == 0:
                continue
            troubled = net.trouble[link]
            if troubled & 2:
                net.trouble[link] = troubled & 1
                continue
            if troubled:
                share = net.share[link]
                if 0.0 < share < 1.0 and int((slot + 1) * share) == int(slot * share):
                    continue
            head = net.head[link]
            packet = net.ring[link, head]
            net.head[link] = head + 1 if head + 1 < shape.queue else 0
            count -= 1
            net.count[link] = count
            if troubled and (net.share[link] == 0.0 or draw(totals) < net.loss[link]):
                lose(shape, traffic, calendar, totals, slot, packet)
                continue
            if count > knobs.mark_low and (knobs.mark_last_hop or link >= last_hop):
                over = (count - knobs.mark_low) / (knobs.mark_high - knobs.mark_low)
                if over >= 1.0 or draw(totals) < over:
                    packet |= MARK
                    totals[MARKS] += 1
            row[link] = packet


@compiled
def judge(knobs: Knobs, w: Floats, in_flight: int, slot: int, bad: bool, marked: int, waited: float) -> bool:
    """Quick adapt: when a round trip delivered next to nothing, the window becomes what was delivered."""
    settled = False
    if w[IGNORED] < w[IGNORE] and marked:
        settled = True
    elif slot > w[JUDGE_AT]:
        # The gate of 1/8 of the window and four target delays: uet-htsim's defaults.
        if w[JUDGE_AT] > 0 and (w[ALARM] > 0 or bad or waited > 4 * knobs.target) and w[ACHIEVED] < w[MOST] / 8:
            w[WINDOW] = max(w[ACHIEVED], 1.0)
            w[IGNORE] = in_flight
            w[IGNORED] = 0.0
            w[ALARM] = 0.0
            settled = True
        w[ACHIEVED] = 0.0
        w[JUDGE_AT] = slot + w[BASE] + knobs.target
    if settled:
        w[CREDIT] = 0.0
        w[FRESH] = 0.0
    return settled


@compiled
def grow(knobs: Knobs, w: Floats, in_flight: int, slot: int, marked: int, number: int, waited: float) -> None:
    """The four quadrants of mark × delay (NSCC): grow by the distance to the target, grow fairly, cut, or hold."""
    # A long wait without a mark is a path that is draining: it counts as a quarter of a round trip.
    sample = w[BASE] / 4 if waited > knobs.target and not marked else waited
    w[AVERAGE] += SMOOTHING * (sample - w[AVERAGE])
    if judge(knobs, w, in_flight, slot, False, marked, waited):
        return
    if marked:
        if waited >= knobs.target:
            w[FAST] = 0.0
            w[CALM] = 0.0
            if w[AVERAGE] > knobs.target and slot - w[LAST_CUT] > w[BASE]:
                w[WINDOW] = w[WINDOW] * max(1 - 0.8 * (w[AVERAGE] - knobs.target) / w[AVERAGE], 0.5)
                w[LAST_CUT] = slot
    elif waited >= knobs.target:
        w[CREDIT] += 5 * knobs.scale * number
    else:
        if waited < knobs.rtt / 12:  # 1 µs of the reference's 12 µs: an idle path
            w[CALM] += number
            if w[CALM] > w[WINDOW] or w[FAST] > 0:
                w[WINDOW] += number * 0.25 * knobs.scale
                w[FAST] = 1.0
        else:
            w[CALM] = 0.0
            w[FAST] = 0.0
        if w[FAST] == 0.0:
            w[CREDIT] += knobs.gain * number * (1 - waited / knobs.target)
    w[WINDOW] = min(max(w[WINDOW], 1.0), w[MOST])
    if w[FRESH] > 8 or slot - w[LAST_ADD] > knobs.rtt:
        w[WINDOW] += w[CREDIT] / w[WINDOW]
        if slot - w[LAST_ADD] >= knobs.rtt:
            w[WINDOW] += 0.15 * knobs.scale
            w[LAST_ADD] = slot
        w[CREDIT] = 0.0
        w[FRESH] = 0.0
    w[WINDOW] = min(max(w[WINDOW], 1.0), w[MOST])


@compiled
def learn(shape: Shape, knobs: Knobs, traffic: Traffic, totals: Ints, slot: int, word: int) -> None:
    """A sender hears of one event: window, packets to send again, and the state of the path."""
    flow, path = word & FLOW_MASK, (word >> FLOW_BITS) & PATH_MASK
    kind = (word >> KIND_BIT) & 3
    count, w = traffic.count[flow], traffic.window[flow]
    state = traffic.path[flow]
    if kind == ACK:
        number, marked = (word >> NUMBER_BIT) & MOST_NUMBER, (word >> SEEN_BIT) & 1
        waited = float((word >> DELAY_BIT) & MOST_DELAY)
        count[IN_FLIGHT] -= number
        count[ACKED] += number
        count[LOSSES] = 0
        w[ACHIEVED] += number
        w[IGNORED] += number
        w[FRESH] += number
        if marked and knobs.skip and state[path] < MOST_SKIP:
            state[path] += 1
        if knobs.controlled:
            grow(knobs, w, count[IN_FLIGHT], slot, marked, number, waited)
        if count[ACKED] == traffic.packets[flow]:
            traffic.done[flow] = slot
            totals[ACTIVE] -= 1
        return
    count[IN_FLIGHT] -= 1
    count[TODO] += 1
    if kind == LOST:
        count[LOSSES] += 1
        if knobs.edge and state[path] < ASSUMED_BAD:
            state[path] = ASSUMED_BAD
            totals[BAD_PATHS] += 1
        if knobs.controlled:
            w[WINDOW] = max(w[WINDOW] - 1.0, 1.0)
        return
    if kind == TRIMMED and knobs.skip and state[path] < ASSUMED_BAD:
        state[path] = min(state[path] + 4, MOST_SKIP)
    if knobs.controlled:
        w[IGNORED] += 1
        w[ALARM] = 1.0
        w[AVERAGE] += SMOOTHING * (knobs.rtt - w[AVERAGE])
        if not judge(knobs, w, count[IN_FLIGHT], slot, True, 1, 0.0):
            w[WINDOW] = max(w[WINDOW] - 1.0, 1.0)


@compiled
def events(
    shape: Shape, knobs: Knobs, traffic: Traffic, calendar: Calendar, totals: Ints, slot: int
) -> None:
    """What senders learn in this slot."""
    at = slot % shape.ring
    event = calendar.first[at]
    calendar.first[at] = -1
    while event >= 0:
        learn(shape, knobs, traffic, totals, slot, calendar.word[event])
        after = calendar.next[event]
        calendar.next[event] = calendar.free[0]
        calendar.free[0] = event
        totals[EVENTS] -= 1
        event = after


@compiled
def choose(shape: Shape, knobs: Knobs, traffic: Traffic, totals: Ints, flow: int, plane: int) -> int:
    """The next path of a connection on a plane, or -1: rotation from a random start, without what is to be skipped."""
    ways = (knobs.paths - plane + shape.planes - 1) // shape.planes  # paths of this plane: plane, plane + planes, ...
    if ways <= 0:
        return -1
    state = traffic.path[flow]
    spare = -1
    for _ in range(ways):
        at = traffic.turn[flow, plane]
        turn, offset = at & 0xFFFF, at >> 16
        path = ((turn + offset) % ways) * shape.planes + plane
        turn += 1
        if turn >= ways:
            turn, offset = 0, int(draw(totals) * ways)
        traffic.turn[flow, plane] = (offset << 16) | turn
        if state[path] == GOOD:
            return path
        if state[path] <= MOST_SKIP:
            state[path] -= 1
            if spare < 0:
                spare = path
    return spare


@compiled
def inject(
    shape: Shape, knobs: Knobs, net: Net, traffic: Traffic, calendar: Calendar, totals: Ints, slot: int
) -> None:
    """Every NIC port sends a packet of the next of its connections that may."""
    row = net.wire[slot % shape.wire]
    for plane in range(shape.planes):
        base = plane * shape.per_plane
        for host in range(shape.hosts):
            link = base + host
            row[link] = 0
            first = traffic.first[host]
            mine = traffic.first[host + 1] - first
            if mine == 0:
                continue
            if traffic.debt[host] >= 1.0:
                traffic.debt[host] -= 1.0
                continue
            share = net.share[link]
            if 0.0 < share < 1.0 and int((slot + 1) * share) == int(slot * share):
                continue
            at = traffic.next[host, plane]
            for _ in range(mine):
                flow = traffic.mine[first + at]
                at = at + 1 if at + 1 < mine else 0
                count = traffic.count[flow]
                if count[TODO] == 0 or count[IN_FLIGHT] + 1 > traffic.window[flow, WINDOW] or slot < traffic.start[flow]:
                    continue
                path = choose(shape, knobs, traffic, totals, flow, plane)
                if path < 0:
                    continue
                count[TODO] -= 1
                count[IN_FLIGHT] += 1
                totals[SENT] += 1
                # The last that the window or the work allows asks, or both ends would wait for each other.
                ask = count[TODO] == 0 or count[IN_FLIGHT] + 1 >= traffic.window[flow, WINDOW]
                packet = flow | (path << FLOW_BITS) | (int(ask) << ASK_BIT) | (slot << STAMP_BIT)
                if net.trouble[link] and (share == 0.0 or draw(totals) < net.loss[link]):
                    lose(shape, traffic, calendar, totals, slot, packet)
                else:
                    row[link] = packet
                break
            traffic.next[host, plane] = at


@compiled
def advance(
    shape: Shape, knobs: Knobs, net: Net, traffic: Traffic, calendar: Calendar, totals: Ints, begin: int, end: int,
    routed: int,
) -> int:
    """Run the slots from `begin` up to `end`; stops early when every connection has finished."""
    for slot in range(begin, end):
        arrive(shape, knobs, net, traffic, calendar, totals, slot, routed)
        events(shape, knobs, traffic, calendar, totals, slot)
        if totals[ACTIVE] == 0:
            return slot
        serve(shape, knobs, net, traffic, calendar, totals, slot)
        inject(shape, knobs, net, traffic, calendar, totals, slot)
    return end


@compiled
def probe(shape: Shape, knobs: Knobs, net: Net, traffic: Traffic, totals: Ints) -> None:
    """Try every retired path once; one whose links all carry the probe is good again."""
    for flow in range(traffic.path.shape[0]):
        if traffic.done[flow] >= 0:
            continue
        for path in range(knobs.paths):
            if traffic.path[flow, path] == ASSUMED_BAD and alive(shape, net, traffic, totals, flow, path):
                traffic.path[flow, path] = GOOD


@compiled
def alive(shape: Shape, net: Net, traffic: Traffic, totals: Ints, flow: int, path: int) -> bool:
    """Whether a probe over a path comes through."""
    base = (path % shape.planes) * shape.per_plane
    up = base + 2 * shape.hosts
    source, target = traffic.source[flow], traffic.target[flow]
    t0, goal = net.host_t0[source], net.host_t0[target]
    ok = carries(net, totals, base + source) and carries(net, totals, base + shape.hosts + target)
    if t0 == goal or not ok:
        return ok
    ups = shape.t0 * shape.t0_up
    port = spread(flow, path, 1, shape.t0_up)
    ok = carries(net, totals, up + t0 * shape.t0_up + port) and carries(net, totals, up + ups + goal * shape.t0_up + port)
    if traffic.links[flow] == 4 or not ok:
        return ok
    pods_up = (shape.per_plane - 2 * shape.hosts - 2 * ups) // 2
    turn, place = spread(flow, path, 2, shape.t1_up), port % shape.t1_per_pod
    here = ((t0 // shape.t0_per_pod) * shape.t1_per_pod + place) * shape.t1_up + turn
    there = ((goal // shape.t0_per_pod) * shape.t1_per_pod + place) * shape.t1_up + turn
    return carries(net, totals, up + 2 * ups + here) and carries(net, totals, up + 2 * ups + pods_up + there)


@compiled
def carries(net: Net, totals: Ints, link: int) -> bool:
    """Whether a probe passes a link."""
    return net.share[link] > 0 and (net.loss[link] == 0 or draw(totals) >= net.loss[link])
