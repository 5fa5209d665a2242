"""The senders' side of a slot: acknowledgements and losses, the congestion window, and the path of the next packet.

It is compiled into the loop of `kernel.py`, whose module docstring describes the conventions.
"""

from __future__ import annotations

from phalanx.sim.packets.engine_state import (
    ACHIEVED,
    ACK,
    ACKED,
    ACTIVE,
    ALARM,
    ASK_BIT,
    ASSUMED_BAD,
    AVERAGE,
    BAD_PATHS,
    BASE,
    CALM,
    CREDIT,
    DELAY_BIT,
    FAST,
    FLOW_BITS,
    FLOW_MASK,
    FRESH,
    GOOD,
    IGNORE,
    IGNORED,
    IN_FLIGHT,
    JUDGE_AT,
    KEPT,
    KEPT_AT,
    KIND_BIT,
    LAST_ADD,
    LAST_CUT,
    LAST_LOSS,
    LOSSES,
    LOST,
    MOST,
    MOST_DELAY,
    MOST_NUMBER,
    MOST_SKIP,
    NUMBER_BIT,
    PATH_MASK,
    PLANE,
    RETIRED,
    SEEN_BIT,
    SENT,
    STAMP_BIT,
    TRIMMED,
    UNACKED,
    UNSENT,
    WHO_MASK,
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
from phalanx.sim.packets.parts import draw, part
from phalanx.sim.packets.switches import held, lose, tell


@part
def judge(knobs: Knobs, w: Floats, flow: int, in_flight: int, slot: int, bad: bool, marked: int, waited: float) -> bool:
    """Quick adapt: when a round trip delivered almost nothing, reduce the window to that; True if settled."""
    settled = False
    if w[flow, IGNORED] < w[flow, IGNORE] and marked:
        settled = True
    elif slot > w[flow, JUDGE_AT]:
        # The condition of 1/8 of the window and four target delays: uet-htsim's defaults.
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
    """Adjust the window by mark and delay, NSCC's four quadrants.

    No mark and a short delay: grow by the distance to the target. No mark and a long delay: grow fairly. A mark and a
    long delay: cut. A mark and a short delay: hold.
    """
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
    """Adjust the window after an acknowledgement."""
    # A long wait without a mark means that the path is draining: it counts as a quarter of a round trip.
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
    """Process an acknowledgement at the sender."""
    number, marks = (word >> NUMBER_BIT) & MOST_NUMBER, (word >> SEEN_BIT) & 3
    # The answer to a sender that asked what had arrived.
    if number == 0:
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
    """Process a trimmed or lost packet at the sender: it is sent again, on another path."""
    tally[flow, IN_FLIGHT] -= 1
    tally[flow, UNSENT] += 1
    settled = False
    if kind == LOST:
        # Full queues trim, so a silent loss is evidence about the path, not of congestion.
        settled = knobs.edge == 1
        if slot - w[flow, LAST_LOSS] > knobs.rtt:  # the losses of one burst count once
            tally[flow, LOSSES] += 1
        w[flow, LAST_LOSS] = slot
        paths_in_use = knobs.paths - tally[flow, RETIRED]
        if knobs.edge and state[flow, path] < ASSUMED_BAD and paths_in_use > knobs.least_paths:
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
    """Count an end for a trigger; at the last one it needs, start the connections that wait for it."""
    traffic.needed[trigger] -= 1
    if traffic.needed[trigger] != 0:
        return
    for index in range(traffic.first_waiting[trigger], traffic.first_waiting[trigger + 1]):
        flow = traffic.waiting[index]
        traffic.tally[flow, UNSENT] = traffic.packets[flow]
        traffic.began[flow] = slot


@part
def events(shape: Shape, knobs: Knobs, traffic: Traffic, calendar: Calendar, totals: Ints, slot: int) -> None:
    """Process the events that reach senders in this slot."""
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
        next_event = following[event]
        following[event] = free[0]
        free[0] = event
        event = next_event
        flying = tally[flow, IN_FLIGHT]
        if 0 < flying == tally[flow, UNACKED] and flying + 1 > w[flow, WINDOW]:
            # The window shrank below the packets that have arrived unacknowledged: the sender asks after its timeout.
            tell(calendar.first, words, following, free, totals, shape.ring, slot + shape.timeout, word & WHO_MASK)


@part
def choose(state: Bytes, turns: Ints32, totals: Ints, flow: int, plane: int, planes: int, paths: int) -> int:
    """Return the next path of a connection on a plane, or -1 if none is usable.

    Paths take turns from a random start, without those to be skipped.
    """
    spare, first_path = -1, (plane - flow) % planes if planes > 1 else 0
    # Path p is on plane (p + connection) % planes: equally many on each, and single paths on different planes.
    plane_paths = (paths - first_path + planes - 1) // planes if planes > 1 else paths
    at = turns[flow, plane]
    turn, offset = at & 0xFFFF, at >> 16
    for _ in range(plane_paths):
        index = turn + offset
        path = (index if index < plane_paths else index - plane_paths) * planes + first_path
        turn += 1
        if turn >= plane_paths:
            turn, offset = 0, int(draw(totals) * plane_paths)
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
    """Return the oldest path that was acknowledged without a mark, or -1: none, on another plane, or bad since."""
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
    """Send a packet of a connection, and return its word."""
    flying = tally[flow, IN_FLIGHT]
    tally[flow, UNSENT] -= 1
    tally[flow, IN_FLIGHT] = flying + 1
    totals[SENT] += 1
    sent[plane] += 1
    # The last packet that the window or the data allows asks for an acknowledgement, or both ends would wait forever.
    ask = tally[flow, UNSENT] == 0 or flying + 2 >= w[flow, WINDOW]
    return flow | (path << FLOW_BITS) | (int(ask) << ASK_BIT) | (slot << STAMP_BIT)


@part
def inject(shape: Shape, knobs: Knobs, net: Net, traffic: Traffic, calendar: Calendar, totals: Ints, slot: int) -> None:
    """Send, where NICs have one port, a packet of the next connection of each NIC that may send."""
    wire, trouble, share, loss, sent = net.wire, net.trouble, net.share, net.loss, net.sent
    firsts, mines, nexts, debt = traffic.first, traffic.mine, traffic.next, traffic.debt
    tally, w, state, turns, kept = traffic.tally, traffic.window, traffic.path, traffic.turn, traffic.kept
    now = slot % shape.wire
    for host in range(shape.hosts):
        wire[now, host] = 0
        first = firsts[host]
        connections = firsts[host + 1] - first
        if debt[host] >= 1.0:
            debt[host] -= 1.0
            continue
        if trouble[host] and held(share, trouble, host, slot):
            continue
        at = nexts[host]
        for _ in range(connections):
            flow = mines[first + at]
            at = at + 1 if at + 1 < connections else 0
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
    """Send packets where a NIC has ports on several planes: connections take turns, and so do the planes of each.

    If one plane always came first, a connection limited by its window would prefer it (41 % of the packets on the
    first of four, 14 % on the last), while MRC keeps planes equal (arXiv:2605.04333 section 2.1).
    """
    wire, trouble, share, loss, ready, sent = net.wire, net.trouble, net.share, net.loss, net.ready, net.sent
    firsts, mines, nexts, debt = traffic.first, traffic.mine, traffic.next, traffic.debt
    tally, w, state, turns, kept = traffic.tally, traffic.window, traffic.path, traffic.turn, traffic.kept
    now, planes = slot % shape.wire, shape.planes
    for host in range(shape.hosts):
        ports = 0
        for plane in range(planes):
            link, debt_index = plane * shape.per_plane + host, plane * shape.hosts + host
            wire[now, link] = 0
            ready[plane] = 0
            if debt[debt_index] >= 1.0:
                debt[debt_index] -= 1.0
            elif not (trouble[link] and held(share, trouble, link, slot)):
                ready[plane] = 1
                ports += 1
        first = firsts[host]
        connections = firsts[host + 1] - first
        at, idle = nexts[host], 0
        while ports > 0 and idle < connections:
            flow = mines[first + at]
            at = at + 1 if at + 1 < connections else 0
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
