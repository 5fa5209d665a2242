"""Facts about machines: an inspection of this host, and the network card that each device uses."""

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
    """The distance of a device to the network card it uses: PIX, PXB, PHB, NODE, SYS as in `nvidia-smi topo`."""

    device: str
    nic: str
    path: str


@dataclass(frozen=True, kw_only=True, slots=True)
class HostFacts:
    """Facts about this machine, or about one host that represents all. None means not inspected."""

    name: str
    source: str  # "this machine", "preflight of run x"
    devices: int | None = None
    nic_paths: tuple[NicPath, ...] | None = None
    link_latency_s: float | None = None  # α of loopback or fabric collectives, measured by phalanx probe
    link_bytes_per_s: float | None = None  # β
    disk_free_bytes: float | None = None
    memory_bytes: float | None = None
    packages: Mapping[str, str] | None = None  # installed versions of torch and of libraries that load checkpoints
    environment: Mapping[str, str] | None = None  # NCCL_*, TORCH_* and GLOO_* variables, values redacted elsewhere


# Inspection of this machine, quickly and without importing torch.


# Libraries that compute, and those that could load checkpoint files of other people.
PACKAGES = ("torch", "safetensors", "numpy", "transformers", "accelerate", "deepspeed", "nvidia-nccl-cu12")
PREFIXES = ("NCCL_", "TORCH_", "GLOO_")
MOST_VALUE = 200  # characters of a variable's value that are kept


def this_host(*, environ: Mapping[str, str] | None = None, folder: Path = Path(), root: Path = Path("/")) -> HostFacts:
    """Inspect this machine and add the measurements of `phalanx probe`; `folder` is where a run would be kept."""
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
    """Return the versions of installed packages from the package metadata; nothing is imported."""
    return {name: version for name in names if (version := installed_version(name))}


def collective_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables of the collectives, with secrets redacted."""
    variables = {name: value for name, value in environ.items() if name.startswith(PREFIXES)}
    return {name: redact(value, environ)[:MOST_VALUE] for name, value in sorted(variables.items())}


def _measured_profile(machine: Machine, environ: Mapping[str, str]) -> MachineProfile | None:
    profile_path = environ.get("PHALANX_PROFILE", "")
    try:
        profile = load_profile(Path(profile_path) if profile_path else usual_path(machine.hostname, environ))
    except UserError:  # never probed, or damaged: `phalanx plan` reports it; here it only counts as missing
        return None
    return profile if profile.device == ("cuda" if machine.gpus else "cpu") else None


def _known_value(value: float) -> float | None:
    """Return a value of a profile, or None for 0, which means not measured."""
    return value or None


# The distance of each GPU to its nearest network card, read from the PCI tree of sysfs.


# Nearest first, with the names of nvidia-smi.
ORDER = ("PIX", "PXB", "PHB", "NODE", "SYS")
_ADDRESS = re.compile(r"(?:[0-9a-f]{4,8}:)?[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")


def nic_paths(machine: Machine, *, root: Path = Path("/")) -> tuple[NicPath, ...] | None:
    """Return the nearest card of every GPU; None where the PCI tree is incomplete, empty without GPUs or cards."""
    # A virtual card does not report its speed.
    real = [nic for nic in machine.nics if nic.bytes_per_s > 0]
    cards = [nic for nic in real if nic.kind == "infiniband"] or real
    if not machine.gpus or not cards:
        return ()
    paths = [_nearest_nic(gpu, cards, root) for gpu in machine.gpus]
    known_paths = tuple(path for path in paths if path is not None)
    return known_paths if len(known_paths) == len(paths) else None


def _nearest_nic(gpu: Gpu, cards: Sequence[Nic], root: Path) -> NicPath | None:
    here = _pci_ancestors(_gpu_folder(gpu, root))
    if not here:
        return None
    kinds_and_names = [
        (path_kind(here, card_ancestors, same_node=gpu.numa_node == card.numa_node and gpu.numa_node >= 0), card.name)
        for card, card_ancestors in _placed_nics(cards, root)
    ]
    if not kinds_and_names:
        return None
    kind, name = min(kinds_and_names, key=lambda kind_and_name: ORDER.index(kind_and_name[0]))
    return NicPath(device=f"GPU {gpu.index}", nic=name, path=kind)


def path_kind(first: Sequence[str], second: Sequence[str], *, same_node: bool) -> str:
    """Return the kind of path between two PCI devices, given their ancestors from the host bridge to themselves.

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
    # Bridges below the last shared ancestor.
    between = max(len(first), len(second)) - 1 - shared
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
    """Return the host bridge, the bridges and the device itself; empty when the device is not on a PCI bus."""
    if folder is None or not path_exists(folder):
        return []
    parts = resolve_path(folder).parts
    starts = [index for index, name in enumerate(parts) if re.fullmatch(r"pci[0-9a-f]{4,8}:[0-9a-f]{2}", name)]
    if not starts:
        return []
    return [parts[starts[-1]], *(part for part in parts[starts[-1] + 1 :] if _ADDRESS.fullmatch(part))]
