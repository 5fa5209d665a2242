"""What writing an event costs a rank: into a file of its own, and into the file of its host beside seven others.

python benchmarks/event_writing.py [--steps 20000] [--ranks 8]

Every step is written at once, as steps of more than 50 ms are; encoding and index are in it. The ranks are processes
that write at the same time. A training step takes 50 ms and more.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

from phalanx.record.events import EventWriter
from phalanx.record.run import Run


def main() -> None:
    """Both layouts, one rank and several."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--ranks", type=int, default=8)
    args = parser.parse_args()
    print("| layout | ranks at once | median | p99 | longest | files | bytes |\n|---|---|---|---|---|---|---|")
    for by_host in (False, True):
        for ranks in (1, args.ranks):
            with tempfile.TemporaryDirectory() as folder:
                run = Run(path=Path(folder))
                for rank in range(ranks):
                    if not os.fork():
                        times = write_rank(run, rank, args.steps, by_host=by_host)
                        (run.path / f"times-{rank}").write_text(" ".join(f"{one:.9f}" for one in times))
                        os._exit(0)
                for _ in range(ranks):
                    os.wait()
                spent = [float(one) for path in run.path.glob("times-*") for one in path.read_text().split()]
                files = [path.stat() for path in run.path.glob("events-*")]
            p99 = statistics.quantiles(spent, n=100)[98]
            used = sum(one.st_blocks * 512 for one in files) / 1e6
            told = f"{statistics.median(spent) * 1e6:.1f} µs | {p99 * 1e6:.0f} µs | {max(spent) * 1e3:.1f} ms"
            print(f"| {'host' if by_host else 'rank'} | {ranks} | {told} | {len(files)} | {used:.1f} MB |")
            sys.stdout.flush()


def write_rank(run: Run, rank: int, steps: int, *, by_host: bool) -> list[float]:
    """Seconds of each write."""
    now, spent = [1e9], []
    host = run.host_events("a") if by_host else None
    writer = EventWriter(run.events(rank), rank=rank, clock=lambda: now[0], host_file=host)
    for step in range(steps):
        now[0] += 0.5
        began_s = time.perf_counter()
        writer.write(
            "step", step=step, epoch=1, loss=2 + 9 / (1 + step / 500), tokens=262144, duration_s=0.5, grad_norm=1.1,
            lr=3e-4, tokens_per_s=524288.0, memory_bytes=65_000_000_000, compute_s=0.4, wait_s=0.1, data_s=0.001,
            compile_s=None, skipped=False, bytes_sent=388140892160, held=step, noise_scale=800.0, noise_trace=900.0,
            grad_squared=1.1,
        )  # fmt: skip
        spent.append(time.perf_counter() - began_s)
    writer.close()
    return spent


if __name__ == "__main__":
    main()
