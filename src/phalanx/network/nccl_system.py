"""A communicator as NCCL 2.30 models it: nodes, GPUs, and the channels that its search finds on NVSwitch boards.

The search (src/graph/search.cc, 2.30.7) is reduced to boards whose GPUs all connect to NVSwitches and have a NIC
each.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from phalanx.errors import mistake
from phalanx.network.nccl_tables import (
    FAMILIES,
    MOST_NVLS_HEADS,
    NET_GB_PER_100G,
    NVLINK_GB,
    NVLINKS,
    NVLS_EFFICIENCY,
    SPEEDS_ACROSS_GB,
    SPEEDS_INSIDE_GB,
    Family,
)

Cpu = Literal["intel", "amd", "arm"]

WHERE = "NCCL"
MOST_RANKS = 1 << 24
# Share of the first speed that works: the search tries no slower speed to get more channels.
SLOWEST_TRY = 0.49


@dataclass(frozen=True, kw_only=True, slots=True)
class Channels:
    """The channels that NCCL's search finds for one pattern: their number, and GB/s of each in and between nodes."""

    count: int
    inside_gb: float
    across_gb: float


@dataclass(frozen=True, kw_only=True, slots=True)
class NcclSystem:
    """A communicator as NCCL models it. A node is one NVLink domain: the 8 GPUs of a board, or the 72 of a rack."""

    nodes: int
    per_node: int
    family: Family
    ring: Channels
    nvls: Channels | None  # None: the switches cannot add, or NCCL_NVLS_ENABLE=0
    link_gb: float = 0.0  # GB/s of a GPU's NVLinks together; 0: unknown
    nic_gb: float = math.inf  # GB/s of a GPU's NIC; infinite in one node
    cpu: Cpu = "intel"
    sharp: bool = False  # the network's switches add too (CollNet)
    plain_tree: bool = False

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return self.nodes * self.per_node

    @property
    def column(self) -> int:
        """The column of NCCL's tables by number of nodes: 0 for one, 1 for two, 2 for more."""
        return min(self.nodes, 3) - 1


def build_system(
    *,
    nodes: int,
    per_node: int,
    family: Family,
    nic_gbps: float = 0.0,
    nvls: bool = True,
    cpu: Cpu = "intel",
    sharp: bool = False,
    links: int = 0,
) -> NcclSystem:
    """Return the communicator with the channels NCCL finds where every GPU has its own NIC and connects to NVSwitches.

    `links` is the number of NVLinks per GPU; 0 means the family's number.

    >>> h200 = build_system(nodes=1, per_node=8, family="hopper")
    >>> h200.ring.count * h200.ring.inside_gb, h200.nvls.count * h200.nvls.inside_gb
    (360.0, 320.0)
    """
    _check_system(nodes, per_node, family, nic_gbps)
    link_gb = NVLINK_GB[family] * (links or NVLINKS[family])
    nic_gb = nic_gbps / 100.0 * NET_GB_PER_100G if nodes > 1 else math.inf
    has_nvls = nvls and NVLS_EFFICIENCY[family] > 0 and per_node > 2
    return NcclSystem(
        nodes=nodes,
        per_node=per_node,
        family=family,
        ring=_ring_channels(family, per_node, link_gb, nic_gb),
        nvls=_nvls_channels(family, per_node, link_gb, nic_gb) if has_nvls else None,
        link_gb=link_gb,
        nic_gb=nic_gb,
        cpu=cpu,
        sharp=sharp,
    )


def _check_system(nodes: int, per_node: int, family: str, nic_gbps: float) -> None:
    if nodes < 1 or per_node < 1 or nodes * per_node > MOST_RANKS:
        problem = f"{nodes:,} nodes of {per_node:,} GPUs"
        raise mistake(WHERE, problem, fix=f"use at least 1 of each, and at most {MOST_RANKS:,} ranks")
    if family not in FAMILIES:
        raise mistake(WHERE, f'there is no family "{family}"', fix=f"use one of {', '.join(FAMILIES)}")
    if nodes > 1 and not (math.isfinite(nic_gbps) and nic_gbps > 0):
        raise mistake(WHERE, f"{nodes:,} nodes with NICs of {nic_gbps:g} Gb/s", fix="use 100, 200, 400 or 800")


def _ring_channels(family: Family, gpus: int, link_gb: float, nic_gb: float) -> Channels:
    """Return the ring channels with the largest total bandwidth.

    In one node their number is limited only by the links; between nodes there is one per GPU and NIC.
    """
    if nic_gb == math.inf:
        first = _fastest_speed(SPEEDS_INSIDE_GB[family], link_gb)
        candidates = [speed_gb for speed_gb in SPEEDS_INSIDE_GB[family] if SLOWEST_TRY * first < speed_gb <= first]
        speed = max(candidates, key=lambda speed_gb: (int(link_gb // speed_gb) * speed_gb, speed_gb))
        count = int(link_gb // speed)
        # NCCL halves fast channels.
        return Channels(count=2 * count, inside_gb=speed / 2, across_gb=speed / 2)
    if gpus == 1:
        speed = _fastest_speed(SPEEDS_ACROSS_GB[family], nic_gb)
        return Channels(count=1, inside_gb=speed, across_gb=speed)
    first = _fastest_speed(SPEEDS_ACROSS_GB[family], min(nic_gb, link_gb))
    candidates = [speed_gb for speed_gb in SPEEDS_ACROSS_GB[family] if SLOWEST_TRY * first < speed_gb <= first]
    speed = max(candidates, key=lambda speed_gb: (_side_by_side(speed_gb, gpus, link_gb) * speed_gb, speed_gb))
    return Channels(count=_side_by_side(speed, gpus, link_gb), inside_gb=speed, across_gb=speed)


def _side_by_side(speed: float, gpus: int, link_gb: float) -> int:
    """Return the number of channels of that speed: at most one per NIC, and as many as the NVLinks of a GPU carry."""
    return max(1, min(gpus, int(link_gb // speed)))


def _nvls_channels(family: Family, gpus: int, link_gb: float, nic_gb: float) -> Channels:
    """Return the NVLS channels, one per head.

    Each GPU's links carry every channel once, and the links of a head its own channel twice.
    """
    heads = min(gpus, MOST_NVLS_HEADS)
    speeds = SPEEDS_INSIDE_GB[family] if nic_gb == math.inf else SPEEDS_ACROSS_GB[family]
    speed = _fastest_speed(speeds, min(nic_gb, link_gb / (heads + 1)))
    return Channels(count=heads, inside_gb=speed, across_gb=speed)


def unrounded_system(comm: NcclSystem) -> NcclSystem:
    """Return the communicator with the rates that sums in the switch really get from links and NICs, for times.

    NCCL's search rounds these rates down to a speed of its list, and chooses by it; the hardware does not round. A
    GPU's links carry the share of every head once and its own twice: 46.4 GB/s each on 7 x H200, where the search
    uses 40 and 45 was measured; 80 on two nodes of 8 x B200, where it uses the NIC's 48 and 90 was measured
    (docs/collectives.md). With fewer heads than GPUs, as in a rack of 72, links are not the limit.
    """
    if comm.nvls is None or not comm.link_gb or comm.per_node > MOST_NVLS_HEADS:
        return comm
    inside_gb = comm.link_gb / (comm.nvls.count + 1)
    across_gb = min(comm.nic_gb, inside_gb)
    return replace(comm, nvls=replace(comm.nvls, inside_gb=inside_gb, across_gb=across_gb))


def _fastest_speed(speeds: tuple[float, ...], room: float) -> float:
    return next((speed for speed in speeds if speed <= room), speeds[-1])
