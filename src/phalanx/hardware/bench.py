"""The measurements of a probe, the same for every engine; runs inside a worker process, one per device.

A worker prints JSON lines: {"progress": text} while it works, then {"result": {...}}.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from phalanx.units import GIB, KIB, MIB, format_bytes, format_flops, format_seconds

Call = Callable[[], object]


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """What one worker is told."""

    rank: int
    ranks: int
    device: str  # "cpu" or "cuda"
    folder: str  # private to this probe; workers find each other here
    seconds: float  # for all measurements of the worker together


class Engine(Protocol):
    """One device's operations, each returned ready to be called and timed."""

    name: str
    device_name: str
    precision: str
    backend: str

    def matmul(self, size: int) -> Call:
        """Multiply two square matrices."""

    def copy(self, num_bytes: int) -> Call:
        """Copy a buffer in device memory."""

    def small_op(self) -> Call:
        """The smallest useful operation."""

    def all_reduce(self, num_bytes: int) -> Call:
        """Sum a buffer over all ranks."""

    def agree(self, value: int) -> int:
        """Rank 0's value, on every rank."""

    def sync(self) -> None:
        """Wait until the device has done what was asked."""

    def close(self) -> None:
        """Leave the other ranks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """What is measured on a kind of device."""

    matmul: tuple[int, ...]
    copy_bytes: int
    all_reduce_bytes: tuple[int, ...]


SIZES = {
    "cpu": Sizes(
        matmul=(64, 128, 256, 512, 1024, 2048),
        copy_bytes=128 * MIB,
        all_reduce_bytes=(1 * KIB, 16 * KIB, 256 * KIB, 1 * MIB, 4 * MIB, 16 * MIB),
    ),
    "cuda": Sizes(
        matmul=(1024, 2048, 4096, 8192, 16384),
        copy_bytes=1 * GIB,
        all_reduce_bytes=(4 * KIB, 64 * KIB, 1 * MIB, 16 * MIB, 64 * MIB, 256 * MIB),
    ),
}


def serve(make_engine: Callable[[Task], Engine]) -> int:
    """Main of a worker process: its task is the only argument, its results go to stdout."""
    task = Task(**json.loads(sys.argv[1]))
    engine = make_engine(task)
    result = measure(engine, task, SIZES[task.device], emit if task.rank == 0 else _silent)
    engine.close()
    emit({"result": result})
    return 0


def emit(message: dict[str, object]) -> None:
    """One line to the parent."""
    print(json.dumps(message), flush=True)


def _silent(message: dict[str, object]) -> None:
    """Only rank 0 reports progress."""


def measure(engine: Engine, task: Task, sizes: Sizes, report: Callable[[dict[str, object]], None]) -> dict[str, object]:
    """All figures of one worker; shares of the time: matmul a half, collectives a third, the rest small."""
    matmul = []
    for size in sizes.matmul:
        elapsed = seconds_per_call(engine.matmul(size), engine.sync, 0.5 * task.seconds / len(sizes.matmul))
        matmul.append((size, 2 * size**3 / elapsed))
        report({"progress": f"matmul {size}: {format_flops(matmul[-1][1])}"})
    copy_s = seconds_per_call(engine.copy(sizes.copy_bytes), engine.sync, 0.08 * task.seconds)
    report({"progress": f"memory: {format_bytes(2 * sizes.copy_bytes / copy_s)}/s"})
    launch_s = seconds_per_call(engine.small_op(), engine.sync, 0.03 * task.seconds)
    report({"progress": f"one small operation: {format_seconds(launch_s)}"})
    points = _collectives(engine, task, sizes.all_reduce_bytes, report) if task.ranks > 1 else []
    return {
        "engine": engine.name,
        "device_name": engine.device_name,
        "precision": engine.precision,
        "backend": engine.backend,
        "matmul_by_size": matmul,
        "memory_bytes_per_s": 2 * sizes.copy_bytes / copy_s,  # a copy reads and writes
        "launch_s": launch_s,
        "all_reduce": points,
    }


def _collectives(
    engine: Engine, task: Task, sizes: Sequence[int], report: Callable[[dict[str, object]], None]
) -> list[tuple[int, float]]:
    points = []
    for num_bytes in sizes:
        elapsed = _seconds_in_step(engine, engine.all_reduce(num_bytes), 0.33 * task.seconds / len(sizes))
        points.append((num_bytes, elapsed))
        report({"progress": f"all-reduce {format_bytes(num_bytes)} x {task.ranks}: {format_seconds(elapsed)}"})
    return points


def _seconds_in_step(engine: Engine, call: Call, budget_s: float) -> float:
    """Time of a collective: all ranks must call it equally often, so rank 0 says how often."""
    first = min(_batch(call, engine.sync, 1) for _ in range(2))  # the first one also sets up buffers
    count = engine.agree(max(1, min(1000, int(budget_s / 4 / max(first, 1e-7)))))
    return sorted(_batch(call, engine.sync, count) for _ in range(3))[1] / count


def seconds_per_call(call: Call, sync: Call, budget_s: float) -> float:
    """Median of three batches long enough to time well, within a budget (one call at least)."""
    _batch(call, sync, 1)
    count, elapsed = 1, _batch(call, sync, 1)
    while elapsed < budget_s / 8 and count < 1 << 20:
        count *= 2
        elapsed = _batch(call, sync, count)
    if elapsed > budget_s / 2:
        return elapsed / count
    return sorted((elapsed, _batch(call, sync, count), _batch(call, sync, count)))[1] / count


def _batch(call: Call, sync: Call, count: int) -> float:
    start = time.perf_counter()
    for _ in range(count):
        call()
    sync()
    return max(time.perf_counter() - start, 1e-9)
