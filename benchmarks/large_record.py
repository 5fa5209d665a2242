"""How long page, report, check and watch take to open the record of a very large run, and how much memory.

python benchmarks/large_record.py FOLDER [--hosts 16384] [--steps 10000] [--keep] [--before SRC] [--times 1]
                                         [--stray 0] [--per-host 0]

One rank's events are written by the trainer's own EventWriter, with its index; the other hosts' files are hard links to
the same bytes, since 16,384 hosts x 10,000 steps are 75 GB. The second rank that `check` reads has a file of its own:
events with the number of another rank are damage, and looked at one by one. Each command runs in a process of its own,
as a person types it; the page cache is as it is. `--before SRC` measures another state of the sources (a folder `src`)
in turn with this one: on a busy machine both then have the same neighbours. `--stray N` adds N event files of ranks
that the run never had. `--per-host 8` writes one file for 8 ranks each instead (`--hosts` counts ranks, then); their
bytes cannot be shared, so use fewer steps, or `--holes`: every 512th rank is written whole, of the others what the
heads of extents say, the index, and of the events the beginning and the last 32 kB; 131,072 ranks x 10,000 steps would
be 1 TB. `--without-tables` removes the rank tables of hosts, as in a run of 0.7.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parent))

from open_run import _write_rank  # the writer of benchmarks/open_run.py
from synthetic import make_plan  # tests/synthetic.py

from phalanx.io.toml import to_toml
from phalanx.job.load import job_to_dict
from phalanx.plan.plan import Plan
from phalanx.record.archive.event_index import HEAD_BYTES, SIZE, newest_in_tails
from phalanx.record.events import EventWriter
from phalanx.record.host_extents import HostStream
from phalanx.record.run import Run

FLOOR_S, FLOOR_BYTES = 3.0, 1e9
WATCH = (
    "import sys; from pathlib import Path; from phalanx.record.report.live import Watcher; "
    "from phalanx.record.run import Run; Watcher(Run(path=Path(sys.argv[1]))).look()"
)


def main() -> None:
    """Make the record, measure, remove it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--hosts", type=int, default=16_384)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--stray", type=int, default=0)
    parser.add_argument("--per-host", type=int, default=0)
    parser.add_argument("--holes", action="store_true", help="of most ranks, not all events are written")
    parser.add_argument("--without-tables", action="store_true", help="remove the rank tables of hosts first")
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--before", type=Path, help="sources to compare with")
    parser.add_argument("--times", type=int, default=1, help="measurements of each, of which the least is told")
    args = parser.parse_args()
    run = Run(path=args.folder / f"large-record-{args.hosts}-{args.per_host}")
    if not run.path.is_dir():
        make_record(run, hosts=args.hosts, steps=args.steps, per_host=args.per_host, has_holes=args.holes)
    if args.without_tables:
        for path in run.path.glob("events-host-*.ranks"):
            path.unlink()
    for rank in range(args.hosts, args.hosts + args.stray):
        if not run.events(rank).exists():
            os.link(run.events(0), run.events(rank))
    commands = {
        "page": ["-m", "phalanx", "train", "--report", str(run.path)],
        "report": ["-m", "phalanx", "report", str(run.path)],
        "check": ["-m", "phalanx", "check", str(run.path)],
        "watch, first look": ["-c", WATCH, str(run.path)],
    }
    sources = {"now": Path(__file__).parents[1] / "src"} | ({"before": args.before} if args.before else {})
    print(f"load average {os.getloadavg()[0]:.0f}; floor {FLOOR_S:g} s, {FLOOR_BYTES / 1e9:g} GB\n")
    print("| what | sources | wall | processor | memory | exit code | floor |\n|---|---|---|---|---|---|---|")
    try:
        for name, words in commands.items():
            found: dict[str, list[Measured]] = {source: [] for source in sources}
            for _ in range(args.times):
                for source, path in sources.items():
                    found[source].append(measure(words, path))
            for source, several in found.items():
                print(f"| {name} | {source} | {min(several, key=lambda one: one.cpu_s)} |", flush=True)
    finally:
        if not args.keep:
            shutil.rmtree(run.path)


