"""The compiled loop of the conventional transport: go-back-N, PFC from switch to switch, DCQCN at the NIC.

It is a separate file, so that the loop of MRC is not compiled again when this one changes. Paths are fixed lists of
links, so the loop needs to know only the switch at the end of each link.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from phalanx.sim.fair_rates import compile_loop
from phalanx.sim.packets import engine_state, parts, roce_senders, roce_state
from phalanx.sim.packets.engine_state import Bytes, Calendar, Floats, Ints, Ints32
from phalanx.sim.packets.parts import draw, nth, part, power_of_two_for, shuffled, stamp_of
from phalanx.sim.packets.roce_senders import events, timers, wake
from phalanx.sim.packets.roce_state import (
    ACK,
    ACTIVE,
    CNP,
    CNP_AT,
    COMPLAINED,
    DELIVERED,
    DROPPED,
    EXPECTED,
    FREE,
    IN_NET,
    LOST,
    MARKS,
    NAK,
    NEXT,
    NOW,
    NUMBER_BIT,
    OVERFLOW,
    PAUSED,
    PROGRESS,
    QP_BITS,
    RATE,
    SEND_AT,
    SENT,
    SENT_BYTES,
    SIGNAL_FIRST,
    SIGNALS,
    TOTAL,
    UNACKED,
    Form,
    Packets,
    Pairs,
    Ports,
    Rules,
)


@part
def tell(calendar: Calendar, totals: Ints, at: int, word: int) -> None:
    """Add an event for a sender to a slot of the calendar's ring."""
    event = calendar.free[0]
    if event < 0:
        totals[OVERFLOW] += 1
        return
    calendar.free[0] = calendar.next[event]
    calendar.word[event] = word
    calendar.next[event] = calendar.first[at]
    calendar.first[at] = event


@part
def forget(packets: Packets, totals: Ints, packet: int) -> None:
    """Remove a packet that leaves the fabric."""
    packets.next[packet] = totals[FREE]
    totals[FREE] = packet
    totals[IN_NET] -= 1


@part
def signal(form: Form, ports: Ports, totals: Ints, slot: int, link: int, pause: int) -> None:
    """Ask the other end of a link to pause, or to resume; it takes effect one propagation time later."""
    ports.asked[link] = pause
    size = ports.signal_slot.shape[0]
    if totals[SIGNALS] == size:
        totals[OVERFLOW] += 1
        return
    at = (totals[SIGNAL_FIRST] + totals[SIGNALS]) % size
    ports.signal_slot[at] = slot + form.back
    ports.signal_link[at] = link * 2 + pause
    totals[SIGNALS] += 1


@part
def signals(ports: Ports, totals: Ints, slot: int) -> None:
    """Apply the pauses, and their ends, that arrive in this slot."""
    while totals[SIGNALS] > 0 and ports.signal_slot[totals[SIGNAL_FIRST]] <= slot:
        word = ports.signal_link[totals[SIGNAL_FIRST]]
        ports.paused[word >> 1] = word & 1
        totals[SIGNAL_FIRST] = (totals[SIGNAL_FIRST] + 1) % ports.signal_slot.shape[0]
        totals[SIGNALS] -= 1


@part
def receive(form: Form, rules: Rules, packets: Packets, pairs: Pairs, calendar: Calendar, totals: Ints, slot: int,
            packet: int) -> None:  # fmt: skip
    """Receive a packet: accept the next in order, report a gap once, and return congestion marks."""
    count, pair, number = pairs.counts, packets.pair[packet], packets.number[packet]
    at = (slot + pairs.hops[pair] * form.back + form.host_slots) % form.ring
    kind = -1
    if number == count[pair, EXPECTED]:
        count[pair, EXPECTED] += 1
        count[pair, COMPLAINED] = 0
        totals[DELIVERED] += 1
        pairs.arrived[pairs.owner[pair]] += 1
        if (number + 1) % rules.ack_every == 0 or number + 1 == count[pair, TOTAL]:
            kind = ACK
    elif number > count[pair, EXPECTED]:
        if count[pair, COMPLAINED] == 0:
            count[pair, COMPLAINED] = 1
            kind = NAK
    elif (number + 1) % rules.ack_every == 0 or number + 1 == count[pair, TOTAL]:
        kind = ACK  # a repeated packet: the sender went back too far
    if kind >= 0:
        tell(
            calendar,
            totals,
            at,
            pair | (kind << QP_BITS) | (count[pair, EXPECTED] << NUMBER_BIT),
        )
    if rules.dcqcn and packets.marked[packet] and slot - pairs.rate[pair, CNP_AT] >= rules.cnp:
        pairs.rate[pair, CNP_AT] = slot
        tell(calendar, totals, at, pair | (CNP << QP_BITS))


