"""Measures the peak memory that this rank uses for the job."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

import torch

_firsts: dict[int, int] = {}  # by process id: a forked process starts again


def first_bytes(now_bytes: int) -> int:
    """Return the bytes that this process used at the first call of this function.

    All users subtract the same number to find what the process took since then.
    """
    return _firsts.setdefault(os.getpid(), now_bytes)


class MemoryMeter:
    """Peak bytes of this rank: on a GPU of torch's allocator, on a CPU of the process since its first meter.

    Pages of libraries do not count: a forked rank shares them, and reads them in only when it first calls them. A
    process that stays through a recovery makes another meter; the peak is kept by process and never falls.
    """

    _peaks: ClassVar[dict[int, int]] = {}  # by process id: a forked process starts again

    def __init__(self, device: torch.device) -> None:
        self._device, self._process = device, os.getpid()
        self._first_bytes = first_bytes(_memory_status().get("RssAnon", 0))
        self._before_bytes = 0  # the peak before `left_out` reset the allocator's

    def peak_bytes(self) -> int:
        """Return the peak so far; at least the bytes in use now."""
        if self._device.type == "cuda":
            return max(self._before_bytes, int(torch.cuda.max_memory_allocated(self._device)))
        now = _memory_status()
        # VmHWM, the peak, counts shared pages too; the present ones are subtracted.
        shared = now.get("RssFile", 0) + now.get("RssShmem", 0)
        peak = max(now.get("VmHWM", 0) - shared, now.get("RssAnon", 0)) - self._first_bytes
        self._peaks[self._process] = max(0, peak, self._peaks.get(self._process, 0))
        return self._peaks[self._process]

    @contextmanager
    def left_out(self) -> Iterator[None]:
        """Context whose allocations on a GPU do not count into the peak: they do not belong to the job."""
        self._before_bytes = self.peak_bytes() if self._device.type == "cuda" else 0
        try:
            yield
        finally:
            if self._device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(self._device)


def _memory_status() -> dict[str, int]:
    """Return the memory lines of /proc/self/status, in bytes; empty where there is no such file."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return {}
    pairs = (line.split(":", 1) for line in lines if line.endswith("kB"))
    return {name: int(value.split()[0]) * 1024 for name, value in pairs}
