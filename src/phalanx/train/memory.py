"""How much memory this rank has come to use for the job."""

from __future__ import annotations

from pathlib import Path

import torch


class MemoryMeter:
    """Peak bytes: of the allocator on a GPU; on a CPU what the process itself took since this meter was made.

    Pages of libraries do not count: a forked rank shares them, and reads them in only when it first calls them.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._first_bytes = _status().get("RssAnon", 0)

    def peak_bytes(self) -> int:
        """The most so far."""
        if self._device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self._device))
        now = _status()
        shared = now.get("RssFile", 0) + now.get("RssShmem", 0)
        return max(0, now.get("VmHWM", 0) - shared - self._first_bytes)


def _status() -> dict[str, int]:
    """The memory lines of /proc/self/status, in bytes; empty where there is none."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return {}
    pairs = (line.split(":", 1) for line in lines if line.endswith("kB"))
    return {name: int(value.split()[0]) * 1024 for name, value in pairs}
