"""An agent whose ranks train nothing, well or badly: `python fake_agent.py BEHAVIOUR RUN PARENT`. No torch."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from phalanx.errors import mistake
from phalanx.record.events import EventWriter
from phalanx.record.run import Run, open_run
from phalanx.train.supervise.process import die_with
from phalanx.train.supervise.watch import Wishes, supervise

WORLD = 4
STEPS = 10  # of behaviour "train"
Heartbeat = Callable[[int], None]
Stop = Callable[[], bool]


def loop(run: Run, rank: int, stop: Stop, heartbeat: Heartbeat, misbehave: Callable[[], None]) -> None:
    """Steps without end; rank 2 misbehaves in step 5."""
    events = EventWriter(run.events(rank), rank=rank)
    print(f"pid {os.getpid()}")
    for step in range(10_000):
        heartbeat(step)
        events.write("step", step=step, loss=1.0, duration_s=0.02, memory_bytes=10**9)
        if step == 3 and rank == 0:
            checkpoint(run, 3)
        if step == 5 and rank == 2:
            misbehave()
        if stop():
            events.write("stop", reason="asked", step=step)
            return
        time.sleep(0.06)


def checkpoint(run: Run, step: int) -> None:
    folder = run.checkpoints / f"step-{step:08d}"
    folder.mkdir()
    (folder / "manifest.json").touch()


def train(run: Run, rank: int, stop: Stop, heartbeat: Heartbeat) -> None:
    """What a trainer records: ten steps from the newest checkpoint on, an evaluation, two samples, a checkpoint."""
    events = EventWriter(run.events(rank), rank=rank)
    first = max(run.saved_steps(), default=0)
    events.write("run_start", steps=STEPS, world=WORLD)
    for step in range(first, STEPS):
        heartbeat(step)
        events.write(
            "step", step=step, loss=5.0 - step / 10, tokens=2048, duration_s=0.2 + rank / 100, grad_norm=1.0, lr=1e-3,
            memory_bytes=10**9 + rank, compute_s=0.1 + 0.02 * (rank == 2), wait_s=0.1, bytes_sent=1000, skipped=False,
        )  # fmt: skip
        time.sleep(0.01)
        if stop():
            if rank == 0:
                checkpoint(run, step + 1)
            events.write("stop", reason="asked", step=step)
            return
    if rank == 0:
        events.write("evaluate", step=STEPS, loss=4.0, bits_per_byte=2.0)
        checkpoint(run, STEPS)
        events.write("checkpoint", step=STEPS, path="checkpoints", seconds=0.5, bytes=3_000_000)
        events.write("sample", step=STEPS, text="Once upon\x1b[31m a time")
    events.write("run_end", steps=STEPS)


def raise_value() -> None:
    raise ValueError("boom")


def raise_user() -> None:
    raise mistake("data/shard-0003", "ends early: 10 bytes of 20", why="it was cut", fix="build it again")


def raise_memory() -> None:
    raise MemoryError


def raise_late() -> None:
    time.sleep(0.3)
    raise KeyError("the true cause")


def sleep() -> None:
    time.sleep(1000)


def stubborn() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(1000)


BEHAVIOURS: dict[str, Callable[[], None]] = {
    "good": lambda: None,
    "raise": raise_value,
    "user": raise_user,
    "sigkill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "memory": raise_memory,
    "hang": sleep,
    "sigstop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "consequence": raise_late,
    "stubborn": stubborn,
    "deaf": stubborn,  # the same, and nobody is impatient
}


def behave(behaviour: str, run: Run, rank: int, stop: Stop, heartbeat: Heartbeat) -> None:
    if behaviour == "finish":
        heartbeat(0)
    elif behaviour == "train":
        train(run, rank, stop, heartbeat)
    elif behaviour == "consequence" and rank == 1:
        heartbeat(4)
        time.sleep(0.2)
        raise RuntimeError("[pair.cc:534] Connection closed by peer [127.0.0.1]:4711")
    elif behaviour == "timeout":
        heartbeat(4)
        time.sleep(0.5 if rank != 2 else 1000)
        if rank == 0:
            raise RuntimeError("[unbound_buffer.cc:81] Timed out waiting 1000ms for recv operation to complete")
        raise RuntimeError("[pair.cc:553] Connection closed by peer [127.0.0.1]:53958")
    else:
        loop(run, rank, stop, heartbeat, BEHAVIOURS[behaviour])


def main(behaviour: str, folder: str, parent: str) -> int:
    die_with(int(parent))
    run = open_run(Path(folder))

    def work(*, rank: int, stop: Stop, heartbeat: Heartbeat) -> None:
        behave(behaviour, run, rank, stop, heartbeat)

    timeout_s = 1.0 if behaviour in ("hang", "sigstop", "stubborn") else 60.0
    return supervise(work, run=run, world=WORLD, timeout_s=timeout_s, wishes=Wishes.listen(), grace_s=0.5)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
