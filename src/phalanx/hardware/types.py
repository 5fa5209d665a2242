"""Devices, machines and clusters as plain values; the other files of this package create them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from phalanx.hardware.cpu_steps import CpuRates
from phalanx.io.codec import Bounds
from phalanx.io.visible import one_line
from phalanx.units import plural

Count = Annotated[int, Bounds(ge=1)]
Quantity = Annotated[float, Bounds(ge=0)]  # finite


@dataclass(frozen=True, kw_only=True, slots=True)
class Accelerator:
    """One device: peak rates as the vendor states them (dense), and the best matmul rate that was measured.

    Rates are FLOP/s and bytes/s; 0 means the device does not support that precision or the figure is unknown.
    """

    name: str
    vendor: str
    family: str  # architecture generation: "ampere", "hopper", "blackwell", "cdna3", "tpu-v5", "cpu" ...
    peak_bf16_flops: Quantity  # fp16 tensor peak where the device has no bf16 (V100)
    peak_fp8_flops: Quantity
    peak_fp4_flops: Quantity
    peak_fp32_flops: Quantity
    matmul_bf16_flops: Quantity  # best measured; 0 if none is published
    matmul_fp8_flops: Quantity
    memory_bytes: Quantity
    memory_bytes_per_s: Quantity
    link: str  # "NVLink4", "PCIe4", "ICI", "loopback" ...
    link_bytes_per_s: Quantity  # one direction, per device, inside the fast domain
    domain_devices: Count  # devices reached at link speed: 8 for an HGX board, 72 for NVL72
    host_devices: Count  # devices that fail together with one host
    nic_bytes_per_s: Quantity  # typical, per device, one direction
    tdp_w: Quantity
    price_item: str = ""  # key into the price table
    source: str = ""
    notes: str = ""


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Cluster:
    """A cluster: `domains` fast domains of `domain_devices` equal devices, joined by NICs.

    >>> import phalanx
    >>> cluster = phalanx.cluster("8xH100:4")
    >>> cluster
    <Cluster 8xH100-80GB-SXM:4: 32 devices>
    >>> cluster.hosts
    4
    """

    name: str
    accelerator: Accelerator
    domain_devices: Count
    domains: Count
    host_devices: Count
    link_bytes_per_s: Quantity
    nic_bytes_per_s: Quantity
    link_latency_s: Quantity
    nic_latency_s: Quantity
    host_memory_bytes: Quantity
    failures_per_host_day: Quantity
    price_usd_per_device_hour: tuple[Quantity, Quantity, Quantity] | None = None  # low, middle, high
    power_w_per_device: Quantity = 0.0  # whole server divided by its devices; 0 derives it from TDP
    pue: Quantity = 0.0  # 0 takes the planner's default
    grid_gco2_per_kwh: Quantity = 0.0
    disk_bytes_per_s: Quantity = 0.0  # checkpoint bandwidth per host; 0 takes the planner's default
    matmul_flops: Quantity = 0.0  # measured by `phalanx probe`; 0 uses the accelerator's value
    launch_s: Quantity = 0.0  # measured cost of one small operation; 0 uses the framework profile
    cpu: CpuRates | None = None  # of measured cores, whose steps hardware/cpu_steps.py predicts
    source: str = ""
    sites: tuple[Site, ...] = ()  # joined by slow links; everything above is then the first site's
    JSON_UNLESS_DEFAULT: ClassVar[tuple[str, ...]] = ("sites",)

    def __str__(self) -> str:
        """Return the page that `phalanx cluster` prints."""
        from phalanx.hardware.cluster_text import cluster_page

        return cluster_page(self)

    def __repr__(self) -> str:
        return f"<Cluster {one_line(self.name)}: {plural(self.devices, 'device')}>"

    def _repr_html_(self) -> str:
        from phalanx.io.notebook import text_as_html

        return text_as_html(str(self))

    @property
    def devices(self) -> int:
        """The number of devices of the cluster."""
        return self.domain_devices * self.domains

    @property
    def hosts(self) -> int:
        """The number of hosts, machines that fail independently of each other."""
        return max(1, self.devices // max(1, self.host_devices))


@dataclass(frozen=True, kw_only=True, slots=True)
class Site:
    """One end of the slow links: a whole cluster, and its connection to the internet.

    Two sites exchange data at the slower of the sender's upload and the receiver's download, with the longer round
    trip and the higher loss of the two.
    """

    name: str
    cluster: Cluster  # a cluster without sites
    up_bytes_per_s: Annotated[float, Bounds(gt=0)]
    down_bytes_per_s: Annotated[float, Bounds(gt=0)]
    latency_s: Quantity = 0.0  # round trip to the other sites
    loss: Annotated[float, Bounds(ge=0, le=0.5)] = 0.0  # share of packets
    client_only: bool = False  # accepts no connections (NAT), so it averages no share for others
    congestion: Literal["cubic", "bbr"] = "cubic"  # the congestion control of its TCP; reno counts as cubic
    session_s: Quantity = 0.0  # mean time that it stays; 0: to the end
    absence_s: Quantity = 0.0  # mean time that it is away between sessions

    @property
    def bytes_per_s(self) -> float:
        """The rate at which the site sends and receives at once: an exchange moves as many bytes each way.

        See plan/slow_exchange.py.
        """
        return min(self.up_bytes_per_s, self.down_bytes_per_s)


# This machine as a value: processors, memory, network cards, GPUs and the paths between them.


@dataclass(frozen=True, kw_only=True, slots=True)
class Nic:
    """A network card; its speed is 0 when the driver does not report it (virtual cards)."""

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
    nvlinks: int  # active links; -1 when the driver could not be queried
    nvlink_bytes_per_s: float  # all active links together, one direction
    used_bytes: int = -1  # memory in use now, by all processes; -1 when the driver could not be queried


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuPath:
    """The path between two GPUs: NVLink, or the highest level that their PCIe paths share."""

    first: int
    second: int
    kind: str  # "NVLink", "same board", "PCIe switch", "PCIe bridge", "same NUMA node", "across NUMA nodes"


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """The hardware of this computer; `notes` state what could not be detected, and a remedy."""

    hostname: str
    cpu_model: str
    sockets: int
    cores: int  # physical cores of the machine
    usable_cores: int  # cores this process may use, after affinity and container limits
    numa_nodes: int
    memory_bytes: int  # usable: the container's limit where it is lower than the machine's memory
    nics: tuple[Nic, ...] = ()
    gpus: tuple[Gpu, ...] = ()
    gpu_paths: tuple[GpuPath, ...] = ()
    notes: tuple[str, ...] = ()
