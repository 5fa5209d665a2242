"""This machine as a value: processors, memory, network cards, GPUs and the paths between them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Nic:
    """A network card; speed 0 when the driver does not say (virtual cards)."""

    name: str
    bytes_per_s: float
    numa_node: int  # -1 when unknown
    kind: str  # "ethernet" or "infiniband"


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """A GPU as its driver describes it."""

    index: int
    name: str
    memory_bytes: int
    pci_address: str
    numa_node: int  # -1 when unknown
    pcie_bytes_per_s: float  # one direction; 0 when unknown
    nvlinks: int  # active links; -1 when the driver could not be asked
    nvlink_bytes_per_s: float  # all active links together, one direction
    used_bytes: int = -1  # of its memory, now, by whomever; -1 when the driver could not be asked


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuPath:
    """How two GPUs reach each other: NVLink, or the highest thing their PCIe paths share."""

    first: int
    second: int
    kind: str  # "NVLink", "same board", "PCIe switch", "PCIe bridge", "same NUMA node", "across NUMA nodes"


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """What there is on this computer; `notes` say what could not be seen and what to do about it."""

    hostname: str
    cpu_model: str
    sockets: int
    cores: int  # physical cores of the machine
    usable_cores: int  # cores this process may use: affinity and container limits counted in
    numa_nodes: int
    memory_bytes: int  # usable: the container's limit when it is lower than the machine
    nics: tuple[Nic, ...] = ()
    gpus: tuple[Gpu, ...] = ()
    gpu_paths: tuple[GpuPath, ...] = ()
    notes: tuple[str, ...] = ()
