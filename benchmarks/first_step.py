"""Seconds from `phalanx train` to the end of the first step, cold and with warm caches, on one GPU.

    PYTHONPATH=src python benchmarks/first_step.py [--precision bf16 fp8] [--out FILE.json] [--shape 1b]

Every run is a process of its own on tokens drawn by Zipf's law, three steps long; the first of each precision finds
empty caches (compiled code, kernels, choices, Python's bytecode), the second what the first left. What it took is read
from the run's own report, and the wall clock of the whole command stands beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from gpu_profile import SHAPES, write_dataset

import phalanx
from phalanx.io.toml import to_toml


def events_after(path: Path, launched: float) -> list[tuple[str, float]]:
    """What rank 0 told first, and how long after the launch."""
    events = [json.loads(line) for line in path.read_text().splitlines()[:12]]
    return [(one["event"], round(one["t"] - launched, 1)) for one in events]


def main() -> None:
    """Train twice for each precision, print what the runs say."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--precision", nargs="+", default=["bf16", "fp8"])
    parser.add_argument("--shape", default="1b")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=200.0, help="begin no run after this")
    args = parser.parse_args()
    end_s, rows = time.monotonic() + args.seconds, []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # Compiled Python too: an installed package has it beside its sources, a copied tree does not.
        caches = {"XDG_CACHE_HOME": f"{name}/cache", "TORCHINDUCTOR_CACHE_DIR": f"{name}/inductor",
                  "TRITON_CACHE_DIR": f"{name}/triton", "PYTHONPYCACHEPREFIX": f"{name}/bytecode"}  # fmt: skip
        job = {
            "spec": "2026.1",
            "name": "first-step",
            "model": {"name": args.shape, "vocab": 32000, **SHAPES[args.shape]},
            "data": {"path": str(write_dataset(folder / "data")), "sequence": 2048, "tokens": 65536 * 1000},
            "batch": {"global_tokens": 65536, "micro": 16},
            "parallel": {"recompute": "none"},
            "train": {"evaluate_every": 0, "evaluate_sequences": 0, "samples": 0},
            "cluster": {"spec": "local"},
        }
        (folder / "job.toml").write_text(to_toml(job), encoding="utf-8")
        for precision in args.precision:
            for state in ("cold", "warm"):
                if time.monotonic() > end_s:
                    continue
                call = [sys.executable, "-m", "phalanx", "train", f"{name}/job.toml", "--steps", "3", "--runs",
                        f"{name}/{precision}-{state}", "--set", f"precision.compute={precision}"]  # fmt: skip
                began, launched = time.monotonic(), time.time()
                done = subprocess.run(call, capture_output=True, text=True, env={**os.environ, **caches}, check=False)
                row = {"precision": precision, "caches": state, "exit": done.returncode,
                       "command_s": round(time.monotonic() - began, 1)}  # fmt: skip
                found = sorted((folder / f"{precision}-{state}").glob("*/"))
                if done.returncode == 0 and found:
                    summary = phalanx.run(found[-1]).summary()
                    row["first_step_s"] = summary.first_step_s
                    row["events_s"] = events_after(phalanx.run(found[-1]).events(0), launched)
                shutil.rmtree(folder / f"{precision}-{state}", ignore_errors=True)  # checkpoints of 14 GB
                print(json.dumps(row), flush=True)
                lines = (done.stdout + done.stderr).splitlines()
                print("\n".join(one for one in lines if "fp8-layer" in one or "rror" in one or "first step" in one))
                if done.returncode:
                    print("\n".join(lines[-25:]))
                rows.append(row)
    if args.out:
        args.out.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
