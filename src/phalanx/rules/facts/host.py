"""The machines themselves, as far as rules ask: this host looked at, and which network card each device uses."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from phalanx.errors import UserError
from phalanx.hardware.discover import discover
from phalanx.hardware.probe import MachineProfile, load_profile, usual_path
from phalanx.hardware.types import Gpu, Machine, Nic
from phalanx.io.packages import installed_version
from phalanx.io.path_probes import path_exists, resolve_path
from phalanx.io.write_errors import free_bytes
from phalanx.record.provenance import redact


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


# Look at this machine, quickly and without torch.


# What computes, and what could load somebody else's file.
PACKAGES = ("torch", "safetensors", "numpy", "transformers", "accelerate", "deepspeed", "nvidia-nccl-cu12")
PREFIXES = ("NCCL_", "TORCH_", "GLOO_")
MOST_VALUE = 200  # characters of a variable


def this_host(*, environ: Mapping[str, str] | None = None, folder: Path = Path(), root: Path = Path("/")) -> HostFacts:
    """What this machine is, and what `phalanx probe` measured of it; `folder` is where a run would be kept."""
    environ = os.environ if environ is None else environ
    machine = discover(root=root, environ=environ)
    measured = _measured_profile(machine, environ)
    return HostFacts(
        name=machine.hostname,
        source="this machine",
        devices=len(machine.gpus) or machine.usable_cores,
        nic_paths=nic_paths(machine, root=root),
        link_latency_s=_known_value(measured.link_latency_s) if measured else None,
        link_bytes_per_s=_known_value(measured.link_bytes_per_s) if measured else None,
        disk_free_bytes=free_bytes(folder),
        memory_bytes=float(machine.memory_bytes),
        packages=installed_packages(),
        environment=collective_variables(environ),
    )


def installed_packages(names: tuple[str, ...] = PACKAGES) -> dict[str, str]:
    """Versions, read from the package metadata: nothing is imported."""
    return {name: found for name in names if (found := installed_version(name))}


def collective_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Settings of the collectives, without secrets that were put into them."""
    mine = {name: value for name, value in environ.items() if name.startswith(PREFIXES)}
    return {name: redact(value, environ)[:MOST_VALUE] for name, value in sorted(mine.items())}


def _measured_profile(machine: Machine, environ: Mapping[str, str]) -> MachineProfile | None:
    named = environ.get("PHALANX_PROFILE", "")
    try:
        profile = load_profile(Path(named) if named else usual_path(machine.hostname, environ))
    except UserError:  # never probed, or damaged: `phalanx plan` says so, and here it is only missing
        return None
    return profile if profile.device == ("cuda" if machine.gpus else "cpu") else None


def _known_value(value: float) -> float | None:
    """A profile writes 0 for what was not measured."""
    return value or None


# How near each GPU is to the network card it would use, read from the PCI tree of sysfs.


ORDER = ("PIX", "PXB", "PHB", "NODE", "SYS")  # nearest first, in nvidia-smi's words
_ADDRESS = re.compile(r"(?:[0-9a-f]{4,8}:)?[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")


def nic_paths(machine: Machine, *, root: Path = Path("/")) -> tuple[NicPath, ...] | None:
    """The nearest card of every GPU; None where the tree does not show it, empty without GPUs or cards."""
    real = [nic for nic in machine.nics if nic.bytes_per_s > 0]  # a virtual card does not say how fast it is
    cards = [nic for nic in real if nic.kind == "infiniband"] or real
    if not machine.gpus or not cards:
        return ()
    found = [_nearest_nic(gpu, cards, root) for gpu in machine.gpus]
    known = tuple(one for one in found if one is not None)
    return known if len(known) == len(found) else None


def _nearest_nic(gpu: Gpu, cards: Sequence[Nic], root: Path) -> NicPath | None:
    here = _pci_ancestors(_gpu_folder(gpu, root))
    if not here:
        return None
    near = [
        (path_kind(here, there, same_node=gpu.numa_node == card.numa_node and gpu.numa_node >= 0), card.name)
        for card, there in _placed_nics(cards, root)
    ]
    if not near:
        return None
    kind, name = min(near, key=lambda one: ORDER.index(one[0]))
    return NicPath(device=f"GPU {gpu.index}", nic=name, path=kind)


def path_kind(first: Sequence[str], second: Sequence[str], *, same_node: bool) -> str:
    """What two PCI devices have between them; each is given by its ancestors from the host bridge down, itself last.

    >>> root, switch = "pci0000:00", "0000:00:01.0"
    >>> path_kind([root, switch, "up", "a", "gpu"], [root, switch, "up", "b", "nic"], same_node=True)
    'PIX'
    >>> path_kind([root, switch, "gpu"], [root, "0000:00:02.0", "nic"], same_node=True)
    'PHB'
    """
    shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))
    if shared == 0:
        return "NODE" if same_node else "SYS"
    if shared == 1:
        return "PHB"  # up to the host bridge
    between = max(len(first), len(second)) - 1 - shared  # bridges below what they share
    return "PIX" if between <= 1 else "PXB"


def _gpu_folder(gpu: Gpu, root: Path) -> Path | None:
    address = gpu.pci_address.lower()
    if not _ADDRESS.fullmatch(address):
        return None
    domain, _, rest = address.partition(":") if address.count(":") == 2 else ("0000", "", address)
    return root / "sys/bus/pci/devices" / f"{int(domain, 16):04x}:{rest}"


def _placed_nics(cards: Sequence[Nic], root: Path) -> list[tuple[Nic, list[str]]]:
    folders = {
        card: root / "sys/class" / ("infiniband" if card.kind == "infiniband" else "net") / card.name / "device"
        for card in cards
    }
    return [(card, ancestors) for card, folder in folders.items() if (ancestors := _pci_ancestors(folder))]


def _pci_ancestors(folder: Path | None) -> list[str]:
    """Host bridge, bridges and the device itself; empty when it is on no PCI bus."""
    if folder is None or not path_exists(folder):
        return []
    parts = resolve_path(folder).parts
    starts = [at for at, part in enumerate(parts) if re.fullmatch(r"pci[0-9a-f]{4,8}:[0-9a-f]{2}", part)]
    if not starts:
        return []
    return [parts[starts[-1]], *(part for part in parts[starts[-1] + 1 :] if _ADDRESS.fullmatch(part))]
