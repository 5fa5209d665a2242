"""Every operation of the kernel library over its shapes: PyTorch's own, compiled plain operations, and our kernels.

    python benchmarks/kernels.py [--ops rms-norm,adamw] [--json FILE] [--no-compile]

Forward and backward (AdamW: one step in place), bf16 (AdamW: fp32), median with a cold L2 cache. "of light": the least
bytes over 4.8 TB/s, or the FLOPs over 989 TFLOP/s where those take longer, over the time. The last column is what the
selector takes.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch

from phalanx.train.kernels.kernel_op import KernelOp, Shape
from phalanx.train.kernels.operations import load_all
from phalanx.train.kernels.selector import fastest_variant, is_right, time_in_turn, timed_call

MEMORY_BYTES_S, PEAK_FLOPS = 4.8e12, 989e12


def measure_shape(op: KernelOp, shape: Shape, dtype: torch.dtype, device: torch.device, *, compiled: bool) -> dict:
    inputs = op.make_inputs(shape, dtype, device, 0)
    timings, extra = {}, {}
    names = [*op.variants, *(["compiled"] if compiled and not op.timed_in_place else [])]
    for name in names:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        try:
            call = timed_call(op, name, inputs) if name != "compiled" else compiled_call(op, inputs)
            torch.cuda.reset_peak_memory_stats()
            call()
            torch.cuda.synchronize()
            extra[name] = (torch.cuda.max_memory_allocated() - before) / 2**20
            timings |= time_in_turn({name: call}, device, limit_s=0.4)
        except torch.OutOfMemoryError:
            print(f"  {name} {dict(shape)}: out of memory", flush=True)
        call = None
    work = op.count_work(shape, dtype)
    light_ms = max((work.read_bytes + work.written_bytes) / MEMORY_BYTES_S, work.flops / PEAK_FLOPS) * 1e3
    ours = {name: took for name, took in timings.items() if name != "compiled"}
    times = {name: took.median_ms for name, took in timings.items()}
    return {
        "op": op.name, "shape": dict(shape), "dtype": str(dtype), "times_ms": times, "extra_mib": extra,
        "light_ms": light_ms, "taken": fastest_variant(ours),
    }  # fmt: skip


def compiled_call(op: KernelOp, inputs):
    torch._dynamo.reset()
    run = torch.compile(op.plain)
    if not op.gradients:
        return lambda: run(*inputs)
    given = [one.detach().requires_grad_(place in op.gradients) for place, one in enumerate(inputs)]
    wanted = [given[place] for place in op.gradients]
    with torch.no_grad():
        grads = [torch.randn_like(one) if one.ndim else torch.ones_like(one) for one in op.variants["builtin"](*inputs)]
    return lambda: torch.autograd.grad(run(*given), wanted, grads)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", default="")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--no-compile", action="store_true")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("this measures kernels on a GPU, and torch sees none")
    device, rows = torch.device("cuda"), []
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    for name, op in load_all().items():
        if args.ops and name not in args.ops.split(","):
            continue
        dtype = op.dtypes[0]
        right = {variant: is_right(op, variant, dtype, device) for variant in op.variants}
        print(f"\n{name}: {'right: ' + ', '.join(v for v, ok in right.items() if ok)}"
              + "".join(f"; WRONG: {v}" for v, ok in right.items() if not ok), flush=True)  # fmt: skip
        slower = 0
        for shape in op.shapes:
            row = measure_shape(op, shape, dtype, device, compiled=not args.no_compile)
            rows.append(row)
            cells = [
                f"{variant} {took:8.3f} ms {row['light_ms'] / took:5.1%} {row['extra_mib'][variant]:7.0f} MiB"
                for variant, took in row["times_ms"].items()
            ]
            sizes = "×".join(str(size) for size in shape.values())
            print(f"  {sizes:22} {' | '.join(cells)} | {row['taken']}", flush=True)
            slower += row["times_ms"][row["taken"]] > row["times_ms"].get("builtin", 1e9)
        print(f"  slower than PyTorch's own after the choice: {slower} of {len(op.shapes)} shapes")
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
