"""How fast queues are simulated: 7,500 nodes, 30 days, 50,000 jobs under each policy, on one core.

Run: python benchmarks/queue_speed.py [POLICY…] [--write FOLDER]    prints a dated page; the limit is 60 s of one core.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import time
from pathlib import Path

import phalanx
from phalanx.api.queue_simulating import QueueSimulation

LIMIT_S = 60.0
CASES: dict[str, tuple[str, list[str]]] = {
    "fifo": ("fifo", []),
    "easy": ("easy", []),
    "easy, preemption": ("easy", ["preemption=true", "grace_s=120"]),
    "easy, required domains": ("easy", ["packing=required"]),
    "conservative, every 60 s": ("conservative", ["backfill_every_s=60"]),
}


def measure(policy: str, overrides: list[str]) -> tuple[float, QueueSimulation]:
    """CPU seconds, and what was found."""
    started = time.process_time()
    found = phalanx.simulate_queue("synthetic", "8xH100:7500", policy=policy, overrides=overrides)
    return time.process_time() - started, found


def page(names: list[str]) -> str:
    """The dated page."""
    lines = [
        f"# Speed of simulated queues, {datetime.date.today():%Y-%m-%d}",
        "",
        "`python benchmarks/queue_speed.py`: 50,000 synthetic jobs in 30 days on 7,500 nodes, load 0.85, seed 0, "
        f"failures on. CPU seconds of one core, Python {platform.python_version()}, the jobs' making included; load "
        f"average of the machine {os.getloadavg()[0]:.0f}. The limit is {LIMIT_S:g} s.",
        "",
        "| policy | seconds | limit / seconds | busy | median wait of 513 nodes and more | 90 % |",
        "|---|---|---|---|---|---|",
    ]
    for name in names:
        seconds, found = measure(*CASES[name])
        busy = found.report.first_to_last_submission.busy
        waiting = found.report.by_size[-1].waiting
        hours = [f"{value / 3600:.1f} h" for value in (waiting.median_s, waiting.p90_s)] if waiting else ["-", "-"]
        lines.append(f"| {name} | {seconds:.1f} | {LIMIT_S / seconds:.1f} | {busy:.1%} | {' | '.join(hours)} |")
        print(lines[-1], flush=True)
    return "\n".join(lines) + "\n"


def main() -> None:
    """Print the page, and keep it where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("policy", nargs="*", help=", ".join(CASES))
    parser.add_argument("--write", metavar="FOLDER", type=Path)
    args = parser.parse_args()
    text = page(args.policy or list(CASES))
    print(text, end="")
    if args.write:
        (args.write / f"{datetime.date.today():%Y-%m-%d}-queue-speed.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
