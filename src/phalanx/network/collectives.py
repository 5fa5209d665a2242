"""The NCCL model of `nccl_choice.py` over arrays: collectives inside a training step, for a million groups at once.

It has the same algorithms, channel limits, corrections and latencies (`nccl_tables.py`), for large messages: protocol
Simple, no rounding of rates to NCCL's list of speeds, and no call, since a training step issues collectives ahead.
With NCCL's rates and latencies both models give the same pick and time (tests/network/test_collectives.py). The
planner passes rates and latencies that are fitted to published steps instead: a collective that shares the device
with compute and other traffic is slower than one alone (docs/decisions/0027). All functions are elementwise over
arrays and return seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from phalanx.network.nccl_choice import CORRECTED_NVLS_TREE, CORRECTED_TREE, TREE_EFFICIENCY
from phalanx.network.nccl_tables import (
    FAMILIES,
    LATENCY_US,
    MOST_NVLS_HEADS,
    NVLS_EFFICIENCY,
    NVLS_TREE_CHANNEL_GB,
    PROTOCOLS,
    TREE_CHANNEL_GB,
    TREE_CORRECTION,
    Algorithm,
)

Floats = NDArray[np.float64]

ALGORITHMS: tuple[Algorithm, ...] = ("Ring", "Tree", "NVLS", "NVLSTree")  # of an all-reduce, without CollNet
NEVER = np.asarray(np.inf)
SIMPLE = PROTOCOLS.index("Simple")
GB, MICROSECOND = 1e9, 1e-6
# A hop of a tree inside a node takes longer than one of a ring, by NCCL's table 4.0 to 3.4 µs.
TREE_HOP = LATENCY_US["NVLINK"]["Tree"][SIMPLE] / LATENCY_US["NVLINK"]["Ring"][SIMPLE]
SWITCH_LATENCY_S = LATENCY_US["NVLINK"]["NVLS"][SIMPLE] * MICROSECOND
# A hop of an NVLSTree between nodes, as a multiple of one of a ring: 20.9 to 14 µs.
SWITCH_TREE_HOP = LATENCY_US["NET"]["NVLSTree"][SIMPLE] / LATENCY_US["NET"]["Ring"][SIMPLE]
# By family and number of nodes (1, 2, more), bytes/s of one channel.
TREE_CHANNEL = np.array([TREE_CHANNEL_GB[family] for family in FAMILIES]) * GB
SWITCH_TREE_CHANNEL = np.array([NVLS_TREE_CHANNEL_GB[family] for family in FAMILIES]) * GB
SWITCH_EFFICIENCY = np.array([NVLS_EFFICIENCY[family] for family in FAMILIES])
# c(S) by power of two from 64 B, for trees and for Blackwell's NVLS trees; 1 beyond the entries that NCCL reads.
CORRECTION = np.array([*TREE_CORRECTION["Simple"][:CORRECTED_TREE], 1.0, 1.0])
SWITCH_CORRECTION = np.array([*TREE_CORRECTION["Simple"][:CORRECTED_NVLS_TREE], 1.0])
BLACKWELL = FAMILIES.index("blackwell")


@dataclass(frozen=True, kw_only=True)
class Group:
    """A communicator: `ranks` members, `per_domain` of them in each fast domain they touch.

    Without `__slots__`, so that cached properties are computed once: a search reads each a hundred times.
    """

    ranks: Floats
    per_domain: Floats
    link_bytes_per_s: Floats
    nic_bytes_per_s: Floats  # per device
    link_latency_s: Floats
    nic_latency_s: Floats
    # Exponent by which NIC bandwidth falls with the domains a collective spans.
    loss: Floats | float = 0.0
    switch: Floats | float = 0.0  # 1 where the switch of the fast domain reduces (NVLS)
    family: Floats | float = 2.0  # index in nccl_tables.FAMILIES
    # Share of a ring's inner steps that wait for the slowest (network) hop.
    pacing: Floats | float = 0.0

    @cached_property
    def domains(self) -> Floats:
        """The number of fast domains that the group spans."""
        return np.maximum(1.0, np.ceil(self.ranks / self.per_domain - 1e-9))

    @cached_property
    def network_bytes_per_s(self) -> Floats:
        """Bytes/s that one device's NIC delivers inside a collective: contention grows with the number of domains."""
        return np.asarray(self.nic_bytes_per_s * self.domains ** -np.asarray(self.loss), dtype=np.float64)

    @cached_property
    def bus_bytes_per_s(self) -> Floats:
        """Bytes/s of a ring's slowest link: NVLink inside a domain; between domains all members' NICs together."""
        across = np.minimum(self.link_bytes_per_s, self.per_domain * self.network_bytes_per_s)
        return np.where(self.domains > 1, across, self.link_bytes_per_s)

    @cached_property
    def tree_bus_bytes_per_s(self) -> Floats:
        """Bytes/s of a tree before the correction c(S): 0.92 of a ring; between nodes a limited channel per NIC."""
        limit = np.where(
            self.domains > 1, self.per_domain * TREE_CHANNEL[self._family_index, self._domain_column], np.inf
        )
        return np.minimum(TREE_EFFICIENCY * self.bus_bytes_per_s, limit)

    @cached_property
    def switch_bus_bytes_per_s(self) -> Floats:
        """Bytes/s of sums in the NVSwitch: NVLS in one domain, NVLSTree between several; 0 where the switch cannot add.

        A device's links carry the share of every head once and its own twice; an all-reduce adds and multicasts at
        once.
        """
        heads = np.minimum(self.per_domain, MOST_NVLS_HEADS)
        head_share = self.link_bytes_per_s / (heads + 1.0)
        inside = 2.0 * head_share * SWITCH_EFFICIENCY[self._family_index] * (heads - 1.0) / heads
        across = np.minimum(self.network_bytes_per_s, head_share) * np.where(self.domains <= 2, 2.0, 1.0)
        between = np.minimum(across, SWITCH_TREE_CHANNEL[self._family_index, self._domain_column])
        bus: Floats = heads * np.where(self.domains > 1, np.minimum(inside, between), inside)
        return np.where((np.asarray(self.switch) > 0) & (self.per_domain > 2), bus, 0.0)

    @property
    def _family_index(self) -> NDArray[np.intp]:
        return np.asarray(self.family, dtype=np.intp)

    @property
    def _domain_column(self) -> NDArray[np.intp]:
        return np.asarray(np.minimum(self.domains, 3.0), dtype=np.intp) - 1

    @cached_property
    def ring_latency_s(self) -> Floats:
        """The start-up time of a ring's n-1 steps.

        `pacing` is the share by which steps inside a domain wait for the network hop.
        """
        between = self.domains - 1.0
        inside = np.maximum(0.0, self.ranks - 1.0 - between)
        paced = np.where(between > 0, self.pacing * self.nic_latency_s, 0.0)
        steps: Floats = between * self.nic_latency_s + inside * np.maximum(self.link_latency_s, paced)
        return steps


