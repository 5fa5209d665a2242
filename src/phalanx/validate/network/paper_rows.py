"""Rows about the clusters of arXiv:2605.04333: what its fabric and our constants say about what was seen there."""

from __future__ import annotations

from phalanx.network.fabric.recovery import REMAP_S, TRANSCEIVER_BACK_S, WAITS, pace
from phalanx.sim.packets.transport import MRC
from phalanx.validate.network.outcome import Context, Outcome, Reader, calibrated, ranged, reproduced
from phalanx.validate.network.table import Row
from phalanx.validate.network.words import count, number, said

NIC_GBPS = 800.0
PLANES = 4  # of the large GPU cluster A in its table 1: 4x200G
MINUTE_S = 60.0
# Section 2.1: 128 to 256 paths per connection. Table 1: its large GPU cluster A is 4x200G on 256-port boxes.
ENTROPY, WAYS = (128, 256), 4 * 128
LOST_PER_S = 1.0  # section 2.4: a NIC lost less than one packet a second


def cage_flaps(row: Row, _: Context) -> Outcome:
    """All links of a NIC on one transceiver: nothing moves until it is back, and that time was set from the paper's.

    With fewer, a NIC moves its connections and goes on with what is left; how much the job waits for it is not known.
    """
    lanes = said(count(row.quantity, "NIC-T0 links?"), "how many links")
    planes = count(f"{row.conditions}, {row.quantity}", "planes?") or PLANES
    if lanes >= planes:
        still_s = TRANSCEIVER_BACK_S + REMAP_S
        note = f"fabric/recovery: all {planes} links of a NIC, {still_s:g} s of the minute; that time was set here"
        return calibrated(row, 100 * still_s / MINUTE_S, note)
    low, high = _slow(1 / planes, waits=WAITS), _slow(lanes / planes, waits=1.0)
    note = f"fabric/recovery: {low:.1f} if links are of as many NICs, {high:.1f} if of one and the job is all network"
    return ranged(row, (low + high) / 2, note, between=(low, high))


def _slow(lost: float, *, waits: float) -> float:
    """Per cent of a minute with moved connections and a NIC that lacks a share."""
    return 100 * (REMAP_S + (MINUTE_S - REMAP_S) * (1 - pace(lost, waits=waits))) / MINUTE_S


def touched_by_stop(row: Row, _: Context) -> Outcome:
    """Connections with a path over one T1: the paper gives their number of paths as a range."""
    low, high = (100 * (1 - (1 - 1 / WAYS) ** entropy) for entropy in ENTROPY)
    middle = 100 * (1 - (1 - 1 / WAYS) ** (sum(ENTROPY) / 2))
    words = f"{low:.1f} with {ENTROPY[0]} EVs to {high:.1f} with {ENTROPY[1]}, of {WAYS} paths (4x200G, 256 ports)"
    return ranged(row, middle, words, between=(low, high))


def loss_rate(row: Row, _: Context) -> Outcome:
    """One packet a second of what a NIC sends."""
    gbps = number(row.conditions, r"(\d+)G\b") or NIC_GBPS
    ours = LOST_PER_S * 8 * MRC.packet_bytes / (gbps * 1e9)
    return reproduced(row, ours, f"section 2.4: under one lost packet a second and NIC, of {gbps:g}G", tolerance=0.1)


READERS: tuple[tuple[str, Reader], ...] = (
    (r"^job throughput drop, \d+ NIC-T0 links? flap", cage_flaps),
    (r"^QPs affected by T1 stop", touched_by_stop),
    (r"^loss rate after start", loss_rate),
)
