"""Measure this machine: one worker process per device, all at work together, then the disk."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import secrets
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from phalanx.errors import Problem, SystemFailure
from phalanx.hardware.machine import Machine
from phalanx.hardware.profile import Profile
from phalanx.units import MIB, format_bytes

NUMPY_WORKER = "phalanx.hardware.worker"
MAX_RANKS = 16  # more processes than this only make the start longer; the rates per core no longer change
_GRACE_S = 30.0  # starting workers and importing their libraries, on a busy machine
_DISK_BLOCK_BYTES = 16 * MIB
_DISK_MOST_BYTES = 1024 * MIB

Report = Callable[[str], None]


def probe(
    machine: Machine,
    *,
    worker: str = NUMPY_WORKER,
    device: str = "cpu",
    ranks: int,
    seconds: float,
    disk_folder: Path,
    environ: Mapping[str, str],
    report: Report,
) -> Profile:
    """Measure for about `seconds`; raises SystemFailure when a worker fails."""
    started = time.monotonic()
    results = _run_workers(worker, device=device, ranks=ranks, seconds=0.7 * seconds, environ=environ, report=report)
    disk_bytes_per_s = measure_disk(disk_folder, min(3.0, 0.15 * seconds), report)
    first = results[0]
    points = [(int(size), float(elapsed)) for size, elapsed in first["all_reduce"]]
    latency_s, bytes_per_s = fit_ring(points, ranks) if points else (0.0, 0.0)
    # Two ranks on one core each get half of it; a profile speaks of a whole core.
    crowding = max(1.0, ranks / machine.usable_cores) if device == "cpu" else 1.0
    by_size = _mean_by_size([result["matmul_by_size"] for result in results], crowding)
    return Profile(
        hostname=machine.hostname,
        taken_at=datetime.now(UTC).isoformat(timespec="seconds"),
        engine=first["engine"],
        device=device,
        device_name=first["device_name"] if device != "cpu" else machine.cpu_model,
        ranks=ranks,
        precision=first["precision"],
        matmul_flops=max(rate for _, rate in by_size),
        matmul_by_size=by_size,
        memory_bytes_per_s=crowding * statistics.mean(result["memory_bytes_per_s"] for result in results),
        launch_s=statistics.median(result["launch_s"] for result in results),
        backend=first["backend"],
        link_latency_s=latency_s,
        link_bytes_per_s=bytes_per_s,
        all_reduce=tuple(points),
        disk_bytes_per_s=disk_bytes_per_s,
        seconds=round(time.monotonic() - started, 2),
    )


def fit_ring(points: Sequence[tuple[int, float]], ranks: int) -> tuple[float, float]:
    """Latency α and bandwidth B of t = 2(n-1)α + 2(n-1)/n·S/B, by least squares on relative errors.

    >>> alpha, bandwidth = fit_ring([(1000, 2e-5 + 1e-6), (1000000, 2e-5 + 1e-3)], 2)
    >>> f"{alpha:.3g} {bandwidth:.3g}"
    '1e-05 1e+09'
    """
    steps, share = 2 * (ranks - 1), 2 * (ranks - 1) / ranks
    rows = [(steps / elapsed, share * size / elapsed) for size, elapsed in points]
    aa, ab, bb = (sum(row[i] * row[j] for row in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    a, b = sum(row[0] for row in rows), sum(row[1] for row in rows)
    determinant = aa * bb - ab * ab
    alpha = (a * bb - b * ab) / determinant if determinant > 1e-12 * aa * bb else 0.0
    beta = (aa * b - ab * a) / determinant if alpha > 0 else 0.0
    if alpha <= 0 or beta <= 0:  # noise drowned one of the two: take each from the end where it rules
        alpha = min(points)[1] / steps
        beta = max(points)[1] / (share * max(points)[0])
    return alpha, 1 / beta


def measure_disk(folder: Path, seconds: float, report: Report) -> float:
    """Bytes/s of a sequential write that has reached the disk (fsync); 0 when the folder cannot be written."""
    block = secrets.token_bytes(_DISK_BLOCK_BYTES)  # random, so that a compressing file system cannot cheat
    written, start = 0, time.perf_counter()
    try:
        # The file has no name from the start: nothing stays behind, however this process ends.
        with tempfile.TemporaryFile(dir=folder, buffering=0) as stream:
            while written < _DISK_MOST_BYTES and time.perf_counter() - start < seconds:
                written += stream.write(block) or 0
                os.fsync(stream.fileno())
    except OSError as error:
        report(f"disk: not measured, {folder} cannot be written ({error.strerror or error})")
        return 0.0
    rate = written / (time.perf_counter() - start)
    report(f"disk at {folder}: {format_bytes(rate)}/s")
    return rate


def _mean_by_size(tables: Sequence[Sequence[Sequence[float]]], scale: float) -> tuple[tuple[int, float], ...]:
    rates: dict[int, list[float]] = {}
    for table in tables:
        for size, rate in table:
            rates.setdefault(int(size), []).append(rate)
    return tuple((size, scale * statistics.mean(values)) for size, values in rates.items())


def _run_workers(
    worker: str, *, device: str, ranks: int, seconds: float, environ: Mapping[str, str], report: Report
) -> list[dict[str, Any]]:
    """Every rank's result, in order; all workers are gone when this returns or raises."""
    with tempfile.TemporaryDirectory(prefix="phalanx-probe-") as folder:
        (Path(folder) / "token").write_bytes(secrets.token_bytes(32))
        messages: queue.Queue[tuple[int, dict[str, Any] | None]] = queue.Queue()
        with _workers(worker, device, ranks, seconds, Path(folder), environ, messages):
            return _collect(messages, ranks, seconds, Path(folder), report)