@part
def enqueue(
    first: Ints32,
    last: Ints32,
    waiting: Ints32,
    following: Ints32,
    out: int,
    packet: int,
) -> None:
    """Put a packet at the end of a port's queue."""
    following[packet] = -1
    if waiting[out] == 0:
        first[out] = packet
    else:
        following[last[out]] = packet
    last[out] = packet
    waiting[out] += 1


@part
def arrive(form: Form, rules: Rules, ports: Ports, packets: Packets, pairs: Pairs, calendar: Calendar, totals: Ints,
           slot: int) -> None:  # fmt: skip
    """Process every packet that reaches the end of a wire, in a different order in each slot.

    A switch queues the packet, or drops it when its buffer is full and PFC is off. With PFC it pauses a link that
    fills too large a share of its buffer.
    """
    wire, first, last, waiting, following = (
        ports.wire,
        ports.first,
        ports.last,
        ports.waiting,
        packets.next,
    )
    nodes, used, held_packets, asked, came_over, owner = (
        ports.node,
        ports.used,
        ports.held,
        ports.asked,
        packets.came,
        packets.pair,
    )
    hop, hops, route = packets.hop, pairs.hops, pairs.route
    now, links, pfc, buffer, share = (
        slot % form.wire,
        waiting.shape[0],
        rules.pfc,
        rules.buffer,
        rules.pause_share,
    )
    word, room = shuffled(slot), power_of_two_for(links)
    for index in range(room):
        link = nth(index, word, room)
        if link >= links:
            continue
        packet = wire[now, link] - 1
        if packet < 0:
            continue
        hop[packet] += 1
        pair = owner[packet]
        if hop[packet] == hops[pair]:
            receive(form, rules, packets, pairs, calendar, totals, slot, packet)
            forget(packets, totals, packet)
            continue
        out, node = route[pair, hop[packet]], nodes[link]
        free = buffer - used[node]
        if not pfc and waiting[out] >= free:
            totals[DROPPED] += 1
            pairs.touched[pairs.owner[pair]] |= 2
            forget(packets, totals, packet)
            continue
        came_over[packet] = link
        enqueue(first, last, waiting, following, out, packet)
        used[node] += 1
        held_packets[link] += 1
        if pfc and asked[link] == 0 and held_packets[link] >= share * free:
            signal(form, ports, totals, slot, link, 1)


@part
def fails(share: Floats, loss: Floats, totals: Ints, link: int) -> bool:
    """Return True if a packet disappears on a link."""
    return bool(share[link] == 0.0 or (loss[link] > 0 and draw(totals) < loss[link]))


@part
def slow(share: Floats, link: int, slot: int) -> bool:
    """Return True if a slow link does not send in this slot."""
    return bool(0.0 < share[link] < 1.0 and int((slot + 1) * share[link]) == int(slot * share[link]))


@part
def lose(packets: Packets, pairs: Pairs, totals: Ints, packet: int) -> None:
    """Count a packet that disappears, and remove it."""
    totals[LOST] += 1
    pairs.touched[pairs.owner[packets.pair[packet]]] |= 1
    forget(packets, totals, packet)


@part
def marks(rules: Rules, totals: Ints, waiting: int) -> bool:
    """Return True if a packet is marked that leaves `waiting` packets behind it in the queue."""
    if waiting <= rules.mark_low:
        return False
    over = (waiting - rules.mark_low) / (rules.mark_high - rules.mark_low)
    return bool(over >= 1.0 or draw(totals) < over * rules.mark_most)


@part
def serve(
    form: Form,
    rules: Rules,
    ports: Ports,
    packets: Packets,
    pairs: Pairs,
    totals: Ints,
    slot: int,
) -> None:
    """Send the head of the queue of every switch port that is not paused.

    The link over which the packet came may resume when the switch holds few of its packets.
    """
    wire, waiting, paused, asked, first = (
        ports.wire,
        ports.waiting,
        ports.paused,
        ports.asked,
        ports.first,
    )
    nodes, used, held_packets, came_over, following = (
        ports.node,
        ports.used,
        ports.held,
        packets.came,
        packets.next,
    )
    share, loss, marked, now = ports.share, ports.loss, packets.marked, slot % form.wire
    buffer, pause_share, low = rules.buffer, rules.pause_share, rules.mark_low
    for plane in range(form.planes):
        base = plane * form.per_plane
        for link in range(base + form.hosts, base + form.per_plane):
            wire[now, link] = 0
            if waiting[link] == 0:
                continue
            if paused[link]:
                totals[PAUSED] += 1
                continue
            if slow(share, link, slot):
                continue
            packet = first[link]
            first[link] = following[packet]
            waiting[link] -= 1
            behind = came_over[packet]
            node = nodes[behind]
            used[node] -= 1
            held_packets[behind] -= 1
            if asked[behind] and held_packets[behind] + 2 <= pause_share * (buffer - used[node]):
                signal(form, ports, totals, slot, behind, 0)
            if waiting[link] > low and marks(rules, totals, waiting[link]):
                marked[packet] = 1
                totals[MARKS] += 1
            if fails(share, loss, totals, link):
                lose(packets, pairs, totals, packet)
            else:
                wire[now, link] = packet + 1


