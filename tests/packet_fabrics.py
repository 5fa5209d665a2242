"""Small fabrics and traffic that the tests of the packet engine share."""

from __future__ import annotations

from phalanx.network.fabric.fabric_types import Fabric, Switch
from phalanx.sim.traffic_matrix import permutation


def clos(hosts: int, half: int, *, planes: int = 1, tiers: int = 2, up: int | None = None, gbps: float = 100) -> Fabric:
    """A full fabric of switches with `half` ports down, or `up` of them up."""
    up, t0, deep = up or half, hosts // half, tiers == 3
    box = Switch(name="box", box="box", radix=2 * half, port_gbps=gbps, watts=0, usd=None)
    return Fabric(
        name="test", hosts=hosts, nic_gbps=planes * gbps, planes=planes, tiers=tiers, switch=box, rails=1,
        oversubscription=half / up, t0_down=half, t0_up=up, t0=t0, t1=t0 if deep else up, t2=t0 // 2 if deep else 0,
        pods=t0 // half if deep else 1, hop_s=1e-6,
    )  # fmt: skip


LEAF_SPINE = clos(64, 8)
FAT_TREE = clos(16, 2, tiers=3)
PLANES = clos(64, 8, planes=4)
SHUFFLE = permutation(64, 2e6, seed=1)
