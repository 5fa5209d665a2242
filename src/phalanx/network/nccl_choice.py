"""Which algorithm and protocol NCCL 2.30 picks by itself, and the time its model gives for it.

The model is NCCL's (src/graph/tuning.cc, 2.30.7), all seven algorithms and three protocols; the search for channels
(src/graph/search.cc) is reduced to boards whose GPUs all meet in NVSwitches. Use it to choose: below about 1 GiB its
times are a ranking, not a prediction (network/fit.py predicts). Left out: PCIe-only boards, mixed GPUs, rails that
share a NIC, user settings (NCCL_ALGO, NCCL_PROTO), aggregated calls, symmetric-memory kernels.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from phalanx.errors import mistake
from phalanx.network.nccl_tables import (
    FAMILIES,
    LATENCY_US,
    LL_MOST_GB,
    MOST_NVLS_HEADS,
    NET_GB_PER_100G,
    NVLINK_GB,
    NVLINKS,
    NVLS_EFFICIENCY,
    NVLS_TREE_CHANNEL_GB,
    PROTOCOLS,
    RING_LL128_CHANNEL_GB,
    SPEEDS_ACROSS_GB,
    SPEEDS_INSIDE_GB,
    TREE_CHANNEL_GB,
    TREE_CORRECTION,
    TREE_LL128_CHANNEL_GB,
    Algorithm,
    Family,
    Hop,
    Protocol,
)

Operation = Literal["all-reduce", "all-gather", "reduce-scatter"]
Cpu = Literal["intel", "amd", "arm"]

WHERE = "NCCL"
POST_US = {"intel": 1.0, "amd": 2.0, "arm": 1.0}  # posting a send to a NIC; three times that for Simple
PLATEAU = 1.4  # ring all-reduce, Simple, several nodes, 64 B or more per channel and rank; 1.9 before Ampere
OLD_PLATEAU = 1.9
PLATEAU_BYTES = 64
CORRECTED_TREE, CORRECTED_NVLS_TREE = 23, 24  # places of c(S) that are read
MOST_RANKS = 1 << 24
SLOWEST_TRY = 0.49  # of the first speed that works: the search tries nothing slower to get more channels


@dataclass(frozen=True, kw_only=True, slots=True)
class Channels:
    """What NCCL's search found for one pattern: so many channels of so many GB/s inside and between nodes."""

    count: int
    inside_gb: float
    across_gb: float


@dataclass(frozen=True, kw_only=True, slots=True)
class System:
    """A communicator as NCCL sees it. A node is whatever one NVLink domain joins: 8 GPUs of a board, 72 of a rack."""

    nodes: int
    per_node: int
    family: Family
    ring: Channels
    nvls: Channels | None  # None: the switches cannot add, or NCCL_NVLS_ENABLE=0
    cpu: Cpu = "intel"
    sharp: bool = False  # the network's switches add too (CollNet)
    plain_tree: bool = False

    @property
    def ranks(self) -> int:
        """All of them."""
        return self.nodes * self.per_node

    @property
    def column(self) -> int:
        """Of the tables by number of nodes."""
        return min(self.nodes, 3) - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """One algorithm and protocol with the time NCCL's model gives."""

    algorithm: Algorithm
    protocol: Protocol
    latency_s: float
    transfer_s: float

    @property
    def seconds(self) -> float:
        """In all."""
        return self.latency_s + self.transfer_s


