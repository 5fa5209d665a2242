"""Checkpoints against their floors: 1 GB of state on 2 ranks, saved beside a computation, restored on 3; and planning.

python benchmarks/checkpoint_speed.py [--folder DIR] [--gigabytes 1.0] [--rounds 5]

Writing and the bare disk take turns, round by round; the share of the disk's rate is the median over rounds. The folder
must be on the disk to be measured, with room for four times the state.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from phalanx.hardware.defaults import CPU_FAILURES_PER_HOST_DAY
from phalanx.plan.reliability import daly
from phalanx.train.checkpoint import load, newest
from phalanx.train.checkpoint.background import AsyncSaver
from phalanx.train.checkpoint.boxes import Box
from phalanx.train.checkpoint.index import Entry, Index, encode
from phalanx.train.checkpoint.route import find_route
from phalanx.train.checkpoint.shard import owned
from phalanx.train.parallel.pieces import Piece
from phalanx.units import DAY_S

RANKS, READERS = 2, 3
LAYERS, KINDS = 16, ("weight", "weight#exp_avg", "weight#exp_avg_sq")
WIDTH = 1024
CHUNK_BYTES = 2**25


def cut(rank: int, world: int, rows: int) -> tuple[int, int]:
    """First row and number of rows of a rank, as FSDP cuts."""
    step = -(-rows // world)
    return min(rows, rank * step), max(0, min(rows, (rank + 1) * step) - min(rows, rank * step))


def pieces(rank: int, world: int, rows: int) -> list[Piece]:
    """A model's weights and two moments, cut by rows."""
    start, count = cut(rank, world, rows)
    return [
        Piece(
            name=f"layers.{layer}.{kind}",
            tensor=torch.full((count, WIDTH), float(layer + place)),
            shape=(rows, WIDTH),
            start=(start, 0),
            replicas=1,
            owner=True,
            groups={},
        )
        for layer in range(LAYERS)
        for place, kind in enumerate(KINDS)
    ]


def compute(weight: torch.Tensor, seconds: float, busy: Callable[[], bool]) -> tuple[int, float]:
    """Steps of arithmetic until `seconds` have passed and nothing is busy; how many, and how long they took."""
    began, steps = time.perf_counter(), 0
    while time.perf_counter() - began < seconds or busy():
        weight = weight @ weight
        weight /= weight.norm()
        steps += 1
    return steps, time.perf_counter() - began


def write_raw(folder: Path, rank: int, data: memoryview) -> float:
    """Seconds to write `data` to one new file from start to end, flushed as a checkpoint is."""
    path = folder / f"raw-{rank}"
    began = time.perf_counter()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    while data:
        data = data[os.write(descriptor, data[:CHUNK_BYTES]) :]
    os.fsync(descriptor)
    os.close(descriptor)
    seconds = time.perf_counter() - began
    path.unlink()
    return seconds


def writer(rank: int, folder: Path, rows: int, rounds: int, barrier: Any) -> dict[str, list[float]]:
    """One rank: in each round the bare disk, a save while nothing else runs, and a save beside a computation."""
    torch.set_num_threads(1)
    mine = pieces(rank, RANKS, rows)
    saver = AsyncSaver(folder / "checkpoints", attempt="bench", rank=rank, world=RANKS, keep=1)
    saver.reserve(mine)
    raw = torch.zeros(sum(piece.tensor.nbytes for piece in mine), dtype=torch.uint8).numpy().data
    weight = torch.randn(256, 256)
    found: dict[str, list[float]] = {"raw": [], "write": [], "blocked": [], "slowdown": []}
    for step in range(2 * rounds):
        barrier.wait()
        if step % 2 == 0:
            found["raw"].append(write_raw(folder, rank, raw))
            barrier.wait()
            found["blocked"].append(saver.save(step=step, pieces=mine, meta={}))
            saved = saver.wait()
            found["write"].append(saved.seconds if saved is not None else 0.0)
            continue
        alone = compute(weight, 2.0, lambda: False)
        barrier.wait()
        found["blocked"].append(saver.save(step=step, pieces=mine, meta={}))
        beside = compute(weight, 0.1, lambda: saver.busy)
        found["slowdown"].append(max(0.0, beside[1] - beside[0] * alone[1] / alone[0]))
        saver.wait()
    return found


