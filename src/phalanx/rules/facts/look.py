"""Look at this machine, quickly and without torch."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from phalanx.errors import UserError
from phalanx.hardware.discover import discover
from phalanx.hardware.probe import MachineProfile, load_profile, usual_path
from phalanx.hardware.types import Machine
from phalanx.record.provenance import redact
from phalanx.rules.facts.host import HostFacts, nic_paths

# What computes, and what could load somebody else's file.
PACKAGES = ("torch", "safetensors", "numpy", "transformers", "accelerate", "deepspeed", "nvidia-nccl-cu12")
PREFIXES = ("NCCL_", "TORCH_", "GLOO_")
MOST_VALUE = 200  # characters of a variable


def this_host(*, environ: Mapping[str, str] | None = None, folder: Path = Path(), root: Path = Path("/")) -> HostFacts:
    """What this machine is, and what `phalanx probe` measured of it; `folder` is where a run would be kept."""
    environ = os.environ if environ is None else environ
    machine = discover(root=root, environ=environ)
    measured = _measured(machine, environ)
    return HostFacts(
        name=machine.hostname,
        source="this machine",
        devices=len(machine.gpus) or machine.usable_cores,
        nic_paths=nic_paths(machine, root=root),
        link_latency_s=_told(measured.link_latency_s) if measured else None,
        link_bytes_per_s=_told(measured.link_bytes_per_s) if measured else None,
        disk_free_bytes=_free_bytes(folder),
        memory_bytes=float(machine.memory_bytes),
        packages=installed(),
        environment=variables(environ),
    )


def installed(names: tuple[str, ...] = PACKAGES) -> dict[str, str]:
    """Versions, read from the package metadata: nothing is imported."""
    found = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Settings of the collectives, without secrets that were put into them."""
    mine = {name: value for name, value in environ.items() if name.startswith(PREFIXES)}
    return {name: redact(value, environ)[:MOST_VALUE] for name, value in sorted(mine.items())}


def _measured(machine: Machine, environ: Mapping[str, str]) -> MachineProfile | None:
    named = environ.get("PHALANX_PROFILE", "")
    try:
        profile = load_profile(Path(named) if named else usual_path(machine.hostname, environ))
    except UserError:  # never probed, or damaged: `phalanx plan` says so, and here it is only missing
        return None
    return profile if profile.device == ("cuda" if machine.gpus else "cpu") else None


def _told(value: float) -> float | None:
    """A profile writes 0 for what was not measured."""
    return value or None


def _free_bytes(folder: Path) -> float | None:
    try:
        return float(shutil.disk_usage(folder).free)
    except OSError:
        return None
