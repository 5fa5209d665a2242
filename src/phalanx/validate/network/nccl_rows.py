"""Rows about NCCL's own tables and choices."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import takewhile

from phalanx.network import nccl_tables as tables
from phalanx.network.nccl_choice import choices, choose, latency
from phalanx.network.nccl_system import Channels, System
from phalanx.validate.network.machines import machine
from phalanx.validate.network.outcome import Context, Outcome, Reader, calibrated, reproduced
from phalanx.validate.network.table import Row
from phalanx.validate.network.words import count, number

SAME = "a constant of our model, read in the same source"
EXACT = 1e-3
MIB = 2**20
LARGEST_POWER = 50  # a pebibyte: beyond any message
PER_NODE = 8  # where a row names only ranks
BY_NODES: Mapping[str, Mapping[tables.Family, tables.Triple]] = {
    "LL max bandwidth": tables.LL_MOST_GB,
    "per-channel Ring LL128": tables.RING_LL128_CHANNEL_GB,
    "per-channel Tree LL128": tables.TREE_LL128_CHANNEL_GB,
    "per-channel Tree Simple": tables.TREE_CHANNEL_GB,
    "per-channel NVLSTree": tables.NVLS_TREE_CHANNEL_GB,
}


def hop_latency(row: Row, _: Context) -> Outcome | None:
    """Base, NVLink, PCI and network latency of a pair."""
    hop, _latency, algorithm, protocol = row.quantity.split(" ")[:4]
    for known, of_hop in tables.LATENCY_US.items():
        for name, triple in of_hop.items():
            if (known, name) == (hop, algorithm) and protocol in tables.PROTOCOLS:
                return calibrated(row, triple[[*tables.PROTOCOLS].index(protocol)], SAME, tolerance=EXACT)
    return None


def by_nodes(row: Row, _: Context) -> Outcome | None:
    """Limits by family and number of nodes."""
    table, family = BY_NODES.get(row.quantity), _family(row.conditions)
    nodes = number(row.conditions, r"(\d+) nodes?\b")
    if table is None or family is None or not nodes:
        return None
    return calibrated(row, table[family][min(int(nodes), 3) - 1], SAME, tolerance=EXACT)


def efficiency(row: Row, _: Context) -> Outcome | None:
    """Of sums in the switch."""
    family = _family(row.conditions)
    return None if family is None else calibrated(row, tables.NVLS_EFFICIENCY[family], SAME, tolerance=EXACT)


def link_rate(row: Row, _: Context) -> Outcome | None:
    """GB/s of one NVLink."""
    sm = number(row.conditions, r"sm(\d+)")
    if sm is None or sm < 80:
        return None
    family: tables.Family = "blackwell" if sm >= 100 else "hopper" if sm >= 90 else "ampere"
    return calibrated(row, tables.NVLINK_GB[family], SAME, tolerance=EXACT)


def tree_correction(row: Row, _: Context) -> Outcome | None:
    """c(S)."""
    nbytes, name = number(row.conditions, r"bytes (\d+)"), row.quantity.rpartition(" ")[2]
    for protocol, factors in tables.TREE_CORRECTION.items():
        if protocol == name and nbytes and nbytes >= 64:
            place = int(nbytes / 64).bit_length() - 1
            return calibrated(row, factors[place], SAME, tolerance=EXACT) if place < len(factors) else None
    return None


def _family(text: str) -> tables.Family | None:
    return next((one for one in tables.FAMILIES if text.lower().startswith(one)), None)


def _ranked(row: Row) -> System | None:
    """A system of ranks whose channels the row names; rows without them are about latency, where they do not count."""
    ranks = count(row.conditions, "ranks?")
    per_node = count(row.conditions, "per node") or PER_NODE
    if not ranks or ranks % per_node:
        return None
    found = re.search(r"(\d+) ch x ([\d.]+) GB/s", row.conditions)
    speed = float(found[2]) if found else 24.0
    ring = Channels(count=int(found[1]) if found else 16, inside_gb=speed, across_gb=speed)
    named = (one for one in tables.FAMILIES if one in row.conditions.lower())
    family: tables.Family = next(named, "hopper")
    nodes = ranks // per_node
    amd = "AMD" in row.conditions
    return System(nodes=nodes, per_node=per_node, family=family, ring=ring, nvls=None, cpu="amd" if amd else "intel")


def crossing(row: Row, _: Context) -> Outcome | None:
    """The first power of two at which NCCL's model has the ring faster than the tree."""
    comm = _ranked(row)
    if comm is None:
        return None
    for power in range(10, LARGEST_POWER):
        best = choose(comm, 2.0**power)
        if best.algorithm == "Ring":
            return reproduced(row, 2.0**power / MIB, "network/nccl_choice", tolerance=EXACT)
    return None


def start_up(row: Row, _: Context) -> Outcome | None:
    """Latency of one pair for a message of nothing."""
    name, protocol = row.quantity.split(" ")[:2]
    comm = _ranked(row)
    if comm is None or protocol not in tables.PROTOCOLS:
        return None
    algorithm: tables.Algorithm = "Ring" if name == "ring" else "Tree"
    chosen = next(one for one in tables.PROTOCOLS if one == protocol)
    scale = {"ms": 1e-3, "us": 1.0, "s": 1e-6}.get(row.unit)
    if scale is None:
        return None
    return reproduced(row, scale * latency(comm, algorithm, chosen, nbytes=0.0), "network/nccl_choice", tolerance=EXACT)


def last_of_pair(row: Row, _: Context) -> Outcome | None:
    """The largest power of two for which NCCL takes the named pair before it takes another."""
    found = re.search(r"using (\w+) (LL128|LL|Simple)", row.quantity)
    known = machine(row.conditions)
    if found is None or known is None or row.unit != "MiB":
        return None
    sizes = (2.0**power for power in range(10, LARGEST_POWER))

    def holds(nbytes: float) -> bool:
        best = choose(known, nbytes)
        return (best.algorithm.lower(), best.protocol) == (found[1].lower(), found[2])

    kept = list(takewhile(holds, sizes))
    if not kept:
        return reproduced(row, 0.0, "network/nccl_choice: never takes it")
    then = choose(known, 2 * kept[-1])
    note = f"network/nccl_choice; then {then.algorithm} {then.protocol} of {len(choices(known, 2 * kept[-1]))} pairs"
    return reproduced(row, kept[-1] / MIB, note, tolerance=EXACT)


READERS: tuple[tuple[str, Reader], ...] = (
    (r"^(base|NVLINK|PCI|NET) latency \w+ \w+", hop_latency),
    (r"^LL max bandwidth|^per-channel ", by_nodes),
    (r"^NVLS efficiency", efficiency),
    (r"^NVLink bandwidth per link", link_rate),
    (r"^treeCorrectionFactor", tree_correction),
    (r"^ring first beats tree", crossing),
    (r"^(ring|tree) \w+ latency", start_up),
    (r"^largest payload still using", last_of_pair),
)
