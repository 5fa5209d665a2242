"""How fast the planner searches: layouts per second on one core, two searches that have a floor, and a first check.

Run: python benchmarks/search_speed.py [--write FOLDER]    prints a dated markdown page; writes it with --write.
"""

from __future__ import annotations

import argparse
import datetime
import math
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

# One core: BLAS threads would help nothing here, and the floor is stated per core.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from phalanx.hardware.cluster import resolve_cluster
from phalanx.job.load import load
from phalanx.plan.request import request_from_job
from phalanx.plan.score import score_layouts
from phalanx.plan.search import search_layouts
from phalanx.plan.space import build_space

EXAMPLES = Path(__file__).parent.parent / "examples"
CALCULON_LAYOUTS_PER_S = 82.0  # the fastest rate measured for Calculon on one core (design notes on planners)
FLOOR_LAYOUTS_PER_S = 50_000
# job file -> seconds a full search may take
SEARCHES = {"llama-3.1-405b-16384xH100.toml": 5.0, "deepseek-v3-2048xH800.toml": 10.0}
REPEATS = 3
CHECK_S = 1.0  # what `phalanx check` may take for a job and its plan
CHECK = "import sys; from phalanx.cli.main import main; sys.exit(main(['check', sys.argv[1]]))"


def first_check(path: Path) -> tuple[float, float]:
    """Processor and wall seconds of `phalanx check` of a job nobody planned before, Python's start included."""
    cpu_s, wall_s = [], []
    with tempfile.TemporaryDirectory() as empty:
        for number in range(REPEATS + 1):  # once more, to compile what Python keeps compiled
            environ = {**os.environ, "XDG_CACHE_HOME": f"{empty}/{number}", "PYTHONPYCACHEPREFIX": f"{empty}/compiled"}
            environ.pop("PYTHONDONTWRITEBYTECODE", None)
            before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
            subprocess.run([sys.executable, "-c", CHECK, str(path)], env=environ, capture_output=True, check=False)
            wall_s.append(time.perf_counter() - started)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            cpu_s.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(cpu_s[1:]), min(wall_s[1:])


def measure(name: str) -> dict[str, float]:
    """Processor seconds, best of three: scoring every layout, and the whole search with runners-up and Pareto set."""
    job = load(EXAMPLES / name).job
    request, _ = request_from_job(job, resolve_cluster(job.cluster.target))
    scoring, searching, legal = [], [], 0
    for _ in range(REPEATS):
        started = time.process_time()
        legal = score_layouts(build_space(request), memory_cutoff=math.inf).legal
        scoring.append(time.process_time() - started)
        started = time.process_time()
        search_layouts(request)
        searching.append(time.process_time() - started)
    return {"legal": legal, "score_s": min(scoring), "search_s": min(searching)}


def page() -> str:
    """The result as markdown."""
    today = datetime.datetime.now(datetime.UTC).date()
    lines = [
        f"# Search speed, {today}",
        "",
        f"`python benchmarks/search_speed.py`, one core of {_processor()}, Python {platform.python_version()}; "
        f"processor seconds, best of {REPEATS}.",
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
        "",
        "The first `phalanx check` of a job, whose plan nobody kept, from the start of Python to its end:",
        "",
        "| job | processor | wall | |",
        "|---|---|---|---|",
    ]
    for path in sorted(EXAMPLES.glob("*.toml")):
        cpu_s, wall_s = first_check(path)
        verdict = "met" if cpu_s < CHECK_S else "MISSED"
        lines.append(f"| {path.stem} | {cpu_s:.2f} s | {wall_s:.2f} s | < {CHECK_S:g} s of a processor: {verdict} |")
    busy, cores = os.getloadavg()[0], os.cpu_count()
    lines += ["", f"Wall time is that of a machine with {cores} cores, on which {busy:.1f} programs ran."]
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
