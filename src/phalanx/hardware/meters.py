"""Meters of a training device: its activity, its energy, and the memory pressure of its host.

Activity is the share of units that worked, not the share of time in which a kernel was resident.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from phalanx.hardware.discover import cgroup_folders
from phalanx.hardware.nvml import GpuMeter


class Activity(Protocol):
    """The interface of an activity meter, which measures how busy a device was since the last call."""

    @property
    def source(self) -> str | None:
        """The method of measurement; None if the activity is not measured."""

    def share(self, ranks: int) -> float | None:
        """Return the activity since the last call, from 0 to 1; None where unknown."""


class NoActivity:
    """The meter of a device without activity counters; readers fall back on MFU."""

    source = None

    def share(self, ranks: int) -> float | None:
        """Return None."""
        return None


class CpuTime:
    """CPU time of this process with all its threads, relative to a fair share of the host's cores."""

    source = "cpu-time"

    def __init__(
        self,
        cores: int,
        *,
        clock: Callable[[], float] = time.monotonic,
        used: Callable[[], float] = time.process_time,
    ) -> None:
        self._cores, self._clock, self._used = cores, clock, used
        self._last = clock(), used()

    def share(self, ranks: int) -> float | None:
        """Return the share since the last call, at most 1 even if the rank uses cores its neighbours leave idle."""
        (then_s, before_s), self._last = self._last, (self._clock(), self._used())
        wall_s = self._last[0] - then_s
        if wall_s <= 0:
            return None
        return min(1.0, (self._last[1] - before_s) / (wall_s * self._cores / ranks))


class SmActivity:
    """The share of streaming multiprocessors with at least one warp, averaged over the time since the last call.

    From NVML's GPU performance monitoring: Hopper and newer. Warps that wait count, so it is an upper bound of the
    useful work, and MFU a lower bound.
    """

    source = "gpm-sm"

    def __init__(self, meter: GpuMeter) -> None:
        self._meter = meter
        self._last = meter.gpm_sample()

    def share(self, ranks: int) -> float | None:
        """Return the share of the whole device, even if several ranks share it."""
        sample = self._meter.gpm_sample()
        if sample is None:
            return None  # the next measurement covers this time too
        before, self._last = self._last, sample
        if before is None:
            return None
        percent = self._meter.sm_percent(before, sample)
        self._meter.gpm_free(before)
        return None if percent is None else min(1.0, max(0.0, percent / 100))


def gpu_activity(meter: GpuMeter) -> Activity:
    """Return a meter of SM activity if the driver measures it, else one without values."""
    return SmActivity(meter) if meter.has_gpm() else NoActivity()


# Joules that a device has taken: from a hardware counter, else a stated estimate. Power is never integrated.
#
# A polled power sensor misses most of what happens (on A100 and H100 it samples a quarter of the time,
# arXiv:2312.02741); a counter misses nothing.


class Energy(Protocol):
    """The interface of an energy meter, which measures the energy taken since the last call."""

    @property
    def source(self) -> str | None:
        """The source of the values; None if there is none."""

    def taken_j(self, utilization: float | None) -> float | None:
        """Return joules since the last call (at first: since the meter was created); None where unknown."""


class NoEnergy:
    """The meter of a device without a known power."""

    source = None

    def taken_j(self, utilization: float | None) -> float | None:
        """Return None."""
        return None


class NvmlEnergy:
    """The counter of an NVIDIA GPU (Volta and newer): the board's energy, in mJ since the driver was loaded."""

    source = "nvml"

    def __init__(self, meter: GpuMeter) -> None:
        self._meter = meter
        self._last_j = meter.energy_j()

    def taken_j(self, utilization: float | None) -> float | None:
        """Return joules since the last call; None if the counter went back because the driver was reloaded."""
        before_j, now_j = self._last_j, self._meter.energy_j()
        if now_j is None:
            return None
        self._last_j = now_j
        return now_j - before_j if before_j is not None and now_j >= before_j else None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Zone:
    file: Path
    range_uj: int  # the counter wraps around at this value


class Rapl:
    """Processor packages and their memory through Linux' powercap files (Intel, and AMD since Zen)."""

    source = "rapl"

    def __init__(self, zones: list[_Zone]) -> None:
        self._zones = zones
        self._last_uj = [_read_number(zone.file) for zone in zones]

    @classmethod
    def of(cls, root: Path) -> Rapl | None:
        """Return the packages of this host; None without them, or if (as usual since 2020) only root may read them."""
        zones = [_energy_zone(folder) for folder in _zone_folders(root / "sys/class/powercap")]
        readable = [zone for zone in zones if zone is not None and _read_number(zone.file) is not None]
        return cls(readable) if readable else None

    def taken_j(self, utilization: float | None) -> float | None:
        """Return joules since the last call; correct if called before a counter wraps twice, 20 minutes at 200 W."""
        values = [_read_number(zone.file) for zone in self._zones]
        parts = [
            (after - before) % zone.range_uj
            for zone, before, after in zip(self._zones, self._last_uj, values, strict=True)
            if before is not None and after is not None
        ]
        self._last_uj = values
        return sum(parts) / 1e6 if parts else None