def make_record(run: Run, *, hosts: int, steps: int, per_host: int = 0, has_holes: bool = False) -> None:
    """A run that is done, with a rank for every host, or with `per_host` ranks in each file."""
    (run.path / "logs").mkdir(parents=True)
    plan = make_plan(ranks=hosts, steps=steps, hosts=hosts)
    job = job_to_dict(Plan.from_dict(plan).job)
    (run.path / "job.json").write_text(json.dumps(job))
    run.job_toml.write_text(to_toml(job))
    run.plan_json.write_text(json.dumps(plan))
    run.set_launch(v=1, world=hosts, layout="", started=1e9, launched=1e9)
    supervisor = EventWriter(run.supervisor, rank=-1, clock=lambda: 1e9)
    supervisor.write("epoch", epoch=1, reason="start", world=hosts, layout=plan["layout"])
    supervisor.write("restore", epoch=1, step=0, source="start")
    supervisor.close()
    _write_rank(run, steps)
    if not per_host and hosts > 1:
        _write_rank(run, steps, rank=hosts // 2)
    if per_host:
        share_files(run, hosts, per_host, has_holes=has_holes)
    for rank in range(1, 0 if per_host else hosts):
        if rank != hosts // 2:
            os.link(run.events(0), run.events(rank))
            os.link(run.events(0).with_suffix(".index"), run.events(rank).with_suffix(".index"))
    run.set_status("done", exit_code=0, message="")


WHOLE_EVERY, LAST_BYTES = 512, 32_768  # with holes: ranks that are written whole, and what is written of others


class HoleStream(HostStream):
    """Takes extents as they are taken, and writes only what begins and ends a session."""

    def write_ends(self, data: bytes) -> None:
        """Append, most of it as holes."""
        real = os.pwrite
        done = 0

        def pwrite(file: int, some: bytes, at: int) -> int:
            is_data = len(some) > 1024
            if is_data and done > 0 and done + len(some) < len(data) - LAST_BYTES:
                return len(some)
            return real(file, some, at)

        os.pwrite = pwrite
        try:
            while done < len(data):
                done += self.write(data[done:])
        finally:
            os.pwrite = real


def share_files(run: Run, ranks: int, per_host: int, *, has_holes: bool = False) -> None:
    """The events and the index of rank 0 as those of every rank, in files of hosts."""
    own = run.events(0)
    events, index = own.read_bytes(), own.with_suffix(".index").read_bytes()
    own.unlink()
    own.with_suffix(".index").unlink()
    newest = newest_in_tails([index[HEAD_BYTES:][-4 * SIZE :]]).tobytes()
    for rank in range(ranks):
        stream = HoleStream(run.host_events(f"host-{rank // per_host:05d}"), rank=rank, generation=1)
        beside = stream.open_index()
        if has_holes and rank % WHOLE_EVERY:
            stream.write_ends(events)
        else:
            write_all(stream, events)
        write_all(beside, index)
        stream.note_block(newest)
        beside.close()
        stream.close()


def write_all(stream: HostStream, data: bytes) -> None:
    """Append all of it."""
    done = 0
    while done < len(data):
        done += stream.write(data[done:])


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    wall_s: float
    cpu_s: float
    memory_bytes: float
    exit_code: int

    def __str__(self) -> str:
        """Cells of a table. Processor time is the number to judge by: these commands hardly wait for anything else."""
        is_met = self.cpu_s <= FLOOR_S and self.memory_bytes <= FLOOR_BYTES
        verdict = "met" if is_met else f"missed by {max(0.0, self.cpu_s - FLOOR_S):.1f} s"
        numbers = f"{self.wall_s:.1f} s | {self.cpu_s:.2f} s | {self.memory_bytes / 1e6:.0f} MB"
        return f"{numbers} | {self.exit_code} | {verdict}"


def measure(words: list[str], source: Path) -> Measured:
    """Seconds and memory of a process."""
    began_s = time.perf_counter()
    # As installed: modules are compiled once. A shell may say that they never are (PYTHONDONTWRITEBYTECODE).
    environ = {**os.environ, "PYTHONPATH": str(source), "PYTHONPYCACHEPREFIX": f"/tmp/large-record-{os.getuid()}"}
    environ.pop("PYTHONDONTWRITEBYTECODE", None)
    process = subprocess.Popen(
        [sys.executable, *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environ
    )
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return Measured(
        wall_s=time.perf_counter() - began_s,
        cpu_s=used.ru_utime + used.ru_stime,
        memory_bytes=used.ru_maxrss * 1e3,
        exit_code=process.returncode,
    )


if __name__ == "__main__":
    main()