def system(
    *,
    nodes: int,
    per_node: int,
    family: Family,
    nic_gbps: float = 0.0,
    nvls: bool = True,
    cpu: Cpu = "intel",
    sharp: bool = False,
) -> System:
    """The channels NCCL finds where every GPU has its own NIC and all meet in NVSwitches.

    >>> h200 = system(nodes=1, per_node=8, family="hopper")
    >>> h200.ring.count * h200.ring.inside_gb, h200.nvls.count * h200.nvls.inside_gb
    (360.0, 320.0)
    """
    _check(nodes, per_node, family, nic_gbps)
    link_gb = NVLINK_GB[family] * NVLINKS[family]
    nic_gb = nic_gbps / 100.0 * NET_GB_PER_100G if nodes > 1 else math.inf
    adds = nvls and NVLS_EFFICIENCY[family] > 0 and per_node > 2
    return System(
        nodes=nodes,
        per_node=per_node,
        family=family,
        ring=_ring_channels(family, per_node, link_gb, nic_gb),
        nvls=_nvls_channels(family, per_node, link_gb, nic_gb) if adds else None,
        cpu=cpu,
        sharp=sharp,
    )


def _check(nodes: int, per_node: int, family: str, nic_gbps: float) -> None:
    if nodes < 1 or per_node < 1 or nodes * per_node > MOST_RANKS:
        what = f"{nodes:,} nodes of {per_node:,} GPUs"
        raise mistake(WHERE, what, fix=f"use at least 1 of each, and at most {MOST_RANKS:,} ranks")
    if family not in FAMILIES:
        raise mistake(WHERE, f'there is no family "{family}"', fix=f"use one of {', '.join(FAMILIES)}")
    if nodes > 1 and not (math.isfinite(nic_gbps) and nic_gbps > 0):
        raise mistake(WHERE, f"{nodes:,} nodes with NICs of {nic_gbps:g} Gb/s", fix="use 100, 200, 400 or 800")


