"""NCCL 2.30's own choice of algorithm and protocol, and the time its model and ours predict for it.

The model is NCCL's (src/graph/tuning.cc, 2.30.7), with all seven algorithms and three protocols; `nccl_system.py`
holds the result of its search for channels. `expect_collective` serves `phalanx fabric collective`, the rules COM001
and COM003 and the plan's table of axes: NCCL's pick, its time, and the range of that time. A fit to two measurements
is more accurate (collective_fit.py). Not modelled: PCIe-only boards, mixed GPUs, rails that share a NIC, user
settings (NCCL_ALGO, NCCL_PROTO), aggregated calls, symmetric-memory kernels.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from phalanx.errors import mistake
from phalanx.network.nccl_system import WHERE, Channels, NcclSystem, unrounded_system
from phalanx.network.nccl_tables import (
    LATENCY_US,
    LL_MOST_GB,
    MOST_NVLS_HEADS,
    NVLS_EFFICIENCY,
    NVLS_TREE_CHANNEL_GB,
    PROTOCOLS,
    RING_LL128_CHANNEL_GB,
    TREE_CHANNEL_GB,
    TREE_CORRECTION,
    TREE_LL128_CHANNEL_GB,
    Algorithm,
    Hop,
    Protocol,
)

Operation = Literal["all-reduce", "all-gather", "reduce-scatter", "broadcast", "reduce"]
OPERATIONS: tuple[Operation, ...] = ("all-reduce", "all-gather", "reduce-scatter", "broadcast", "reduce")
FROM_ONE = ("broadcast", "reduce")

# Posting a send to a NIC; three times that for Simple.
POST_US = {"intel": 1.0, "amd": 2.0, "arm": 1.0}
# Factor on the latency of a ring all-reduce, Simple, several nodes, 64 B or more per channel and rank; 1.9 before
# Ampere.
PLATEAU = 1.4
OLD_PLATEAU = 1.9
PLATEAU_BYTES = 64
TREE_EFFICIENCY = 0.92  # share of a ring's bus bandwidth
CORRECTED_TREE, CORRECTED_NVLS_TREE = 23, 24  # entries of c(S) that NCCL reads
# Costs missing in NCCL's sum of start-up and transfer, fitted to 24 measured sweeps of 12 sources
# (benchmarks/collective_interval.py): the call itself, on one node and between nodes, and k √(start-up x transfer)
# for filling the pipeline. With any one source left out, the fits are 25 to 40 µs, 80 to 100 µs and 0.2; without one
# of the three with small messages between nodes, 10 µs and 0.6.
START_INSIDE_S, START_ACROSS_S = 30e-6, 100e-6
FILL = 0.2
MIB = 2**20
# Ratio of measured to expected time: the range of 80 % of systems, each source left out in turn (the same page).
# Messages below 1, 16 and 256 MiB, and the rest; on one node and between nodes.
RATIOS: tuple[tuple[float, tuple[float, float], tuple[float, float]], ...] = (
    (1 * MIB, (0.30, 3.1), (0.30, 3.1)),
    (16 * MIB, (0.47, 2.7), (0.47, 2.7)),
    (256 * MIB, (0.74, 1.5), (0.79, 2.7)),
    (math.inf, (0.96, 1.13), (0.84, 2.3)),
)
# Beyond eight nodes only one cluster is published (HF's on EFA, shared/data/comm.csv): from 8 to 64 nodes an
# all-reduce of 256 MB took 3.0 times as long, while the model's time hardly changes. Other clusters may be better, so
# only the slow end moves.
SWEPT_NODES, CROWDING = 8, 0.53


# The factor by which the model may exaggerate the time of one algorithm over another on the same system. Measured
# once, a forced ring against NCCL's own NVLSTree on two nodes (NVIDIA/nccl-tests issue 309): 1.37 modelled and 0.91
# measured at 64 MiB, 1.29 and 1.19 at 4 GiB. In a node 1.33 and 1.31 (stas00/ml-engineering).
RIVAL_DOUBT_INSIDE, RIVAL_DOUBT_SMALL, RIVAL_DOUBT_LARGE = 1.1, 1.5, 1.15


@dataclass(frozen=True, kw_only=True, slots=True)
class AlgorithmChoice:
    """One algorithm and protocol with the time of NCCL's model."""

    algorithm: Algorithm
    protocol: Protocol
    latency_s: float
    transfer_s: float

    @property
    def seconds(self) -> float:
        """The total time."""
        return self.latency_s + self.transfer_s


