"""Probe worker on one device with torch: `python -m phalanx.train.torch_probe TASK`.

The planner never imports it.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]

from phalanx.hardware.probe_worker import Call, ProbeTask, serve_probe


class TorchEngine:
    """Timed operations as the trainer runs them: bf16 with NCCL on a GPU, or fp32 with gloo on one core."""

    def __init__(self, task: ProbeTask) -> None:
        gpu = task.device == "cuda"
        if gpu:
            torch.cuda.set_device(task.rank)
        else:
            torch.set_num_threads(1)
        self.name = f"torch {torch.__version__}"
        self.device_name = torch.cuda.get_device_name(task.rank) if gpu else "cpu"
        self.precision = "bf16" if gpu else "fp32"
        self.backend = ("nccl" if gpu else "gloo") if task.ranks > 1 else ""
        self._rank = task.rank
        self._device = torch.device("cuda", task.rank) if gpu else torch.device("cpu")
        self._dtype = torch.bfloat16 if gpu else torch.float32
        if task.ranks > 1:
            store = FileStore(str(Path(task.folder) / "store"), task.ranks)
            dist.init_process_group(
                self.backend, store=store, rank=task.rank, world_size=task.ranks, timeout=timedelta(seconds=60)
            )

    def matmul(self, size: int) -> Call:
        """Return a call that multiplies two square matrices."""
        # Random values: constant operands draw less power, so that a GPU's clock stays higher than in training.
        first = torch.randn(size, size, device=self._device, dtype=self._dtype)
        second = torch.randn(size, size, device=self._device, dtype=self._dtype)
        out = torch.empty(size, size, device=self._device, dtype=self._dtype)
        return lambda: torch.mm(first, second, out=out)

    def copy(self, num_bytes: int) -> Call:
        """Return a call that copies a buffer in device memory."""
        source = torch.ones(num_bytes // 4, device=self._device)
        target = torch.zeros_like(source)
        return lambda: target.copy_(source)

    def small_op(self) -> Call:
        """Return a call that adds two vectors of eight elements."""
        first = torch.ones(8, device=self._device)
        second = torch.ones(8, device=self._device)
        return lambda: first + second

    def all_reduce(self, num_bytes: int) -> Call:
        """Return a call that sums a buffer over all ranks."""
        values = torch.zeros(num_bytes // 4, device=self._device)
        return lambda: dist.all_reduce(values)

    def agree(self, value: int) -> int:
        """Return rank 0's value on every rank."""
        shared = torch.tensor([value], device=self._device)
        dist.broadcast(shared, src=0)
        return int(shared.item())

    def sync(self) -> None:
        """Wait until the GPU has finished; a CPU needs no wait."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def close(self) -> None:
        """Leave the process group."""
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(serve_probe(TorchEngine))
