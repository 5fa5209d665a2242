"""What the loop of the conventional transport keeps: named groups of arrays."""

from __future__ import annotations

from typing import NamedTuple

from phalanx.sim.packets.engine_state import Bytes, Floats, Ints, Ints32

# Bits of an event word: queue pair, kind, sequence number.
QP_BITS, KIND_BITS = 25, 2
NUMBER_BIT = QP_BITS + KIND_BITS
ACK, NAK, CNP = 0, 1, 2

# Columns of Pairs.counts
(TOTAL, UNACKED, NEXT, EXPECTED, COMPLAINED, PROGRESS, PATIENCE, FAST_TIME, FAST_BYTES) = range(9)
# Columns of Pairs.rate, in packets and slots: what DCQCN remembers
RATE, TARGET, ALPHA, SEND_AT, ALPHA_AT, TIMER_AT, SENT_BYTES, CNP_AT = range(8)

# Totals the loop adds to; RANDOM where `engine_state.py` has it, because both loops draw with `parts.draw`.
(
    DELIVERED,
    SENT,
    DROPPED,
    LOST,
    MARKS,
    ACTIVE,
    RANDOM,
    OVERFLOW,
    PAUSED,
    IN_NET,
    FREE,
    SIGNAL_FIRST,
    SIGNALS,
    NOW,
) = range(14)


class Form(NamedTuple):
    """Sizes, in slots and packets."""

    hosts: int
    planes: int
    per_plane: int  # links
    wire: int  # slots from the start of sending to arrival
    back: int  # slots per link of what travels without waiting, and of a pause
    host_slots: int
    ring: int  # slots of the calendar
    timeout: int
    tick: int  # slots between two looks at the timers


class Rules(NamedTuple):
    """The transport in slots and packets."""

    pfc: int
    dcqcn: int
    ack_every: int
    buffer: float  # packets of a switch
    pause_share: float
    mark_low: float
    mark_high: float
    mark_most: float
    gain: float
    cnp: float
    alpha: float
    timer: float
    counter: float
    fast_rounds: int
    add: float  # packets per slot
    hyper: float
    least: float


class Ports(NamedTuple):
    """Links: the queue at the start of each, and what the switch at its end holds of it."""

    first: Ints32  # packet at the head of the queue, -1 is none
    last: Ints32
    waiting: Ints32
    wire: Ints32  # [slot, link] packet + 1 on its way, 0 is none
    node: Ints32  # switch at the end, -1 is a host
    held: Ints32  # packets in that switch that came over the link
    used: Ints32  # [switch] packets
    asked: Bytes  # 1: the switch has asked for a pause
    paused: Bytes  # 1: the pause has arrived
    share: Floats  # of its speed that a link has
    loss: Floats
    signal_slot: Ints32  # pauses and their ends on their way back, a ring
    signal_link: Ints32  # link · 2 + pause


class Packets(NamedTuple):
    """One row for each packet that can be in the fabric at once."""

    pair: Ints32
    number: Ints32
    hop: Bytes  # links behind it
    marked: Bytes
    came: Ints32  # link it came over
    next: Ints32  # in its queue, or in the list of free rows


class Pairs(NamedTuple):
    """Queue pairs, and which of them a NIC port has."""

    owner: Ints32  # connection
    route: Ints32  # [pair, hop] links
    hops: Bytes
    counts: Ints32
    rate: Floats
    mine: Ints32  # pairs in order of their NIC port
    begin: Ints32  # [NIC port] where its pairs start in `mine`
    turn: Ints32  # [NIC port] whose turn it is
    left: Ints32  # [connection] pairs that are not done
    done: Ints32  # [connection] slot
    arrived: Ints  # [connection] packets in order
    touched: Bytes  # [connection] 1: lost a packet
