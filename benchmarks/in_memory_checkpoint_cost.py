"""What the copies in memory cost: a put of 1 GB, with and without a copy on another host, and the share of a step.

    python benchmarks/in_memory_checkpoint_cost.py [--gigabytes 1.0] [--puts 8] [--steps 30] [--device cpu]

The step is that of examples/first-run.toml: four ranks, two pipeline stages of two sharded data ranks. Steps with and
without a snapshot alternate, so that a busy neighbour hurts them alike.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from phalanx.elastic.replica_store import ReplicaStore
from phalanx.job.load import load
from phalanx.plan.layout import Layout
from phalanx.train.engine import Engine
from phalanx.train.parallel.tensor_shard import TensorShard
from phalanx.train.rank_settings import Settings
from phalanx.train.state.in_memory import InMemoryCheckpointer, ReplicaAddress
from phalanx.train.state.replica_server import ReplicaServer
from phalanx.train.verify.ranks import run_ranks

FLOOR_S = 0.5  # of blocking for 1 GB: issue 4
JOB = Path(__file__).parent.parent / "examples" / "first-run.toml"
SECRET = b"benchmark"
WARM_UP, TENSORS = 4, 60  # a model of 20 tensors, and two moments of each


def state(size_gb: float, device: str) -> list[TensorShard]:
    """Weights and moments of a model, all on this rank."""
    rows = int(size_gb * 1e9 / TENSORS / 4 / 1024)
    tensors = [torch.rand(rows, 1024, device=device) for _ in range(TENSORS)]
    return [
        TensorShard(
            name=f"w{place}", tensor=one, shape=tuple(one.shape), start=(0, 0), replicas=1, owner=True, groups={}
        )
        for place, one in enumerate(tensors)
    ]


def keeper_of(
    replica_store: ReplicaStore, rank: int, world: int, peer: ReplicaAddress | None = None
) -> InMemoryCheckpointer:
    return InMemoryCheckpointer(replica_store, slot=0, rank=rank, world=world, generation=1, secret=SECRET, peer=peer)


def put_alone(keeper: InMemoryCheckpointer, shards: Sequence[TensorShard], step: int) -> tuple[float, float, float]:
    """Seconds of blocking, processor seconds of this thread in it, and seconds until the snapshot is safe."""
    began_s, used_s = time.perf_counter(), time.thread_time()
    blocked_s = keeper.put(step, shards, {}, held=keeper.safe_step)
    used_s = time.thread_time() - used_s
    while keeper.safe_step < step:
        time.sleep(0.001)
    return blocked_s, used_s, time.perf_counter() - began_s


def measure_puts(
    shards: Sequence[TensorShard], puts: int, *, reserve: bool, peer: ReplicaAddress | None
) -> list[list[float]]:
    replica_store = ReplicaStore(1)
    keeper = keeper_of(replica_store, 0, 1, peer)
    if reserve:
        keeper.reserve(shards)
    found = [put_alone(keeper, shards, step) for step in range(1, puts + 1)]
    keeper.close()
    return [list(column) for column in zip(*found, strict=True)]


def other_host() -> tuple[int, ReplicaAddress]:
    """A process with a replica store of its own that takes copies; forked before this one has threads."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        server = ReplicaServer(ReplicaStore(1), secret=SECRET, address="127.0.0.1")
        os.write(writing, server.port.to_bytes(4, "little"))
        signal.pause()
    return child, ReplicaAddress(host="127.0.0.1", port=int.from_bytes(os.read(reading, 4), "little"), slot=0)


def report_puts(size_gb: float, puts: int, device: str) -> None:
    child, peer = other_host()
    torch.set_num_threads(1)  # one core of a busy host: what a rank can count on
    try:
        shards = state(size_gb, device)
        size = sum(one.tensor.numel() * 4 for one in shards) / 1e9
        for name, reserve, where in (
            ("memory taken at the first put", False, None),
            ("memory reserved before", True, None),
            ("and a copy on another host (loopback)", True, peer),
        ):
            blocked, used, safe = measure_puts(shards, puts, reserve=reserve, peer=where)
            print(
                f"{size:.2f} GB on {device}, {name}: blocked first {blocked[0]:.3f} s, then {_spread(blocked[2:])}, of "
                f"which {statistics.median(used[2:]):.3f} s on a core; safe after {_spread(safe[2:])}"
            )
            last_s = statistics.median(blocked[2:])
        print(f"floor: {FLOOR_S} s of blocking for 1 GB; measured {last_s / size:.3f} s")
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _spread(times: Sequence[float]) -> str:
    return f"{statistics.median(times):.3f} s ({min(times):.3f} to {max(times):.3f})"


def first_run() -> tuple[Layout, int]:
    """The layout that examples/first-run.toml is trained in, and its sequences per data rank."""
    return Layout(
        data=2, shard=2, tensor=1, context=1, pipeline=2, virtual_pipeline=1, expert=1, zero=2,
        sequence_parallel=False, micro_batch=4, accumulation=2, recompute="none", precision="fp32", schedule="1f1b",
        offload="none", compression="none",
    ), 8  # fmt: skip


def measure_steps(rank: int, steps: int) -> tuple[dict[bool, list[float]], list[float], int]:
    """Seconds of steps without and with a snapshot after them, blocking seconds, and bytes of this rank's state."""
    torch.set_num_threads(1)
    job, (layout, rows) = load(JOB).job, first_run()
    engine = Engine(job.model, Settings.of(job, layout, on_gpu=False), job.optim, device=torch.device("cpu"))
    engine.initialise()
    keeper = keeper_of(ReplicaStore(1), rank, layout.devices)
    found: dict[bool, list[float]] = {False: [], True: []}
    blocked: list[float] = []
    drawn = torch.Generator().manual_seed(rank // 2)
    for step in range(2 * (steps + WARM_UP)):
        tokens_BS = torch.randint(0, job.model.vocab, (rows, job.data.sequence), generator=drawn)
        began_s = time.perf_counter()
        engine.step(tokens_BS, tokens_BS, lr=1e-4)
        taken_s = 0.0
        if step % 4 < 2:  # pairs: what runs in the background falls into the next step, which is one with a put too
            taken_s = keeper.put(step, engine.state(), {}, held=keeper.safe_step)
        if step >= 2 * WARM_UP:
            found[step % 4 < 2].append(time.perf_counter() - began_s)
            blocked += [taken_s] if step % 4 < 2 else []
    keeper.close()
    size_bytes = sum(one.tensor.numel() * one.tensor.element_size() for one in engine.state() if one.owner)
    return found, blocked, size_bytes


def report_steps(steps: int) -> None:
    answers = run_ranks(measure_steps, 4, steps, limit_s=600.0)
    found, blocked, _ = answers[0]
    size = sum(answer[2] for answer in answers) / 1e6
    without_s, with_s = (statistics.median(found[kind]) for kind in (False, True))
    put_s = statistics.median(blocked)
    print(
        f"first run, 4 ranks, {size:.1f} MB of state, {len(blocked)} steps each: {without_s * 1e3:.1f} ms without, "
        f"{with_s * 1e3:.1f} ms with a snapshot after every step ({100 * (with_s / without_s - 1):+.1f} %); "
        f"blocked {put_s * 1e3:.2f} ms = {100 * put_s / without_s:.2f} % of a step"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--puts", type=int, default=8)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only", choices=("puts", "steps"))
    args = parser.parse_args()
    if args.only != "steps":
        report_puts(args.gigabytes, args.puts, args.device)
    if args.only != "puts":
        report_steps(args.steps)


if __name__ == "__main__":
    main()
