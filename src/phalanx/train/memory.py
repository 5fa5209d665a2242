"""How much memory this rank has come to use for the job."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import torch


class MemoryMeter:
    """Peak bytes: of the allocator on a GPU; on a CPU what the process grew by since its libraries were loaded."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def peak_bytes(self) -> int:
        """The most so far."""
        if self._device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self._device))
        return max(0, _peak_resident() - _AT_IMPORT)


def _peak_resident() -> int:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def resident_bytes() -> int:
    """Bytes of this process in memory now; its peak where the system does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except (OSError, ValueError, IndexError):
        return _peak_resident()
    return pages * resource.getpagesize()


_AT_IMPORT = resident_bytes()
