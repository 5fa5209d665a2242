"""What a collective costs: α-β arithmetic per algorithm, over groups that may span fast domains.

Formulas: ring, tree and hierarchical all-reduce as in NCCL's tuning model (src/graph/tuning.cc, 2.30) and Thakur et
al. 2005. All functions are elementwise over arrays and return seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

ALGORITHMS = ("ring", "tree", "hierarchical", "switch")
# Share of line rate that a pipelined tree reaches beside a ring; NCCL 2.30 uses 0.92 (src/graph/tuning.cc).
TREE_EFFICIENCY = 0.92
# Reduction inside the NVSwitch (NVLS): measured 480 GB/s of bus bandwidth where a ring reaches 367 on 8 x H200
# (stas00/ml-engineering network/README.md), and only for sums that stay inside one domain.
SWITCH_GAIN = 480.0 / 367.0
SWITCH_LATENCY_S = 25e-6


@dataclass(frozen=True, kw_only=True)
class Group:
    """A communicator: `ranks` members, `per_domain` of them in each fast domain they touch.

    Without slots, so that what follows from the fields is computed once: a search asks for it a hundred times.
    """

    ranks: Floats
    per_domain: Floats
    link_bytes_per_s: Floats
    nic_bytes_per_s: Floats  # per device
    link_latency_s: Floats
    nic_latency_s: Floats
    loss: Floats | float = 0.0  # exponent by which NIC bandwidth falls with the domains a collective spans
    switch: Floats | float = 0.0  # 1 where the switch of the fast domain reduces (NVLS)
    pacing: Floats | float = 0.0  # share of a ring's inner steps that wait for the slowest (network) hop

    @cached_property
    def domains(self) -> Floats:
        """Fast domains the group spans."""
        return np.maximum(1.0, np.ceil(self.ranks / self.per_domain - 1e-9))

    @cached_property
    def network_bytes_per_s(self) -> Floats:
        """What one device's NIC delivers inside a collective: contention grows with the domains taking part."""
        return np.asarray(self.nic_bytes_per_s * self.domains ** -np.asarray(self.loss), dtype=np.float64)

    @cached_property
    def bus_bytes_per_s(self) -> Floats:
        """Slowest link of a ring: NVLink inside a domain, all of the members' NICs together between domains."""
        across = np.minimum(self.link_bytes_per_s, self.per_domain * self.network_bytes_per_s)
        return np.where(self.domains > 1, across, self.link_bytes_per_s)

    @cached_property
    def ring_latency_s(self) -> Floats:
        """Start-up of the steps of a ring; inside a domain they wait for the slowest hop as far as it paces them."""
        between = self.domains - 1.0
        inside = np.maximum(0.0, self.ranks - 1.0 - between)
        paced = np.where(between > 0, self.pacing * self.nic_latency_s, 0.0)
        steps: Floats = between * self.nic_latency_s + inside * np.maximum(self.link_latency_s, paced)
        return steps


def place(
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
) -> Group:
    """The group of an axis whose members stand `stride` ranks apart when ranks fill domains in order.

    Where groups of this size do not tile a domain (64 ranks on 72 devices), some straddle two of them, and the slowest
    group is the one that counts.
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
    )


def ring_latency(group: Group) -> Floats:
    """Start-up of the n-1 steps of a ring: network steps between domains, link steps inside."""
    return group.ring_latency_s


def all_gather(group: Group, nbytes: Floats) -> Floats:
    """Ring all-gather (or reduce-scatter) of `nbytes` in total; NCCL has no tree for it."""
    share = (group.ranks - 1.0) / np.maximum(group.ranks, 1.0)
    return np.where(group.ranks > 1, share * nbytes / group.bus_bytes_per_s + ring_latency(group), 0.0)


reduce_scatter = all_gather


def all_reduce_by_algorithm(group: Group, nbytes: Floats) -> tuple[Floats, Floats, Floats, Floats]:
    """Seconds of each of ALGORITHMS; infinite where the algorithm does not apply."""
    ring = 2.0 * all_gather(group, nbytes)
    depth = np.floor(np.log2(np.maximum(group.domains, 1.0)) + 1e-9)
    tree = 2.0 * nbytes / (TREE_EFFICIENCY * group.bus_bytes_per_s) + 2.0 * (
        (group.per_domain - 1.0) * group.link_latency_s + depth * group.nic_latency_s
    )
    inner = (group.per_domain - 1.0) / group.per_domain * nbytes / group.link_bytes_per_s
    inner = inner + (group.per_domain - 1.0) * group.link_latency_s
    outer_share = 2.0 * (group.domains - 1.0) / group.domains * nbytes / group.per_domain
    outer = outer_share / group.network_bytes_per_s + 2.0 * (group.domains - 1.0) * group.nic_latency_s
    spans = (group.domains > 1) & (group.per_domain > 1)
    hierarchical = np.where(spans, 2.0 * inner + outer, np.inf)
    switch_bus = group.link_bytes_per_s * SWITCH_GAIN
    switch = 2.0 * (group.ranks - 1.0) / np.maximum(group.ranks, 1.0) * nbytes / switch_bus + SWITCH_LATENCY_S
    reduces = (np.asarray(group.switch) > 0) & (group.domains <= 1) & (group.ranks > 2)
    return ring, tree, hierarchical, np.where(reduces, switch, np.inf)


def all_reduce(group: Group, nbytes: Floats) -> Floats:
    """The fastest applicable algorithm."""
    ring, tree, hierarchical, switch = all_reduce_by_algorithm(group, nbytes)
    best = np.minimum(np.minimum(ring, tree), np.minimum(hierarchical, switch))
    return np.where(group.ranks > 1, best, 0.0)


def all_to_all(group: Group, nbytes: Floats, *, network_copies: Floats | float = 1.0) -> Floats:
    """Each rank sends `nbytes` in total, evenly to all members.

    `network_copies` is the share of bytes that really crosses the network when several receivers in one domain want
    the same data and it is sent there once.
    """
    # Whatever crosses the network once is handed on inside the domain to the members that want it.
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


def send(group: Group, nbytes: Floats) -> Floats:
    """One point-to-point message between neighbours of the group."""
    crosses = group.per_domain <= 1
    rate = np.where(crosses, group.nic_bytes_per_s, group.link_bytes_per_s)
    latency = np.where(crosses, group.nic_latency_s, group.link_latency_s)
    return np.where(group.ranks > 1, nbytes / rate + latency, 0.0)


def ring_hop(group: Group, nbytes: Floats) -> Floats:
    """One message of every member to the next, all at once, as in ring attention: the slowest hop counts.

    A ring over several domains crosses the network once in each, through one member's card.
    """
    crosses = group.domains > 1
    rate = np.where(crosses, group.nic_bytes_per_s, group.link_bytes_per_s)
    latency = np.where(crosses, group.nic_latency_s, group.link_latency_s)
    return np.where(group.ranks > 1, nbytes / rate + latency, 0.0)
