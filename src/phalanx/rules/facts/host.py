"""What is known of the machines themselves: the H of the rules' evidence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class NicPath:
    """How near a device is to the network card it uses: PIX, PXB, PHB, NODE, SYS as nvidia-smi topo names them."""

    device: str
    nic: str
    path: str


@dataclass(frozen=True, kw_only=True, slots=True)
class HostFacts:
    """One host that stands for all, or this machine. None is "nobody looked"."""

    name: str
    source: str  # "this machine", "preflight of run x"
    devices: int | None = None
    nic_paths: tuple[NicPath, ...] | None = None
    link_latency_s: float | None = None  # α of loopback or fabric collectives, measured by phalanx probe
    link_bytes_per_s: float | None = None  # β
    disk_free_bytes: float | None = None
    memory_bytes: float | None = None
    packages: Mapping[str, str] | None = None  # installed versions of torch and of what loads checkpoints
    environment: Mapping[str, str] | None = None  # NCCL_*, TORCH_* and GLOO_* variables, values redacted elsewhere
