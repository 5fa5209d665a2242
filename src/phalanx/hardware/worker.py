"""Probe worker on one CPU core with numpy: `python -m phalanx.hardware.worker TASK`."""

from __future__ import annotations

import platform
import sys
from pathlib import Path

import numpy as np

from phalanx.hardware.bench import Call, Task, serve
from phalanx.hardware.ring import Ring


class NumpyEngine:
    """fp32 on one core; collectives over a TCP ring."""

    precision = "fp32"

    def __init__(self, task: Task) -> None:
        self.name = f"numpy {np.__version__}"
        self.device_name = platform.processor() or platform.machine()
        self.backend = "tcp" if task.ranks > 1 else ""
        self._random = np.random.default_rng(task.rank)
        self._ring = Ring(rank=task.rank, ranks=task.ranks, folder=Path(task.folder)) if task.ranks > 1 else None

    def matmul(self, size: int) -> Call:
        """Multiply two square matrices."""
        left, right = self._random.random((2, size, size), dtype=np.float32)
        out = np.empty((size, size), dtype=np.float32)
        return lambda: np.matmul(left, right, out=out)

    def copy(self, num_bytes: int) -> Call:
        """Copy a buffer in memory."""
        source, target = np.ones(num_bytes // 4, dtype=np.float32), np.zeros(num_bytes // 4, dtype=np.float32)
        return lambda: np.copyto(target, source)

    def small_op(self) -> Call:
        """Add two vectors of eight."""
        first, second = np.ones(8, dtype=np.float32), np.ones(8, dtype=np.float32)
        return lambda: first + second

    def all_reduce(self, num_bytes: int) -> Call:
        """Sum a buffer over all ranks."""
        values = np.zeros(num_bytes // 4, dtype=np.float32)
        ring = self._ring
        assert ring is not None, "a single rank has no collectives"
        return lambda: ring.all_reduce(values)

    def agree(self, value: int) -> int:
        """Rank 0's value, on every rank."""
        assert self._ring is not None, "a single rank has nobody to agree with"
        # One element per rank keeps every chunk of the ring non-empty; counts up to 2^24 are exact in fp32.
        values = np.full(self._ring.ranks, value if self._ring.rank == 0 else 0, dtype=np.float32)
        self._ring.all_reduce(values)
        return int(values[0])

    def sync(self) -> None:
        """Nothing is asynchronous here."""

    def close(self) -> None:
        """Leave the ring."""
        if self._ring is not None:
            self._ring.close()


if __name__ == "__main__":
    sys.exit(serve(NumpyEngine))
