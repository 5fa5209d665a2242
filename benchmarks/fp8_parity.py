"""fp8 against bf16 over 500 steps of real text: pairs of `phalanx train`, one pair for each seed, and their parity.

    PYTHONPATH=src python benchmarks/fp8_parity.py [--seeds 1,2,3] [--data FOLDER] [--out FOLDER] [--at-once 2]

Both runs of a pair see the same tokens in the same order from the same first weights. Held-out loss after the last step
and the mean of the last 50 steps are compared; then `phalanx check RUN --parity` judges each pair.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

import phalanx

JOB = Path(__file__).parent / "data" / "fp8-parity.toml"
PHALANX = (sys.executable, "-m", "phalanx")


def train(args: argparse.Namespace, precision: str, seed: int) -> dict[str, Any]:
    """One run, and what it came to."""
    name = f"{precision}-{seed}"
    changes = [f"precision.compute={precision.removesuffix('-head')}", f"data.seed={seed}", *args.set]
    changes += ["precision.fp8_head=true"] if precision.endswith("-head") else []
    changes += [f"data.path={args.data}", "data.corpus="] if args.data else []
    call = [*PHALANX, "train", str(args.job), "--runs", str(args.out), "--name", name]
    for one in changes:
        call += ["--set", one]
    began = time.monotonic()
    with (args.out / f"{name}.log").open("w") as log:
        done = subprocess.run(call, stdout=log, stderr=log)
    row: dict[str, Any] = {"precision": precision, "seed": seed, "exit": done.returncode}
    row["seconds"] = round(time.monotonic() - began, 1)
    found = sorted(one for one in args.out.glob(f"{name}-*") if one.is_dir())
    if done.returncode or not found:
        return row
    row["folder"] = str(found[-1])
    events = [json.loads(line) for line in phalanx.run(found[-1]).events(0).read_text().splitlines()]
    steps = [one for one in events if one.get("event") == "step"]
    held_out = [one["loss"] for one in events if one.get("event") == "evaluate"]
    row |= {"steps": len(steps), "last_50": mean(one["loss"] for one in steps[-50:]), "held_out": held_out[-1]}
    row["step_ms"] = 1e3 * median(one["duration_s"] for one in steps[10:])
    return row


def main() -> None:
    """Train all, print a table, judge every pair."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--data", default="", help="a folder of phalanx data build; without it the job's corpus")
    parser.add_argument("--out", type=Path, default=Path("parity-runs"))
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument("--job", type=Path, default=JOB)
    parser.add_argument("--formats", default="bf16,fp8", help="two of bf16, fp8 and fp8-head")
    parser.add_argument("--set", action="append", default=[])
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    plain, narrow = args.formats.split(",")
    asked = [(precision, int(seed)) for seed in args.seeds.split(",") for precision in (plain, narrow)]
    with ThreadPoolExecutor(args.at_once) as pool:
        rows = list(pool.map(lambda one: train(args, *one), asked))
    (args.out / "rows.json").write_text(json.dumps(rows, indent=1))
    found: dict[int, dict[str, dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(row["seed"], {})[row["precision"]] = row
    for key in ("held_out", "last_50"):
        apart = []
        for seed, pair in found.items():
            if all(key in one for one in pair.values()):
                apart.append(pair[narrow][key] - pair[plain][key])
                print(f"{key}, seed {seed}: {pair[plain][key]:.4f} {pair[narrow][key]:.4f} {apart[-1]:+.4f}")
        if len(apart) > 1:
            print(f"{key}, mean of {len(apart)} pairs {mean(apart):+.4f} ± {stdev(apart) / len(apart) ** 0.5:.4f}")
    for seed, pair in found.items():
        folders = [pair[one].get("folder", "") for one in (plain, narrow)]
        if all(folders):
            call = [*PHALANX, "check", folders[1], "--parity", *folders, "--select", "PRC003"]
            done = subprocess.run(call, capture_output=True, text=True)
            print(f"seed {seed}: check --parity exits {done.returncode}\n{done.stdout}{done.stderr}")


if __name__ == "__main__":
    main()
