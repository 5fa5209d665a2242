"""A cluster as NCCL would see it; or why NCCL's model has nothing to say about it."""

from __future__ import annotations

from collections.abc import Mapping

from phalanx.errors import UserError, mistake
from phalanx.hardware.types import Cluster
from phalanx.network.nccl_system import Cpu, System, system
from phalanx.network.nccl_tables import Family

FAMILIES: Mapping[str, Family] = {
    "volta": "volta",
    "ampere": "ampere",
    "hopper": "hopper",
    "blackwell": "blackwell",
}
GRACE = ("GH", "GB")  # Grace, an Arm processor, on the same module
# One direction of one NVLink as vendors count it; NCCL counts 20 to 20.6 and 40.1 of these (nccl_tables.NVLINK_GB).
LINK_GB: Mapping[Family, float] = {"volta": 25.0, "ampere": 25.0, "hopper": 25.0, "blackwell": 50.0}


def nccl_system(cluster: Cluster, *, nvls: bool = True, cpu: Cpu | None = None, sharp: bool = False) -> System:
    """Nodes are fast domains, and every device has its own NIC. Raises UserError for what NCCL's model leaves out.

    `cpu` None: Arm beside devices that come with one (GH200, GB200, GB300), else Intel.
    """
    device = cluster.accelerator
    family = FAMILIES.get(device.family)
    if device.vendor != "nvidia" or family is None or not device.link.startswith("NVLink"):
        raise _foreign(cluster)
    return system(
        nodes=cluster.domains,
        per_node=cluster.domain_devices,
        family=family,
        nic_gbps=cluster.nic_bytes_per_s * 8 / 1e9,
        nvls=nvls,
        cpu=cpu or ("arm" if device.name.startswith(GRACE) else "intel"),
        sharp=sharp,
        links=max(1, round(cluster.link_bytes_per_s / 1e9 / LINK_GB[family])),
    )


def _foreign(cluster: Cluster) -> UserError:
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
