"""Measure this machine, with one worker process per device, then its disk; store the result as a small JSON file."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import secrets
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Annotated, Any

from phalanx.errors import Problem, SystemFailure, mistake
from phalanx.hardware.types import Machine
from phalanx.io.codec import Bounds, from_json_values, json_text, json_values
from phalanx.io.files import read_text, replace_text
from phalanx.io.write_errors import write_failure
from phalanx.units import MIB, format_bytes

NUMPY_WORKER = "phalanx.hardware.probe_worker"
MAX_RANKS = 16  # more processes only make the start longer; the rates per core do not change
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
) -> MachineProfile:
    """Measure for about `seconds`; raises SystemFailure if a worker fails."""
    started = time.monotonic()
    results = _run_workers(worker, device=device, ranks=ranks, seconds=0.7 * seconds, environ=environ, report=report)
    disk_bytes_per_s = measure_disk(disk_folder, min(3.0, 0.15 * seconds), report)
    first = results[0]
    points = [(int(size), float(elapsed)) for size, elapsed in first["all_reduce"]]
    latency_s, bytes_per_s = fit_ring(points, ranks) if points else (0.0, 0.0)
    # Two ranks on one core each get half of it; a profile has the rates of a whole core.
    crowding = max(1.0, ranks / machine.usable_cores) if device == "cpu" else 1.0
    by_size = _mean_by_size([result["matmul_by_size"] for result in results], crowding)
    return MachineProfile(
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
    """Fit latency α and bandwidth B of t = 2(n-1)α + 2(n-1)/n·S/B by least squares on relative errors.

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
    # The noise exceeds one of the two terms: take each from the end of the range where it dominates.
    if alpha <= 0 or beta <= 0:
        alpha = min(points)[1] / steps
        beta = max(points)[1] / (share * max(points)[0])
    return alpha, 1 / beta


def measure_disk(folder: Path, seconds: float, report: Report) -> float:
    """Return bytes/s of a sequential write that reached the disk (fsync); 0 if the folder cannot be written."""
    # Random, so that a file system with compression does not write less.
    block = secrets.token_bytes(_DISK_BLOCK_BYTES)
    num_written, start = 0, time.perf_counter()
    try:
        # The file never has a name, so nothing is left in the folder, however this process ends.
        with tempfile.TemporaryFile(dir=folder, buffering=0) as stream:
            while num_written < _DISK_MOST_BYTES and time.perf_counter() - start < seconds:
                num_written += stream.write(block) or 0
                os.fsync(stream.fileno())
    except OSError as error:
        report(f"disk: not measured, {folder} cannot be written ({error.strerror or error})")
        return 0.0
    rate = num_written / (time.perf_counter() - start)
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
    """Return every rank's result, in order; all workers have ended when this returns or raises."""
    with tempfile.TemporaryDirectory(prefix="phalanx-probe-") as folder:
        (Path(folder) / "token").write_bytes(secrets.token_bytes(32))
        messages: queue.Queue[tuple[int, dict[str, Any] | None]] = queue.Queue()
        with _workers(worker, device, ranks, seconds, Path(folder), environ, messages):
            return _collect_results(messages, ranks, seconds, Path(folder), report)


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
                # A separate session: Ctrl-C reaches only the parent, which then ends the workers quietly.
                process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, env=env,
                    start_new_session=True,
                )  # fmt: skip
            processes.append(process)
            assert process.stdout is not None
            reader = threading.Thread(target=_read_messages, args=(rank, process.stdout, messages), daemon=True)
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


def _read_messages(rank: int, stream: IO[bytes], messages: queue.Queue[tuple[int, dict[str, Any] | None]]) -> None:
    with stream:
        for line in stream:
            with contextlib.suppress(ValueError):  # a library may print to stdout too
                message = json.loads(line)
                if isinstance(message, dict):
                    messages.put((rank, message))
    messages.put((rank, None))


