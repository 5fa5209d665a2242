"""fp8 rounding fused into RMSNorm and SwiGLU against compiled plain operations, on one GPU, at 13 shapes each.

    PYTHONPATH=src python benchmarks/float8_kernels.py --out FILE.json [--seconds 150]

Both make the same: rows in e4m3 with their scales, and the transposed copy with one. "plain" is what the trainer did
before: torch.compile's code for the operation and its rounding, then the transposing kernel on the result in 16 bit.
Results are compared with float64 first. Median of 20, L2 cache flushed, events around the calls.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from phalanx.train.kernels.float8_norm import float8_norm_rows
from phalanx.train.kernels.float8_rounding import float8_transposed, plain_float8_rows
from phalanx.train.kernels.float8_rows import scaled_rows, turned_rows
from phalanx.train.kernels.float8_swiglu import (
    exact_gradients,
    exact_product,
    float8_swiglu_gradient_rows,
    float8_swiglu_rows,
)

EPS = 1e-5
NARROW = ((8192, 768), (32768, 1024), (16384, 1536), (4096, 2048), (16384, 2048), (32768, 2048), (16384, 3072),
          (4096, 4096), (8192, 4096), (16384, 4096), (16384, 5120), (8192, 8192), (4096, 16384))  # fmt: skip
WIDE = ((4096, 2048), (16384, 3072), (32768, 5504), (4096, 8192), (8192, 8192), (16384, 8192), (32768, 8192),
        (4096, 14336), (8192, 14336), (16384, 14336), (4096, 28672), (8192, 28672), (2048, 53248))  # fmt: skip
Rounded = tuple[Tensor, Tensor, Tensor, Tensor]  # rows, their scales, the transposed copy, its scale


def finish(rows: Tensor, scale: Tensor) -> Rounded:
    whole = scale.amax()
    return rows, scale, turned_rows(rows, scale, whole), whole


def both_layouts(value: Tensor) -> Rounded:
    rows, scale = plain_float8_rows(value)
    whole = scale.amax()
    return rows, scale, float8_transposed(value, whole), whole


def plain_norm(x: Tensor, more: Tensor, weight: Tensor) -> Rounded:
    return both_layouts(torch.nn.functional.rms_norm(x + more, weight.shape, weight, EPS))


def plain_swiglu(gate_up: Tensor) -> Rounded:
    return both_layouts(exact_product(gate_up).to(gate_up.dtype))


def plain_gradients(grad: Tensor, gate_up: Tensor) -> Rounded:
    return both_layouts(exact_gradients(grad, gate_up).to(gate_up.dtype))


def exact_norm(x: Tensor, more: Tensor, weight: Tensor) -> Tensor:
    stream = (x + more).double()
    return stream * torch.rsqrt(stream.square().mean(-1, keepdim=True) + EPS) * weight.double()


def draw(*size: int) -> Tensor:
    return torch.randn(*size, device="cuda", dtype=torch.bfloat16)


def draw_norm(tokens: int, width: int) -> tuple[Tensor, ...]:
    return draw(tokens, width), draw(tokens, width), 1 + 0.1 * draw(width)


# name: inputs, fused, plain, the truth, shapes
OPS: dict[str, tuple[Callable[..., tuple[Tensor, ...]], Callable[..., Rounded], Callable[..., Rounded],
                     Callable[..., Tensor], tuple[tuple[int, int], ...]]] = {
    "rows": (lambda t, c: (draw(t, c),), lambda x: finish(*scaled_rows(x)), both_layouts,
             lambda x: x.double(), NARROW),
    "norm": (draw_norm, lambda x, m, w: finish(*float8_norm_rows(x, m, w, EPS)[:2]), plain_norm, exact_norm, NARROW),
    "swiglu": (lambda t, c: (draw(t, 2 * c),), lambda x: finish(*float8_swiglu_rows(x)), plain_swiglu,
               lambda x: exact_product(x.double()), WIDE),
    "swiglu gradients": (lambda t, c: (draw(t, c), draw(t, 2 * c)),
                         lambda g, x: finish(*float8_swiglu_gradient_rows(g, x)), plain_gradients,
                         lambda g, x: exact_gradients(g.double(), x.double()), WIDE),
}  # fmt: skip


def worst(found: Rounded, truth: Tensor) -> tuple[float, float]:
    """Largest error over what is promised, of rows and of the transposed copy."""
    rows, scale, turned, whole = found
    scale, whole = scale.double(), whole.double()
    off = (rows.double() * scale - truth).abs() / torch.maximum(truth.abs() / 16, scale * 2.0**-10)
    turned_off = (turned.double().t() * whole - truth).abs() / torch.maximum(truth.abs() / 16, whole * 2.0**-9)
    return float(off.max()), float(turned_off.max())


def timed(call: Callable[..., object], inputs: tuple[Tensor, ...]) -> float:
    flushed = torch.empty(256 << 20, dtype=torch.int8, device="cuda")
    for _ in range(3):
        call(*inputs)
    found = []
    for _ in range(20):
        for _ in range(4):
            flushed.zero_()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call(*inputs)
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end))
    return statistics.median(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=150.0, help="begin no shape after this")
    parser.add_argument("--few", action="store_true", help="two shapes of each operation")
    args = parser.parse_args()
    end_s, lines = time.perf_counter() + args.seconds, []
    torch.manual_seed(0)
    for name, (inputs_of, fused, plain, truth_of, shapes) in OPS.items():
        for tokens, width in ((64, 528), (132, 1040), *(shapes[5:10:4] if args.few else shapes)):
            if time.perf_counter() > end_s:
                break
            inputs = inputs_of(tokens, width)
            line = {"op": name, "tokens": tokens, "width": width}
            if tokens * width < 2**24:
                line["error"] = worst(fused(*inputs), truth_of(*inputs))
            if tokens > 1000:
                compiled = torch.compile(plain, dynamic=False)
                line |= {"fused_ms": timed(fused, inputs), "plain_ms": timed(compiled, inputs)}
                torch._dynamo.reset()
            print(json.dumps(line), flush=True)
            lines.append(line)
            args.out.write_text(json.dumps(lines, indent=1))


if __name__ == "__main__":
    main()
