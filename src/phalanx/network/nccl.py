"""NCCL's own tuning model: how long it thinks an all-reduce takes by ring and by tree, and so which one it picks.

Read in NVIDIA/nccl src/graph/tuning.cc (2.20 whole, the constants again in 2.28); formulas and numbers are NCCL's, the
code is ours. It gives the times at 64 MiB of the specification's table (8 GPUs a node, 400 and 200 Gb/s each) to the
microsecond, and its crossings of ring and tree within 16 %: the table's own grid was coarser, it seems. This is the
short form that the specification's rules ask, for ring and tree on AMD hosts; `nccl_choice.py` has all algorithms, and
the constants are in `nccl_tables.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from phalanx.network import nccl_tables as tables
from phalanx.network.nccl_tables import PROTOCOLS

Algorithm = Literal["ring", "tree"]
Operation = Literal["all-reduce", "reduce-scatter", "all-gather"]

_LATENCY = tables.LATENCY_US
US = 1e-6
GB = 1e9

# Microseconds, LL / LL128 / Simple. Tree Simple 8.4, 4 and 14: since 2.21 or so; before, NCCL charged 28 a hop.
BASE_US: Mapping[Algorithm, tables.Triple] = {"ring": _LATENCY["base"]["Ring"], "tree": _LATENCY["base"]["Tree"]}
LINK_US: Mapping[Algorithm, tables.Triple] = {"ring": _LATENCY["NVLINK"]["Ring"], "tree": _LATENCY["NVLINK"]["Tree"]}
NET_US: Mapping[Algorithm, tables.Triple] = {"ring": _LATENCY["NET"]["Ring"], "tree": _LATENCY["NET"]["Tree"]}
# A rank posts every step of a ring that leaves the node: 2 µs on AMD hosts, 1 on others, three times that for Simple.
POST_US = 2.0
POST_SIMPLE = 3.0
RING_PLATEAU = 1.4  # ring all-reduce, Simple, several nodes, Ampere and later: its latency is worse than its steps

# Share of the bus that a protocol's flags leave, and the most GB/s of LL on one, two and more nodes.
RING_SHARE = (1 / 2, 0.92, 1.0)
TREE_SHARE = 0.92
TREE_PROTOCOL_SHARE = (1 / 3.8, 120 / 128, 1.0)
TREE_PROTOCOL_SHARE_ALONE = (1 / 3.8, 7 / 9, 1.0)  # inside one node
LL_MOST_GB = (
    tables.LL_MOST_GB["hopper"][0],
    *tables.LL_MOST_GB["ampere"][1:],
)  # inside a Hopper node; between nodes with AMD hosts
TREE_PATTERN = 0.85  # a plain tree, where the two directions share a card; not of balanced or split trees

# Most a channel carries, GB/s, on one, two and more nodes.
RING_LL128_CHANNEL_GB: Mapping[str, tables.Triple] = {
    str(one): most for one, most in tables.RING_LL128_CHANNEL_GB.items()
}
TREE_LL128_CHANNEL_GB: Mapping[str, tables.Triple] = {
    str(one): most for one, most in tables.TREE_LL128_CHANNEL_GB.items()
}
TREE_CHANNEL_GB: Mapping[str, tables.Triple] = {str(one): most for one, most in tables.TREE_CHANNEL_GB.items()}
# Rings reach so much of a card's line rate in whole channels: 384 of 8 x 50 GB/s, 192 of 8 x 25.
NET_SHARE = 0.96
LINK_SHARE = 0.82  # of NVLink: 20.6 of 25 GB/s a link on Hopper, 20.0 on Ampere (src/graph/topo.h)
CHANNEL_GB = 24.0  # of one channel: 16 make the 384 GB/s of an H100 node, 8 the 192 of an A100 node

# c(S): trees are slower than the model in the middle. By power of two from 64 B to 256 MiB; larger messages have none.
TREE_CORRECTION = tuple(tables.TREE_CORRECTION[protocol][:23] for protocol in PROTOCOLS)


@dataclass(frozen=True, kw_only=True, slots=True)
class Communicator:
    """A communicator as NCCL sees it: `nodes` fast domains with `per_node` ranks each, and the bus of its rings."""

    nodes: int
    per_node: int
    bus_bytes_per_s: float
    family: str = "hopper"  # "ampere" or "hopper"; later ones count as hopper, as in NCCL
    plain_tree: bool = False

    @property
    def ranks(self) -> int:
        """All of them."""
        return self.nodes * self.per_node

    @property
    def channels(self) -> int:
        """Rings side by side."""
        return max(1, round(self.bus_bytes_per_s / GB / CHANNEL_GB))

    @property
    def size_class(self) -> int:
        """Column of the tables that differ between one, two and more nodes."""
        return min(self.nodes, 3) - 1


def communicator(
    *, ranks: int, per_node: int, link_bytes_per_s: float, nic_bytes_per_s: float, family: str = "hopper"
) -> Communicator:
    """The communicator of `ranks` ranks, `per_node` in each domain they touch; rates are one device's line rates.

    >>> round(communicator(ranks=64, per_node=8, link_bytes_per_s=450e9, nic_bytes_per_s=50e9).bus_bytes_per_s / 1e9)
    369
    """
    inside = max(1, min(per_node, ranks))
    nodes = max(1, math.ceil(ranks / inside))
    bus = LINK_SHARE * link_bytes_per_s
    if nodes > 1:
        bus = min(bus, NET_SHARE * inside * nic_bytes_per_s) if inside > 1 else NET_SHARE * nic_bytes_per_s
    known = "ampere" if family in ("ampere", "volta", "turing") else "hopper"
    return Communicator(nodes=nodes, per_node=inside, bus_bytes_per_s=bus, family=known)


def seconds(group: Communicator, algorithm: Algorithm, nbytes: float, *, operation: Operation = "all-reduce") -> float:
    """What NCCL predicts, by its best protocol; infinite for a tree that does not exist."""
    return min(latency + transfer for latency, transfer in _protocols(group, algorithm, nbytes, operation))


def parts(
    group: Communicator, algorithm: Algorithm, nbytes: float, *, operation: Operation = "all-reduce"
) -> tuple[float, float]:
    """(latency, transfer) of the best protocol."""
    return min(_protocols(group, algorithm, nbytes, operation), key=sum)


def fastest(group: Communicator, nbytes: float, *, operation: Operation = "all-reduce") -> Algorithm:
    """The algorithm NCCL picks by itself. At 64 MiB on 8 x H100 nodes it is the ring on 2 and the tree on 8.

    >>> bus = 384e9
    >>> [fastest(Communicator(nodes=n, per_node=8, bus_bytes_per_s=bus), 64 * 2**20) for n in (2, 8)]
    ['ring', 'tree']
    """
    by_ring = seconds(group, "ring", nbytes, operation=operation)
    return "ring" if by_ring <= seconds(group, "tree", nbytes, operation=operation) else "tree"


def _protocols(
    group: Communicator, algorithm: Algorithm, nbytes: float, operation: Operation
) -> list[tuple[float, float]]:
    if group.ranks <= 1:
        return [(0.0, 0.0)]
    if algorithm == "tree":
        if operation != "all-reduce":
            return [(math.inf, 0.0)]  # NCCL has rings, NVLS, CollNet and PAT for gathers and scatters, and no tree
        return [_tree(group, index, nbytes) for index in range(3)]
    return [_ring(group, index, nbytes, operation) for index in range(3)]


def _ring(group: Communicator, index: int, nbytes: float, operation: Operation) -> tuple[float, float]:
    """2(n-1) steps of an all-reduce, n-1 of the others; inner steps wait until the outer ones are posted."""
    rounds = 2 if operation == "all-reduce" else 1
    steps, across = rounds * (group.ranks - 1), rounds * (group.nodes - 1)
    simple = PROTOCOLS[index] == "Simple"
    posting = POST_US * (POST_SIMPLE if simple else 1.0) if group.nodes > 1 else 0.0
    inside_us = max(LINK_US["ring"][index], posting)
    latency_us = BASE_US["ring"][index] + (steps - across) * inside_us + across * NET_US["ring"][index]
    if simple and group.nodes > 1 and rounds == 2:
        latency_us *= RING_PLATEAU
    rate = group.bus_bytes_per_s * RING_SHARE[index]
    if PROTOCOLS[index] == "LL":
        rate = min(rate, LL_MOST_GB[group.size_class] * GB)
    if PROTOCOLS[index] == "LL128":
        rate = min(rate, group.channels * RING_LL128_CHANNEL_GB[group.family][group.size_class] * GB)
    return latency_us * US, nbytes * steps / group.ranks / rate


def _tree(group: Communicator, index: int, nbytes: float) -> tuple[float, float]:
    """A chain inside each node, a tree of nodes above: up and down again."""
    depth = int(math.log2(group.nodes))
    latency_us = BASE_US["tree"][index] + 2 * (
        (group.per_node - 1) * LINK_US["tree"][index] + depth * NET_US["tree"][index]
    )
    share = TREE_PROTOCOL_SHARE if group.nodes > 1 else TREE_PROTOCOL_SHARE_ALONE
    most = group.channels * TREE_CHANNEL_GB[group.family][group.size_class] * GB
    rate = min(group.bus_bytes_per_s * TREE_SHARE, most) * share[index]
    if PROTOCOLS[index] == "LL":
        rate = min(rate, LL_MOST_GB[group.size_class] * GB)
    if PROTOCOLS[index] == "LL128":
        rate = min(rate, group.channels * TREE_LL128_CHANNEL_GB[group.family][group.size_class] * GB)
    rate *= TREE_PATTERN if group.plain_tree else 1.0
    return latency_us * US, 2 * nbytes / (rate * correction(index, nbytes))


def correction(index: int, nbytes: float) -> float:
    """c(S) of a protocol, by the power of two below the message."""
    table = TREE_CORRECTION[index]
    place = int(math.log2(max(1, int(min(nbytes, 2.0**62)) >> 6)))
    return table[place] if place < len(table) else 1.0


def hierarchical_seconds(
    *,
    domains: int,
    per_domain: int,
    link_bytes_per_s: float,
    nic_bytes_per_s: float,
    nbytes: float,
    operation: Operation = "all-reduce",
) -> float:
    """Two levels: inside each domain over the fast links, then between equal ranks of the domains, each with a part.

    Not one of NCCL's algorithms for gathers and scatters: a trainer gets it by sharding inside a domain (HSDP), or from
    NVLS and CollNet. Latencies are those of NCCL's LL128 rings. Infinite where there are no two levels.
    """
    if domains < 2 or per_domain < 2:
        return math.inf
    inner = Communicator(nodes=1, per_node=per_domain, bus_bytes_per_s=LINK_SHARE * link_bytes_per_s)
    outer = Communicator(nodes=domains, per_node=1, bus_bytes_per_s=NET_SHARE * nic_bytes_per_s)
    between = min(seconds(outer, algorithm, nbytes / per_domain, operation=operation) for algorithm in ("ring", "tree"))
    once = seconds(inner, "ring", nbytes, operation="all-gather")
    return between + once * (2 if operation == "all-reduce" else 1)
