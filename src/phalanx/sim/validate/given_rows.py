"""Rows that we take as given: constants of our defaults, field rates, and what follows from them."""

from __future__ import annotations

from phalanx.network.fabric.budget import (
    CABLE_PER_DAY,
    EDGE_RECOVERY_S,
    LLAMA_COUNT,
    LLAMA_GPU_DAYS,
    MONTH_DAYS,
    REPAIR_S,
)
from phalanx.network.fabric.parse import parse_fabric
from phalanx.sim.packets.transport import ECMP, MRC
from phalanx.sim.validate.outcome import Context, Outcome, Reader, calibrated, reproduced
from phalanx.sim.validate.table import Row
from phalanx.sim.validate.words import count, number

# arXiv:2605.04333 table 1: GB/s of a GPU's NIC.
CLUSTER_GB = {"A": 100.0, "B": 100.0, "C": 50.0, "D": 50.0}
REFERENCE = "mrc-131k"
PEAK = 0.03  # what the design asks of the peak of a collective


def latency(row: Row, _: Context) -> Outcome:
    """Two links under one T0, four over a T1."""
    links = 4 if "cross T1" in row.quantity else 2
    hop_s = parse_fabric(REFERENCE).hop_s
    return calibrated(row, 1e6 * (MRC.host_s + links * hop_s), "host_s and hop_s were set from this measurement")


def write_rate(row: Row, _: Context) -> Outcome | None:
    """Payload's share of the line."""
    line = number(row.conditions, r"(\d+)G NIC")
    if line is None:
        return None
    return calibrated(row, line * MRC.payload_bytes / MRC.packet_bytes, "the header bytes were set from this")


def goodput(row: Row, _: Context) -> Outcome | None:
    """The same from the bytes the row names."""
    payload, header = number(row.conditions, r"(\d+) B payload"), number(row.conditions, r"(\d+) B headers")
    line = number(row.conditions, r"(\d+)G\b")
    if not payload or header is None or line is None:
        return None
    return reproduced(row, line * payload / (payload + header), "payload / (payload + headers)", tolerance=1e-3)


def collective_peak(row: Row, _: Context) -> Outcome | None:
    """A NIC's line rate without headers: nothing else is lost in our model."""
    name = row.conditions.rpartition("Cluster ")[2][:1]
    if name not in CLUSTER_GB:
        return None
    share = MRC.payload_bytes / MRC.packet_bytes
    return reproduced(row, CLUSTER_GB[name] * share, "line rate less headers", tolerance=PEAK)


def link_month(row: Row, _: Context) -> Outcome:
    """Per cent of cables per month."""
    return calibrated(row, 100 * CABLE_PER_DAY * MONTH_DAYS, "our rate of cable failures is this one")


def llama(row: Row, _: Context) -> Outcome:
    """Counted interruptions."""
    return calibrated(row, LLAMA_COUNT, "our rate of network interruptions is this one")


def interruptions(row: Row, _: Context) -> Outcome | None:
    """Per day, by GPUs."""
    gpus = count(row.conditions, "GPUs?")
    if not gpus:
        return None
    return reproduced(row, gpus * LLAMA_COUNT / LLAMA_GPU_DAYS, "fabric/budget", tolerance=5e-3)


def link_failures(row: Row, _: Context) -> Outcome | None:
    """Per day, by cables."""
    links = number(row.conditions, r"([\d,]+) (?:800G-equivalent )?links")
    if not links:
        return None
    return reproduced(row, links * CABLE_PER_DAY, "fabric/budget", tolerance=5e-3)


def _taken(ours: float, note: str) -> Reader:
    def read(row: Row, _: Context) -> Outcome:
        return calibrated(row, ours, note)

    return read


READERS: tuple[tuple[str, Reader], ...] = (
    (r"^p2p latency", latency),
    (r"^p2p write bandwidth", write_rate),
    (r"^goodput from header overhead", goodput),
    (r"^NCCL over MRC peak", collective_peak),
    (r"^NIC-ToR link failures per month", link_month),
    (r"^network switch/cable interruptions", llama),
    (r"^network interruptions per day", interruptions),
    (r"^link failures per day", link_failures),
    (r"^entropy values per QP, high", _taken(MRC.paths, "our default number of paths")),
    (r"^path failure bypass", _taken(1e6 * EDGE_RECOVERY_S, "our default of recovery at the edge")),
    (r"^conventional fabric reroute", _taken(ECMP.converge_s, "our default of routing's convergence")),
    (r"^Clustermapper probe interval", _taken(1e3 * MRC.probe_s, "our default between probes of a retired path")),
    (r"^link recovery time, most", _taken(REPAIR_S / 60, "our default time until a link is back")),
)
