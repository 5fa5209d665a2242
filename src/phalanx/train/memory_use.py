"""How much memory this rank has come to use for the job."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

import torch

_firsts: dict[int, int] = {}  # by process: a forked one begins anew


def first_bytes(now_bytes: int) -> int:
    """What this process held when somebody first asked: whoever tells what it took since then starts from the same."""
    return _firsts.setdefault(os.getpid(), now_bytes)


class MemoryMeter:
    """Peak bytes: of the allocator on a GPU; on a CPU what the process itself took since it made its first meter.

    Pages of libraries do not count: a forked rank shares them, and reads them in only when it first calls them. A
    process that stays through a recovery makes another meter, and what it holds still is its own: the peak never falls.
    """

    _peaks: ClassVar[dict[int, int]] = {}  # by process: a forked one begins anew

    def __init__(self, device: torch.device) -> None:
        self._device, self._process = device, os.getpid()
        self._first_bytes = first_bytes(_memory_status().get("RssAnon", 0))
        self._before_bytes = 0  # the peak before something was left out

    def peak_bytes(self) -> int:
        """The most so far; no less than what is held now."""
        if self._device.type == "cuda":
            return max(self._before_bytes, int(torch.cuda.max_memory_allocated(self._device)))
        now = _memory_status()
        shared = now.get("RssFile", 0) + now.get("RssShmem", 0)
        most = max(now.get("VmHWM", 0) - shared, now.get("RssAnon", 0)) - self._first_bytes
        self._peaks[self._process] = max(0, most, self._peaks.get(self._process, 0))
        return self._peaks[self._process]

    @contextmanager
    def left_out(self) -> Iterator[None]:
        """What is done inside is no part of the job: its peak does not count on a GPU."""
        self._before_bytes = self.peak_bytes() if self._device.type == "cuda" else 0
        try:
            yield
        finally:
            if self._device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(self._device)


def _memory_status() -> dict[str, int]:
    """The memory lines of /proc/self/status, in bytes; empty where there is none."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return {}
    pairs = (line.split(":", 1) for line in lines if line.endswith("kB"))
    return {name: int(value.split()[0]) * 1024 for name, value in pairs}