@part
def fill(
    pairs_of: Ints32,
    numbers: Ints32,
    hop: Bytes,
    marked: Bytes,
    packet: int,
    pair: int,
    number: int,
) -> None:
    """Set the fields of a new packet."""
    pairs_of[packet] = pair
    numbers[packet] = number
    hop[packet] = 0
    marked[packet] = 0


@part
def inject(form: Form, ports: Ports, packets: Packets, pairs: Pairs, totals: Ints, slot: int) -> None:
    """Send, from every NIC port that is not paused, a packet of the next of its queue pairs whose rate allows it."""
    count, rate, port_pairs, begin, turns = (
        pairs.counts,
        pairs.rate,
        pairs.mine,
        pairs.begin,
        pairs.turn,
    )
    wire, paused, share, loss, now = (
        ports.wire,
        ports.paused,
        ports.share,
        ports.loss,
        slot % form.wire,
    )
    owner, numbers, hop, marked, following = (
        packets.pair,
        packets.number,
        packets.hop,
        packets.marked,
        packets.next,
    )
    for plane in range(form.planes):
        for host in range(form.hosts):
            link, port = plane * form.per_plane + host, plane * form.hosts + host
            wire[now, link] = 0
            first = begin[port]
            number = begin[port + 1] - first
            if number == 0 or slow(share, link, slot):
                continue
            at = turns[port]
            for _ in range(number):
                pair = port_pairs[first + at]
                at = at + 1 if at + 1 < number else 0
                if count[pair, NEXT] >= count[pair, TOTAL] or rate[pair, SEND_AT] > slot:
                    continue
                packet = totals[FREE]
                if paused[link] or packet < 0:
                    totals[PAUSED] += paused[link]
                    totals[OVERFLOW] += packet < 0
                    break
                totals[FREE] = following[packet]
                totals[IN_NET] += 1
                totals[SENT] += 1
                turns[port] = at
                fill(owner, numbers, hop, marked, packet, pair, count[pair, NEXT])
                if count[pair, NEXT] == count[pair, UNACKED]:
                    # The timer runs from the oldest packet without acknowledgement.
                    count[pair, PROGRESS] = slot
                count[pair, NEXT] += 1
                rate[pair, SENT_BYTES] += 1
                rate[pair, SEND_AT] = max(rate[pair, SEND_AT], slot - 1.0) + 1.0 / rate[pair, RATE]
                if fails(share, loss, totals, link):
                    lose(packets, pairs, totals, packet)
                else:
                    wire[now, link] = packet + 1
                break


def loop(stamp: int) -> Callable[..., Any]:
    """Return the compiled function; `stamp` is in the key of its cache, as in `kernel.loops`."""

    @compile_loop
    def advance(form: Form, rules: Rules, ports: Ports, packets: Packets, pairs: Pairs, calendar: Calendar,
                totals: Ints, begin: int, end: int) -> int:  # fmt: skip
        """Run the slots from `begin` up to `end`; stops early when every connection has finished."""
        _ = stamp
        slot = begin
        while slot < end:
            signals(ports, totals, slot)
            arrive(form, rules, ports, packets, pairs, calendar, totals, slot)
            events(form, rules, pairs, calendar, totals, slot)
            if totals[ACTIVE] == 0:
                break
            if slot % form.tick == 0:
                timers(form, rules, pairs, slot)
            before = totals[SENT]
            serve(form, rules, ports, packets, pairs, totals, slot)
            inject(form, ports, packets, pairs, totals, slot)
            slot += 1
            # The fabric is empty and no sender sent: skip to the next event at a sender or its next action.
            if totals[IN_NET] == 0 and totals[SENT] == before:
                until = min(end, wake(form, pairs, slot))
                while slot < until and calendar.first[slot % form.ring] < 0:
                    slot += 1
        totals[NOW] = slot
        return slot

    return advance


advance = loop(stamp_of(__file__, *(module.__file__ for module in (parts, roce_senders, roce_state, engine_state))))
