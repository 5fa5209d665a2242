"""Transports of the packet engine: paths, window, packets, and the response to marks and losses, for MRC and RoCE."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from phalanx.errors import mistake
from phalanx.network.fabric.fabric_types import Fabric
from phalanx.sim.packets.engine_state import MOST_PATHS

Spray = Literal["oblivious", "skip", "recycle"]
Recovery = Literal["edge", "routing"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Transport:
    """A transport's settings; None is derived from the fabric's round trip."""

    name: str
    # Number per connection, over all planes: 1 is ECMP by connection, 8 is eight queue pairs.
    paths: int = 256
    # "skip" leaves marked and trimmed paths out for a rotation; "recycle" also uses unmarked paths again first
    # (REPS).
    spray: Spray = "skip"
    # "edge" retires a path at its first silent loss; "routing" waits for convergence.
    recovery: Recovery = "edge"
    # Convergence of routing; "seconds or tens of seconds" in a conventional fabric (OpenAI, 2026-05-05). CONVERGE_S
    # of failure_budget.py is 10 s; packet simulations end after 5.6 s at 100G.
    converge_s: float = 1.0
    payload_bytes: int = 4096
    # 4096/(4096+166) is the 96 % of line rate of arXiv:2605.04333 section 5.2.1.
    header_bytes: int = 166
    ack_bytes: int = 64
    # Of both ends together: 5.09 µs between hosts under one T0, less two links of 0.73 (section 5.2.1).
    host_s: float = 3.63e-6
    ack_every: int = 4  # packets; marked ones are acknowledged at once
    queue_packets: int | None = None  # None: one bandwidth-delay product
    # Shares of that product: where marking begins, and where every packet is marked.
    marks: tuple[float, float] = (0.2, 0.8)
    # A mark on the last hop is not evidence about the path (arXiv:2605.04333 section 2.1 leaves it out) and here only
    # limits the window: without it a 7:1 incast ran unfairly (20 to 101 Gb/s) with 15 % of its packets trimmed.
    mark_last_hop: bool = True
    window_packets: float | None = None  # at the start; None: 1.5 bandwidth-delay products
    controlled: bool = True  # False keeps the window constant
    timeout_s: float | None = None  # from sending until a packet counts as lost
    # ev_min_active: the paths of a connection that are never retired (4 in mrc_qp.md, an example of the OCP).
    least_paths: int = 4
    # Between probes of a retired path. Calibrated, as it is not published: with 1 % loss everywhere about a third of
    # the throughput is left (arXiv:2605.04333 section 5.2.7). The docs list the results of 15 and 20 ms.
    probe_s: float = 20e-3

    @property
    def packet_bytes(self) -> int:
        """Bytes of a full packet on the wire."""
        return self.payload_bytes + self.header_bytes


# The transport of arXiv:2605.04333 and 2606.18170.
MRC = Transport(name="MRC")
# RoCE with one path per queue pair on a routed fabric. Its own congestion control (DCQCN) and PFC are not modelled
# here: it uses the same window, so that only paths and recovery differ.
ECMP = Transport(name="ECMP", paths=1, spray="oblivious", recovery="routing")
# uet-htsim (public forks) with its defaults and -sender_cc_only: 4,150 B packets with 64 B headers. Of its load
# balancers, "mixed" is "recycle" here and "bitmap" is "skip".
HTSIM = Transport(name="uet-htsim", spray="recycle", paths=64, payload_bytes=4086, header_bytes=64, host_s=0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Slots:
    """A transport on a fabric, in slots (the time of one packet on a port) and packets."""

    slot_s: float
    wire: int  # from the start of sending to arrival at the other end
    back: int  # per link, of acknowledgements, which do not queue
    host: int
    rtt: float  # of the longest path, without queues
    product: int  # bandwidth-delay product in packets
    queue: int
    window: float
    timeout: int


def in_slots(fabric: Fabric, transport: Transport, *, planes: int) -> Slots:
    """Return a transport on a fabric in slots, of which `planes` planes are simulated."""
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


def check_transport(transport: Transport) -> None:
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


# The conventional transport: RoCE with go-back-N, one hashed path per queue pair, PFC and DCQCN.


# KMIN_MAP and KMAX_MAP of the ns-3 RDMA model as ASTRA-sim ships it (config.txt), in KB by Gb/s; PMAX_MAP is 0.2.
MARK_GBPS = (25.0, 40.0, 100.0, 200.0, 400.0)
MARK_LOW_KB = (100.0, 200.0, 400.0, 600.0, 800.0)
MARK_HIGH_KB = (400.0, 800.0, 1600.0, 2400.0, 3200.0)
MOST_QPS = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Dcqcn:
    """Rate control at the sending NIC: constants of Zhu et al., SIGCOMM 2015, whose links had 40 Gb/s."""

    gain: float = 1 / 256  # of alpha
    cnp_s: float = 50e-6  # at most one report per queue pair and this time
    alpha_s: float = 55e-6  # alpha falls after this time without a report
    timer_s: float = 55e-6  # and the rate rises after this time,
    counter_bytes: float = 10e6  # or after this many bytes
    # Rounds that halve the distance to the old rate before it is exceeded.
    fast_rounds: int = 5
    add_share: float = 40e6 / 40e9  # of line rate: 40 Mb/s at 40 Gb/s
    # Ten times add_share, as 5 and 50 Mb/s are the defaults of NVIDIA's driver.
    hyper_share: float = 400e6 / 40e9
    least_share: float = 1e-3  # of line rate


@dataclass(frozen=True, kw_only=True, slots=True)
class Roce:
    """The settings of a conventional transport."""

    name: str = "RoCE"
    qps: int = 1  # per connection, each on one path by hash
    # True: switches pause the port that fills them. False: a full buffer drops packets.
    pfc: bool = True
    dcqcn: Dcqcn | None = Dcqcn()  # None: send at line rate
    converge_s: float = 1.0  # of routing, as `Transport.converge_s`
    payload_bytes: int = 4096
    header_bytes: int = 82  # preamble and gap 20, Ethernet 18, IPv4 20, UDP 8, BTH 12, ICRC 4
    host_s: float = 3.63e-6  # of both ends together, as MRC's: arXiv:2605.04333 section 5.2.1
    ack_every: int = 4
    # 4.096 µs · 2^14, the default of perftest; NCCL's own default is longer.
    timeout_s: float = 4.096e-6 * 2**14
    # Of a switch; None: 3.2 KB per Gb/s of its ports, as Tomahawk 5 has 165 MB for 51.2 Tb/s.
    buffer_bytes: float | None = None
    # A port is paused when it holds this share of the free buffer (ns-3 RDMA model: 1/8), and resumes when it holds
    # two packets less.
    pause_share: float = 1 / 8
    # Chance of a mark where marking ends; above that every packet is marked.
    mark_most: float = 0.2

    @property
    def packet_bytes(self) -> int:
        """Bytes of a full packet on the wire."""
        return self.payload_bytes + self.header_bytes


ROCE = Roce(name="RoCE, PFC and DCQCN")
ROCE_PFC = Roce(name="RoCE, PFC", dcqcn=None)
ROCE_LOSSY = Roce(name="RoCE, DCQCN", pfc=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class RoceSlots:
    """A conventional transport on a fabric, in slots (the time of one packet on a port) and packets."""

    slot_s: float
    wire: int  # from the start of sending to arrival at the other end
    back: int  # per link, of acknowledgements, which do not queue
    host: int
    buffer: float  # packets that a switch buffers
    mark_low: float
    mark_high: float
    timeout: int

    def slots(self, time_s: float) -> float:
        """Return a time in slots."""
        return time_s / self.slot_s


def roce_slots(fabric: Fabric, roce: Roce) -> RoceSlots:
    """Return a conventional transport on a fabric in slots."""
    packet_bits, gbps = 8.0 * roce.packet_bytes, fabric.port_gbps
    slot_s = packet_bits / (gbps * 1e9)
    flight = max(0, round(fabric.hop_s / slot_s))
    buffer_bytes = roce.buffer_bytes or 165e6 / 51.2e3 * fabric.switch.radix * gbps
    low, high = (float(np.interp(gbps, MARK_GBPS, kb)) for kb in (MARK_LOW_KB, MARK_HIGH_KB))
    return RoceSlots(
        slot_s=slot_s,
        wire=flight + 1,
        back=max(1, flight),
        host=round(roce.host_s / slot_s),
        buffer=buffer_bytes / roce.packet_bytes,
        mark_low=1e3 * low / roce.packet_bytes,
        mark_high=1e3 * high / roce.packet_bytes,
        timeout=max(1, round(roce.timeout_s / slot_s)),
    )


def check_roce(roce: Roce) -> None:
    """Raise UserError for settings that no connection can work with."""
    where = f"transport {roce.name}"
    if not 1 <= roce.qps <= MOST_QPS:
        raise mistake(where, f"{roce.qps} queue pairs per connection", fix=f"use 1 to {MOST_QPS}")
    if roce.payload_bytes < 1 or roce.header_bytes < 0 or roce.ack_every < 1:
        raise mistake(where, f"{roce.payload_bytes} bytes in a packet, acknowledged every {roce.ack_every}")
    if roce.timeout_s <= 0 or not 0 < roce.pause_share <= 1:
        raise mistake(where, f"a timeout of {roce.timeout_s:g} s, pause at {roce.pause_share:g} of what is free")
    if roce.buffer_bytes is not None and not (64 * roce.packet_bytes <= roce.buffer_bytes < math.inf):
        raise mistake(where, f"a buffer of {roce.buffer_bytes:g} bytes", fix="use at least 64 packets: 5e6, or 165e6")
