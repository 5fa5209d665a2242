"""The plan held against the traced step on a grid of layouts: python benchmarks/trace_against_plan.py [NAME ...]

Prints a line per layout (communication, FLOPs, memory: traced over planned) and, with -v, every category.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace

from phalanx.hardware.cluster import resolve_cluster
from phalanx.job.load import load
from phalanx.plan.layout import Layout
from phalanx.plan.request import request_from_job
from phalanx.train.tracing.trace_report import against_plan, render_against
from phalanx.train.tracing.traced_ranks import TracedStep, trace_ranks

ONE = Layout(
    data=1, shard=1, tensor=1, context=1, pipeline=1, virtual_pipeline=1, expert=1, zero=0, sequence_parallel=False,
    micro_batch=1, accumulation=2, recompute="none", precision="bf16", schedule="1f1b", offload="none",
    compression="none",
)  # fmt: skip
SP = {"sequence_parallel": True}
DP8 = {"data": 8, "shard": 8}
PP4 = {"pipeline": 4, "data": 2, "accumulation": 8}
SMALL = {
    "replicated": {"data": 8},
    "zero1": DP8 | {"zero": 1},
    "zero2": DP8 | {"zero": 2},
    "zero3": DP8 | {"zero": 3},
    "zero3 full": DP8 | {"zero": 3, "recompute": "full"},
    "zero3 selective": DP8 | {"zero": 3, "recompute": "selective"},
    "zero3 micro 2": DP8 | {"zero": 3, "micro_batch": 2},
    "hsdp": {"data": 16, "shard": 8, "zero": 3},
    "hsdp zero2": {"data": 16, "shard": 8, "zero": 2},
    "tp4": {"tensor": 4, "data": 2},
    "tp4 sp": {"tensor": 4, "data": 2} | SP,
    "tp8 sp full": {"tensor": 8, "data": 2, "recompute": "full"} | SP,
    "tp8 sp zero1": {"tensor": 8, "zero": 1} | DP8 | SP,
    "tp4 sp zero3": {"tensor": 4, "zero": 3} | DP8 | SP,
    "cp4 zero3": {"context": 4, "data": 2, "shard": 8, "zero": 3},
    "cp2 tp2 sp zero1": {"context": 2, "tensor": 2, "data": 2, "shard": 4, "zero": 1} | SP,
    "pp4": PP4,
    "pp4 zero1": PP4 | {"shard": 2, "zero": 1},
    "pp4 zero3": PP4 | {"shard": 2, "zero": 3},
    "pp4 gpipe full": PP4 | {"shard": 2, "zero": 1, "schedule": "gpipe", "recompute": "full"},
    "pp4 interleaved tp2": PP4 | SP | {
        "virtual_pipeline": 2, "schedule": "interleaved", "tensor": 2, "shard": 2, "zero": 1
    },
    "pp2 zero2 tp2": {"pipeline": 2, "data": 2, "shard": 2, "zero": 2, "tensor": 2, "accumulation": 4} | SP,
}  # fmt: skip
LARGE = {
    "70b tp8 zero3": {"tensor": 8, "data": 8, "shard": 8, "zero": 3} | SP,
}


def main(names: list[str], *, verbose: bool) -> None:
    """Every layout of the grid, or those named."""
    print(f"{'layout':<22}{'communication':>15}{'FLOPs':>9}{'memory':>9}{'seconds':>9}")
    for model, sequence, grid in (("llama-3-8b", 4096, SMALL), ("llama-3-70b", 4096, LARGE)):
        for name, changes in grid.items():
            if not names or name in names:
                _one(model, sequence, name, replace(ONE, **changes), verbose=verbose)


def _one(model: str, sequence: int, name: str, layout: Layout, *, verbose: bool) -> None:
    began_s = time.perf_counter()
    sequences = layout.data * layout.micro_batch * layout.accumulation
    wishes = [f"model.preset={model}", f"data.sequence={sequence}", f"batch.global_sequences={sequences}"]
    job = load("examples/llama-3-8b-64xH100.toml", overrides=wishes).job
    request, _ = request_from_job(job, resolve_cluster(f"8xH100:{max(layout.devices // 8, 1)}"))
    inside = layout.devices // layout.pipeline
    step = TracedStep.of(job, layout)
    traces = [trace_ranks(step, [place * inside])[0] for place in range(layout.pipeline)]
    lines = against_plan(request, layout, traces)
    worst = {line.kind: line.difference for line in lines if line.limit}
    off = "" if all(line.agrees for line in lines) else "  <- more than its limit"
    print(
        f"{name:<22}{worst.get('communication', 0):>+15.1%}{worst['FLOPs']:>+9.2%}{worst['memory']:>+9.1%}"
        f"{time.perf_counter() - began_s:>9.0f}{off}",
        flush=True,
    )
    if verbose:
        print(render_against(lines), flush=True)


if __name__ == "__main__":
    main([name for name in sys.argv[1:] if name != "-v"], verbose="-v" in sys.argv)
