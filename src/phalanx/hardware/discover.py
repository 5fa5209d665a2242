"""Discover this machine: /proc and /sys for processors, memory and network cards, NVML for GPUs.

Works without GPUs, without NVML, inside containers, and (coarsely) on systems that have no /proc.
"""

from __future__ import annotations

import math
import os
import platform
import re
from collections.abc import Mapping
from pathlib import Path

from phalanx.hardware.nvml import GpuView, see_gpus
from phalanx.hardware.types import Machine, Nic
from phalanx.units import plural

_PCI_VENDORS = {"0x10de": "NVIDIA", "0x1002": "AMD"}
_NO_LIMIT = 1 << 60  # cgroup v1 writes 2^63, rounded to a page, for "unlimited"


def discover(*, root: Path = Path("/"), environ: Mapping[str, str] | None = None) -> Machine:
    """Return this machine; /proc and /sys are read under `root`, which tests replace."""
    env = os.environ if environ is None else environ
    cpuinfo = _read_text(root / "proc/cpuinfo")
    sockets, cores = _count_cores(cpuinfo)
    gpus = see_gpus(root=root, visible=env.get("CUDA_VISIBLE_DEVICES"))
    match = re.search(r"^(?:model name|Model|Hardware)\s*:\s*(.+)$", cpuinfo, re.MULTILINE)
    return Machine(
        hostname=platform.node() or "localhost",
        cpu_model=match.group(1).strip() if match else platform.processor() or platform.machine() or "unknown CPU",
        sockets=sockets,
        cores=cores,
        usable_cores=usable_cores(root, cores),
        numa_nodes=max(1, len(_matching_paths(root / "sys/devices/system/node", r"node\d+"))),
        memory_bytes=memory_bytes(root),
        nics=_find_nics(root),
        gpus=gpus.gpus,
        gpu_paths=gpus.paths,
        notes=gpus.notes + _unseen_gpus(root, gpus),
    )


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:  # sysfs returns EINVAL for the speed of a card that is down
        return ""


def _read_integer(path: Path, default: int = 0) -> int:
    text = _read_text(path).strip()
    return int(text) if re.fullmatch(r"-?\d{1,20}", text) else default


def _matching_paths(folder: Path, pattern: str) -> list[Path]:
    try:
        return sorted(entry for entry in folder.iterdir() if re.fullmatch(pattern, entry.name))
    except OSError:
        return []


def _count_cores(cpuinfo: str) -> tuple[int, int]:
    """Return the number of sockets and of physical cores; hyper-threads of one core share its id."""
    logical = len(re.findall(r"^processor\s*:", cpuinfo, re.MULTILINE)) or os.cpu_count() or 1
    cores: set[tuple[str, str]] = set()
    for block in cpuinfo.split("\n\n"):
        socket = re.search(r"^physical id\s*:\s*(\d+)", block, re.MULTILINE)
        core = re.search(r"^core id\s*:\s*(\d+)", block, re.MULTILINE)
        if socket and core:
            cores.add((socket.group(1), core.group(1)))
    return max(1, len({socket for socket, _ in cores})), len(cores) or logical


def usable_cores(root: Path, cores: int) -> int:
    """Return the number of cores this process may use, after affinity and container limits."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else cores
    quota = _cpu_quota(root)
    limit = math.floor(quota) if quota else allowed
    return max(1, min(cores, allowed, limit)) if root == Path("/") else max(1, min(cores, limit or cores))


def cgroup_folders(root: Path, controller: str) -> list[Path]:
    """Return the folders that may hold this process's limits (cgroup v2 and v1), from its own group up to the root."""
    folders: list[Path] = []
    for line in _read_text(root / "proc/self/cgroup").splitlines():
        _, names, group = line.split(":", 2) if line.count(":") >= 2 else ("", "-", "")
        if names and controller not in names.split(","):
            continue
        top = root / "sys/fs/cgroup" / controller if names else root / "sys/fs/cgroup"
        parts = [part for part in group.split("/") if part and part != ".."]
        folders += [top.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1)]
    return folders


def _cpu_quota(root: Path) -> float:
    """Return the CPUs that a container may use at once; 0 if it is not limited."""
    quotas = []
    for folder in cgroup_folders(root, "cpu"):
        words = _read_text(folder / "cpu.max").split()
        if len(words) == 2 and words[0].isdigit() and int(words[1]) > 0:
            quotas.append(int(words[0]) / int(words[1]))
        quota, period = _read_integer(folder / "cpu.cfs_quota_us", -1), _read_integer(folder / "cpu.cfs_period_us")
        if quota > 0 and period > 0:
            quotas.append(quota / period)
    return min(quotas, default=0.0)


def memory_bytes(root: Path) -> int:
    """Return the memory of the machine, or the lowest limit of the containers this process is in."""
    match = re.search(r"^MemTotal:\s*(\d+) kB", _read_text(root / "proc/meminfo"), re.MULTILINE)
    total = int(match.group(1)) * 1024 if match else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limits = [total]
    for folder in cgroup_folders(root, "memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            limit = _read_integer(folder / name)
            if 0 < limit < _NO_LIMIT:
                limits.append(limit)
    return min(limits)


def _find_nics(root: Path) -> tuple[Nic, ...]:
    cards = []
    for folder in _matching_paths(root / "sys/class/net", r"[^.].*"):
        if not (folder / "device").exists():  # loopback, bridges, tunnels
            continue
        megabits = _read_integer(folder / "speed", -1)
        speed = megabits * 1e6 / 8 if megabits > 0 else 0.0
        node = _read_integer(folder / "device/numa_node", -1)
        cards.append(Nic(name=folder.name, bytes_per_s=speed, numa_node=node, kind="ethernet"))
    for folder in _matching_paths(root / "sys/class/infiniband", r"[^.].*"):
        rates = [
            re.match(r"\s*([\d.]+) Gb/sec", _read_text(port / "rate"))
            for port in _matching_paths(folder / "ports", r"\d+")
        ]
        speed = sum(float(rate.group(1)) for rate in rates if rate) * 1e9 / 8
        node = _read_integer(folder / "device/numa_node", -1)
        cards.append(Nic(name=folder.name, bytes_per_s=speed, numa_node=node, kind="infiniband"))
    return tuple(cards)


def _unseen_gpus(root: Path, seen: GpuView) -> tuple[str, ...]:
    """Return a note if PCI lists GPUs that no driver library reported."""
    if seen.gpus or seen.hidden:
        return ()
    counts: dict[str, int] = {}
    for device in _matching_paths(root / "sys/bus/pci/devices", r"[0-9a-f:.]+"):
        if _read_text(device / "class").strip().startswith(("0x0300", "0x0302", "0x0380", "0x1200")):
            vendor = _PCI_VENDORS.get(_read_text(device / "vendor").strip(), "")
            if vendor:
                counts[vendor] = counts.get(vendor, 0) + 1
    remedies = {
        "NVIDIA": "install the driver and pip install nvidia-ml-py to see them",
        "AMD": "name them, such as 8xMI300X, instead of local",
    }
    return tuple(
        f"{plural(count, f'{vendor} GPU')} on PCIe cannot be queried: {remedies[vendor]}"
        for vendor, count in counts.items()
    )
