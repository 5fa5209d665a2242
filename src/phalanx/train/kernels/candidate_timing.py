"""Verification and timing of kernels made from the shipped templates, in a separate process: sources in, JSON lines
out.

    echo '{"op": "rms-norm", "device": "cpu", "shape": {…}, "sources": […]}' |
        python -m phalanx.train.kernels.candidate_timing

Only for sources from the templates: it guards against mistakes, not against cheats. Other sources are for the guard
of the kernel lab.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

EPS = 1e-5
ERROR_BOUND = 4.0  # multiples of the dtype's epsilon, relative to the largest value of the row
RUNS = 20
FLUSH_BYTES = 256 << 20  # more than any second-level cache


def main() -> int:
    """Read one request from stdin; print a line about the device, then one line per source."""
    request = json.loads(sys.stdin.read())
    device = torch.device(request["device"])
    torch.set_num_threads(1 if device.type == "cpu" else torch.get_num_threads())
    _say({"bytes_per_s": copy_bandwidth(device), "name": device_name(device), "torch": torch.__version__})
    with tempfile.TemporaryDirectory(prefix="phalanx-kernels-") as folder:
        for number, source in enumerate(request["sources"]):
            try:
                kernel = _load(Path(folder) / f"candidate_{number}.py", source)
                _say({"number": number, **measure(kernel, request["shape"], device)})
            except Exception as error:  # any exception of a kernel refuses only that kernel
                text = str(error).splitlines()
                _say({"number": number, "why": f"{type(error).__name__}: {text[0][:300] if text else ''}"})
    return 0


def _say(values: Mapping[str, Any]) -> None:
    """Print one JSON line at once."""
    print(json.dumps(values), flush=True)


def _load(path: Path, source: str) -> Callable[..., Tensor]:
    """Write a source to a file, import it and return its kernel."""
    path.write_text(source, encoding="utf-8")  # Triton reads the text of its kernels from a file
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    kernel: Callable[..., Tensor] = module.kernel
    return kernel


def make_inputs(tokens: int, width: int, device: torch.device, seed: int) -> tuple[Tensor, Tensor]:
    """Draw x and weight, bfloat16 on a GPU and float32 on a CPU, with rows whose sizes differ by up to 10,000 times."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    rng = torch.Generator().manual_seed(seed)
    sizes = 10.0 ** torch.empty(tokens, 1).uniform_(-2, 2, generator=rng)
    x = torch.randn(tokens, width, generator=rng) * sizes
    weight = 1.0 + 0.1 * torch.randn(width, generator=rng)
    return x.to(device, dtype), weight.to(device, dtype)


def worst_error(kernel: Callable[..., Tensor], x: Tensor, weight: Tensor) -> float:
    """Return the largest error over the allowed one; infinite for a wrong shape or dtype, or a changed input."""
    before = (x.clone(), weight.clone())
    out = kernel(x, weight)
    if not isinstance(out, Tensor) or out.shape != x.shape or out.dtype != x.dtype:
        return float("inf")
    if not torch.equal(before[0], x) or not torch.equal(before[1], weight):
        return float("inf")
    wide = before[0].double()
    truth = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS) * before[1].double()
    error = (out.double() - truth).abs().amax(-1) / truth.abs().amax(-1)
    bound = ERROR_BOUND * torch.finfo(x.dtype).eps
    return float(error.max()) / bound if bool(torch.isfinite(error).all()) else float("inf")


def measure(kernel: Callable[..., Tensor], shape: Mapping[str, int], device: torch.device) -> dict[str, Any]:
    """Verify a kernel at odd sizes and at the requested shape, then return its median time and minimum bytes."""
    tokens, width = int(shape["tokens"]), int(shape["width"])
    for rows, columns, seed in ((5, 96, 1), (37, width - 3, 2), (64, width, 3)):
        error = worst_error(kernel, *make_inputs(rows, columns, device, seed))
        if not error <= 1.0:
            return {"why": f"wrong at {rows} × {columns}: {error:.3g} times the error that is allowed"}
    x, weight = make_inputs(tokens, width, device, 4)
    error = worst_error(kernel, x, weight)
    if not error <= 1.0:
        return {"why": f"wrong at {tokens} × {width}: {error:.3g} times the error that is allowed"}
    seconds = time_kernel(lambda: kernel(x, weight), device)
    return {"seconds": seconds, "bytes": 2 * x.numel() * x.element_size() + weight.numel() * weight.element_size()}


def time_kernel(call: Callable[[], object], device: torch.device) -> float:
    """Return the median seconds of a call; on a GPU with a cold L2 cache."""
    call()
    if device.type != "cuda":
        samples = []
        for _ in range(RUNS // 2):
            start = time.perf_counter()
            call()
            samples.append(time.perf_counter() - start)
        return median(samples)
    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=device)
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(RUNS)]
    for begin, end in events:
        flush.zero_()
        begin.record()
        call()
        end.record()
    torch.cuda.synchronize(device)
    return median(begin.elapsed_time(end) for begin, end in events) / 1e3


def copy_bandwidth(device: torch.device) -> float:
    """Return bytes read and written per second by a large copy, the speed of light of memory-bound operations."""
    size = (1 << 30) if device.type == "cuda" else (64 << 20)
    source = torch.ones(size // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    seconds = min(time_kernel(lambda: target.copy_(source), device) for _ in range(2))
    return 2.0 * size / seconds


def device_name(device: torch.device) -> str:
    """Return the device's name for the archive, as times are only comparable on one kind of device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU, one core"


if __name__ == "__main__":
    sys.exit(main())
