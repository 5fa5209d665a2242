"""A queue pair of the conventional transport: its rate by DCQCN, its timers, and its handling of acknowledgements.

It is compiled into the loop of `roce_kernel.py`.
"""

from __future__ import annotations

from phalanx.sim.packets.engine_state import Calendar, Floats, Ints, Ints32
from phalanx.sim.packets.parts import part
from phalanx.sim.packets.roce_state import (
    ACTIVE,
    ALPHA,
    ALPHA_AT,
    CNP,
    FAST_BYTES,
    FAST_TIME,
    KIND_BITS,
    NAK,
    NEXT,
    NUMBER_BIT,
    PATIENCE,
    PROGRESS,
    QP_BITS,
    RATE,
    SEND_AT,
    SENT_BYTES,
    TARGET,
    TIMER_AT,
    TOTAL,
    UNACKED,
    Form,
    Pairs,
    Rules,
)

PAIR_MASK = (1 << QP_BITS) - 1
KIND_MASK = (1 << KIND_BITS) - 1
MOST_DOUBLINGS = 6  # of a timeout: a queue pair has seven retries


@part
def cut(rules: Rules, rate: Floats, count: Ints32, pair: int, slot: int) -> None:
    """Cut the rate by the share alpha/2 after a report of marks (DCQCN, equation 1)."""
    rate[pair, TARGET] = rate[pair, RATE]
    rate[pair, RATE] = max(rate[pair, RATE] * (1 - rate[pair, ALPHA] / 2), rules.least)
    rate[pair, ALPHA] = (1 - rules.gain) * rate[pair, ALPHA] + rules.gain
    rate[pair, ALPHA_AT] = slot + rules.alpha
    rate[pair, TIMER_AT] = slot + rules.timer
    rate[pair, SENT_BYTES] = 0.0
    count[pair, FAST_TIME] = 0
    count[pair, FAST_BYTES] = 0


@part
def rise(rules: Rules, rate: Floats, count: Ints32, pair: int) -> None:
    """Raise the rate after a round of the timer or the byte counter (DCQCN, section 3.3).

    The first rounds halve the distance to the old rate, the next add a constant, and later ones add more.
    """
    timed, sent = count[pair, FAST_TIME], count[pair, FAST_BYTES]
    if min(timed, sent) > rules.fast_rounds:
        rate[pair, TARGET] += rules.hyper * (min(timed, sent) - rules.fast_rounds)
    elif max(timed, sent) >= rules.fast_rounds:
        rate[pair, TARGET] += rules.add
    rate[pair, TARGET] = min(rate[pair, TARGET], 1.0)
    rate[pair, RATE] = (rate[pair, TARGET] + rate[pair, RATE]) / 2


@part
def timers(form: Form, rules: Rules, pairs: Pairs, slot: int) -> None:
    """Advance the timers of all senders: alpha falls, rates rise, and retransmission timeouts expire.

    After a timeout a sender goes back to the first unacknowledged packet.
    """
    count, rate = pairs.counts, pairs.rate
    for pair in range(count.shape[0]):
        if count[pair, UNACKED] == count[pair, TOTAL]:
            continue
        if rules.dcqcn and rate[pair, RATE] < 1.0:
            while rate[pair, ALPHA_AT] <= slot:
                rate[pair, ALPHA] *= 1 - rules.gain
                rate[pair, ALPHA_AT] += rules.alpha
            while rate[pair, TIMER_AT] <= slot:
                count[pair, FAST_TIME] += 1
                rate[pair, TIMER_AT] += rules.timer
                rise(rules, rate, count, pair)
            if rate[pair, SENT_BYTES] >= rules.counter:
                rate[pair, SENT_BYTES] = 0.0
                count[pair, FAST_BYTES] += 1
                rise(rules, rate, count, pair)
        wait = form.timeout << min(count[pair, PATIENCE], MOST_DOUBLINGS)
        if count[pair, NEXT] > count[pair, UNACKED] and slot - count[pair, PROGRESS] > wait:
            count[pair, NEXT] = count[pair, UNACKED]
            count[pair, PROGRESS] = slot
            count[pair, PATIENCE] += 1


@part
def events(form: Form, rules: Rules, pairs: Pairs, calendar: Calendar, totals: Ints, slot: int) -> None:
    """Process the events that reach senders in this slot."""
    count, at = pairs.counts, slot % form.ring
    event = calendar.first[at]
    calendar.first[at] = -1
    while event >= 0:
        word = calendar.word[event]
        pair, kind, number = (
            word & PAIR_MASK,
            (word >> QP_BITS) & KIND_MASK,
            word >> NUMBER_BIT,
        )
        if kind == CNP:
            cut(rules, pairs.rate, count, pair, slot)
        elif number > count[pair, UNACKED] or kind == NAK:
            unfinished = count[pair, UNACKED] < count[pair, TOTAL]
            count[pair, UNACKED] = max(count[pair, UNACKED], number)
            count[pair, PROGRESS] = slot
            count[pair, PATIENCE] = 0
            # Go-back-N: every packet from the gap on is sent again.
            count[pair, NEXT] = number if kind == NAK else max(count[pair, NEXT], number)
            if unfinished and count[pair, UNACKED] == count[pair, TOTAL]:
                owner = pairs.owner[pair]
                pairs.left[owner] -= 1
                if pairs.left[owner] == 0:
                    pairs.done[owner] = slot
                    totals[ACTIVE] -= 1
        next_event = calendar.next[event]
        calendar.next[event] = calendar.free[0]
        calendar.free[0] = event
        event = next_event


@part
def wake(form: Form, pairs: Pairs, slot: int) -> int:
    """Return the slot in which a sender next sends or times out, if no event reaches it before."""
    count, rate = pairs.counts, pairs.rate
    first = slot + 1e9
    for pair in range(count.shape[0]):
        if count[pair, NEXT] < count[pair, TOTAL]:
            first = min(first, rate[pair, SEND_AT])
        if count[pair, NEXT] > count[pair, UNACKED]:
            wait = form.timeout << min(count[pair, PATIENCE], MOST_DOUBLINGS)
            first = min(first, float(count[pair, PROGRESS] + wait))
    # Timers are checked in slots that are multiples of a tick.
    return int(first // form.tick) * form.tick
