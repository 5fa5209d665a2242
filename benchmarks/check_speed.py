"""How fast a run log is read for `phalanx check`, and in how much memory: `python benchmarks/check_speed.py FOLDER`.

Writes runs of about 100 MB and 1 GB of events with the trainer's own EventWriter: steps, device samples, pings,
timelines and checkpoints at their usual rates, on `--ranks` ranks. Each is read by a process of its own, whose
processor time and largest memory count; "stream" is the reading of every line, with the ledger made on the way,
"all" the facts of the rules with stragglers and cost. Then every example job is checked. The floor is 100 MB/s for one
core (issue 6).
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from synthetic import make_plan  # tests/synthetic.py

from phalanx.io.toml import to_toml
from phalanx.job.load import job_to_dict
from phalanx.plan.plan import Plan
from phalanx.record.events import EventWriter
from phalanx.record.run import Run

FLOOR = 100.0  # MB/s
STEP_BYTES = 725  # of a rank, with its share of everything else
BEGAN_S, STEP_S = 1.79e9, 0.5
MONITOR, PEERS, TIMELINE, SAVE = 20, 60, 200, 1000  # steps between two
SPANS = 300
EXAMPLES = Path(__file__).parents[1] / "examples"


def main() -> None:
    """Make the runs, measure, remove them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--mb", type=int, nargs="+", default=[100, 1000])
    parser.add_argument("--keep", action="store_true", help="leave the runs where they are")
    parser.add_argument("--read", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.read is not None:
        print(json.dumps(_read(Run(path=args.read))))
        return
    for size in args.mb:
        run = Run(path=args.folder / f"check-{size}-{args.ranks}")
        if not run.path.is_dir():
            _make(run, ranks=args.ranks, steps=int(size * 1e6 / args.ranks / STEP_BYTES))
        print(_told(run, _apart("--read", str(run.path), str(args.folder)), ranks=args.ranks))
        if not args.keep:
            shutil.rmtree(run.path)
    _check_examples()


def _apart(*words: str) -> dict[str, Any]:
    made = subprocess.run([sys.executable, __file__, *words], capture_output=True, text=True, check=True)
    return dict(json.loads(made.stdout))


def _read(run: Run) -> dict[str, Any]:
    """In a process that does nothing else."""
    from phalanx.rules.log.stream import LogStream

    before = _most_kb()
    stream = LogStream(run)
    began_s = time.process_time()
    stream.refresh()
    read_s, memory = time.process_time() - began_s, _most_kb()
    facts = stream.facts()
    all_s = time.process_time() - began_s
    grammar = facts.grammar
    return {
        "bytes": stream.bytes_read, "read_s": read_s, "all_s": all_s, "before": before, "read": memory,
        "all": _most_kb(), "wrong": grammar.unreadable + grammar.invalid,
        "steps": facts.steps.count if facts.steps else 0,
    }  # fmt: skip


def _most_kb() -> int:
    """The most memory of this process; getrusage would begin with that of the one that started it."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")))


def _told(run: Run, found: dict[str, Any], *, ranks: int) -> str:
    size = found["bytes"] / 1e6
    stream, all_ = size / found["read_s"], size / found["all_s"]
    return (
        f"{size:,.0f} MB, {ranks} ranks, {found['steps']:,} steps, {found['wrong']} lines refused: "
        f"stream {stream:.0f} MB/s ({stream / FLOOR:.2f} of the floor), all {all_:.0f} MB/s ({all_ / FLOOR:.2f}); "
        f"memory {found['before'] / 1e3:.0f} MB before, {found['read'] / 1e3:.0f} MB stream, "
        f"{found['all'] / 1e3:.0f} MB all"
    )


def _check_examples() -> None:
    """Seconds of `phalanx check`, the start of Python included."""
    for path in sorted(EXAMPLES.glob("*.toml")):
        began_s = time.perf_counter()
        made = subprocess.run(
            [sys.executable, "-m", "phalanx", "check", str(path)], capture_output=True, text=True, check=False
        )
        print(f"{path.name}: {time.perf_counter() - began_s:.2f} s, exit {made.returncode}")


# ---- a run -----------------------------------------------------------------------------------------------------------


def _make(run: Run, *, ranks: int, steps: int) -> None:
    run.path.mkdir(parents=True)
    plan = make_plan(ranks=ranks, steps=steps, hosts=max(1, ranks // 8))
    run.plan_json.write_text(json.dumps(plan))
    run.job_toml.write_text(to_toml(job_to_dict(Plan.from_dict(plan).job)))
    run.set_launch(v=1, world=ranks, layout="", started=BEGAN_S)
    run.set_status("done")
    now = [BEGAN_S]
    supervisor = EventWriter(run.supervisor, rank=-1, clock=lambda: now[0])
    supervisor.write("host", host="host-0", state="joined", problems=[], epoch=0)
    members = [{"rank": rank, "host": "host-0", "slot": rank, "pid": rank} for rank in range(ranks)]
    supervisor.write("epoch", epoch=1, reason="start", world=ranks, layout=plan["layout"], members=members)
    supervisor.write("restore", epoch=1, step=0, source="start")
    for rank in range(ranks):
        _write_rank(run, rank, ranks=ranks, steps=steps)
    now[0] = BEGAN_S + steps * STEP_S + 3
    supervisor.write("end", epoch=1, state="done", message="")
    supervisor.close()


def _write_rank(run: Run, rank: int, *, ranks: int, steps: int) -> None:
    now = [BEGAN_S + 1]
    writer = EventWriter(run.events(rank), rank=rank, clock=lambda: now[0])
    writer.write("ready", step=0, epoch=1, source="start", seconds=1.0, warnings=[])
    writer.write("run_start", step=0, steps=steps, world=ranks, epoch=1)
    chances = np.random.default_rng(rank).random((steps, 4)).tolist()
    shared = np.random.default_rng(99).random(steps).tolist()
    for step in range(steps):
        now[0] += STEP_S
        writer.write("step", **_step(step, chances[step], shared[step]))
        if step % MONITOR == MONITOR - 1:
            writer.write("monitor", epoch=1, **_monitor(now[0], chances[step][0]))
        if step % PEERS == PEERS - 1:
            pair = {"peer": (rank + 1) % ranks, "axis": "data", "count": 30, "p50_s": 1.2e-5, "p99_s": 4e-5, "lost": 0}
            writer.write("peers", epoch=1, pairs=[pair])
        if step % TIMELINE == TIMELINE - 1:
            writer.write("timeline", **_timeline(step))
        if step % SAVE == SAVE - 1:
            writer.write("checkpoint", step=step + 1, epoch=1, phase="stage", blocked_s=0.01, seconds=None, bytes=None)
            done = {"phase": "commit", "path": f"step-{step + 1:08d}", "seconds": 2.0, "bytes": 10**9}
            writer.write("checkpoint", step=step + 1, epoch=1, **done)
    writer.write("run_end", step=steps, state="done")
    writer.close()


def _step(step: int, chance: list[float], shared: float) -> dict[str, Any]:
    compute_s = STEP_S * (0.7 + 0.02 * chance[0])
    trace, squared = 900.0 + shared, 2.0 + shared
    return {
        "step": step, "epoch": 1, "loss": 2.0 + shared / 10, "tokens": 262144, "duration_s": STEP_S - 1e-3 * chance[1],
        "grad_norm": 1.0 + shared / 10, "lr": 3e-4, "tokens_per_s": 524288.0 + chance[1], "memory_bytes": 65498251264,
        "compute_s": compute_s, "wait_s": STEP_S - compute_s - 2e-3, "data_s": 1e-3 * chance[2], "compile_s": None,
        "noise_scale": trace / squared, "noise_trace": trace, "grad_squared": squared, "skipped": False,
        "bytes_sent": 388140892160, "collective_s": None, "collective_bytes": None, "expert_imbalance": None,
        "held": step or None, "hold_s": 1e-4 * chance[3], "guard_s": None,
    }  # fmt: skip


def _monitor(time_s: float, chance: float) -> dict[str, Any]:
    return {
        "utilization": 0.86 + 0.05 * chance, "utilization_source": "gpm-sm", "memory_bytes": 66571993088,
        "memory_limit_bytes": 85899345920, "memory_pressure": 0.77, "memory_pressure_source": "limit",
        "allocation_retries": 0, "power_w": 640.0 + 30 * chance, "energy_j": 650.0 * (time_s - BEGAN_S),
        "energy_source": "nvml", "temperature_c": 61.0 + 4 * chance,
    }  # fmt: skip


def _timeline(step: int) -> dict[str, Any]:
    spans = [["forward", f"layers.{count}.mlp", count * 1e-3, 9.7e-4, None, None] for count in range(SPANS)]
    return {"step": step, "epoch": 1, "seconds": STEP_S, "spans": spans, "dropped": 0, "collectives": []}


if __name__ == "__main__":
    main()