def choose_pair(comm: NcclSystem, nbytes: float, *, operation: Operation = "all-reduce") -> AlgorithmChoice:
    """Return the pair of algorithm and protocol that NCCL chooses by default: the one with the shortest modelled time.

    >>> from phalanx.network.nccl_system import build_system
    >>> h200 = build_system(nodes=1, per_node=8, family="hopper")
    >>> [(pair.algorithm, pair.protocol) for pair in (choose_pair(h200, 2**20), choose_pair(h200, 2**21))]
    [('Ring', 'LL'), ('NVLS', 'Simple')]
    """
    return min(possible_pairs(comm, nbytes, operation=operation), key=lambda pair: pair.seconds)


def possible_pairs(
    comm: NcclSystem, nbytes: float, *, operation: Operation = "all-reduce"
) -> tuple[AlgorithmChoice, ...]:
    """Return every pair of algorithm and protocol that exists for this communicator and operation."""
    if not (math.isfinite(nbytes) and nbytes > 0):
        raise mistake(WHERE, f"a message of {nbytes:g} bytes", fix="sizes are above zero")
    if comm.ranks == 1:
        return (AlgorithmChoice(algorithm="Ring", protocol="Simple", latency_s=0.0, transfer_s=0.0),)
    pairs = []
    for algorithm, protocol, bus_gb in _existing_pairs(comm, operation):
        latency_us = start_up_us(comm, algorithm, protocol, operation=operation, nbytes=nbytes)
        rate_gb = bus_gb * _wire_share(comm, algorithm, operation) * tree_correction(comm, algorithm, protocol, nbytes)
        if rate_gb > 0:
            choice = AlgorithmChoice(
                algorithm=algorithm,
                protocol=protocol,
                latency_s=latency_us * 1e-6,
                transfer_s=nbytes / (rate_gb * 1e9),
            )
            pairs.append(choice)
    return tuple(pairs)


def unrounded_choice(
    comm: NcclSystem, picked: AlgorithmChoice, nbytes: float, *, operation: Operation = "all-reduce"
) -> AlgorithmChoice:
    """Return the same pair with the start-up and transfer times of unrounded link rates."""
    pair = (picked.algorithm, picked.protocol)
    choices = possible_pairs(unrounded_system(comm), nbytes, operation=operation)
    return next(choice for choice in choices if (choice.algorithm, choice.protocol) == pair)


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpectedTime:
    """The expected time of a collective: its pair, start-up and transfer, and the range of 80 % of systems."""

    algorithm: Algorithm
    protocol: Protocol
    latency_s: float  # NCCL's own start-up: before and between transfers
    call_s: float  # before NCCL's start-up: 10 to 290 µs between nodes, by the network
    transfer_s: float  # with the time to fill the pipeline
    low_s: float
    high_s: float

    @property
    def seconds(self) -> float:
        """The total time."""
        return self.call_s + self.latency_s + self.transfer_s


def expect_collective(
    comm: NcclSystem, nbytes: float, *, operation: Operation = "all-reduce", algorithm: Algorithm | None = None
) -> ExpectedTime | None:
    """Return the expected time of NCCL's own pick, or of its best protocol for a given algorithm.

    None where the algorithm does not exist for this communicator and operation.

    >>> from phalanx.network.nccl_system import build_system
    >>> expected = expect_collective(build_system(nodes=8, per_node=8, family="hopper", nic_gbps=400), 64 * 2**20)
    >>> expected.algorithm, round(expected.seconds * 1e6), round(expected.low_s * 1e6), round(expected.high_s * 1e6)
    ('NVLSTree', 700, 553, 1891)
    """
    pairs = [pair for pair in possible_pairs(comm, nbytes, operation=operation) if algorithm in (None, pair.algorithm)]
    if not pairs:
        return None
    picked = min(pairs, key=lambda pair: pair.seconds)
    if comm.ranks == 1:
        zeros = {"latency_s": 0.0, "call_s": 0.0, "transfer_s": 0.0, "low_s": 0.0, "high_s": 0.0}
        return ExpectedTime(algorithm=picked.algorithm, protocol=picked.protocol, **zeros)
    wire = unrounded_choice(comm, picked, nbytes, operation=operation)
    seconds = expected_s(comm, picked, nbytes, operation=operation)
    low, high = time_ratios(comm, nbytes)
    return ExpectedTime(
        algorithm=picked.algorithm,
        protocol=picked.protocol,
        latency_s=wire.latency_s,
        call_s=start_s(comm),
        transfer_s=seconds - wire.latency_s - start_s(comm),
        low_s=low * seconds,
        high_s=high * seconds,
    )


def expected_s(
    comm: NcclSystem,
    picked: AlgorithmChoice,
    nbytes: float,
    *,
    operation: Operation = "all-reduce",
    fill: float = FILL,
    start: float | None = None,
) -> float:
    """Return the expected time of a pair: NCCL's estimate plus the call, unrounded link rates and the pipeline filling.

    NCCL adds start-up and transfer, which ignores the filling of the pipeline by chunks (collective_fit.py), and its
    start-up omits the call. `fill` and `start` override the constants for fits.
    """
    choice = unrounded_choice(comm, picked, nbytes, operation=operation)
    called_s = start_s(comm) if start is None else start
    return called_s + choice.seconds + fill * math.sqrt(choice.latency_s * choice.transfer_s)


