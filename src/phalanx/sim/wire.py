"""What a transfer costs beside its payload at the rates the fluid engine finds: headers, latency, queues, luck."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from phalanx.sim.links import Floats, Ints


@dataclass(frozen=True, kw_only=True, slots=True)
class Wire:
    """Overheads of a transport; zeros are the bare fluid."""

    payload_bytes: int = 4096
    header_bytes: int = 0
    base_s: float = 0.0  # of both ends
    link_s: float = 0.0  # of each link of the path, with the switch before it
    stores: bool = False  # switches take in a whole packet before they send it on
    replies: bool = False  # done is when the last ACK is back at the sender
    queue_trips: float = 0.0  # round trips that the last packet queues where links are full
    unequal: float = 0.0  # spread (sigma of the logarithm) of how hard flows pull on a full link

    def wire_bytes(self, nbytes: Floats) -> Floats:
        """Payload and headers."""
        return np.asarray(nbytes + np.ceil(nbytes / self.payload_bytes) * self.header_bytes)

    def latency_s(self, nbytes: Floats, links: Ints, port_gbps: float, queued: NDArray[np.bool_]) -> Floats:
        """Propagation, a packet's time on each link after the first (switches store it), and queues on full links."""
        packet_bytes = np.minimum(nbytes, self.payload_bytes) + self.header_bytes
        packet_s = self.stores * 8.0 * packet_bytes / (port_gbps * 1e9)
        ack_s = self.stores * 8.0 * self.header_bytes / (port_gbps * 1e9)
        there = self.base_s + links * self.link_s + np.maximum(links - 1, 0) * packet_s
        back = self.base_s + links * (self.link_s + ack_s)
        return np.asarray(there + self.replies * back + queued * self.queue_trips * (there + back))

    def pulls(self, rows: int, seed: int) -> Floats:
        """How hard each row pulls; all alike when sharing is fair."""
        if self.unequal == 0:
            return np.ones(rows)
        drawn = np.random.default_rng([seed, rows]).standard_normal(rows)
        return np.exp(self.unequal * drawn)


IDEAL = Wire()
# arXiv:2605.04333 section 5.2.1: 5.09 µs for 2 bytes under one T0 (two links), 1.45 µs more over T1 (four links); 166 B
# of headers with 4,096 B give its 96 % of line rate. Calibrated, not predicted.
MRC = Wire(header_bytes=166, stores=True, base_s=3.64e-6, link_s=0.725e-6)
# uet-htsim, as its public forks have it: 4,150 B packets with 64 B of headers and 1 µs per link, done when the last
# ACK is back. These give its single connection (2 MB, six links of 100G) 176.2 µs, as it prints. The last two are
# fitted, on its seven rows of three tiers alone (grid of 0 to 3 and 0 to 1, smallest largest error: 6 %); its rows of
# two tiers were held out, and come within 8 %. One reason for the first: windows are up to 1.5 bandwidth-delay
# products, and what exceeds one waits in queues. One for the second: 2 MB last a few dozen round trips, too short for
# windows to become equal. docs/simulation/fluid.md has the table.
HTSIM = Wire(payload_bytes=4086, header_bytes=64, link_s=1e-6, stores=True, replies=True, queue_trips=1.5, unequal=0.75)
