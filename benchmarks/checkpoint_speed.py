"""Checkpoints against their floors: 1 GB of state on 2 ranks, saved beside a computation, restored on 3; and planning.

python benchmarks/checkpoint_speed.py [--folder DIR] [--gigabytes 1.0] [--rounds 5]

Writing and the bare disk take turns, round by round; the share of the disk's rate is the median over rounds, and that
of the best of each, which other work on the machine disturbs least. The folder must be on the disk to be measured, with
room for four times the state.
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
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from phalanx.hardware.catalog import find_accelerator
from phalanx.hardware.failures import failures_per_host_day
from phalanx.plan.reliability import daly_interval
from phalanx.train.parallel.tensor_shard import TensorShard
from phalanx.train.state.async_saver import AsyncSaver
from phalanx.train.state.checkpoint_index import RankIndex, StoredShard, decode_json, encode_rank_index
from phalanx.train.state.reader import newest_checkpoint
from phalanx.train.state.restore import find_restore_route, load_shards
from phalanx.train.state.shards import Region, owned_shards
from phalanx.units import DAY_S

RANKS, READERS = 2, 3
LAYERS, KINDS = 16, ("weight", "weight#exp_avg", "weight#exp_avg_sq")
WIDTH = 1024
SIMULATED_ROWS = 4096 * 24
CHUNK_BYTES = 2**25


def cut(rank: int, world: int, rows: int) -> tuple[int, int]:
    """First row and number of rows of a rank, as FSDP cuts."""
    step = -(-rows // world)
    return min(rows, rank * step), max(0, min(rows, (rank + 1) * step) - min(rows, rank * step))


def shards(rank: int, world: int, rows: int) -> list[TensorShard]:
    """A model's weights and two moments, cut by rows."""
    start, count = cut(rank, world, rows)
    return [
        TensorShard(
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
    mine = shards(rank, RANKS, rows)
    saver = AsyncSaver(folder / "checkpoints", attempt="bench", rank=rank, world=RANKS, keep=1)
    saver.reserve(mine)
    raw = torch.zeros(sum(shard.tensor.nbytes for shard in mine), dtype=torch.uint8).numpy().data
    weight = torch.randn(256, 256)
    found: dict[str, list[float]] = {"raw": [], "write": [], "blocked": [], "slowdown": []}
    for step in range(2 * rounds):
        barrier.wait()
        if step % 2 == 0:
            found["raw"].append(write_raw(folder, rank, raw))
            barrier.wait()
            found["blocked"].append(saver.save(step=step, shards=mine, meta={}))
            saved = saver.wait()
            found["write"].append(saved.seconds if saved is not None else 0.0)
            continue
        alone = compute(weight, 2.0, lambda: False)
        barrier.wait()
        found["blocked"].append(saver.save(step=step, shards=mine, meta={}))
        beside = compute(weight, 0.1, lambda: saver.busy)
        found["slowdown"].append(max(0.0, beside[1] - beside[0] * alone[1] / alone[0]))
        saver.wait()
    return found


def reader(rank: int, folder: Path, rows: int, barrier: Any) -> list[float]:
    """One rank of another world: seconds to verify and fill its shards from files that are not in memory."""
    torch.set_num_threads(1)
    mine = shards(rank, READERS, rows)
    for shard in mine:
        shard.tensor.fill_(-1)
    commit = newest_checkpoint(folder / "checkpoints")
    assert commit is not None
    assert isinstance(commit.path, Path)
    if rank == 0:
        for path in commit.path.iterdir():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    barrier.wait()
    began = time.perf_counter()
    load_shards(commit.path, mine, rank=rank, world=READERS)
    seconds = time.perf_counter() - began
    for place, shard in enumerate(mine):
        assert bool((shard.tensor == place // len(KINDS) + place % len(KINDS)).all()), shard.name
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """How ranks are numbered: stages, then copies, then shards, then tensor ranks."""

    stages: int = 1
    copies: int = 1
    shards: int = 1
    tensor: int = 1

    @property
    def world(self) -> int:
        """All ranks."""
        return self.stages * self.copies * self.shards * self.tensor

    def rank_shards(self, rank: int) -> list[TensorShard]:
        """What a rank of it holds: matrices cut twice by rows, norms by shards alone; without memory."""
        rest, tensor = divmod(rank, self.tensor)
        rest, shard = divmod(rest, self.shards)
        stage, copy = divmod(rest, self.copies)
        part, (start, count) = SIMULATED_ROWS // self.tensor, cut(shard, self.shards, SIMULATED_ROWS // self.tensor)
        norm_start, norm_count = cut(shard, self.shards, SIMULATED_ROWS)
        found = []
        for layer in range(stage * LAYERS // self.stages, (stage + 1) * LAYERS // self.stages):
            for kind in KINDS:
                for name, whole, local, at, owner in (
                    ("mlp", (SIMULATED_ROWS, WIDTH), (count, WIDTH), (tensor * part + start, 0), copy == 0),
                    ("norm", (SIMULATED_ROWS,), (norm_count,), (norm_start,), copy == tensor == 0),
                ):
                    values = torch.empty(local, device="meta")
                    found.append(
                        TensorShard(
                            name=f"layers.{layer}.{name}.{kind}",
                            tensor=values,
                            shape=whole,
                            start=at,
                            replicas=1,
                            owner=owner,
                            groups={},
                        )
                    )
        return found


class Simulated:
    """What the ranks of a split would have written, without a byte of it."""

    where, step = "simulated", 0

    def __init__(self, split: Split) -> None:
        self.world, self.meta, self._split = split.world, dict[str, Any](), split
        self._writers = {rank for rank in range(split.world) if owned_shards(split.rank_shards(rank))}

    def count(self, rank: int) -> int:
        """Whether a rank wrote anything."""
        return int(rank in self._writers)

    def index(self, rank: int) -> RankIndex:
        """As it is read: from its text."""
        entries, offset = [], 0
        for shard in owned_shards(self._split.rank_shards(rank)):
            size_bytes = shard.tensor.numel() * 4
            entries.append(
                StoredShard(
                    name=shard.name,
                    dtype="float32",
                    shape=shard.shape,
                    region=Region(shard.start, tuple(shard.tensor.shape)),
                    rank=rank,
                    offset=offset,
                    size_bytes=size_bytes,
                    sha256="0" * 64,
                )
            )
            offset += size_bytes
        index = RankIndex(rank=rank, header_bytes=0, header_sha256="", shards=tuple(entries), meta={})
        decode_json(encode_rank_index(index))
        return index

    def open(self, rank: int) -> Any:
        """Never asked for: only the plan is made."""
        raise NotImplementedError


def planning(old: Split, new: Split) -> tuple[float, float, int]:
    """Seconds to plan a rank's save, seconds to plan its restore in `new`, and indexes read for that; worst of some."""
    source, save_s, load_s, indexes = Simulated(old), 0.0, 0.0, 0
    for place in (0.0, 0.37, 0.62, 0.999):
        began = time.perf_counter()
        source.index(int(place * old.world))
        save_s = max(save_s, time.perf_counter() - began)
        rank = int(place * new.world)
        mine = new.rank_shards(rank)
        began = time.perf_counter()
        route = find_restore_route(source, mine, cast=False, rank=rank, world=new.world)
        load_s, indexes = max(load_s, time.perf_counter() - began), max(indexes, route.num_indexes_read)
    return save_s, load_s, indexes


def plan_all() -> None:
    """Print what planning takes in worlds of growing size."""
    for world in (256, 1024, 4096):
        for name, old, new in (
            ("sharded, a quarter fewer ranks", Split(shards=world), Split(shards=world * 3 // 4)),
            (
                "4 stages, copies of 64, one copy fewer",
                Split(stages=4, copies=world // 256, shards=8, tensor=8),
                Split(stages=4, copies=max(1, world // 256 - 1), shards=8, tensor=8),
            ),
            (
                "2 stages, 2 copies, 8 tensor ranks to 4",
                Split(stages=2, copies=2, shards=world // 32, tensor=8),
                Split(stages=2, copies=2, shards=world // 32, tensor=4),
            ),
        ):
            save_s, load_s, indexes = planning(old, new)
            print(
                f"  planning, one of {world:5,} ranks: save {save_s:.3f} s, at most 1; "
                f"restore {load_s:.3f} s, {indexes} indexes ({name})"
            )


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
    best = min(slowest["raw"]) / min(slowest["write"])
    blocked_s = statistics.median(slowest["blocked"])
    stall_s = blocked_s + statistics.median(slowest["slowdown"])
    interval_s = daly_interval(blocked_s, DAY_S / failures_per_host_day(find_accelerator("cpu"), 1))
    rates = {key: size_gb / statistics.median(slowest[key]) for key in ("raw", "write")}
    peaks = {key: size_gb / min(slowest[key]) for key in ("raw", "write")}
    print(f"{size_gb:.2f} GB of state on {RANKS} ranks, {args.rounds} rounds, load {os.getloadavg()[0]:.1f}")
    print(
        f"  blocked             {blocked_s:8.2f} s   at most 0.50 "
        f"(best {min(slowest['blocked']):.2f}, worst {max(slowest['blocked']):.2f})"
    )
    print(f"  blocked and slowed  {stall_s:8.2f} s   {stall_s / interval_s:.3%} of {interval_s:,.0f} s, at most 5 %")
    print(f"  bare disk           {rates['raw']:8.2f} GB/s   best {peaks['raw']:.2f}")
    print(
        f"  save                {rates['write']:8.2f} GB/s   best {peaks['write']:.2f}; "
        f"{share:.0%} of the bare disk, best against best {best:.0%}, at least 80 %"
    )
    print(f"  restore on {READERS} ranks  {restore_s:8.2f} s   at most 10")
    plan_all()


if __name__ == "__main__":
    main()