def start_s(comm: NcclSystem) -> float:
    """Return the time of the call itself, before NCCL's own start-up."""
    if comm.ranks == 1:
        return 0.0
    return START_INSIDE_S if comm.nodes == 1 else START_ACROSS_S


def time_ratios(comm: NcclSystem, nbytes: float) -> tuple[float, float]:
    """Return the factors on the expected time that bound 80 % of systems."""
    _, inside, across = next(row for row in RATIOS if nbytes < row[0])
    low, high = inside if comm.nodes == 1 else across
    return low, high * max(1.0, comm.nodes / SWEPT_NODES) ** CROWDING


def rival_doubt(comm: NcclSystem, nbytes: float) -> float:
    """Return the modelled ratio of two algorithms' times above which the slower one is also slower on real systems."""
    if comm.nodes == 1:
        return RIVAL_DOUBT_INSIDE
    return RIVAL_DOUBT_SMALL if nbytes < 256 * MIB else RIVAL_DOUBT_LARGE


def _existing_pairs(comm: NcclSystem, operation: Operation) -> Iterator[tuple[Algorithm, Protocol, float]]:
    """Yield the pairs that exist, with the bandwidth of their bus in GB/s."""
    reduces = operation == "all-reduce"
    for protocol in PROTOCOLS:
        yield "Ring", protocol, _ring_bus(comm, protocol)
        if reduces:
            yield "Tree", protocol, _tree_bus(comm, protocol)
    if operation in FROM_ONE:
        return
    if comm.nvls is not None and comm.nvls.count > 1:
        yield from _by_switch(comm, comm.nvls, operation)
    if comm.per_node == 1 and not reduces:
        yield "PAT", "Simple", 0.75 * _bus_rate(comm)
    if comm.sharp and comm.nodes > 1:
        yield "CollnetDirect", "Simple", _direct_bus(comm, operation)
        if reduces:
            yield "CollnetChain", "Simple", comm.ring.count * comm.ring.inside_gb


def _by_switch(comm: NcclSystem, found: Channels, operation: Operation) -> Iterator[tuple[Algorithm, Protocol, float]]:
    """Yield NVLS and NVLSTree where they exist.

    Gathers and scatters need one head per rank (src/enqueue.cc), which a rack of 72 does not have.
    """
    reduces = operation == "all-reduce"
    if (comm.nodes == 1 or comm.sharp) and (reduces or comm.per_node <= MOST_NVLS_HEADS):
        yield "NVLS", "Simple", _nvls_bus(comm, found, "NVLS", operation)
    if comm.nodes > 1 and reduces:
        yield "NVLSTree", "Simple", _nvls_bus(comm, found, "NVLSTree", operation)


def _bus_rate(comm: NcclSystem) -> float:
    return comm.ring.count * (comm.ring.inside_gb if comm.nodes <= 2 else comm.ring.across_gb)


def _ll_most(comm: NcclSystem) -> float:
    if comm.nodes == 1:
        return LL_MOST_GB[comm.family][0]
    return LL_MOST_GB["ampere" if comm.cpu == "amd" else "volta"][comm.column]


def _ring_bus(comm: NcclSystem, protocol: Protocol) -> float:
    bus = _bus_rate(comm)
    if protocol == "LL":
        return min(_ll_most(comm), bus / 2)
    if protocol == "LL128":
        return min(0.92 * bus, comm.ring.count * RING_LL128_CHANNEL_GB[comm.family][comm.column])
    return bus


def _tree_bus(comm: NcclSystem, protocol: Protocol) -> float:
    bus = min(TREE_EFFICIENCY * _bus_rate(comm), comm.ring.count * TREE_CHANNEL_GB[comm.family][comm.column])
    if protocol == "LL":
        bus = min(bus / 3.8, _ll_most(comm))
    if protocol == "LL128":
        flags = 7 / 9 if comm.nodes == 1 else 120 / 128
        bus = min(bus * flags, comm.ring.count * TREE_LL128_CHANNEL_GB[comm.family][comm.column])
    return bus * (0.85 if comm.plain_tree else 1.0)


def _nvls_bus(comm: NcclSystem, found: Channels, algorithm: Algorithm, operation: Operation) -> float:
    """Return the bus bandwidth of sums in the switch.

    An all-reduce adds and multicasts at once, so its bus counts twice.
    """
    inside = found.inside_gb * NVLS_EFFICIENCY[comm.family] * (found.count - 1) / found.count
    inside *= 2.0 if operation == "all-reduce" else (comm.per_node - 1) / comm.per_node
    if comm.nodes == 1:
        return found.count * inside
    across = found.across_gb * (2 if comm.nodes <= 2 and algorithm == "NVLSTree" else 1)
    limit = NVLS_TREE_CHANNEL_GB[comm.family][comm.column] if algorithm == "NVLSTree" else math.inf
    return found.count * min(inside, across, limit)


