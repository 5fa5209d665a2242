"""What a transfer costs beside its payload at the rate the fluid engine finds: headers and latency."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from phalanx.sim.links import Floats, Ints


@dataclass(frozen=True, kw_only=True, slots=True)
class Overhead:
    """Headers per packet, and the time a first bit needs on an idle path; `replies` adds the way back of the last ACK."""

    payload_bytes: int
    header_bytes: int
    base_s: float = 0.0  # of both ends, on every path
    link_s: float = 0.0  # of each link of the path, with the switch before it
    replies: bool = False

    def wire_bytes(self, nbytes: Floats) -> Floats:
        """Payload and headers."""
        return np.asarray(nbytes + np.ceil(nbytes / self.payload_bytes) * self.header_bytes)

    def latency_s(self, links: Ints, port_gbps: float) -> Floats:
        """Propagation, and a packet's time on each link after the first: switches store a packet before they send."""
        packet_s = 8.0 * (self.payload_bytes + self.header_bytes) / (port_gbps * 1e9)
        ack_s = 8.0 * self.header_bytes / (port_gbps * 1e9) if self.replies else 0.0
        ways = 2 if self.replies else 1
        return np.asarray(
            self.base_s + links * (ways * self.link_s + ack_s) + np.maximum(links - 1, 0) * packet_s
        )


NONE = Overhead(payload_bytes=4096, header_bytes=0)
# arXiv:2605.04333 section 5.2.1: 5.09 µs under one T0 (two links), 1.45 µs more over T1 (four links); 166 B of headers
# with 4,096 B reproduce its 96 % of line rate. The packet's 0.34 µs per link at 100G is part of the measured 0.73.
MRC = Overhead(payload_bytes=4096, header_bytes=166, base_s=3.64e-6, link_s=0.39e-6)
# uet-htsim @40ccb05: 4,150 B packets with 64 B headers, 1 µs per link, done when the last ACK is back. These constants
# give its single connection (2 MB, six links at 100G) 176.2 µs, which it prints too.
HTSIM = Overhead(payload_bytes=4086, header_bytes=64, link_s=1e-6, replies=True)
