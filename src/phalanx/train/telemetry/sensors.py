"""Sensors of a rank's device: utilisation, memory, energy, temperature."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from phalanx.hardware.discover import memory_bytes, usable_cores
from phalanx.hardware.meters import CpuTime, Energy, anonymous_bytes, cpu_energy, gpu_activity, gpu_energy, memory_stall
from phalanx.hardware.nvml import GpuMeter
from phalanx.train.memory_use import first_bytes
from phalanx.train.telemetry.sharing import Sharers, gpu_uuid


@dataclass(frozen=True, kw_only=True, slots=True)
class SensorReading:
    """One sample; None where this host cannot measure. Energy is that since the previous sample."""

    utilization: float | None = None
    utilization_source: str | None = None
    memory_bytes: int | None = None
    memory_limit_bytes: int | None = None
    memory_pressure: float | None = None
    memory_pressure_source: str | None = None
    allocation_retries: int | None = None
    energy_j: float | None = None
    energy_source: str | None = None
    power_w: float | None = None
    temperature_c: float | None = None


class Sensors(Protocol):
    """Interface of the sensors of one process, over all its memberships."""

    def read(self, sharers: Sharers) -> SensorReading:
        """Take a sample; `sharers` ranks of the job share the host and the device."""


class CpuSensors:
    """Sensors of a rank that computes on a share of the host's cores."""

    def __init__(self, *, power_w: float, root: Path = Path("/")) -> None:
        self._root = root
        self._activity = CpuTime(usable_cores(root, os.cpu_count() or 1))
        self._energy = _Meter(cpu_energy(power_w, root))
        self._limit_bytes = memory_bytes(root)
        held_bytes = anonymous_bytes(root) or 0
        self._first_bytes = first_bytes(held_bytes) if root == Path("/") else held_bytes

    def read(self, sharers: Sharers) -> SensorReading:
        """Take a sample: memory is the growth since training began, the limit this rank's share of the host's."""
        utilization = self._activity.share(sharers.host)
        held_bytes, stall = anonymous_bytes(self._root), memory_stall(self._root)
        taken_j, mean_w = self._energy.read(utilization, sharers.host)
        return SensorReading(
            utilization=utilization,
            utilization_source=self._activity.source,
            memory_bytes=None if held_bytes is None else max(0, held_bytes - self._first_bytes),
            memory_limit_bytes=self._limit_bytes // sharers.host,
            memory_pressure=stall.share if stall else None,
            memory_pressure_source=stall.source if stall else None,
            energy_j=taken_j,
            energy_source=self._energy.source,
            power_w=mean_w,
        )


class GpuSensors:
    """Sensors of a rank with a GPU. Its host's processors and memory are not counted."""

    def __init__(self, device: torch.device, meter: GpuMeter, *, power_w: float) -> None:
        self._device, self._meter = device, meter
        self._activity = gpu_activity(meter)
        self._energy = _Meter(gpu_energy(meter, power_w))

    def read(self, sharers: Sharers) -> SensorReading:
        """Take a sample; memory is what the allocator reserves.

        The pressure is the share of the GPU's memory that all processes use.
        """
        utilization = self._activity.share(sharers.host)
        stats = torch.cuda.memory_stats(self._device)
        used_bytes, limit_bytes, source = self._memory_bytes()
        taken_j, mean_w = self._energy.read(utilization, sharers.device)
        return SensorReading(
            utilization=utilization,
            utilization_source=self._activity.source,
            memory_bytes=int(stats.get("reserved_bytes.all.current", 0)),
            memory_limit_bytes=limit_bytes,
            memory_pressure=used_bytes / limit_bytes if limit_bytes else None,
            memory_pressure_source=source,
            allocation_retries=int(stats.get("num_alloc_retries", 0)),
            energy_j=taken_j,
            energy_source=self._energy.source,
            power_w=mean_w,
            temperature_c=self._meter.temperature_c(),
        )

    def _memory_bytes(self) -> tuple[int, int, str]:
        used_and_total = self._meter.memory_bytes()
        if used_and_total is not None:
            return *used_and_total, "nvml"
        free_bytes, limit_bytes = torch.cuda.mem_get_info(self._device)
        return limit_bytes - free_bytes, limit_bytes, "cuda"


class _Meter:
    """This rank's part of an energy meter, and the mean power since the previous sample.

    The mean, because a power sensor's present value does not represent the seconds between two samples.
    """

    def __init__(self, energy: Energy) -> None:
        self._energy = energy
        self.source = energy.source
        self._last_s = time.monotonic()

    def read(self, utilization: float | None, sharers: int) -> tuple[float | None, float | None]:
        """Return joules and watts; an estimate already covers one rank only."""
        then_s, self._last_s = self._last_s, time.monotonic()
        taken_j = self._energy.taken_j(utilization)
        if taken_j is None:
            return None, None
        part_j = taken_j / (1 if self.source == "estimate" else sharers)
        return part_j, part_j / (self._last_s - then_s) if self._last_s > then_s else None


def sensors_of(device: torch.device, *, power_w: float) -> Sensors:
    """Return the sensors of a rank's device, whose catalogue power is `power_w` watts."""
    if device.type != "cuda":
        return CpuSensors(power_w=power_w)
    return GpuSensors(device, GpuMeter.open(gpu_uuid(device)), power_w=power_w)