def place_group(
    ranks: Floats,
    stride: Floats,
    *,
    domain: Floats,
    devices: Floats,
    link_bytes_per_s: Floats,
    nic_bytes_per_s: Floats,
    link_latency_s: Floats,
    nic_latency_s: Floats,
    pacing: Floats | float = 0.0,
    loss: Floats | float = 0.0,
    switch: Floats | float = 0.0,
    family: Floats | float = 2.0,
) -> Group:
    """Return the group of a mesh axis whose members are `stride` ranks apart, when ranks fill domains in order.

    Where groups of this size do not tile a domain (64 ranks on 72 devices), some groups straddle two domains. The
    result describes such a group, since the slowest one sets the time.
    """
    inside = np.clip(np.floor(domain / np.maximum(stride, 1.0) + 1e-9), 1.0, np.maximum(ranks, 1.0))
    block = np.maximum(ranks * stride, 1.0)
    straddles = (devices > domain) & (block > 1) & (block <= domain) & (np.mod(domain, block) > 0)
    per_domain = np.where(straddles, np.maximum(1.0, np.floor(ranks / 2.0)), inside)
    return Group(
        ranks=ranks,
        per_domain=per_domain,
        link_bytes_per_s=link_bytes_per_s,
        nic_bytes_per_s=nic_bytes_per_s,
        link_latency_s=link_latency_s,
        nic_latency_s=nic_latency_s,
        pacing=pacing,
        loss=loss,
        switch=switch,
        family=family,
    )


def ring_latency(group: Group) -> Floats:
    """Return the start-up time of the n-1 steps of a ring: network steps between domains, link steps inside."""
    return group.ring_latency_s


