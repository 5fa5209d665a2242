"""State of the loop of the conventional transport: named groups of arrays."""

from __future__ import annotations

from typing import NamedTuple

from phalanx.sim.packets.engine_state import Bytes, Floats, Ints, Ints32

# Bits of an event word: queue pair, kind, sequence number.
QP_BITS, KIND_BITS = 25, 2
NUMBER_BIT = QP_BITS + KIND_BITS
ACK, NAK, CNP = 0, 1, 2

# Columns of Pairs.counts
(TOTAL, UNACKED, NEXT, EXPECTED, COMPLAINED, PROGRESS, PATIENCE, FAST_TIME, FAST_BYTES) = range(9)
# Columns of Pairs.rate, in packets and slots: the state of DCQCN.
RATE, TARGET, ALPHA, SEND_AT, ALPHA_AT, TIMER_AT, SENT_BYTES, CNP_AT = range(8)

# Indices of the totals that the loop increments. RANDOM has the same index as in `engine_state.py`, because both
# loops use `parts.draw`.
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
    wire: int  # slots from the start of sending to arrival at the other end
    # Slots per link of acknowledgements, which do not queue, and of a pause.
    back: int
    host_slots: int
    ring: int  # slots of the calendar
    timeout: int
    tick: int  # slots between two checks of the timers


class Rules(NamedTuple):
    """Parameters of the transport, in slots and packets."""

    pfc: int
    dcqcn: int
    ack_every: int
    buffer: float  # packets that a switch buffers
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
    """Links: the queue at the start of each, and its share of the buffer of the switch at its end."""

    first: Ints32  # packet at the head of the queue, -1 is none
    last: Ints32
    waiting: Ints32
    wire: Ints32  # [slot, link] packet + 1 in transit, 0 is none
    node: Ints32  # switch at the end, -1 is a host
    held: Ints32  # packets in that switch that came over the link
    used: Ints32  # [switch] packets
    asked: Bytes  # 1: the switch has asked for a pause
    paused: Bytes  # 1: the pause has arrived
    share: Floats  # remaining share of a link's speed
    loss: Floats
    # Pauses and their ends on the way back, a ring buffer.
    signal_slot: Ints32
    signal_link: Ints32  # link · 2 + pause


class Packets(NamedTuple):
    """One row for each packet that can be in the fabric at once."""

    pair: Ints32
    number: Ints32
    hop: Bytes  # number of links it has passed
    marked: Bytes
    came: Ints32  # the last link it passed
    next: Ints32  # in its queue, or in the list of free rows


class Pairs(NamedTuple):
    """Queue pairs, and the queue pairs of each NIC port."""

    owner: Ints32  # connection
    route: Ints32  # [pair, hop] links
    hops: Bytes
    counts: Ints32
    rate: Floats
    mine: Ints32  # pairs in order of their NIC port
    begin: Ints32  # [NIC port] where its pairs start in `mine`
    turn: Ints32  # [NIC port] pair whose turn it is
    left: Ints32  # [connection] pairs that are not done
    done: Ints32  # [connection] slot
    arrived: Ints  # [connection] packets in order
    touched: Bytes  # [connection] 1: lost a packet