def _collect_results(
    messages: queue.Queue[tuple[int, dict[str, Any] | None]], ranks: int, seconds: float, folder: Path, report: Report
) -> list[dict[str, Any]]:
    results: dict[int, dict[str, Any]] = {}
    deadline = time.monotonic() + 2 * seconds + _GRACE_S
    while len(results) < ranks:
        try:
            rank, message = messages.get(timeout=max(0.01, deadline - time.monotonic()))
        except queue.Empty:
            raise _worker_failure(folder, "did not finish in time", range(ranks)) from None
        if message is None and rank not in results:
            raise _worker_failure(folder, "ended without a result", [rank])
        if message and "result" in message:
            results[rank] = message["result"]
        elif message and "progress" in message:
            report(str(message["progress"]))
    return [results[rank] for rank in range(ranks)]


def _worker_failure(folder: Path, what: str, ranks: Sequence[int]) -> SystemFailure:
    texts = [(folder / f"stderr.{rank}").read_text(errors="replace").strip() for rank in ranks]
    last = next((text.splitlines()[-1] for text in texts if text), "it printed nothing")
    where = f"probe worker {ranks[0]}" if len(ranks) == 1 else "probe workers"
    return SystemFailure(Problem(where=where, what=what, why=last[:300], fix="try again, or with --engine numpy"))


# The result of `phalanx probe` on a machine: a small versioned JSON file that later plans read.


VERSION = 1


Text = Annotated[str, Bounds(max_length=500)]
Size = Annotated[int, Bounds(ge=0, le=10**30)]
Quantity = Annotated[float, Bounds(ge=0, le=1e30)]


@dataclass(frozen=True, kw_only=True, slots=True)
class MachineProfile:
    """Measured rates of one device (a core or a GPU) while all devices of the machine work; 0 means not measured."""

    hostname: Text
    taken_at: Text  # ISO 8601, UTC
    engine: Text  # "numpy 2.4.6", "torch 2.11.0"
    device: Text  # "cpu" or "cuda"
    device_name: Text
    ranks: Annotated[int, Bounds(ge=1, le=10**7)]
    precision: Text  # of the matmul: "fp32" on CPUs, "bf16" on GPUs
    matmul_flops: Quantity  # best over sizes
    matmul_by_size: tuple[tuple[Size, Quantity], ...]  # (n, FLOP/s) of n x n x n
    memory_bytes_per_s: Quantity
    launch_s: Quantity
    backend: Text  # "tcp", "gloo", "nccl", or "" with a single device
    link_latency_s: Quantity
    link_bytes_per_s: Quantity
    all_reduce: tuple[tuple[Size, Quantity], ...]  # (bytes, seconds) behind the two fitted values
    disk_bytes_per_s: Quantity
    seconds: Quantity  # duration of the probe


def usual_path(hostname: str, environ: Mapping[str, str]) -> Path:
    """Return the default path of this machine's profile."""
    home = environ.get("XDG_DATA_HOME") or os.path.join(environ.get("HOME") or ".", ".local", "share")
    safe = re.sub(r"[^A-Za-z0-9._-]", "_", hostname).strip(".") or "localhost"
    return Path(home) / "phalanx" / "profiles" / f"{safe[:100]}.json"


def save_profile(profile: MachineProfile, path: Path, *, folders: bool = False) -> None:
    """Write the whole file or nothing; `folders` also creates its parent folders, for paths that Phalanx chose."""
    text = json_text({"version": VERSION, **json_values(profile)}, indent=1) + "\n"
    try:
        if folders:
            path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, text)
    except OSError as error:
        raise write_failure(
            path, error, needed_bytes=len(text.encode()), fix="give another place with --out FILE"
        ) from None


def load_profile(path: Path) -> MachineProfile:
    """Read the profile in a file; raises UserError if it is missing, damaged or from another version."""
    fix_text = "run phalanx probe again"
    try:
        data = json.loads(read_text(path))
    except (ValueError, RecursionError):
        raise mistake(str(path), "is not JSON", why="the profile is damaged", fix=fix_text) from None
    if not isinstance(data, dict) or data.get("version") != VERSION:
        version = data.get("version") if isinstance(data, dict) else None
        raise mistake(str(path), f"has profile version {str(version)[:20]}, not {VERSION}", fix=fix_text)
    values = {name: value for name, value in data.items() if name != "version"}
    return from_json_values(MachineProfile, values, str(path), noun="profile", fix=fix_text)
