"""How fast months are simulated: failures per second on one core, for runs of growing clusters.

Run: python benchmarks/months_speed.py [--write FOLDER]    prints a dated markdown page; writes it with --write.
"""

from __future__ import annotations

import argparse
import datetime
import platform
import time
from dataclasses import replace
from pathlib import Path

from phalanx.job.load import load
from phalanx.plan.make import make_plan
from phalanx.sim.months.causes import NetworkCauses
from phalanx.sim.months.policy import MonthsPolicy, months_policy
from phalanx.sim.months.simulate_run import simulate_runs
from phalanx.units import DAY_S

LLAMA = Path(__file__).parent.parent / "examples" / "llama-3.1-405b-16384xH100.toml"
FAILURES = 10_000  # the yardstick: so many in seconds
REPEATS = 3


def cases() -> dict[str, MonthsPolicy]:
    """Llama 3.1 405B's plan, at its own failure rate and at that of eight times the hosts."""
    made = make_plan(load(LLAMA))
    usual, edge = months_policy(made), months_policy(made, network=NetworkCauses(edge=True))
    return {
        "16,384 GPUs": usual,
        "131,072 GPUs": replace(usual, mtbf_s=usual.mtbf_s / 8, spares=81),
        "131,072 GPUs, edge recovery": replace(edge, mtbf_s=edge.mtbf_s / 8, spares=81),
        "131,072 GPUs, Weibull 0.7, no spares": replace(usual, mtbf_s=usual.mtbf_s / 8, spares=0, shape=0.7),
    }


def measure(made: MonthsPolicy) -> tuple[int, int, float]:
    """Failures, events and CPU seconds of a run long enough for 10,000 failures; the best of three."""
    days = FAILURES * made.mtbf_s / DAY_S
    best = (0, 0, float("inf"))
    for _ in range(REPEATS):
        started = time.process_time()
        (one,) = simulate_runs(made, days=days, count=1, seed=0)
        best = min(best, (one.failures, one.events, time.process_time() - started), key=lambda found: found[2])
    return best


def cpu_name() -> str:
    """As the kernel calls it."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine())


def page() -> str:
    """The dated page."""
    lines = [
        f"# Speed of simulated months, {datetime.date.today():%Y-%m-%d}",
        "",
        f"`python benchmarks/months_speed.py`, one core of {cpu_name()}, Python {platform.python_version()}; "
        f"CPU seconds, best of {REPEATS}.",
        "",
        "| run | failures | events | seconds | failures/s |",
        "|---|---|---|---|---|",
    ]
    for name, made in cases().items():
        failures, events, seconds = measure(made)
        lines.append(f"| {name} | {failures:,} | {events:,} | {seconds:.2f} | {failures / seconds:,.0f} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Print the page, and keep it where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", metavar="FOLDER", type=Path)
    args = parser.parse_args()
    text = page()
    print(text, end="")
    if args.write:
        (args.write / f"{datetime.date.today():%Y-%m-%d}-months-speed.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
