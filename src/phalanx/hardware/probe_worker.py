"""The worker process of a probe: `python -m phalanx.hardware.probe_worker TASK` times one CPU core with numpy.

`train/` has an engine for torch that `serve_probe` measures the same way. All-reduces run over a ring of processes on
this machine, connected by TCP over 127.0.0.1.
"""

from __future__ import annotations

import hmac
import json
import platform
import select
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from phalanx.io.files import replace_text
from phalanx.units import GIB, KIB, MIB, format_bytes, format_flops, format_seconds

_PATIENCE_S = 20.0
_TOKEN_BYTES = 32


class Ring:
    """A ring of ranks, each sending to the next and receiving from the previous; they meet through a folder."""

    def __init__(self, *, rank: int, ranks: int, folder: Path) -> None:
        self.rank = rank
        self.ranks = ranks
        token = (folder / "token").read_bytes()
        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.settimeout(_PATIENCE_S)
            replace_text(folder / f"port.{rank}", str(listener.getsockname()[1]))
            port = int(_await_file(folder / f"port.{(rank + 1) % ranks}"))
            self._next = socket.create_connection(("127.0.0.1", port), timeout=_PATIENCE_S)
            self._next.sendall(token)
            self._previous = _accept_neighbour(listener, token)
        for peer in (self._next, self._previous):
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            peer.setblocking(False)

    def all_reduce(self, values: NDArray[np.float32]) -> None:
        """Sum `values` over all ranks, in place: reduce-scatter, then all-gather, 2(n-1) steps."""
        chunks = np.array_split(values, self.ranks)
        scratch = np.empty(len(chunks[0]), dtype=np.float32)
        for step in range(self.ranks - 1):
            target = chunks[(self.rank - step - 1) % self.ranks]
            incoming = scratch[: len(target)]
            self._exchange_bytes(chunks[(self.rank - step) % self.ranks], incoming)
            target += incoming
        for step in range(self.ranks - 1):
            self._exchange_bytes(chunks[(self.rank + 1 - step) % self.ranks], chunks[(self.rank - step) % self.ranks])

    def _exchange_bytes(self, outgoing: NDArray[np.float32], incoming: NDArray[np.float32]) -> None:
        """Send and receive at the same time; one after the other would deadlock once socket buffers are full."""
        to_send, to_fill = outgoing.view(np.uint8).data, incoming.view(np.uint8).data
        while to_send or to_fill:
            readers = [self._previous] if to_fill else []
            writers = [self._next] if to_send else []
            ready, writable, _ = select.select(readers, writers, [], _PATIENCE_S)
            if not ready and not writable:
                raise TimeoutError(f"rank {self.rank} waited {_PATIENCE_S:.0f} s for its neighbours")
            if writable:
                to_send = to_send[self._next.send(to_send) :]
            if ready:
                received = self._previous.recv_into(to_fill)
                if received == 0:
                    raise ConnectionError(f"rank {(self.rank - 1) % self.ranks} left the ring")
                to_fill = to_fill[received:]

    def close(self) -> None:
        """Leave the ring."""
        self._next.close()
        self._previous.close()


def _await_file(path: Path) -> str:
    deadline = time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline:
        if path.exists():
            return path.read_text()
        time.sleep(0.005)
    raise TimeoutError(f"no other process wrote {path.name} within {_PATIENCE_S:.0f} s")


def _accept_neighbour(listener: socket.socket, token: bytes) -> socket.socket:
    """Return the connection of the neighbour, which the token distinguishes from other local programs that connect."""
    while True:
        peer, _ = listener.accept()
        peer.settimeout(_PATIENCE_S)
        received = peer.recv(_TOKEN_BYTES, socket.MSG_WAITALL)
        if hmac.compare_digest(received, token):
            return peer
        peer.close()


# The measurements of a probe, the same for every engine; they run in a worker process, one per device.
#
# A worker prints JSON lines: {"progress": text} while it works, then {"result": {...}}.


Call = Callable[[], object]


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeTask:
    """The task of one worker."""

    rank: int
    ranks: int
    device: str  # "cpu" or "cuda"
    folder: str  # private to this probe; workers find each other's ports here
    seconds: float  # for all measurements of the worker together