def reader(rank: int, folder: Path, rows: int, barrier: Any) -> list[float]:
    """One rank of another world: seconds to verify and fill its pieces from files that are not in memory."""
    torch.set_num_threads(1)
    mine = pieces(rank, READERS, rows)
    for piece in mine:
        piece.tensor.fill_(-1)
    commit = newest(folder / "checkpoints")
    assert commit is not None
    assert isinstance(commit.path, Path)
    if rank == 0:
        for path in commit.path.iterdir():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    barrier.wait()
    began = time.perf_counter()
    load(commit.path, mine, rank=rank, world=READERS)
    seconds = time.perf_counter() - began
    for place, piece in enumerate(mine):
        assert bool((piece.tensor == place // len(KINDS) + place % len(KINDS)).all()), piece.name
    return [seconds]


def together(work: Callable[..., Any], world: int, *args: Any) -> list[Any]:
    """`work` on so many processes, with a barrier; what each returned."""
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(world)
    ends = [context.Pipe() for _ in range(world)]

    def run(rank: int, end: Connection) -> None:
        end.send(work(rank, *args, barrier))

    processes = [context.Process(target=run, args=(rank, ends[rank][1])) for rank in range(world)]
    for process in processes:
        process.start()
    found = [end.recv() for end, _ in ends]
    for process in processes:
        process.join()
    return found


class Simulated:
    """What `world` ranks of sharded data parallelism would have written, without a byte of it."""

    where, step = "simulated", 0

    def __init__(self, world: int, rows: int) -> None:
        self.world, self.meta, self._rows = world, dict[str, Any](), rows

    def count(self, rank: int) -> int:
        """The same for every rank that has rows."""
        return LAYERS * len(KINDS) if cut(rank, self.world, self._rows)[1] else 0

    def index(self, rank: int) -> Index:
        """The boxes of one rank."""
        start, count = cut(rank, self.world, self._rows)
        size_bytes = count * WIDTH * 4
        entries = tuple(
            Entry(
                name=f"layers.{layer}.{kind}",
                dtype="float32",
                shape=(self._rows, WIDTH),
                box=Box((start, 0), (count, WIDTH)),
                rank=rank,
                offset=place * size_bytes,
                size_bytes=size_bytes,
                sha256="0" * 64,
            )
            for place, (layer, kind) in enumerate((layer, kind) for layer in range(LAYERS) for kind in KINDS)
        )
        return Index(rank=rank, header_bytes=0, header_sha256="", entries=entries, meta={})

    def open(self, rank: int) -> Any:
        """Never asked for: only the plan is made."""
        raise NotImplementedError


def planning(world: int) -> tuple[float, float, int]:
    """Seconds to plan one rank's save, its restore on three quarters of the ranks, and the indexes that one reads."""
    rows = 4096 * 3
    source = Simulated(world, rows)
    rank = world // 2 + 1
    began = time.perf_counter()
    owned(pieces(rank, world, rows))
    encode(source.index(rank))
    save_s = time.perf_counter() - began
    fewer = world * 3 // 4
    mine = pieces(fewer // 2 + 1, fewer, rows)
    began = time.perf_counter()
    route = find_route(source, mine, cast=False, near=(fewer // 2 + 1) / fewer)
    return save_s, time.perf_counter() - began, route.num_indexes_read


def main() -> None:
    """Print each number beside its floor."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=None, help="where to write (the folder for temporary files)")
    parser.add_argument("--gigabytes", type=float, default=1.0, help="state of all ranks together (1.0)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds (5)")
    args = parser.parse_args()
    rows = int(args.gigabytes * 1e9) // (LAYERS * len(KINDS) * WIDTH * 4)
    size_gb = rows * LAYERS * len(KINDS) * WIDTH * 4 / 1e9
    folder = Path(tempfile.mkdtemp(prefix="phalanx-checkpoint-speed-", dir=args.folder))
    try:
        written = together(writer, RANKS, folder, rows, args.rounds)
        restore_s = max(max(seconds) for seconds in together(reader, READERS, folder, rows))
    finally:
        shutil.rmtree(folder)
    slowest = {
        key: [max(values) for values in zip(*(rank[key] for rank in written), strict=True)] for key in written[0]
    }
    share = statistics.median(raw / save for raw, save in zip(slowest["raw"], slowest["write"], strict=True))
    blocked_s = statistics.median(slowest["blocked"])
    stall_s = blocked_s + statistics.median(slowest["slowdown"])
    interval_s = daly(blocked_s, DAY_S / CPU_FAILURES_PER_HOST_DAY)
    rates = {key: size_gb / statistics.median(slowest[key]) for key in ("raw", "write")}
    print(f"{size_gb:.2f} GB of state on {RANKS} ranks, {args.rounds} rounds")
    print(f"  blocked             {blocked_s:8.2f} s   at most 0.50 (worst {max(slowest['blocked']):.2f})")
    print(f"  blocked and slowed  {stall_s:8.2f} s   {stall_s / interval_s:.3%} of {interval_s:,.0f} s, at most 5 %")
    print(f"  bare disk           {rates['raw']:8.2f} GB/s")
    print(f"  save                {rates['write']:8.2f} GB/s   {share:.0%} of the bare disk, at least 80 %")
    print(f"  restore on {READERS} ranks  {restore_s:8.2f} s   at most 10")
    for world in (256, 1024, 4096):
        save_s, load_s, indexes = planning(world)
        print(
            f"  planning, one of {world:,} ranks: save {save_s:.3f} s, restore {load_s:.3f} s "
            f"({indexes} indexes), at most 1"
        )


if __name__ == "__main__":
    main()
