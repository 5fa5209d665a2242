"""How fast the planner searches: layouts per second on one core, and the two searches that have a floor.

Run: python benchmarks/search_speed.py [--write FOLDER]    prints a dated markdown page; writes it with --write.
"""

from __future__ import annotations

import argparse
import datetime
import math
import os
import platform
import time
from pathlib import Path

# One core: BLAS threads would help nothing here, and the floor is stated per core.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from phalanx.hardware.cluster import resolve
from phalanx.job.load import load
from phalanx.plan.ask import from_job
from phalanx.plan.score import score
from phalanx.plan.search import search
from phalanx.plan.space import build

EXAMPLES = Path(__file__).parent.parent / "examples"
CALCULON_LAYOUTS_PER_S = 82.0  # the fastest rate measured for Calculon on one core (design notes on planners)
FLOOR_LAYOUTS_PER_S = 50_000
# job file -> seconds a full search may take
SEARCHES = {"llama-3.1-405b-16384xH100.toml": 5.0, "deepseek-v3-2048xH800.toml": 10.0}
REPEATS = 3


def measure(name: str) -> dict[str, float]:
    """Best of three: scoring every layout of the cluster, and the whole search with runners-up and Pareto set."""
    job = load(EXAMPLES / name).job
    ask, _ = from_job(job, resolve(job.cluster.target))
    scoring, searching, legal = [], [], 0
    for _ in range(REPEATS):
        started = time.perf_counter()
        legal = score(build(ask), hopeless=math.inf).legal
        scoring.append(time.perf_counter() - started)
        started = time.perf_counter()
        search(ask)
        searching.append(time.perf_counter() - started)
    return {"legal": legal, "score_s": min(scoring), "search_s": min(searching)}


def page() -> str:
    """The result as markdown."""
    today = datetime.datetime.now(datetime.UTC).date()
    lines = [
        f"# Search speed, {today}",
        "",
        f"`python benchmarks/search_speed.py`, one core of {_processor()}, Python {platform.python_version()}; "
        f"best of {REPEATS}.",
        "",
        "| job | legal layouts | scored in | layouts/s | × Calculon (82/s) | whole search | floor |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, floor_s in SEARCHES.items():
        found = measure(name)
        rate = found["legal"] / found["score_s"]
        fine = found["search_s"] < floor_s and rate > FLOOR_LAYOUTS_PER_S
        lines.append(
            f"| {name.removesuffix('.toml')} | {found['legal']:,.0f} | {found['score_s']:.2f} s | {rate:,.0f} "
            f"| {rate / CALCULON_LAYOUTS_PER_S:,.0f} | {found['search_s']:.2f} s "
            f"| < {floor_s:g} s, ≥ {FLOOR_LAYOUTS_PER_S:,}/s: {'met' if fine else 'MISSED'} |"
        )
    lines += [
        "",
        "Scored: memory and step time of every legal layout. The whole search skips the time of layouts that need more",
        "than twice the usable memory, and adds the runners-up and the Pareto set, which also looks at a half and a",
        "quarter of the cluster.",
    ]
    return "\n".join(lines) + "\n"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine())


def main() -> None:
    """Print the page, and write it when asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--write", metavar="FOLDER", type=Path)
    args = parser.parse_args()
    text = page()
    print(text, end="")
    if args.write:
        name = f"{datetime.datetime.now(datetime.UTC).date()}-search-speed.md"
        (args.write / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
