"""An agent whose ranks train nothing, well or badly: `python fake_agent.py BEHAVIOUR RUN HOST SLOTS ADDRESS PARENT`.

No torch. The agent, the coordinator and the processes are real; only what a rank does between `go` and `left` is not.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from phalanx.elastic import host_agent as hosting
from phalanx.elastic.heartbeat_board import NO_STEP, Phase
from phalanx.elastic.host_agent import HostAgent
from phalanx.elastic.local_launch import StopSignals
from phalanx.elastic.membership import HostMembership
from phalanx.elastic.rank_link import Interrupted, RankLink
from phalanx.elastic.rank_process import die_with, take_rank
from phalanx.errors import mistake
from phalanx.plan.plan import Plan
from phalanx.record.events import EventWriter
from phalanx.record.run import Run, open_run

STEPS = 10  # of behaviour "train"
BAD_RANK, BAD_STEP, SAVED_STEP = 2, 5, 3
LOCK_S = 20
SPOILT = "spoilt"  # a file in the run folder

# Where a rank waits for the others: the stack must show a file that is known for it.
WAIT = """
def wait_for(others, is_over):
    while not is_over() and not others():
        sleep(0.005)
"""
_scope: dict[str, Callable[..., None]] = {"sleep": time.sleep}
exec(compile(WAIT, "distributed_c10d.py", "exec"), _scope)
wait_for = _scope["wait_for"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A rank's part in a membership."""

    run: Run
    link: RankLink
    membership: HostMembership
    rank: int
    host: str
    is_deaf: bool = False  # does not notice that its membership is over, as in a collective that nobody wakes

    @property
    def epoch(self) -> int:
        return self.membership.generation

    @property
    def stopping(self) -> bool:
        return self.link.board.stopping

    def at(self, step: int, phase: Phase = Phase.TRAINING) -> None:
        """Got to a step."""
        self.link.progress(step, phase)

    def meet(self, step: int) -> None:
        """Wait for the others of this host, as a collective would."""
        slots = self.membership.ranks

        def is_there(slot: int) -> bool:
            beat = self.link.board.last(slot)
            is_gone = beat.generation != self.epoch and not self.is_deaf
            return is_gone or (beat.step >= step and beat.generation == self.epoch)

        is_over = lambda: self.link.is_over(self.epoch) and not self.is_deaf  # noqa: E731
        wait_for(lambda: all(is_there(slot) for slot in slots), is_over)
        if is_over():
            raise Interrupted


def loop(part: Part, misbehave: Callable[[], None]) -> str:
    """Steps without end; rank 2 misbehaves in step 5 of the first epoch."""
    events = EventWriter(part.run.events(part.rank), rank=part.rank)
    for step in range(10_000):
        part.at(step)
        events.write("step", step=step, epoch=part.epoch, loss=1.0, duration_s=0.02, memory_bytes=10**9)
        if step == SAVED_STEP and part.rank == 0:
            checkpoint(part.run, step)
        if (step, part.rank, part.epoch) == (BAD_STEP, BAD_RANK, 1):
            events.flush()
            misbehave()
        if part.stopping:
            events.write("stop", reason="asked", step=step)
            if part.rank == 0:
                checkpoint(part.run, step + 1)
            return "stopped"
        if part.link.board.reforming:
            return "reform"
        part.meet(step)
        time.sleep(0.03)
    return "done"


def crawl(part: Part) -> str:
    """Three steps more in every generation; then rank 2 hangs, and the others wait for it."""
    for step in range(3 * part.epoch + 1):
        part.at(step)
        part.meet(step)
    if part.rank == BAD_RANK:
        sleep()
    wait_for(lambda: False, lambda: part.link.is_over(part.epoch))
    raise Interrupted


def checkpoint(run: Run, step: int) -> None:
    folder = run.checkpoints / f"step-{step:08d}"
    folder.mkdir(exist_ok=True)
    (folder / "manifest.json").touch()


def train(part: Part) -> str:
    """What a trainer records: ten steps from the newest checkpoint on, an evaluation, a sample, a checkpoint."""
    run, rank = part.run, part.rank
    events = EventWriter(run.events(rank), rank=rank)
    first = max(run.saved_steps(), default=0)
    events.write("run_start", steps=STEPS, world=part.membership.world, epoch=part.epoch)
    for step in range(first, STEPS):
        part.at(step)
        events.write(
            "step", step=step, epoch=part.epoch, loss=5.0 - step / 10, tokens=2048, duration_s=0.2 + rank / 100,
            grad_norm=1.0, lr=1e-3, memory_bytes=10**9 + rank, compute_s=0.1 + 0.02 * (rank == 2), wait_s=0.1,
            bytes_sent=1000, skipped=False,
        )  # fmt: skip
        part.meet(step)
    if rank == 0:
        events.write("evaluate", step=STEPS, loss=4.0, bits_per_byte=2.0)
        checkpoint(run, STEPS)
        events.write("checkpoint", step=STEPS, path="checkpoints", seconds=0.5, bytes=3_000_000)
        events.write("sample", step=STEPS, text="Once upon\x1b[31m a time")
    events.write("run_end", steps=STEPS)
    return "done"


def raise_value() -> None:
    raise ValueError("boom")


def leak() -> None:
    raise ValueError(f"401 for {os.environ['PHALANX_TEST_TOKEN']}")


def raise_user() -> None:
    raise mistake("data/shard-0003", "ends early: 10 bytes of 20", why="it was cut", fix="build it again")


def raise_memory() -> None:
    raise MemoryError


def sleep() -> None:
    time.sleep(1000)


def stubborn() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(1000)


