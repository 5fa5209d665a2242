"""The types of a fabric: a folded Clos of equal planes. Counts are per fabric unless a name states otherwise.

Hosts are network interfaces (NICs): a GPU has one. Every NIC is split into `planes` ports of `port_gbps`, and each
plane is a separate Clos: T0 switches carry NICs, T1 join T0s, T2 (three tiers) join T1s. Uplink u of a T0 goes to T1
u mod `t1_per_pod` of its pod. With fewer T1s than uplinks there are parallel links; their numbers differ by at most
one between T1s.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

KINDS = ETHERNET, INFINIBAND = "ethernet", "infiniband"


@dataclass(frozen=True, kw_only=True, slots=True)
class Switch:
    """A switch of the catalogue in one port configuration."""

    name: str  # "Spectrum-5 512x100G"
    box: str  # "Spectrum-5"
    radix: int  # ports at `port_gbps`
    port_gbps: float
    watts: float  # of the box without its optics; 0: unknown
    usd: tuple[float, float] | None  # low and high price of the box; None: unknown
    source: str = ""
    # Ports of this speed in the silicon before the limit on logical ports; 0: `radix`.
    lanes: int = 0
    evidence: str = ""  # "fair" or "weak": how reliable watts and price are
    also: str = ""  # products with it, separated by commas: "QM9700, QM9790"
    kind: str = ETHERNET  # or INFINIBAND, on which MRC's recovery at the edge does not run


@dataclass(frozen=True, kw_only=True, slots=True)
class Fabric:
    """Equal planes of a folded Clos."""

    name: str
    hosts: int  # NICs that are connected
    nic_gbps: float
    planes: int
    tiers: int  # 1, 2, 3 or 4
    switch: Switch
    oversubscription: float  # capacity down over capacity up at T0: 1 is full bisection
    rails: int  # NICs of a server that go to different T0s; 1: no rails
    t0_down: int  # ports of a T0 that carry NICs
    t0_up: int  # ports of a T0 that go up
    t0: int  # switches per plane
    t1: int
    t2: int = 0
    t3: int = 0
    # Equal blocks of T0s and T1s per plane; 1 in two tiers, where every T0 meets every T1.
    pods: int = 1
    # Ports of a T1 that go up; 0: half of the radix where there is a tier above.
    t1_up: int = 0
    t2_up: int = 0  # ports of a T2 that go up; 0: half of the radix
    # One more switch and its fibre (arXiv:2605.04333 section 5.2.1: 1.45 µs for two).
    hop_s: float = 0.73e-6

    @property
    def port_gbps(self) -> float:
        """The speed of one port of a NIC, in one plane."""
        return self.nic_gbps / self.planes

    @property
    def switches_per_plane(self) -> int:
        """The number of switches of all tiers in one plane."""
        return self.t0 + self.t1 + self.t2 + self.t3

    @property
    def switches(self) -> int:
        """The number of switches of all planes."""
        return self.planes * self.switches_per_plane

    @property
    def hops(self) -> int:
        """The number of switches on the longest path."""
        return 2 * self.tiers - 1

    @property
    def paths(self) -> int:
        """The number of paths between two hosts under different T0s, over all planes."""
        if self.tiers == 1:
            return self.planes
        half = self.switch.radix // 2
        above = (self.t1_up or half, self.t2_up or half)[: self.tiers - 2]
        return self.planes * self.t0_up * math.prod(above)

    @property
    def hosts_per_t0(self) -> int:
        """The number of NICs under the fullest T0: with rails a T0 has one NIC of each server."""
        return min(self.t0_down, math.ceil(self.hosts / self.rails))

    @property
    def t1_per_pod(self) -> int:
        """The number of T1s that a T0 connects to in its plane."""
        return self.t1 // self.pods


# InfiniBand: the number of addresses in a subnet.
# A local identifier (LID) has 16 bits, and 0x0001 to 0xBFFF are unicast (InfiniBand Architecture Specification,
# volume 1; Shanley, InfiniBand Network Architecture, 2002, "LID Address Space"). Every NIC port takes one, and every
# switch. Planes share no cable, so each is assumed to be a separate subnet.


MOST_LIDS = 0xBFFF


def is_infiniband(fabric: Fabric) -> bool:
    """Return True if the switches are InfiniBand, on which MRC's recovery at the edge does not exist."""
    return fabric.switch.kind == INFINIBAND


def plane_addresses(fabric: Fabric) -> int:
    """Return the number of LIDs that a plane needs: one for each host's port and one for each switch."""
    return fabric.hosts + fabric.switches_per_plane


def needs_routers(fabric: Fabric) -> bool:
    """Return True if a plane exceeds one InfiniBand subnet; the routers between subnets are not counted."""
    return is_infiniband(fabric) and plane_addresses(fabric) > MOST_LIDS
