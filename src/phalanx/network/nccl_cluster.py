"""The communicator that NCCL's model sees on a cluster; UserError for clusters that the model does not cover."""

from __future__ import annotations

import math
from collections.abc import Mapping

from phalanx.errors import UserError, mistake
from phalanx.hardware.types import Cluster
from phalanx.network.nccl_choice import Operation, expect_collective
from phalanx.network.nccl_system import Channels, Cpu, NcclSystem, build_system
from phalanx.network.nccl_tables import Family

FAMILIES: Mapping[str, Family] = {
    "volta": "volta",
    "ampere": "ampere",
    "hopper": "hopper",
    "blackwell": "blackwell",
}
# Devices unknown to NCCL: rings reach this share of a link (20.6 of 25 GB/s on Hopper) and of a NIC, in channels of
# 24 GB/s (16 make the 384 of an H100 node).
LINK_SHARE, NET_SHARE, CHANNEL_GB = 0.82, 0.96, 24.0
FASTEST = 1e15  # bytes per second, above any link
GRACE = ("GH", "GB")  # Grace, an Arm processor, on the same module
# One direction of one NVLink as vendors count it; NCCL counts 20 to 20.6 or 40.1 GB/s for it (nccl_tables.NVLINK_GB).
LINK_GB: Mapping[Family, float] = {"volta": 25.0, "ampere": 25.0, "hopper": 25.0, "blackwell": 50.0}


def nccl_system(
    cluster: Cluster,
    *,
    nodes: int | None = None,
    per_node: int | None = None,
    nvls: bool = True,
    cpu: Cpu | None = None,
    sharp: bool = False,
) -> NcclSystem:
    """Return the communicator of a whole cluster, or of `nodes` fast domains with `per_node` devices each.

    Every device has its own NIC. `cpu` None: Arm for devices on a module with an Arm processor (GH200, GB200, GB300),
    else Intel. Raises UserError for devices that NCCL's model does not cover.
    """
    device = cluster.accelerator
    family = FAMILIES.get(device.family)
    if device.vendor != "nvidia" or family is None or not device.link.startswith("NVLink"):
        raise _foreign_system(cluster)
    return build_system(
        nodes=nodes or cluster.domains,
        per_node=per_node or cluster.domain_devices,
        family=family,
        nic_gbps=sane_rate(cluster.nic_bytes_per_s) * 8 / 1e9,
        nvls=nvls,
        cpu=cpu or ("arm" if device.name.startswith(GRACE) else "intel"),
        sharp=sharp,
        links=max(1, round(sane_rate(cluster.link_bytes_per_s) / 1e9 / LINK_GB[family])),
    )


def group_system(cluster: Cluster, *, nodes: int, per_node: int) -> NcclSystem:
    """Return the communicator of a group of ranks on any cluster.

    Devices that the model does not cover (RCCL, PCIe) are approximated by NCCL's rings and trees at the rates of
    their links, without sums in a switch: good for comparing message sizes, not for absolute times.
    """
    try:
        return nccl_system(cluster, nodes=nodes, per_node=per_node)
    except UserError:
        pass
    link_gb = LINK_SHARE * sane_rate(cluster.link_bytes_per_s) / 1e9
    nic_gb = NET_SHARE * sane_rate(cluster.nic_bytes_per_s) / 1e9 if nodes > 1 else math.inf
    bus_gb = link_gb if nodes == 1 else nic_gb if per_node == 1 else min(link_gb, per_node * nic_gb)
    count = max(1, round(bus_gb / CHANNEL_GB))
    channels = Channels(count=count, inside_gb=bus_gb / count, across_gb=bus_gb / count)
    family = nccl_family(cluster.accelerator.family)
    return NcclSystem(
        nodes=nodes, per_node=per_node, family=family, ring=channels, nvls=None, link_gb=link_gb, nic_gb=nic_gb
    )


def nccl_family(family: str) -> Family:
    """Return the NCCL family whose tables apply to an accelerator's family; the nearest one for unknown families."""
    return FAMILIES.get(family) or ("ampere" if family == "turing" else "hopper")


def two_levels_s(cluster: Cluster, *, domains: int, per_domain: int, nbytes: float, operation: Operation) -> float:
    """Return the time of a collective in two levels: inside each domain over the fast links, then between domains.

    Between domains, equal ranks exchange 1/per_domain of the data each. NCCL has no such algorithm for gathers and
    scatters: a trainer gets it by sharding inside a domain (HSDP), or from CollNet. Infinite where there are no two
    levels.
    """
    if domains < 2 or per_domain < 2:
        return math.inf
    outer = expect_collective(
        group_system(cluster, nodes=domains, per_node=1), nbytes / per_domain, operation=operation
    )
    inner = expect_collective(group_system(cluster, nodes=1, per_node=per_domain), nbytes, operation="all-gather")
    if outer is None or inner is None:
        return math.inf
    return outer.seconds + inner.seconds * (2 if operation == "all-reduce" else 1)


def sane_rate(bytes_per_s: float) -> float:
    """Return the rate clipped to 1 to FASTEST bytes per second, safe to divide by; 1 if it is not finite."""
    return max(1.0, min(bytes_per_s, FASTEST)) if math.isfinite(bytes_per_s) else 1.0


def _foreign_system(cluster: Cluster) -> UserError:
    device = cluster.accelerator
    why = {
        "amd": "RCCL has its own tables for AMD's devices",
        "nvidia": f"it is a model of NVLink boards, Volta to Blackwell; this is {device.family} on {device.link}",
    }.get(device.vendor, f"{device.vendor}'s devices do not run NCCL")
    return mistake(
        f"cluster {cluster.name}",
        f"NCCL's choice on {device.name} is not modelled",
        why=why,
        fix="give two measurements with --fit, or use H100, H200, B200 or A100",
    )