def _zone_folders(top: Path) -> list[Path]:
    """Return the folders of packages and of their memory; cores and graphics are part of the package."""
    try:
        names = sorted(entry.name for entry in top.iterdir())
    except OSError:
        return []
    packages = [name for name in names if re.fullmatch(r"intel-rapl:\d+", name)]
    inside = [name for name in names if re.fullmatch(r"intel-rapl:\d+:\d+", name)]
    # psys contains the packages
    package_names = [name for name in packages if not _zone_name(top / name).startswith("psys")]
    return [top / name for name in (*package_names, *(name for name in inside if _zone_name(top / name) == "dram"))]


def _energy_zone(folder: Path) -> _Zone | None:
    limit_uj = _read_number(folder / "max_energy_range_uj")
    return _Zone(file=folder / "energy_uj", range_uj=limit_uj + 1) if limit_uj else None


def _zone_name(folder: Path) -> str:
    try:
        return (folder / "name").read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""


def _read_number(path: Path) -> int | None:
    try:
        text = path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return None
    return int(text) if re.fullmatch(r"\d{1,19}", text) else None


class Estimate:
    """The catalogue's power of the device times its activity; a device with unknown activity counts as busy.

    The power of an idle device is not included: good for a rough sum of a run, not for comparing two settings.
    """

    source = "estimate"

    def __init__(self, power_w: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._power_w, self._clock = power_w, clock
        self._last_s = clock()

    def taken_j(self, utilization: float | None) -> float | None:
        """Return joules of the time since the last call."""
        then_s, self._last_s = self._last_s, self._clock()
        return self._power_w * (1.0 if utilization is None else utilization) * max(0.0, self._last_s - then_s)


def gpu_energy(meter: GpuMeter, power_w: float) -> Energy:
    """Return the meter of the GPU's counter, else an estimate from its power."""
    return NvmlEnergy(meter) if meter.energy_j() is not None else estimated_energy(power_w)


def cpu_energy(power_w: float, root: Path = Path("/")) -> Energy:
    """Return a RAPL meter if it can be read, else an estimate from the power of this rank's cores."""
    return Rapl.of(root) or estimated_energy(power_w)


def estimated_energy(power_w: float) -> Energy:
    """Return an estimate from a known power, or a meter without values."""
    return Estimate(power_w) if power_w > 0 else NoEnergy()


# Memory pressure of this process: how long it stalls for lack of memory, and how much it holds.


# "some avg10=0.12 avg60=0.05 avg300=0.01 total=1234": percent of the last 10 s in which some task stalled.
_STALL = re.compile(r"^some avg10=(\d{1,3}(?:\.\d+)?) ", re.MULTILINE)
_MOST_CHARS = 1 << 16  # these files have a few lines; more is not the expected content


@dataclass(frozen=True, kw_only=True, slots=True)
class Stall:
    """The share of the last 10 s in which some task waited for memory, and the scope of that value."""

    share: float
    source: str  # "psi-cgroup": of this container; "psi-host": of the whole machine


def memory_stall(root: Path = Path("/")) -> Stall | None:
    """Return the memory stalls of this process's own group, else of the machine; None if the kernel has no counts."""
    files = [(folder / "memory.pressure", "psi-cgroup") for folder in cgroup_folders(root, "memory")[:1]]
    for path, source in (*files, (root / "proc/pressure/memory", "psi-host")):
        match = _STALL.search(_read_text(path))
        if match:
            return Stall(share=min(1.0, float(match.group(1)) / 100), source=source)
    return None


def anonymous_bytes(root: Path = Path("/")) -> int | None:
    """Return this process's own memory, without pages of files and libraries, which other processes share."""
    match = re.search(r"^RssAnon:\s*(\d{1,15}) kB", _read_text(root / "proc/self/status"), re.MULTILINE)
    return int(match.group(1)) * 1024 if match else None


def _read_text(path: Path) -> str:
    try:
        with path.open(encoding="utf-8", errors="replace") as stream:
            return stream.read(_MOST_CHARS)
    except OSError:  # absent, or (EOPNOTSUPP) switched off at boot
        return ""
