"""The device's limits, measured in the same run: bytes copied and floating-point operations of products per second."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch

from phalanx.train.kernels.kernel_op import KernelWork
from phalanx.units import MIB

COPY_BYTES = {"cpu": 64 * MIB, "cuda": 1024 * MIB}
# More than the last cache of any GPU; a CPU's may be larger.
FLUSH_BYTES = {"cpu": 64 * MIB, "cuda": 256 * MIB}
PRODUCT_SIZE = {"cpu": 768, "cuda": 8192}
# A product that takes longer gives the rate, and the next size would take eight times as long.
ENOUGH_S = 0.02


@dataclass(frozen=True, kw_only=True, slots=True)
class MachineLimits:
    """The limits of one device and dtype."""

    bytes_per_s: float  # read plus written, by a large copy
    flops_per_s: float  # by a large matrix product

    def least_seconds(self, work: KernelWork) -> float:
        """Return the time at the speed of light: the larger of moving the bytes and computing the operations."""
        moved = work.read_bytes + work.written_bytes
        return max(moved / self.bytes_per_s, work.flops / self.flops_per_s)


def measure_limits(device: torch.device, dtype: torch.dtype) -> MachineLimits:
    """Return the best of several large copies and products; takes under a second on a CPU, milliseconds on a GPU."""
    size = COPY_BYTES[device.type]
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.ones_like(source)
    copying = min(measure_calls(lambda: target.copy_(source), device, repeats=7))
    kinds = {dtype if dtype.itemsize >= 2 else torch.bfloat16}
    if device.type == "cpu" and dtype.itemsize < 4:
        # A CPU without instructions for 16-bit numbers computes faster in wider ones.
        kinds.add(torch.float32)
    flops_per_s = max(_product_rate(device, kind) for kind in kinds)
    return MachineLimits(bytes_per_s=2 * size / copying, flops_per_s=flops_per_s)


def _product_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Return the FLOP/s of the largest matrix product that this device computes in a moment.

    Sizes grow from small: a CPU without instructions for 16-bit numbers takes minutes where others take a second.
    """
    side = PRODUCT_SIZE[device.type] // 16
    while True:
        factor = torch.randn(side, side, device=device).to(dtype)
        seconds = min(measure_calls(lambda factor=factor: factor @ factor, device, repeats=5))  # type: ignore[misc]
        if side >= PRODUCT_SIZE[device.type] or seconds > ENOUGH_S:
            return 2 * side**3 / seconds
        side *= 2


def flush_caches(device: torch.device, kept: dict[str, torch.Tensor]) -> None:
    """Overwrite the contents of the caches; `kept` keeps the block between calls."""
    block = kept.get(device.type)
    if block is None:
        block = kept[device.type] = torch.zeros(FLUSH_BYTES[device.type], dtype=torch.uint8, device=device)
    block.fill_(1)
    synchronize_device(device)


def synchronize_device(device: torch.device) -> None:
    """Wait for all streams of a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure_calls(
    call: Callable[[], object], device: torch.device, *, repeats: int, warm_up: int = 1, flush: bool = False
) -> list[float]:
    """Return the seconds of each call: by events on a GPU, by the clock on a CPU."""
    flush_blocks: dict[str, torch.Tensor] = {}
    for _ in range(warm_up):
        call()
    synchronize_device(device)
    samples = []
    for _ in range(repeats):
        if flush:
            flush_caches(device, flush_blocks)
        if device.type == "cuda":
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            call()
            end.record()
            torch.cuda.synchronize(device)
            samples.append(begin.elapsed_time(end) / 1e3)
        else:
            start = time.perf_counter()
            call()
            samples.append(time.perf_counter() - start)
    return samples


def median_seconds(call: Callable[[], object], device: torch.device, *, repeats: int) -> float:
    """Return the median seconds of a call with cold caches."""
    return median(measure_calls(call, device, repeats=repeats, warm_up=3, flush=True))