def _ring_channels(family: Family, gpus: int, link_gb: float, nic_gb: float) -> Channels:
    """The most that whole channels carry: inside, any number of them; across, one per GPU and its NIC."""
    if nic_gb == math.inf:
        first = _fastest(SPEEDS_INSIDE_GB[family], link_gb)
        tried = [one for one in SPEEDS_INSIDE_GB[family] if SLOWEST_TRY * first < one <= first]
        speed = max(tried, key=lambda one: (int(link_gb // one) * one, one))
        count = int(link_gb // speed)
        return Channels(count=2 * count, inside_gb=speed / 2, across_gb=speed / 2)  # NCCL halves fast channels
    room = min(nic_gb, link_gb / gpus if gpus > 1 else nic_gb)
    speed = _fastest(SPEEDS_ACROSS_GB[family], room)
    return Channels(count=gpus, inside_gb=speed, across_gb=speed)


def _nvls_channels(family: Family, gpus: int, link_gb: float, nic_gb: float) -> Channels:
    """One channel per head: each GPU's links carry every channel once, and those of a head its own twice."""
    heads = min(gpus, MOST_NVLS_HEADS)
    speeds = SPEEDS_INSIDE_GB[family] if nic_gb == math.inf else SPEEDS_ACROSS_GB[family]
    speed = _fastest(speeds, min(nic_gb, link_gb / (heads + 1)))
    return Channels(count=heads, inside_gb=speed, across_gb=speed)


def _fastest(speeds: tuple[float, ...], room: float) -> float:
    return next((one for one in speeds if one <= room), speeds[-1])


def choose(comm: System, nbytes: float, *, operation: Operation = "all-reduce") -> Choice:
    """The pair NCCL takes by itself.

    >>> h200 = system(nodes=1, per_node=8, family="hopper")
    >>> [(one.algorithm, one.protocol) for one in (choose(h200, 2**20), choose(h200, 2**21))]
    [('Ring', 'LL'), ('NVLS', 'Simple')]
    """
    return min(choices(comm, nbytes, operation=operation), key=lambda one: one.seconds)


def choices(comm: System, nbytes: float, *, operation: Operation = "all-reduce") -> tuple[Choice, ...]:
    """Every pair that exists for this communicator and operation."""
    if not (math.isfinite(nbytes) and nbytes > 0):
        raise mistake(WHERE, f"a message of {nbytes:g} bytes", fix="sizes are above zero")
    if comm.ranks == 1:
        return (Choice(algorithm="Ring", protocol="Simple", latency_s=0.0, transfer_s=0.0),)
    found = []
    for algorithm, protocol, bus_gb in _exists(comm, operation):
        latency_us = latency(comm, algorithm, protocol, operation=operation, nbytes=nbytes)
        rate_gb = bus_gb * _share(comm, algorithm, operation) * correction(comm, algorithm, protocol, nbytes)
        if rate_gb > 0:
            one = Choice(
                algorithm=algorithm,
                protocol=protocol,
                latency_s=latency_us * 1e-6,
                transfer_s=nbytes / (rate_gb * 1e9),
            )
            found.append(one)
    return tuple(found)


def _exists(comm: System, operation: Operation) -> Iterator[tuple[Algorithm, Protocol, float]]:
    """Pairs with the bandwidth of their bus."""
    reduces = operation == "all-reduce"
    for protocol in PROTOCOLS:
        yield "Ring", protocol, _ring_bus(comm, protocol)
        if reduces:
            yield "Tree", protocol, _tree_bus(comm, protocol)
    if comm.nvls is not None and comm.nvls.count > 1:
        if comm.nodes == 1 or comm.sharp:
            yield "NVLS", "Simple", _nvls_bus(comm, comm.nvls, "NVLS", operation)
        if comm.nodes > 1 and reduces:
            yield "NVLSTree", "Simple", _nvls_bus(comm, comm.nvls, "NVLSTree", operation)
    if comm.per_node == 1 and not reduces:
        yield "PAT", "Simple", 0.75 * _bus(comm)
    if comm.sharp and comm.nodes > 1:
        yield "CollnetDirect", "Simple", _direct_bus(comm, operation)
        if reduces:
            yield "CollnetChain", "Simple", comm.ring.count * comm.ring.inside_gb


def _bus(comm: System) -> float:
    return comm.ring.count * (comm.ring.inside_gb if comm.nodes <= 2 else comm.ring.across_gb)


def _ll_most(comm: System) -> float:
    if comm.nodes == 1:
        return LL_MOST_GB[comm.family][0]
    return LL_MOST_GB["ampere" if comm.cpu == "amd" else "volta"][comm.column]


def _ring_bus(comm: System, protocol: Protocol) -> float:
    bus = _bus(comm)
    if protocol == "LL":
        return min(_ll_most(comm), bus / 2)
    if protocol == "LL128":
        return min(0.92 * bus, comm.ring.count * RING_LL128_CHANNEL_GB[comm.family][comm.column])
    return bus


def _tree_bus(comm: System, protocol: Protocol) -> float:
    bus = min(0.92 * _bus(comm), comm.ring.count * TREE_CHANNEL_GB[comm.family][comm.column])
    if protocol == "LL":
        bus = min(bus / 3.8, _ll_most(comm))
    if protocol == "LL128":
        flags = 7 / 9 if comm.nodes == 1 else 120 / 128
        bus = min(bus * flags, comm.ring.count * TREE_LL128_CHANNEL_GB[comm.family][comm.column])
    return bus * (0.85 if comm.plain_tree else 1.0)


def _nvls_bus(comm: System, found: Channels, algorithm: Algorithm, operation: Operation) -> float:
    """An all-reduce adds and multicasts at once, so its bus counts twice."""
    inside = found.inside_gb * NVLS_EFFICIENCY[comm.family] * (found.count - 1) / found.count
    inside *= 2.0 if operation == "all-reduce" else (comm.per_node - 1) / comm.per_node
    if comm.nodes == 1:
        return found.count * inside
    across = found.across_gb * (2 if comm.nodes <= 2 and algorithm == "NVLSTree" else 1)
    limit = NVLS_TREE_CHANNEL_GB[comm.family][comm.column] if algorithm == "NVLSTree" else math.inf
    return found.count * min(inside, across, limit)


def _direct_bus(comm: System, operation: Operation) -> float:
    if operation != "all-reduce":
        return comm.per_node * min(comm.ring.inside_gb, 0.9 * comm.ring.across_gb)
    share = comm.per_node / comm.ring.count
    newer = 0.85 if comm.family in ("hopper", "blackwell") else 1.0
    return comm.ring.count * comm.ring.inside_gb / (share - (share - 1) / 2) * newer


def _share(comm: System, algorithm: Algorithm, operation: Operation) -> float:
    """Bytes of the message that a byte on the bus stands for."""
    if algorithm in ("Ring", "NVLS", "NVLSTree") and (algorithm == "Ring" or operation == "all-reduce"):
        return comm.ranks / _steps(comm, operation)
    return 0.5 if operation == "all-reduce" else 1.0


def _steps(comm: System, operation: Operation) -> int:
    return (2 if operation == "all-reduce" else 1) * (comm.ranks - 1)


def latency(
    comm: System,
    algorithm: Algorithm,
    protocol: Protocol,
    *,
    operation: Operation = "all-reduce",
    nbytes: float = math.inf,
) -> float:
    """Microseconds before and between transfers."""
    base, inside = _us("base", algorithm, protocol), _us("NVLINK", algorithm, protocol)
    across = _us("NET", "Tree" if comm.per_node == 1 else algorithm, protocol)
    local, depth = comm.per_node - 1, int(math.log2(comm.nodes))
    if algorithm == "Ring":
        return _ring_latency(comm, protocol, operation, nbytes)
    if algorithm == "Tree":
        return base + 2 * (local * inside + depth * across)
    if algorithm == "NVLS":
        return inside + (across if comm.nodes > 1 else 0.0)
    if algorithm == "NVLSTree":
        return base + inside + 2 * depth * across
    if algorithm == "PAT":
        return base + depth * across / 3.5 + 2.8 * comm.ranks
    if algorithm == "CollnetDirect":
        return base + 2 * (min(1, local) * inside + 0.4 * local) + across
    return base + 2 * local * inside + across


def _ring_latency(comm: System, protocol: Protocol, operation: Operation, nbytes: float) -> float:
    """Steps inside a node wait until those that leave it are posted."""
    simple = protocol == "Simple"
    rounds = 2 if operation == "all-reduce" else 1
    leaving = rounds * (comm.nodes - 1)
    across = _us("NET", "Tree" if comm.per_node == 1 else "Ring", protocol)
    post = POST_US[comm.cpu] * (3 if simple else 1) if comm.nodes > 1 else 0.0
    inside = max(_us("NVLINK", "Ring", protocol), post)
    total = _us("base", "Ring", protocol) + (_steps(comm, operation) - leaving) * inside + leaving * across
    if simple and comm.nodes > 1 and rounds == 2 and nbytes / (comm.ring.count * comm.ranks) >= PLATEAU_BYTES:
        total *= OLD_PLATEAU if comm.family == "volta" else PLATEAU
    return total


def _us(hop: Hop, algorithm: Algorithm, protocol: Protocol) -> float:
    return LATENCY_US[hop][algorithm][PROTOCOLS.index(protocol)]


def correction(comm: System, algorithm: Algorithm, protocol: Protocol, nbytes: float) -> float:
    """c(S): trees fall short of the model in the middle, and NVLS trees of Blackwell with x86 hosts too."""
    place = int(math.log2(max(1, int(min(nbytes, 2.0**62)) >> 6)))
    switched = algorithm == "NVLSTree" and comm.family == "blackwell" and comm.cpu != "arm"
    places = CORRECTED_TREE if algorithm == "Tree" else CORRECTED_NVLS_TREE if switched else 0
    return TREE_CORRECTION[protocol][place] if place < places else 1.0


def bus_bytes_per_s(comm: System, nbytes: float, seconds: float, *, operation: Operation = "all-reduce") -> float:
    """Bus bandwidth as nccl-tests prints it (doc/PERFORMANCE.md): what a ring would have to carry."""
    return _steps(comm, operation) / comm.ranks * nbytes / seconds