def _direct_bus(comm: NcclSystem, operation: Operation) -> float:
    if operation != "all-reduce":
        return comm.per_node * min(comm.ring.inside_gb, 0.9 * comm.ring.across_gb)
    share = comm.per_node / comm.ring.count
    newer_share = 0.85 if comm.family in ("hopper", "blackwell") else 1.0
    return comm.ring.count * comm.ring.inside_gb / (share - (share - 1) / 2) * newer_share


def _wire_share(comm: NcclSystem, algorithm: Algorithm, operation: Operation) -> float:
    """Return the bytes of the message per byte on the bus."""
    if algorithm in ("Ring", "NVLS", "NVLSTree") and (algorithm == "Ring" or operation == "all-reduce"):
        return comm.ranks / _ring_steps(comm, operation)
    return 0.5 if operation == "all-reduce" else 1.0


def _ring_steps(comm: NcclSystem, operation: Operation) -> int:
    if operation in FROM_ONE:
        return comm.ranks
    return (2 if operation == "all-reduce" else 1) * (comm.ranks - 1)


def start_up_us(
    comm: NcclSystem,
    algorithm: Algorithm,
    protocol: Protocol,
    *,
    operation: Operation = "all-reduce",
    nbytes: float = math.inf,
) -> float:
    """Return the start-up time in microseconds: before and between transfers."""
    base, inside = _hop_latency("base", algorithm, protocol), _hop_latency("NVLINK", algorithm, protocol)
    across = _hop_latency("NET", "Tree" if comm.per_node == 1 else algorithm, protocol)
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


def _ring_latency(comm: NcclSystem, protocol: Protocol, operation: Operation, nbytes: float) -> float:
    """Return the start-up time of a ring in µs; steps inside a node wait until the sends that leave it are posted."""
    simple = protocol == "Simple"
    if operation in FROM_ONE:
        return _hop_latency("base", "Ring", protocol) + _pass_on(comm, protocol)
    rounds = 2 if operation == "all-reduce" else 1
    leaving = rounds * (comm.nodes - 1)
    across = _hop_latency("NET", "Tree" if comm.per_node == 1 else "Ring", protocol)
    post = POST_US[comm.cpu] * (3 if simple else 1) if comm.nodes > 1 else 0.0
    inside = max(_hop_latency("NVLINK", "Ring", protocol), post)
    total = (
        _hop_latency("base", "Ring", protocol) + (_ring_steps(comm, operation) - leaving) * inside + leaving * across
    )
    if simple and comm.nodes > 1 and rounds == 2 and nbytes / (comm.ring.count * comm.ranks) >= PLATEAU_BYTES:
        total *= OLD_PLATEAU if comm.family == "volta" else PLATEAU
    return total


def _pass_on(comm: NcclSystem, protocol: Protocol) -> float:
    """Return the time in µs to pass a message from rank to rank along the ring.

    In one node the steps overlap, as all channels visit the ranks in the same order.
    """
    if comm.nodes == 1:
        return _hop_latency("NVLINK", "Ring", protocol)
    return comm.ranks * _hop_latency("NET", "Tree" if protocol == "Simple" else "Ring", protocol)


def _hop_latency(hop: Hop, algorithm: Algorithm, protocol: Protocol) -> float:
    return LATENCY_US[hop][algorithm][PROTOCOLS.index(protocol)]


def tree_correction(comm: NcclSystem, algorithm: Algorithm, protocol: Protocol, nbytes: float) -> float:
    """Return the correction c(S) of NCCL's bandwidth.

    Trees are slower than the model at medium sizes, and so are Blackwell's NVLS trees with x86 hosts.
    """
    units = int(min(nbytes, 2.0**62)) >> 6
    if units == 0:
        return 1.0
    index = units.bit_length() - 1
    switched = algorithm == "NVLSTree" and comm.family == "blackwell" and comm.cpu != "arm"
    corrected = CORRECTED_TREE if algorithm == "Tree" else CORRECTED_NVLS_TREE if switched else 0
    return TREE_CORRECTION[protocol][index] if index < corrected else 1.0


def bus_bytes_per_s(comm: NcclSystem, nbytes: float, seconds: float, *, operation: Operation = "all-reduce") -> float:
    """Return the bus bandwidth as nccl-tests prints it (doc/PERFORMANCE.md): the rate a ring would have to carry."""
    return _ring_steps(comm, operation) / comm.ranks * nbytes / seconds if seconds > 0 else 0.0
