"""The conventional transport: RoCE with go-back-N, one hashed path per queue pair, PFC and DCQCN."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from phalanx.errors import mistake
from phalanx.network.fabric.types import Fabric

# KMIN_MAP and KMAX_MAP of the ns-3 RDMA model as ASTRA-sim ships it (config.txt), in KB by Gb/s; PMAX_MAP is 0.2.
MARK_GBPS = (25.0, 40.0, 100.0, 200.0, 400.0)
MARK_LOW_KB = (100.0, 200.0, 400.0, 600.0, 800.0)
MARK_HIGH_KB = (400.0, 800.0, 1600.0, 2400.0, 3200.0)
MOST_QPS = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Dcqcn:
    """Rate control at the sending NIC: constants of Zhu et al., SIGCOMM 2015, whose links had 40 Gb/s."""

    gain: float = 1 / 256  # of alpha
    cnp_s: float = 50e-6  # a receiver complains at most this often per queue pair
    alpha_s: float = 55e-6  # without a complaint alpha falls this often
    timer_s: float = 55e-6  # and the rate rises this often,
    counter_bytes: float = 10e6  # or after this many bytes
    fast_rounds: int = 5  # of halving the distance to the old rate before adding to it
    add_share: float = 40e6 / 40e9  # of line rate: 40 Mb/s at 40 Gb/s
    hyper_share: float = 400e6 / 40e9  # ten times that, as 5 and 50 Mb/s are the defaults of NVIDIA's driver
    least_share: float = 1e-3  # of line rate


@dataclass(frozen=True, kw_only=True, slots=True)
class Roce:
    """A conventional transport's settings."""

    name: str = "RoCE"
    qps: int = 1  # per connection, each on one path by hash
    pfc: bool = True  # switches pause the port that fills them; off, a full buffer drops
    dcqcn: Dcqcn | None = Dcqcn()  # None sends at line rate
    converge_s: float = 1.0  # of routing, as `Transport.converge_s`
    payload_bytes: int = 4096
    header_bytes: int = 82  # preamble and gap 20, Ethernet 18, IPv4 20, UDP 8, BTH 12, ICRC 4
    host_s: float = 3.63e-6  # of both ends together, as MRC's: arXiv:2605.04333 section 5.2.1
    ack_every: int = 4
    # 4.096 µs · 2^14, the default of perftest; NCCL's own default is longer.
    timeout_s: float = 4.096e-6 * 2**14
    buffer_bytes: float | None = None  # of a switch; 3.2 KB per Gb/s of its ports: Tomahawk 5 has 165 MB for 51.2 Tb/s
    # A port is paused when it holds this share of what is free of the buffer (ns-3 RDMA model: 1/8), and goes on when
    # it holds two packets less.
    pause_share: float = 1 / 8
    mark_most: float = 0.2  # chance of a mark where marking ends; above it every packet is marked

    @property
    def packet_bytes(self) -> int:
        """On the wire."""
        return self.payload_bytes + self.header_bytes


ROCE = Roce(name="RoCE, PFC and DCQCN")
ROCE_PFC = Roce(name="RoCE, PFC", dcqcn=None)
ROCE_LOSSY = Roce(name="RoCE, DCQCN", pfc=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class RoceSlots:
    """A conventional transport on a fabric, in slots (the time of one packet on a port) and packets."""

    slot_s: float
    wire: int  # from the start of sending to arrival
    back: int  # per link, of what travels without waiting
    host: int
    buffer: float  # packets of a switch
    mark_low: float
    mark_high: float
    timeout: int

    def slots(self, time_s: float) -> float:
        """A time in slots."""
        return time_s / self.slot_s


def roce_slots(fabric: Fabric, roce: Roce) -> RoceSlots:
    """What the loop needs of a transport on a fabric."""
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
