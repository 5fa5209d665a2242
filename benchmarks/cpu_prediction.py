"""Eight small jobs on this machine's cores: the step that is predicted beside the one that is measured.

    python benchmarks/cpu_prediction.py [--steps 24] [--only NAME ...]

The first `phalanx plan` measures the machine (about 20 s, kept) and every plan times its own layout for a few seconds;
then the job is trained by the command a user gives. Data: `offline-english`, as in `make run`. Prints a Markdown
table; the measured step is the median of the report, as `phalanx train` prints it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
FIRST = ROOT / "examples/first-run.toml"
JOBS: dict[str, list[str]] = {  # what --set changes of examples/first-run.toml
    "first run: PP2·ZeRO-2 over 2, 4 ranks": [],
    "one rank, all threads, 256 wide": [
        "cluster.spec=local-cpu:1", "parallel.pipeline=1", "parallel.shard=1", "parallel.zero=0", "model.hidden=256",
        "model.head_dim=64", "model.ffn=768", "batch.micro=4",
    ],
    "DP2, 6 layers, sequence 512": [
        "cluster.spec=local-cpu:2", "parallel.pipeline=1", "parallel.shard=1", "parallel.zero=0", "parallel.data=2",
        "model.layers=6", "data.sequence=512",
    ],
    "TP2, 192 wide": [
        "cluster.spec=local-cpu:2", "parallel.pipeline=1", "parallel.shard=1", "parallel.zero=0", "parallel.tensor=2",
        "model.hidden=192", "model.head_dim=48", "model.ffn=512", "batch.micro=4",
    ],
    "ZeRO-3 over 4 ranks, recompute": [
        "cluster.spec=local-cpu:4", "parallel.pipeline=1", "parallel.shard=4", "parallel.zero=3",
        'parallel.recompute="full"',
    ],
    "CP2 ring, sequence 1024": [
        "cluster.spec=local-cpu:2", "parallel.pipeline=1", "parallel.shard=2", "parallel.zero=1", "parallel.context=2",
        "data.sequence=1024", "batch.micro=1",
    ],
    "PP2 interleaved with TP2, 8 layers": [
        "cluster.spec=local-cpu:4", "parallel.shard=1", "parallel.zero=0", "parallel.tensor=2", "model.layers=8",
        "parallel.virtual_pipeline=2", 'parallel.schedule="interleaved"', "model.hidden=64", "model.head_dim=16",
    ],
    "planned freely, 2 ranks, vocabulary 512, 320 wide": [
        "cluster.spec=local-cpu:2", 'parallel.pipeline="auto"', 'parallel.virtual_pipeline="auto"',
        'parallel.schedule="auto"', 'parallel.shard="auto"', 'parallel.zero="auto"', "model.hidden=320",
        "model.heads=10", 'batch.micro="auto"',
    ],
}  # fmt: skip


def call(*words: str) -> str:
    """What a command prints; its progress goes to our stderr."""
    done = subprocess.run([sys.executable, "-m", "phalanx", *words], stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout


def main() -> None:
    """Plan, train, compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--only", nargs="+", default=[])
    args = parser.parse_args()
    load = "".join(f" {one:.2f}" for one in os.getloadavg())
    print(f"{os.cpu_count()} cores, load{load}\n")
    print("| job | predicted | 80 % interval | measured | error | |\n|---|---|---|---|---|---|")
    for name, sets in JOBS.items():
        if args.only and not any(part in name for part in args.only):
            continue
        words = [word for one in sets for word in ("--set", one)]
        found = json.loads(call("plan", str(FIRST), *words, "--json"))["prediction"]
        with tempfile.TemporaryDirectory() as folder:
            report = json.loads(
                call("train", str(FIRST), *words, "--steps", str(args.steps), "--runs", folder, "--no-check", "--json",
                     "--set", "train.evaluate_every=0")
            )  # fmt: skip
        step_s = report["step_s"]["measured"]
        low, high = found["step_s_low"], found["step_s_high"]
        where = "inside" if low <= step_s <= high else "outside"
        print(
            f"| {name} | {found['step_s'] * 1e3:.0f} ms | {low * 1e3:.0f} to {high * 1e3:.0f} ms "
            f"| {step_s * 1e3:.0f} ms | {found['step_s'] / step_s - 1:+.0%} | {where} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
