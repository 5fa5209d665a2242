"""How connections send: paths, window, what a queue tells them, and what they do about a loss."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from phalanx.errors import mistake
from phalanx.network.fabric.types import Fabric
from phalanx.sim.packets.state import MOST_PATHS

Spray = Literal["oblivious", "skip", "recycle"]
Recovery = Literal["edge", "routing"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Transport:
    """A transport's settings; None is worked out from the fabric's round trip."""

    name: str
    paths: int = 256  # per connection, over all planes: 1 is ECMP by connection, 8 is eight queue pairs
    # "skip" leaves marked and trimmed paths out for a rotation; "recycle" also uses unmarked ones again first (REPS)
    spray: Spray = "skip"
    recovery: Recovery = "edge"  # "edge" retires a path at its first silent loss; "routing" waits for convergence
    # Of routing; "seconds or tens of seconds" in a conventional fabric (OpenAI, 2026-05-05). `recovery.CONVERGE_S` is
    # 10 s; here packets end after 5.6 s at 100G.
    converge_s: float = 1.0
    payload_bytes: int = 4096
    header_bytes: int = 166  # 4096/(4096+166) is the 96 % of line rate of arXiv:2605.04333 section 5.2.1
    ack_bytes: int = 64
    # Of both ends together: 5.09 µs between hosts under one T0, less two links of 0.73 (section 5.2.1).
    host_s: float = 3.63e-6
    ack_every: int = 4  # packets; marked ones are acknowledged at once
    queue_packets: int | None = None  # one bandwidth-delay product
    marks: tuple[float, float] = (0.2, 0.8)  # of that product: where marking begins, and where every packet is marked
    # A mark there is no sign of the path (arXiv:2605.04333 section 2.1 leaves it out) and here only holds the window:
    # without it a 7:1 incast ran unfairly (20 to 101 Gb/s) with 15 % of its packets trimmed.
    mark_last_hop: bool = True
    window_packets: float | None = None  # at the start; 1.5 bandwidth-delay products
    controlled: bool = True  # False keeps the window where it starts
    timeout_s: float | None = None  # from sending to knowing that a packet was lost
    # ev_min_active: that many paths of a connection are never retired (4 in mrc_qp.md, an example of the OCP)
    least_paths: int = 4
    # Between tries of a retired path. Calibrated, the cadence is not published: with 1 % loss everywhere about a third
    # of the throughput is left (arXiv:2605.04333 section 5.2.7). Docs have what 15 and 20 ms give.
    probe_s: float = 20e-3

    @property
    def packet_bytes(self) -> int:
        """On the wire."""
        return self.payload_bytes + self.header_bytes


# What arXiv:2605.04333 and 2606.18170 describe.
MRC = Transport(name="MRC")
# RoCE with one path per queue pair on a routed fabric. Its own congestion control (DCQCN) and PFC are not modelled:
# the same window is used, so that only paths and recovery differ.
ECMP = Transport(name="ECMP", paths=1, spray="oblivious", recovery="routing")
# uet-htsim (public forks) with its defaults and -sender_cc_only: 4,150 B packets with 64 B headers. Of its load
# balancing, "mixed" is "recycle" here and "bitmap" is "skip".
HTSIM = Transport(name="uet-htsim", spray="recycle", paths=64, payload_bytes=4086, header_bytes=64, host_s=0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Slots:
    """A transport on a fabric, in slots (the time of one packet on a port) and packets."""

    slot_s: float
    wire: int  # from the start of sending to arrival
    back: int  # per link, of what travels without waiting
    host: int
    rtt: float  # of the longest path, empty
    product: int  # bandwidth-delay product in packets
    queue: int
    window: float
    timeout: int


def in_slots(fabric: Fabric, transport: Transport, *, planes: int) -> Slots:
    """What the engine needs of a transport on a fabric of which it simulates `planes`."""
    slot_s = 8.0 * transport.packet_bytes / (fabric.port_gbps * 1e9)
    flight = max(0, round(fabric.hop_s / slot_s))
    links, host = fabric.hops + 1, round(transport.host_s / slot_s)
    rtt = links * (2 * flight + 1) + host
    product = math.ceil(rtt * planes)
    queue = transport.queue_packets or max(8, math.ceil(rtt))
    # uet-htsim (public forks) main_uec.cpp: 15 µs and six full queues.
    timeout_s = transport.timeout_s or 15e-6 + 6 * queue * slot_s
    return Slots(
        slot_s=slot_s,
        wire=flight + 1,
        back=max(1, flight),
        host=host,
        rtt=rtt,
        product=product,
        queue=queue,
        window=transport.window_packets or 1.5 * product,
        timeout=max(1, round(timeout_s / slot_s)),
    )


def check(transport: Transport) -> None:
    """Raise UserError for settings that no connection can work with."""
    where = f"transport {transport.name}"
    if not 1 <= transport.paths <= MOST_PATHS:
        raise mistake(
            where, f"{transport.paths} paths per connection", fix=f"use 1 to {MOST_PATHS:,}; MRC uses 128 to 256"
        )
    if transport.payload_bytes < 1 or transport.header_bytes < 0 or transport.ack_every < 1:
        raise mistake(where, f"{transport.payload_bytes} bytes in a packet, acknowledged every {transport.ack_every}")
    if not 0 <= transport.marks[0] < transport.marks[1]:
        raise mistake(where, f"marking from {transport.marks[0]:g} to {transport.marks[1]:g}", fix="use a rising pair")
    if transport.queue_packets is not None and not 1 <= transport.queue_packets <= 16_000:
        raise mistake(where, f"a queue of {transport.queue_packets} packets", fix="use 1 to 16,000")
