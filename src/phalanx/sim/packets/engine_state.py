"""State of the packet engine: named groups of arrays that the compiled loop reads and writes.

A packet is one 64-bit word: its connection, the path it took, whether a queue marked it, whether it asks for an
acknowledgement, and the slot it was sent in. Packets of one connection are alike, so a lost one only increases the
number to send again: there are no sequence numbers.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Ints = NDArray[np.int64]
Ints32 = NDArray[np.int32]
Shorts = NDArray[np.int16]
Floats = NDArray[np.float64]

# Bits of a packet word, lowest first.
FLOW_BITS, PATH_BITS = 25, 11
MARK_BIT = FLOW_BITS + PATH_BITS
# Set by a mark on the last hop, which carries no information about the path.
LAST_BIT = MARK_BIT + 1
ASK_BIT = LAST_BIT + 1
STAMP_BIT = ASK_BIT + 1
MOST_FLOWS = 1 << FLOW_BITS
MOST_PATHS = 1 << PATH_BITS
MOST_SLOTS = 1 << (63 - STAMP_BIT)  # 16.8 million: 5.6 s at 100 Gb/s
FLOW_MASK = (1 << FLOW_BITS) - 1
PATH_MASK = (1 << PATH_BITS) - 1
MARK = 1 << MARK_BIT
# Bits of an event word: connection and path as in a packet, then kind, both marks, packets and queueing delay.
KIND_BIT, SEEN_BIT, NUMBER_BIT, DELAY_BIT = MARK_BIT, 38, 40, 50
MOST_DELAY = (1 << 13) - 1
MOST_NUMBER = (1 << 10) - 1
WHO_MASK = (1 << MARK_BIT) - 1

# Path states, as in arXiv:2606.18170 section II-A. 1 to MOST_SKIP is SKIP: the number of rotations to leave out.
GOOD, MOST_SKIP, ASSUMED_BAD, DENIED = 0, 15, 254, 255

# Kinds of events at the sender.
ACK, TRIMMED, TRIMMED_LAST_HOP, LOST = 0, 1, 2, 3

# Columns of Traffic.tally
# TOUCHED: 1 a packet disappeared, 2 one was trimmed
# PLANE: the plane whose turn it is
UNSENT, IN_FLIGHT, ACKED, ARRIVED, UNACKED, LOSSES, TOUCHED, KEPT, KEPT_AT, RETIRED, PLANE = range(11)
# Columns of Traffic.window: congestion window and the memory of its control loop, in packets and slots
(
    WINDOW,
    MOST,
    BASE,
    CREDIT,
    CALM,
    FAST,
    LAST_CUT,
    LAST_ADD,
    ACHIEVED,
    JUDGE_AT,
    IGNORED,
    IGNORE,
    FRESH,
    ALARM,
    AVERAGE,
    LAST_LOSS,
) = range(16)


class Shape(NamedTuple):
    """Sizes of the fabric and of the queues; links are numbered as in `phalanx.sim.fabric_links`."""

    hosts: int
    block: int  # hosts under the same T0s
    planes: int
    per_plane: int  # links
    t0: int
    t0_up: int
    t0_per_pod: int
    t1_per_pod: int
    t1_up: int
    wire: int  # slots from the start of sending to arrival at the other end
    back: int  # slots per link of an acknowledgement
    host_slots: int  # extra slots at both ends together
    queue: int
    ring: int  # slots of the calendar
    timeout: int  # slots from sending until a packet is known to be lost


class Knobs(NamedTuple):
    """Parameters of the transport, in slots and packets."""

    paths: int
    seed: int  # of the hash that places paths
    skip: int  # 1: marked and trimmed paths are left out for one rotation
    kept: int  # number of paths stored to be used again, 0: none
    edge: int  # 1: a silent loss retires its path at once
    mark_low: float
    mark_high: float
    mark_last_hop: int
    ack_every: int
    ack_share: float  # share of a slot that one acknowledgement takes
    controlled: int  # 0: the window is constant
    target: float  # queueing delay that the window control aims at
    rtt: float  # of the longest path
    idle: float  # a delay below it counts as an idle path
    scale: float  # bandwidth-delay product over the reference's 12 µs at 100 Gb/s
    gain: float  # proportional increase
    smoothing: float  # weight of one acknowledgement in the average delay
    # Packets acknowledged until the increase they earned is added to the window.
    fresh: float
    probe_slots: int  # between two probes of the same retired path
    least_paths: int  # that stay in use despite losses


class Net(NamedTuple):
    """Links and their queues."""

    ring: Ints  # [link, queue] packets
    head: Shorts
    waiting: Shorts  # packets in the queue
    wire: Ints  # [slot, link] packets in transit, 0 is none
    share: Floats  # remaining share of a link's speed
    room: Floats  # remaining share of its queue and of the marking threshold
    loss: Floats  # chance that a packet on it disappears
    avoided: Bytes  # 1: routing avoids the link as dead
    trouble: Bytes  # 1: share or loss is not normal, 2: headers are owed a slot
    owed: Floats  # slots that headers of trimmed packets take on the link
    host_t0: Ints32
    # [plane] 1: that port of the current NIC may still send in this slot.
    ready: Bytes
    sent: Ints  # [plane] packets


class Traffic(NamedTuple):
    """The connections, and the connections of each host."""

    source: Ints32
    target: Ints32
    packets: Ints32
    done: Ints32  # slot of the last acknowledgement, -1 while running
    links: Bytes  # links of the path
    tally: Ints32
    window: Floats
    path: Bytes  # [connection, path] state
    turn: Ints32  # [connection, plane] next path
    # [connection, place] paths that were acknowledged unmarked, to be used again first.
    kept: Shorts
    mine: Ints32  # connections in order of their source
    first: Ints32  # [host] where its connections start in `mine`
    next: Ints32  # [host] connection whose turn it is
    debt: Floats  # [plane · host] slots owed to acknowledgements
    began: Ints32  # slot of the start, -1 before it
    fires: Ints32  # trigger that the end of the connection fires, -1 is none
    needed: Ints32  # [trigger] number of ends it still waits for
    waiting: Ints32  # connections in order of the trigger they wait for
    first_waiting: Ints32  # [trigger] where those of a trigger start in `waiting`


class Calendar(NamedTuple):
    """Events at senders by slot: linked lists in one pool."""

    first: Ints32  # [slot of the ring] head of the list, -1 is empty
    word: Ints
    next: Ints32
    free: Ints32  # [1] head of the free list


# Indices of the totals that the loop increments, and of its current slot.
DELIVERED, SENT, TRIMS, LOSSES_SEEN, MARKS, ACTIVE, RANDOM, OVERFLOW, BAD_PATHS, NOW = range(10)
