"""Rows about the clusters of arXiv:2605.04333: what its fabric and our constants say about what was seen there."""

from __future__ import annotations

from phalanx.network.fabric.bill import loss
from phalanx.network.fabric.catalogue import unnamed
from phalanx.network.fabric.sizing import Shape, size
from phalanx.sim.packets.transport import MRC
from phalanx.sim.validate.outcome import Context, Outcome, Reader, reproduced
from phalanx.sim.validate.table import Row
from phalanx.sim.validate.words import count, number, said

MODULE_GBPS = 800.0  # of a transceiver, and of a NIC
# Section 2.1: 128 to 256 paths per connection. Table 1: its large GPU cluster A is 4x200G on 256-port boxes.
ENTROPY, WAYS = (128, 256), 4 * 128
LOST_PER_S = 1.0  # section 2.4: a NIC lost less than one packet a second


def cage_flaps(row: Row, _: Context) -> Outcome:
    """A switch's transceiver carries its lanes to as many NICs: each loses one plane, and the slowest sets the job."""
    lanes = said(count(row.quantity, "NIC-T0 links?"), "how many links")
    made = size(64, MODULE_GBPS, unnamed(64, MODULE_GBPS / lanes), Shape(planes=lanes, tiers=2))
    note = f"one {MODULE_GBPS:g}G module is {lanes} links to {lanes} NICs of {lanes} planes; the slowest sets the job"
    return reproduced(row, 100 * loss(made).nic_link, f"fabric/bill; {note}")


def touched_by_stop(row: Row, _: Context) -> Outcome:
    """Connections with a path over one T1: the paper gives their number of paths as a range."""
    low, high = (100 * (1 - (1 - 1 / WAYS) ** entropy) for entropy in ENTROPY)
    middle = 100 * (1 - (1 - 1 / WAYS) ** (sum(ENTROPY) / 2))
    words = f"{low:.1f} with {ENTROPY[0]} EVs to {high:.1f} with {ENTROPY[1]}, of {WAYS} paths (4x200G, 256 ports)"
    return reproduced(row, middle, words, tolerance=0.0, between=(low, high))


def loss_rate(row: Row, _: Context) -> Outcome:
    """One packet a second of what a NIC sends."""
    gbps = number(row.conditions, r"(\d+)G\b") or MODULE_GBPS
    ours = LOST_PER_S * 8 * MRC.packet_bytes / (gbps * 1e9)
    return reproduced(row, ours, f"section 2.4: under one lost packet a second and NIC, of {gbps:g}G", tolerance=0.1)


READERS: tuple[tuple[str, Reader], ...] = (
    (r"^job throughput drop, \d+ NIC-T0 links? flap", cage_flaps),
    (r"^QPs affected by T1 stop", touched_by_stop),
    (r"^loss rate after start", loss_rate),
)
