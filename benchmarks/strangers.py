"""20,000 connections of strangers to the ports on which each rank of a real run listens: what a rank pays for them.

python benchmarks/strangers.py [--count 20000] [--steps 120] [--job examples/drill.toml] [--for-s 60]

A run trains in a process of its own. When every rank has taken a few steps, strangers come to the ports of one rank
after the other, in turn, say nothing and stay until their turn to be closed comes. Printed: descriptors of every rank
before and with them, and whether the losses are those of a run that nobody came to.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from phalanx.record.events import read_events
from phalanx.record.run import Run, open_run
from phalanx.train.drill.machine_faults import listening_ports, send_strangers

FIRST_STEPS = 3  # before strangers come
PATIENCE_S = 300.0


def start_run(args: argparse.Namespace, folder: Path) -> subprocess.Popen[bytes]:
    """`phalanx train`, as a person types it."""
    words = ["train", args.job, "--steps", str(args.steps), "--runs", str(folder), "--no-check"]
    return subprocess.Popen(
        [sys.executable, "-m", "phalanx", *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )


def wait_for_run(folder: Path) -> Run:
    """The run, once all its ranks have taken some steps."""
    until_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < until_s:
        with suppress(Exception):
            run = open_run(str(next(folder.iterdir())))
            taken = [sum(one["event"] == "step" for one in read_events(path)[0]) for path in run.event_files()]
            if taken and min(taken) >= FIRST_STEPS:
                return run
        time.sleep(0.2)
    raise TimeoutError("no step was taken")


def rank_processes(run: Run) -> dict[int, int]:
    """Process of every rank, as the newest membership has it."""
    epochs = [event for event in read_events(run.supervisor)[0] if event["event"] == "epoch"]
    return {int(one["rank"]): int(one["pid"]) for one in epochs[-1]["members"]}


def descriptors(pid: int) -> int:
    """Open files and sockets of a process; 0 when it is gone."""
    try:
        return len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return 0


def losses(run: Run) -> list[float]:
    """Of every step."""
    return [event["loss"] for event in read_events(run.events(0))[0] if event["event"] == "step"]


def main() -> int:
    """Print a row for each rank, then the verdict."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--job", default="examples/drill.toml")
    parser.add_argument("--for-s", type=float, default=60.0, help="at most, for each rank")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        with start_run(args, root / "attacked") as process:
            run = wait_for_run(root / "attacked")
            print("| rank | ports | connections tried | seconds | descriptors before | most | after |")
            print("|---|---|---|---|---|---|---|")
            ranks = rank_processes(run)
            for rank, pid in sorted(ranks.items()):
                ports, before = listening_ports([pid]), descriptors(pid)
                most, tried, began_s = before, 0, time.monotonic()
                for _ in range(20):  # one twentieth after the other, to look in between
                    tried += send_strangers(ports, count=args.count // 20, for_s=args.for_s / 20)
                    most = max(most, descriptors(pid))
                took_s = time.monotonic() - began_s
                row = (rank, len(ports), f"{tried:,}", f"{took_s:.1f}", before, most, descriptors(pid))
                print("| " + " | ".join(map(str, row)) + " |", flush=True)
            during = len(losses(run))
            same = rank_processes(run) == ranks
            code = process.wait()
        with start_run(args, root / "alone") as process:
            process.wait()
        alone = open_run(str(next((root / "alone").iterdir())))
        equal = losses(run) == losses(alone)
        print(
            f"\n{during} of {args.steps} steps were done when the last stranger came; exit code {code}; "
            f"{'the same processes' if same else 'PROCESSES WERE LOST'}; "
            f"{len(losses(run))} losses {'equal' if equal else 'DIFFER from'} those of a run that nobody came to"
        )
    return 0 if same and equal and not code else 1


if __name__ == "__main__":
    sys.exit(main())
