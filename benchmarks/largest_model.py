"""The largest Llama that trains on one GPU: layers of 4,096 × 14,336 until the plan says no, then 20 real steps of it.

    PYTHONPATH=src python benchmarks/largest_model.py find                       what the plan says, without a GPU
    PYTHONPATH=src python benchmarks/largest_model.py train KIND --layers N      20 steps; one JSON line

KIND is `none` (fp32 state on the device), `int8` (8-bit state), `bf16-int8` (and no fp32 weights), or `offload`
(optimizer in host memory, of which there are HOST_GIB). 8 micro-batches of 1 × 2,048 tokens, full recompute,
vocabulary 32,000.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpu_profile import StepLog, draw_on_device, run_of, write_dataset

from phalanx.errors import UserError, mistake
from phalanx.hardware.cluster import resolve_cluster
from phalanx.io.toml import to_toml
from phalanx.job.load import load
from phalanx.plan.make import make_plan
from phalanx.plan.plan import Plan
from phalanx.train.engine import Engine
from phalanx.train.rank_control import RankControl
from phalanx.train.rank_training import train_rank

KINDS: dict[str, dict[str, dict[str, Any]]] = {
    "none": {"parallel": {"offload": "none"}},
    "int8": {"parallel": {"offload": "none"}, "precision": {"optimizer_state": "int8"}},
    "bf16-int8": {"parallel": {"offload": "none"}, "precision": {"optimizer_state": "int8", "master_weights": False}},
    "offload": {"parallel": {"offload": "optimizer"}},
}


class Enough(Exception):
    """All steps were taken."""


HOST_GIB = 128.0  # of the machine with one H200 that this was run on


def plan_of(kind: str, layers: int, dataset: str) -> Plan:
    """The job of so many layers, planned; raises UserError where it does not fit."""
    changes = KINDS[kind]
    job = {
        "spec": "2026.1",
        "name": "largest",
        "model": {"name": "llama", "layers": layers, "hidden": 4096, "heads": 32, "kv_heads": 8, "head_dim": 128,
                  "ffn": 14336, "vocab": 32000},
        "data": {"path": dataset, "sequence": 2048, "tokens": 16384 * 1000},
        "batch": {"global_tokens": 16384, "micro": 1},
        "parallel": {"recompute": "full", **changes["parallel"]},
        "precision": changes.get("precision", {}),
        "train": {"evaluate_every": 0, "evaluate_sequences": 0, "samples": 0},
        "cluster": {"spec": "1xH200"},
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "job.toml"
        path.write_text(to_toml(job), encoding="utf-8")
        cluster = replace(resolve_cluster("1xH200"), host_memory_bytes=HOST_GIB * 2**30)
        plan = make_plan(load(path), cluster)
    if any("in host memory" in one for one in plan.warnings):  # a layout chosen by hand is planned all the same
        raise mistake("offload", "the host's memory does not hold it")
    return plan


def describe(kind: str, layers: int, plan: Plan) -> dict[str, Any]:
    """What the plan predicts."""
    each = 4096 * 4096 * 2 + 4096 * 1024 * 2 + 3 * 4096 * 14336
    return {
        "kind": kind, "layers": layers, "parameters": layers * each + 2 * 32000 * 4096,
        "predicted_gb": plan.memory.total_bytes / 1e9,
        "predicted_s": plan.prediction.step_s, "low_s": plan.prediction.step_s_low,
        "high_s": plan.prediction.step_s_high,
    }  # fmt: skip


def find_largest(kind: str, dataset: str) -> dict[str, Any]:
    """By bisection; memory grows with every layer."""
    low, high, best = 1, 400, None
    while low < high:
        middle = (low + high + 1) // 2
        try:
            best, low = plan_of(kind, middle, dataset), middle
        except UserError:
            high = middle - 1
    assert best is not None
    return describe(kind, low, best)


def train(kind: str, layers: int, steps: int, seconds: float) -> dict[str, Any]:
    """So many steps by `train_rank`, the function that `phalanx train` runs."""
    device, log = torch.device("cuda", 0), StepLog()
    Engine.initialise = draw_on_device  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as folder:
        dataset = write_dataset(Path(folder) / "dataset")
        plan = plan_of(kind, layers, str(dataset))
        found = describe(kind, layers, plan)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl", store=dist.FileStore(f"{folder}/store", 1), rank=0, world_size=1, device_id=device
        )
        end_s = time.perf_counter() + seconds

        def after_step(step: int, phase: object) -> None:
            if log.steps:
                print(f"step {len(log.steps)}: {log.steps[-1]['duration_s']:.2f} s", flush=True)
            if len(log.steps) >= steps or time.perf_counter() > end_s:
                raise Enough

        run, plan = run_of(plan, dataset, Path(folder))
        began_s = time.perf_counter()
        try:
            train_rank(run, plan, device, log, RankControl(stop=lambda: False, progress=after_step))  # type: ignore[arg-type]
        except Enough:
            found["status"] = "ok"
        except torch.OutOfMemoryError as error:
            found["status"] = f"out of memory: {error}"[:300]
        times = [one["duration_s"] for one in log.steps[3:]]
        free, total = torch.cuda.mem_get_info()
        return found | {
            "steps": len(log.steps), "step_s": statistics.median(times) if times else None,
            "losses": [round(one["loss"], 3) for one in log.steps[:: max(1, len(log.steps) - 1)]],
            "peak_gb": torch.cuda.max_memory_allocated() / 1e9, "device_gb": (total - free) / 1e9,
            "whole_s": time.perf_counter() - began_s,
        }  # fmt: skip


def main() -> None:
    """One of both."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("action", choices=("find", "train"))
    parser.add_argument("kind", nargs="?", choices=tuple(KINDS))
    parser.add_argument("--layers", type=int)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=100.0, help="begin no step after this")
    args = parser.parse_args()
    if args.action == "find":
        with tempfile.TemporaryDirectory() as folder:
            dataset = write_dataset(Path(folder) / "dataset")
            for kind in [args.kind] if args.kind else KINDS:
                print(json.dumps(find_largest(kind, str(dataset))), flush=True)
        return
    print(json.dumps(train(args.kind, args.layers, args.steps, args.seconds)), flush=True)
    os._exit(0)  # threads of the run that was left in the middle would be waited for


if __name__ == "__main__":
    main()