@contextlib.contextmanager
def _workers(
    worker: str,
    device: str,
    ranks: int,
    seconds: float,
    folder: Path,
    environ: Mapping[str, str],
    messages: queue.Queue[tuple[int, dict[str, Any] | None]],
) -> Iterator[None]:
    env = dict(environ)
    if device == "cpu":  # one core per rank, as the trainer runs them
        env |= {f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL", "VECLIB", "NUMEXPR")}
    processes, readers = [], []
    try:
        for rank in range(ranks):
            task = {"rank": rank, "ranks": ranks, "device": device, "folder": str(folder), "seconds": seconds}
            command = [sys.executable, "-m", worker, json.dumps(task)]
            with (folder / f"stderr.{rank}").open("wb") as errors:
                # A session of its own: Ctrl-C reaches only the parent, which then ends the workers quietly.
                process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, env=env,
                    start_new_session=True,
                )  # fmt: skip
            processes.append(process)
            assert process.stdout is not None
            reader = threading.Thread(target=_read, args=(rank, process.stdout, messages), daemon=True)
            reader.start()
            readers.append(reader)
        yield
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()
        for reader in readers:
            reader.join()


def _read(rank: int, stream: IO[bytes], messages: queue.Queue[tuple[int, dict[str, Any] | None]]) -> None:
    with stream:
        for line in stream:
            with contextlib.suppress(ValueError):  # a library may print to stdout too
                message = json.loads(line)
                if isinstance(message, dict):
                    messages.put((rank, message))
    messages.put((rank, None))


def _collect(
    messages: queue.Queue[tuple[int, dict[str, Any] | None]], ranks: int, seconds: float, folder: Path, report: Report
) -> list[dict[str, Any]]:
    results: dict[int, dict[str, Any]] = {}
    deadline = time.monotonic() + 2 * seconds + _GRACE_S
    while len(results) < ranks:
        try:
            rank, message = messages.get(timeout=max(0.01, deadline - time.monotonic()))
        except queue.Empty:
            raise _failure(folder, "did not finish in time", range(ranks)) from None
        if message is None and rank not in results:
            raise _failure(folder, "ended without a result", [rank])
        if message and "result" in message:
            results[rank] = message["result"]
        elif message and "progress" in message:
            report(str(message["progress"]))
    return [results[rank] for rank in range(ranks)]


def _failure(folder: Path, what: str, ranks: Sequence[int]) -> SystemFailure:
    texts = [(folder / f"stderr.{rank}").read_text(errors="replace").strip() for rank in ranks]
    last = next((text.splitlines()[-1] for text in texts if text), "it printed nothing")
    where = f"probe worker {ranks[0]}" if len(ranks) == 1 else "probe workers"
    return SystemFailure(Problem(where=where, what=what, why=last[:300], fix="try again, or with --engine numpy"))
