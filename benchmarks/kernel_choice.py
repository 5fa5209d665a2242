"""What the selector takes at the catalogue's shapes, and whether it is slower than PyTorch's own when timed once more.

    PYTHONPATH=src python benchmarks/kernel_choice.py [--op OP] [--out FILE.json]

Each shape is chosen with an empty cache; then the chosen variant and the built-in are timed again, in turn, three times
each. What counts is the second timing, of which the choice knew nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import torch

from phalanx.hardware.kernel_choices import kernel_cache_folder
from phalanx.train.kernels.evolved_norm import find_winner, with_winner
from phalanx.train.kernels.kernel_op import KernelOp, Shape
from phalanx.train.kernels.operations import load_all
from phalanx.train.kernels.selector import BUILTIN, choose_variant, time_in_turn, timed_call

OPS = (
    "rms-norm", "swiglu", "rope", "linear-cross-entropy", "adamw", "float8-rows", "float8-norm", "float8-swiglu",
    "float8-swiglu-gradients", "int8-blocks", "int4-blocks", "expert-gather",
    "expert-combine",
)  # fmt: skip


def measure_shape(op: KernelOp, shape: Shape, device: torch.device, folder: Path) -> dict[str, Any]:
    """The choice, and both timed again."""
    dtype = op.dtypes[0]
    if op.name == "rms-norm" and (source := find_winner(op.name, shape["width"], dtype, device, _cache())):
        op = with_winner(op, source)
    choice = choose_variant(op, shape, dtype, device, folder=folder)
    again: dict[str, list[float]] = {}
    inputs = op.make_inputs(shape, dtype, device, 1)
    calls = {name: timed_call(op, name, inputs) for name in dict.fromkeys((BUILTIN, choice.variant))}
    for _ in range(1 if choice.variant == BUILTIN else 3):
        for name, timing in time_in_turn(calls, device, limit_s=0.3).items():
            again.setdefault(name, []).append(timing.median_ms)
    torch.cuda.empty_cache()
    found = {name: median(times) for name, times in again.items()}
    return {
        "op": op.name,
        "shape": dict(shape),
        "dtype": str(dtype),
        "chosen": choice.variant,
        "first_ms": dict(choice.times_ms),
        "again_ms": found,
        "ratio": found[choice.variant] / found[BUILTIN],
    }


def _cache() -> Path | None:
    return kernel_cache_folder(os.environ)


def main() -> None:
    """A line for each shape, then how many were slower."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--op", action="append", default=[])
    parser.add_argument("--out", default="")
    args = parser.parse_args()
    torch._dynamo.config.recompile_limit = 256  # compiled built-ins are compiled for every shape
    device, ops, rows = torch.device("cuda", 0), load_all(), []
    with tempfile.TemporaryDirectory() as folder:
        for name in args.op or OPS:
            for shape in ops[name].shapes:
                row = measure_shape(ops[name], shape, device, Path(folder))
                rows.append(row)
                sizes = " × ".join(f"{size:,}" for size in shape.values())
                times = ", ".join(f"{one} {took:.3f}" for one, took in row["again_ms"].items())
                print(f"{name} {sizes}: {row['chosen']}, {times} ms, {row['ratio']:.3f}", flush=True)
                if args.out:
                    Path(args.out).write_text(json.dumps(rows, indent=1))
    for name in args.op or OPS:
        own = [row["ratio"] for row in rows if row["op"] == name]
        slower = sum(one > 1.0 for one in own)
        print(f"{name}: {slower} of {len(own)} shapes slower than the built-in, largest ratio {max(own):.3f}")


if __name__ == "__main__":
    main()
