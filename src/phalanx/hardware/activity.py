"""How busy a device is: the share of its units that worked, never the share of time a kernel was merely resident."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from phalanx.hardware.nvml import GpuMeter


class Activity(Protocol):
    """Something that can say how busy the device was since it was last asked."""

    @property
    def source(self) -> str | None:
        """How it is measured; None when it is not."""

    def share(self, ranks: int) -> float | None:
        """From 0 to 1 since the last call, of this rank's part when `ranks` share the host; None where unknown."""


class NoActivity:
    """Of a device that cannot be asked: readers fall back on MFU."""

    source = None

    def share(self, ranks: int) -> float | None:
        """Unknown."""
        return None


class CpuTime:
    """CPU time of this process, all its threads, over the cores it may use: those of the host, shared fairly."""

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
        """Never above 1, though a rank may take the cores that its neighbours leave idle."""
        (then_s, before_s), self._last = self._last, (self._clock(), self._used())
        wall_s = self._last[0] - then_s
        if wall_s <= 0:
            return None
        return min(1.0, (self._last[1] - before_s) / (wall_s * self._cores / ranks))


class SmActivity:
    """Share of the streaming multiprocessors with at least one warp, averaged over the time since the last call.

    NVML's GPU performance monitoring: Hopper and newer. Warps that wait count, so this is a ceiling of the useful work
    and MFU its floor.
    """

    source = "gpm-sm"

    def __init__(self, meter: GpuMeter) -> None:
        self._meter = meter
        self._last = meter.gpm_sample()

    def share(self, ranks: int) -> float | None:
        """The device's own, also when several ranks share it."""
        now = self._meter.gpm_sample()
        if now is None:
            return None  # the next answer covers this time too
        before, self._last = self._last, now
        if before is None:
            return None
        percent = self._meter.sm_percent(before, now)
        self._meter.gpm_free(before)
        return None if percent is None else min(1.0, max(0.0, percent / 100))


def gpu_activity(meter: GpuMeter) -> Activity:
    """SM activity where the driver measures it, else none."""
    return SmActivity(meter) if meter.has_gpm() else NoActivity()