def be_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def hold_lock() -> None:
    """Native code that keeps the interpreter lock, as a library does that sets itself up."""
    ctypes.PyDLL(None).sleep(LOCK_S)


def deadlock() -> None:
    """The same, for ever: not even a signal ends it."""
    library, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(256)
    for _ in range(2):
        library.pthread_mutex_lock(mutex)


def stop_with_lock() -> None:
    """Stopped by somebody else while it holds the lock."""
    rank = os.getpid()
    if not os.fork():
        time.sleep(1.5)
        os.kill(rank, signal.SIGSTOP)
        os._exit(0)
    hold_lock()


BEHAVIOURS: dict[str, Callable[[], None]] = {
    "good": lambda: None,
    "raise": raise_value,
    "leak": leak,
    "user": raise_user,
    "sigkill": be_killed,
    "memory": raise_memory,
    "hang": sleep,
    "sigstop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "stubborn": stubborn,
    "late": lambda: None,
    "importing": lambda: None,
    "forming": lambda: None,
    "recovering": be_killed,
    "recovered": be_killed,  # once, and then trains
    "deaf": be_killed,
    "deaf-joining": be_killed,  # while the others make their communicators
    "lock-step": hold_lock,
    "lock-for-ever": deadlock,
    "lock-and-stop": stop_with_lock,
}


def behave(behaviour: str, part: Part) -> tuple[str, str]:
    """How the rank left the membership: a state, or why."""
    if behaviour == "finish":
        part.at(0)
        return "done", ""
    if behaviour == "train":
        return train(part), ""
    if behaviour == "crawl":
        return crawl(part), ""
    if behaviour == "consequence" and part.rank == 1:
        part.at(4)
        time.sleep(0.1)
        return "", "RuntimeError: [pair.cc:534] Connection closed by peer [127.0.0.1]:4711"
    if behaviour == "consequence" and part.rank == BAD_RANK:
        part.at(4)
        time.sleep(0.3)
        raise KeyError("the true cause")
    if behaviour == "timeout":
        part.at(4, Phase.RESTING)
        time.sleep(3.0 if part.rank != BAD_RANK else 1000)
        return "", "RuntimeError: Timed out waiting 3000ms for recv operation to complete"
    if behaviour == "crash":
        raise ValueError("boom, always")
    if behaviour == "spoilt":
        return loop(part, lambda: (part.run.path / SPOILT).touch() or be_killed()), ""
    return loop(part, BEHAVIOURS.get(behaviour, lambda: None)), ""


def before_ready(behaviour: str, part: Part) -> None:
    """Some get no further until they are asked to stop, or hold the interpreter lock for a while."""
    if behaviour == "lock-joining" and (part.rank, part.epoch) == (BAD_RANK, 1):
        hold_lock()
    if behaviour == "forming" or (behaviour == "recovering" and part.epoch > 1):
        (part.run.path / f"waits-{part.epoch}-{part.rank}").touch()
        wait_for(lambda: part.stopping, lambda: part.link.is_over(part.epoch))


def serve(behaviour: str, run: Run, host: str, link: RankLink) -> None:
    """The trainer's way through formations, without training."""
    while (form := link.next_form()) is not None:
        membership = HostMembership.from_json(form)
        rank = membership.ranks.get(link.slot)
        if rank is None:
            continue
        local = len(membership.ranks)
        take_rank(run, rank, world=membership.world, slot=link.slot, local_world=local)
        print(f"pid {os.getpid()}")
        state = why = ""
        try:
            link.enter(membership.generation)
            link.progress(NO_STEP, Phase.BUILDING)
            is_deaf = behaviour == "deaf" and membership.generation == 1
            part = Part(run=run, link=link, membership=membership, rank=rank, host=host, is_deaf=is_deaf)
            before_ready(behaviour, part)
            link.send("ready", epoch=membership.generation, port=1, replica_port=0)
            link.go(membership.generation)
            if behaviour == "deaf-joining" and membership.generation == 1:
                if rank == BAD_RANK:
                    be_killed()
                wait_for(lambda: False, lambda: False)
            if behaviour == "lock-building" and (rank, membership.generation) == (BAD_RANK, 1):
                hold_lock()
            if rank == 0:
                link.send("restored", epoch=membership.generation, step=0, source="start")
            state, why = behave(behaviour, part)
        except Interrupted:
            pass
        step = link.step
        link.leave()
        link.send("left", epoch=membership.generation, step=step, why=why, state=state)


def problems(run: Run, host: str, new_ranks: int, new_places: int) -> list[str]:
    """The preflight before a membership, of a host whose disk may have gone bad."""
    with (run.path / "looks").open("a") as looks:
        looks.write(f"{host} {new_ranks} {new_places}\n")
    return [f"{host}: its disk cannot be written"] if host == "host-1" and (run.path / SPOILT).exists() else []


def main(behaviour: str, folder: str, host: str, slots: str, address: str, parent: str, *task: str) -> int:
    die_with(int(parent))
    run = open_run(Path(folder))
    if behaviour == "late":  # before anybody listens
        (run.path / "waits").touch()
        time.sleep(1000)
    stop_requests = StopSignals.listen()
    hosting.GRACE_S, hosting.DEAF_S = 0.5, 4.0
    agent = HostAgent(run, host=host, slots=int(slots), address=address, stop_requests=stop_requests)
    agent.checks.plan = Plan.from_json(run.plan_json.read_text(encoding="utf-8"), where="plan")
    agent.checks.recheck = lambda ranks, places: problems(run, host, ranks, places)
    agent.begin()
    if behaviour == "importing":  # as long as importing torch takes
        (run.path / "waits").touch()
        while not stop_requests.count:
            time.sleep(0.01)
    return agent.serve(lambda link: serve(behaviour, run, host, link))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