def all_gather(group: Group, nbytes: Floats) -> Floats:
    """Return the time of a ring all-gather or reduce-scatter of `nbytes` in total; NCCL has no tree for them."""
    share = (group.ranks - 1.0) / np.maximum(group.ranks, 1.0)
    return np.where(group.ranks > 1, share * nbytes / group.bus_bytes_per_s + group.ring_latency_s, 0.0)


reduce_scatter = all_gather


def all_reduce_by_algorithm(group: Group, nbytes: Floats) -> tuple[Floats, Floats, Floats, Floats]:
    """Return the seconds of an all-reduce by each of ALGORITHMS; infinite where the algorithm does not exist."""
    ring = 2.0 * all_gather(group, nbytes)
    depth = np.floor(np.log2(np.maximum(group.domains, 1.0)) + 1e-9)
    size_index = np.minimum(np.frexp(np.maximum(nbytes, 64.0) / 64.0)[1] - 1, CORRECTION.size - 1)
    tree = 2.0 * nbytes / (group.tree_bus_bytes_per_s * CORRECTION[size_index]) + 2.0 * (
        (group.per_domain - 1.0) * TREE_HOP * group.link_latency_s + depth * group.nic_latency_s
    )
    bus, one_domain = group.switch_bus_bytes_per_s, group.domains <= 1
    if not (bus > 0).any():
        return ring, tree, NEVER, NEVER
    wire = 2.0 * (group.ranks - 1.0) / np.maximum(group.ranks, 1.0) / np.where(bus > 0, bus, 1e-30)
    hops = SWITCH_LATENCY_S + 2.0 * depth * SWITCH_TREE_HOP * group.nic_latency_s
    switch = wire * nbytes + hops
    newer = np.asarray(group.family) == BLACKWELL
    between = np.where(newer, wire * nbytes / SWITCH_CORRECTION[size_index] + hops, switch) if newer.any() else switch
    return (
        ring,
        tree,
        np.where((bus > 0) & one_domain, switch, np.inf),
        np.where((bus > 0) & ~one_domain, between, np.inf),
    )


def all_reduce(group: Group, nbytes: Floats) -> Floats:
    """Return the seconds of an all-reduce with the fastest algorithm."""
    ring, tree, switch, switch_tree = all_reduce_by_algorithm(group, nbytes)
    best = np.minimum(np.minimum(ring, tree), np.minimum(switch, switch_tree))
    return np.where(group.ranks > 1, best, 0.0)


def all_to_all(group: Group, nbytes: Floats, *, network_copies: Floats | float = 1.0) -> Floats:
    """Return the time in which each rank sends `nbytes` in total, evenly to all members.

    `network_copies` is the share of bytes that crosses the network when several receivers in one domain want the same
    data and it is sent there only once.
    """
    # Inside the domain the links carry every byte, as data that crossed the network once is forwarded to all its
    # receivers.
    local = np.where(group.domains > 1, group.per_domain, group.ranks)
    inside = (local - 1.0) / np.maximum(local, 1.0) * nbytes / group.link_bytes_per_s
    outside = (
        (group.ranks - group.per_domain)
        / np.maximum(group.ranks, 1.0)
        * nbytes
        * network_copies
        / group.network_bytes_per_s
    )
    latency = np.where(group.domains > 1, group.nic_latency_s, group.link_latency_s)
    return np.where(group.ranks > 1, np.maximum(inside, outside) + latency, 0.0)


def message_seconds(group: Group, nbytes: Floats) -> Floats:
    """Return the time of one point-to-point message between neighbours of the group."""
    crosses = group.per_domain <= 1
    rate = np.where(crosses, group.nic_bytes_per_s, group.link_bytes_per_s)
    latency = np.where(crosses, group.nic_latency_s, group.link_latency_s)
    return np.where(group.ranks > 1, nbytes / rate + latency, 0.0)


def ring_hop(group: Group, nbytes: Floats) -> Floats:
    """Return the time in which every member sends one message to the next at once, as in ring attention.

    The slowest hop sets the time. A ring over several domains crosses the network once per domain, through one
    member's NIC.
    """
    crosses = group.domains > 1
    rate = np.where(crosses, group.nic_bytes_per_s, group.link_bytes_per_s)
    latency = np.where(crosses, group.nic_latency_s, group.link_latency_s)
    return np.where(group.ranks > 1, nbytes / rate + latency, 0.0)
