"""InfiniBand beside Ethernet: how many addresses a subnet has.

A local identifier (LID) has 16 bits, and 0x0001 to 0xBFFF are unicast (InfiniBand Architecture Specification, volume
1; Shanley, InfiniBand Network Architecture, 2002, "LID Address Space"). Every NIC port takes one, and every switch.
Planes share no cable, so each is taken as a subnet of its own.
"""

from __future__ import annotations

from phalanx.network.fabric.types import INFINIBAND, Fabric

MOST_LIDS = 0xBFFF


def is_infiniband(fabric: Fabric) -> bool:
    """Whether its switches speak InfiniBand, where MRC's recovery at the edge does not exist."""
    return fabric.switch.kind == INFINIBAND


def addresses(fabric: Fabric) -> int:
    """LIDs that a plane takes: one for each host's port and one for each switch."""
    return fabric.hosts + fabric.switches_per_plane


def needs_routers(fabric: Fabric) -> bool:
    """Whether a plane is more than one subnet of InfiniBand can hold; the routers between subnets are not counted."""
    return is_infiniband(fabric) and addresses(fabric) > MOST_LIDS