class ProbeEngine(Protocol):
    """The operations of one device, each returned as a function that is ready to be timed."""

    name: str
    device_name: str
    precision: str
    backend: str

    def matmul(self, size: int) -> Call:
        """Return a function that multiplies two square matrices."""

    def copy(self, num_bytes: int) -> Call:
        """Return a function that copies a buffer in device memory."""

    def small_op(self) -> Call:
        """Return a function that runs the smallest useful operation."""

    def all_reduce(self, num_bytes: int) -> Call:
        """Return a function that sums a buffer over all ranks."""

    def agree(self, value: int) -> int:
        """Return rank 0's value on every rank."""

    def sync(self) -> None:
        """Wait until the device has completed all operations."""

    def close(self) -> None:
        """Disconnect from the other ranks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """The sizes that are measured on a kind of device."""

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


def serve_probe(make_engine: Callable[[ProbeTask], ProbeEngine]) -> int:
    """Run a worker process: its task is the only argument, its results go to stdout."""
    task = ProbeTask(**json.loads(sys.argv[1]))
    engine = make_engine(task)
    result = measure_engine(engine, task, SIZES[task.device], emit_message if task.rank == 0 else _ignore_progress)
    engine.close()
    emit_message({"result": result})
    return 0


def emit_message(message: dict[str, object]) -> None:
    """Print one line for the parent."""
    print(json.dumps(message), flush=True)


def _ignore_progress(message: dict[str, object]) -> None:
    """Drop a progress message; only rank 0 reports progress."""


def measure_engine(
    engine: ProbeEngine, task: ProbeTask, sizes: Sizes, report: Callable[[dict[str, object]], None]
) -> dict[str, object]:
    """Return all values of one worker; matmuls take half of the time, collectives a third, the rest little."""
    matmul = []
    for size in sizes.matmul:
        elapsed = seconds_per_call(engine.matmul(size), engine.sync, 0.5 * task.seconds / len(sizes.matmul))
        matmul.append((size, 2 * size**3 / elapsed))
        report({"progress": f"matmul {size}: {format_flops(matmul[-1][1])}"})
    copy_s = seconds_per_call(engine.copy(sizes.copy_bytes), engine.sync, 0.08 * task.seconds)
    report({"progress": f"memory: {format_bytes(2 * sizes.copy_bytes / copy_s)}/s"})
    launch_s = seconds_per_call(engine.small_op(), engine.sync, 0.03 * task.seconds)
    report({"progress": f"one small operation: {format_seconds(launch_s)}"})
    points = _time_collectives(engine, task, sizes.all_reduce_bytes, report) if task.ranks > 1 else []
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


def _time_collectives(
    engine: ProbeEngine, task: ProbeTask, sizes: Sequence[int], report: Callable[[dict[str, object]], None]
) -> list[tuple[int, float]]:
    points = []
    for num_bytes in sizes:
        elapsed = _seconds_in_step(engine, engine.all_reduce(num_bytes), 0.33 * task.seconds / len(sizes))
        points.append((num_bytes, elapsed))
        report(
            {"progress": f"all-reduce of {format_bytes(num_bytes)} on {task.ranks} ranks: {format_seconds(elapsed)}"}
        )
    return points


def _seconds_in_step(engine: ProbeEngine, call: Call, budget_s: float) -> float:
    """Return the time of a collective; all ranks must call it equally often, so rank 0 decides how often."""
    # The first call also sets up buffers.
    first = min(_time_batch(call, engine.sync, 1) for _ in range(2))
    count = engine.agree(max(1, min(1000, int(budget_s / 4 / max(first, 1e-7)))))
    return sorted(_time_batch(call, engine.sync, count) for _ in range(3))[1] / count


def seconds_per_call(call: Call, sync: Call, budget_s: float) -> float:
    """Return the median of three batches that are long enough to time, within a budget (at least one call)."""
    _time_batch(call, sync, 1)
    count, elapsed = 1, _time_batch(call, sync, 1)
    while elapsed < budget_s / 8 and count < 1 << 20:
        count *= 2
        elapsed = _time_batch(call, sync, count)
    if elapsed > budget_s / 2:
        return elapsed / count
    return sorted((elapsed, _time_batch(call, sync, count), _time_batch(call, sync, count)))[1] / count


def _time_batch(call: Call, sync: Call, count: int) -> float:
    start = time.perf_counter()
    for _ in range(count):
        call()
    sync()
    return max(time.perf_counter() - start, 1e-9)


# The engine for one CPU core with numpy.


class NumpyEngine:
    """fp32 on one core; collectives over a TCP ring."""

    precision = "fp32"

    def __init__(self, task: ProbeTask) -> None:
        self.name = f"numpy {np.__version__}"
        self.device_name = platform.processor() or platform.machine()
        self.backend = "tcp" if task.ranks > 1 else ""
        self._random = np.random.default_rng(task.rank)
        self._ring = Ring(rank=task.rank, ranks=task.ranks, folder=Path(task.folder)) if task.ranks > 1 else None

    def matmul(self, size: int) -> Call:
        """Return a function that multiplies two square matrices."""
        left, right = self._random.random((2, size, size), dtype=np.float32)
        out = np.empty((size, size), dtype=np.float32)
        return lambda: np.matmul(left, right, out=out)

    def copy(self, num_bytes: int) -> Call:
        """Return a function that copies a buffer in memory."""
        source, target = np.ones(num_bytes // 4, dtype=np.float32), np.zeros(num_bytes // 4, dtype=np.float32)
        return lambda: np.copyto(target, source)

    def small_op(self) -> Call:
        """Return a function that adds two vectors of eight."""
        first, second = np.ones(8, dtype=np.float32), np.ones(8, dtype=np.float32)
        return lambda: first + second

    def all_reduce(self, num_bytes: int) -> Call:
        """Return a function that sums a buffer over all ranks."""
        values = np.zeros(num_bytes // 4, dtype=np.float32)
        ring = self._ring
        assert ring is not None, "a single rank has no collectives"
        return lambda: ring.all_reduce(values)

    def agree(self, value: int) -> int:
        """Return rank 0's value on every rank."""
        assert self._ring is not None, "a single rank has nobody to agree with"
        # One element per rank keeps every chunk of the ring non-empty; counts up to 2^24 are exact in fp32.
        values = np.full(self._ring.ranks, value if self._ring.rank == 0 else 0, dtype=np.float32)
        self._ring.all_reduce(values)
        return int(values[0])

    def sync(self) -> None:
        """Do nothing: no operation is asynchronous here."""

    def close(self) -> None:
        """Leave the ring."""
        if self._ring is not None:
            self._ring.close()


if __name__ == "__main__":
    sys.exit(serve_probe(NumpyEngine))
