"""Rows that we take as given: constants of our defaults, field rates, and what follows from them."""

from __future__ import annotations

from phalanx.hardware.failures import HOPPER_SITE, llama_device_days, site_figures
from phalanx.network.fabric.budget import CABLE_PER_DAY, LLAMA_COUNT, MONTH_DAYS
from phalanx.network.fabric.parse import parse_fabric
from phalanx.network.fabric.recovery import CONVERGE_S, EDGE_RECOVERY_S, FLAP_S, REMAP_S, T1_BACK_S
from phalanx.plan.physics import physics
from phalanx.sim.packets.transport import MRC
from phalanx.validate.network.outcome import Context, Outcome, Reader, calibrated, reproduced
from phalanx.validate.network.paper_rows import ENTROPY
from phalanx.validate.network.table import Row
from phalanx.validate.network.words import NotSaid, count, number, said

# arXiv:2605.04333 table 1: GB/s of a GPU's NIC.
CLUSTER_GB = {"A": 100.0, "B": 100.0, "C": 50.0, "D": 50.0}
REFERENCE = "mrc-131k"
PEAK = 0.03  # what the design asks of the peak of a collective


def latency(row: Row, _: Context) -> Outcome:
    """Two links under one T0, four over a T1."""
    links = 4 if "cross T1" in row.quantity else 2
    hop_s = parse_fabric(REFERENCE).hop_s
    return calibrated(row, 1e6 * (MRC.host_s + links * hop_s), "host_s and hop_s were set from this measurement")


def write_rate(row: Row, _: Context) -> Outcome:
    """Payload's share of the line."""
    line = said(number(row.conditions, r"(\d+)G NIC") or number(row.conditions, r"(\d+)G\b"), "the NIC's speed")
    return calibrated(row, line * MRC.payload_bytes / MRC.packet_bytes, "the header bytes were set from this")


def goodput(row: Row, _: Context) -> Outcome:
    """The same from the bytes the row names."""
    payload = said(number(row.conditions, r"(\d+) ?B payload"), "the payload's bytes")
    header = said(number(row.conditions, r"(\d+) ?B headers?"), "the headers' bytes")
    line = said(number(row.conditions, r"(\d+)G\b"), "the line's speed")
    return reproduced(row, line * payload / (payload + header), "payload / (payload + headers)", tolerance=1e-3)


def collective_peak(row: Row, _: Context) -> Outcome:
    """What the planner takes a collective to get of a NIC: fitted to published training runs, of which this is none."""
    name = row.conditions.rpartition("Cluster ")[2][:1]
    if name not in CLUSTER_GB:
        raise NotSaid("which of the paper's clusters it is")
    share = float(physics().nic)
    return reproduced(row, CLUSTER_GB[name] * share, f"plan/physics: {share:.3f} of a NIC's line rate", tolerance=PEAK)


def link_month(row: Row, _: Context) -> Outcome:
    """Per cent of cables per month."""
    return calibrated(row, 100 * CABLE_PER_DAY * MONTH_DAYS, "our rate of cable failures is this one")


def llama(row: Row, _: Context) -> Outcome:
    """Counted interruptions."""
    return calibrated(row, LLAMA_COUNT, "our rate of network interruptions is this one")


def _interruptions_per_day(row: Row) -> float:
    gpus = said(count(row.conditions, "GPUs?"), "how many GPUs")
    everything = "all cause" in f"{row.quantity} {row.conditions}".lower().replace("-", " ")
    return gpus * (_llama_all() if everything else LLAMA_COUNT) / llama_device_days()


def _llama_all() -> float:
    return next(one.value for one in site_figures() if one.site == HOPPER_SITE)


def interruptions(row: Row, _: Context) -> Outcome:
    """Per day, by GPUs."""
    return reproduced(row, _interruptions_per_day(row), "fabric/budget", tolerance=5e-3)


def between_interruptions(row: Row, _: Context) -> Outcome:
    """The same the other way round."""
    scale = said({"h": 24.0, "hours": 24.0, "min": 1440.0, "minutes": 1440.0}.get(row.unit), "a unit of time")
    return reproduced(row, scale / _interruptions_per_day(row), "fabric/budget", tolerance=0.02)


def lost_share(row: Row, _: Context) -> Outcome:
    """Of the cluster's time, when every interruption by the network costs a restart."""
    minutes = said(number(row.conditions, r"([\d.]+) ?min"), "how many minutes a restart takes")
    per_day = number(row.conditions, r"([\d.]+) (?:network-caused )?(?:restarts?|interruptions?)")
    per_day = per_day or _interruptions_per_day(row)
    scale = 100.0 if row.unit == "percent" else 1.0
    return reproduced(row, scale * per_day * minutes / 1440, "fabric/budget")


def link_failures(row: Row, _: Context) -> Outcome:
    """Per day, by cables."""
    links = number(row.conditions, r"([\d,]+) (?:800G-equivalent )?(?:links|cables)")
    return reproduced(row, said(links, "how many links") * CABLE_PER_DAY, "fabric/budget", tolerance=5e-3)


def mean_time(row: Row, _: Context) -> Outcome:
    """Between failures of any of so many parts that live so long."""
    text = f"{row.conditions}, {row.quantity}"
    years = said(number(text, r"(\d+(?:\.\d+)?)[ -]years?"), "the years one part lives")
    parts = said(count(text, "(?:links?|NICs?|GPUs?|hosts?)"), "how many parts")
    scale = said({"h": 8760.0, "hours": 8760.0, "min": 525_600.0, "minutes": 525_600.0}.get(row.unit), "a unit of time")
    return reproduced(row, scale * years / parts, "years / parts", tolerance=0.02)


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
    (r"^(network |all-cause )?interruptions per day", interruptions),
    (r"between (network |all-cause )?interruptions", between_interruptions),
    (r"lost to (the )?network", lost_share),
    (r"MTTF|between (NIC )?link failures", mean_time),
    (r"^link failures per day", link_failures),
    (r"^entropy values per QP, low", _taken(ENTROPY[0], "the lower end of what paper_rows assume")),
    (r"^entropy values per QP, high", _taken(MRC.paths, "our default number of paths")),
    (r"^path failure bypass", _taken(1e6 * EDGE_RECOVERY_S, "our default of recovery at the edge")),
    (r"^conventional fabric reroute", _taken(CONVERGE_S, "our default of routing's convergence")),
    (r"^link recovery time, most", _taken(FLAP_S / 60, "our default time until a link is back")),
    (r"^NIC port failure QP remap", _taken(REMAP_S, "our default time for moving a NIC's connections")),
    (r"^T1 forwarding restored", _taken(T1_BACK_S / 60, "our default time until a T1 is back")),
)
