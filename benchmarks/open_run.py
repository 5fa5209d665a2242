"""How long a run of 1,000 ranks x 100,000 steps takes to open and to draw: `python benchmarks/open_run.py FOLDER`.

One rank's events are written by the trainer's own EventWriter, the others are copies (`--copy`, 45 GB) or hard links
to the same bytes; every rank has an index file of its own. "cold": the kernel was asked to drop the files from its
page cache, and the history is new; "warm": the same again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import shutil
import statistics
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from synthetic import make_plan  # tests/synthetic.py

from phalanx.record.archive.history import RunHistory
from phalanx.record.events import EventWriter
from phalanx.record.run import Run

NAMES = ("loss", "grad_norm", "lr", "tokens_per_s", "mfu", "duration_s", "compute_s", "wait_s", "memory_bytes",
         "noise_scale")  # fmt: skip
TOKENS = 64 * 4096


def main() -> None:
    """Make the run, measure, remove it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--ranks", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--copy", action="store_true", help="copy the events instead of linking them")
    parser.add_argument("--keep", action="store_true")
    args = parser.parse_args()
    run = Run(path=args.folder / "open-run")
    if not run.path.is_dir():
        _make(run, ranks=args.ranks, steps=args.steps, copy=args.copy)
    events = sum(path.stat().st_size for path in run.path.glob("*.jsonl"))
    index = sum(path.stat().st_size for path in run.path.glob("*.index"))
    print(
        f"{args.ranks:,} ranks x {args.steps:,} steps: {events / 1e9:.1f} GB of events, {index / 1e6:.0f} MB of index"
    )
    try:
        for kind in ("cold", "warm"):
            print(f"{kind}: {_measure(run, cold=kind == 'cold')}")
        print(f"most memory of this process: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3:.0f} MB")
    finally:
        if not args.keep:
            shutil.rmtree(run.path)


def _make(run: Run, *, ranks: int, steps: int, copy: bool) -> None:
    run.path.mkdir(parents=True)
    run.plan_json.write_text(json.dumps(make_plan(ranks=ranks, steps=steps, hosts=max(1, ranks // 8))))
    run.set_launch(world=ranks, layout="", started=1e9)
    run.set_status("running")
    supervisor = EventWriter(run.supervisor, rank=-1, clock=lambda: 1e9)
    supervisor.write("epoch", epoch=1, reason="start", world=ranks)
    supervisor.close()
    _write_rank(run, steps)
    for rank in range(1, ranks):
        (shutil.copyfile if copy else os.link)(run.events(0), run.events(rank))
        shutil.copyfile(run.events(0).with_suffix(".index"), run.events(rank).with_suffix(".index"))


def _write_rank(run: Run, steps: int, *, rank: int = 0, host_file: Path | None = None) -> None:
    """One rank, with what writing an event costs, index included."""
    rng, now, spent = np.random.default_rng(0), [1e9], []
    writer = EventWriter(run.events(rank), rank=rank, clock=lambda: now[0], host_file=host_file)
    writer.write("run_start", step=0, steps=steps, world=1000, epoch=1)
    noise = rng.standard_normal((steps, 4))
    for step in range(steps):
        loss, norm, busy, trace = noise[step].tolist()
        now[0] += 0.5
        began_s = time.perf_counter()
        writer.write(
            "step", step=step, epoch=1, loss=2 + 9 / (1 + step / 500) + 0.03 * loss, tokens=TOKENS, duration_s=0.5,
            grad_norm=1 + 0.1 * norm, lr=3e-4, tokens_per_s=TOKENS / 0.5, memory_bytes=65_000_000_000,
            compute_s=0.4 + 0.01 * busy, wait_s=0.1 - 0.01 * busy, data_s=0.001, compile_s=None, skipped=False,
            bytes_sent=388140892160, held=step, noise_scale=800 + 50 * trace, noise_trace=900.0, grad_squared=1.1,
        )  # fmt: skip
        spent.append(time.perf_counter() - began_s)
        if step % 20 == 0:
            writer.write("monitor", utilization=0.9, utilization_source="gpm-sm", memory_bytes=64_000_000_000,
                         memory_pressure=0.8, power_w=650.0, energy_j=325.0 * step, temperature_c=61.0)  # fmt: skip
        if step % 1000 == 999:
            writer.write("checkpoint", step=step + 1, epoch=1, phase="stage", blocked_s=0.1, seconds=None, bytes=None)
    writer.close()
    p99 = statistics.quantiles(spent, n=100)[98]
    print(f"writing a step: median {statistics.median(spent) * 1e6:.0f} µs, p99 {p99 * 1e6:.0f} µs")


def _measure(run: Run, *, cold: bool) -> str:
    if cold:
        os.sync()
        for path in (*run.path.glob("*.jsonl"), *run.path.glob("*.index")):
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    marks, cpu_s = [time.perf_counter()], time.process_time()
    history = RunHistory.open(run)
    marks.append(time.perf_counter())
    curves = [history.curve(name, points=800) for name in NAMES]
    marks.append(time.perf_counter())
    mesh = history.mesh("compute_s")
    marks.append(time.perf_counter())
    cpu_s = time.process_time() - cpu_s
    history.mesh("wait_s")
    marks.append(time.perf_counter())
    history.refresh()
    marks.append(time.perf_counter())
    zoomed = history.curve("loss", first=50_000, last=55_000)
    marks.append(time.perf_counter())
    assert not history.damage()
    spent = [after - before for before, after in itertools.pairwise(marks)]
    size = f"{len(curves[0].step)} points, mesh {len(mesh.values)} x {len(mesh.step)}, zoom {len(zoomed.step)} points"
    words = ("open", "10 curves", "mesh", "mesh of another series", "refresh", "zoom to 5,000 steps")
    told = ", ".join(f"{word} {seconds:.3f} s" for word, seconds in zip(words, spent, strict=True))
    return f"{told}; first page {sum(spent[:3]):.3f} s, {cpu_s:.3f} s of CPU ({size})"


if __name__ == "__main__":
    main()
