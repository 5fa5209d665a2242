"""Seconds from the loss of a rank to the next step on every rank: Phalanx, torchrun, torchft in one run, 4 CPU ranks.

    python benchmarks/recovery.py [--trials 3] [--only shrink --only torchrun ...]

The model is that of examples/drill.toml, fully sharded (torchft: replicated, for it shards only inside a replica group
and loses the group as a whole). A rank is killed while it trains; counted is the time until the last rank of the next
membership has ended its first step. torchrun runs with its work-around for gloo (without it a restart reads the dead
processes' addresses: pytorch#135712), polls ten times a second, and reloads a checkpoint.

Steps done again: those that every rank had ended and that are repeated. Steps lost: of these, the ones that Phalanx had
called safe in its record (`held`); the others promise nothing between checkpoints.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
JOB = HERE.parent / "examples" / "drill.toml"
WORKERS = str(HERE / "recovery_workers.py")
RANKS, VICTIM = 4, 2
DEAD_AFTER_S = 5.0
STEADY = 8  # steps of a whole membership before a rank is lost
PATIENCE_S = 120.0
Event = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """One loss and what came of it."""

    recovery_s: float
    world: int  # ranks of the next membership
    again: int  # steps that all had ended and that are repeated
    lost: int | None = None  # steps that were called safe and are repeated; None where nobody calls them that


@dataclass(frozen=True, kw_only=True, slots=True)
class Contestant:
    """A way to recover. `floor_s` is what issue 4 allows."""

    name: str
    run: Callable[[Path, int], list[Trial]]
    floor_s: float | None = None


# ---- what all records have in common ---------------------------------------------------------------------------------


def lines(path: Path) -> list[Event]:
    """Every whole line of a file that is still being written."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def wait_for(condition: Callable[[], Any], process: subprocess.Popen[bytes], what: str) -> Any:
    """The first true value of a condition."""
    until_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < until_s:
        found = condition()
        if found:
            return found
        if process.poll() is not None:
            raise RuntimeError(f"ended with exit code {process.returncode} instead of {what}")
        time.sleep(0.01)
    raise RuntimeError(f"no {what} within {PATIENCE_S:g} s")


def last_common_step(steps: Sequence[Sequence[Event]], before_s: float) -> int:
    """The newest step that every rank had ended."""
    return min(max((one["step"] for one in rank if one["t"] <= before_s), default=-1) for rank in steps)


def measured(before: int, firsts: Sequence[Event], lost_s: float, *, held: int | None = None) -> Trial:
    """A trial from the first steps of every rank after the loss; `before` was ended by all, `held` steps were safe."""
    next_step = min(first["step"] for first in firsts)
    return Trial(
        recovery_s=max(first["t"] for first in firsts) - lost_s,
        world=len(firsts),
        again=max(before + 1 - next_step, 0),
        lost=None if held is None else max(held - next_step, 0),
    )


def moment() -> None:
    """Up to a step's time, so that a rank is lost anywhere in one."""
    time.sleep(random.uniform(0.0, 0.3))


@contextmanager
def started(command: Sequence[str], log: Path, **environ: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process with its own session, asked to end and then made to."""
    with open(log, "ab") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=out, env={**os.environ, **environ}, start_new_session=True
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


# ---- Phalanx ---------------------------------------------------------------------------------------------------------


def phalanx(*settings: str, spares: int = 0, number: signal.Signals = signal.SIGKILL) -> Callable[..., list[Trial]]:
    """`phalanx train` of the drill's job, a run for every trial."""

    def run(folder: Path, trials: int) -> list[Trial]:
        words = [word for one in (*settings, f"fault.dead_after_s={DEAD_AFTER_S}") for word in ("--set", one)]
        command = [sys.executable, "-m", "phalanx", "train", str(JOB), "--steps", "100000", "--spares", str(spares)]
        found = []
        for trial in range(trials):
            runs = folder / str(trial)
            with started([*command, *words, "--runs", str(runs)], folder / "log") as process:
                found.append(lose_a_rank(runs, process, number))
        return found

    return run


def lose_a_rank(folder: Path, process: subprocess.Popen[bytes], number: signal.Signals) -> Trial:
    whole = wait_for(lambda: steady(folder), process, "a whole membership")
    moment()
    lost_s = time.time()
    os.kill(whole["members"][VICTIM]["pid"], number)
    firsts = wait_for(lambda: followed(folder, whole["epoch"]), process, "the next step")
    ended = [[one for one in steps(folder, rank) if one["epoch"] == whole["epoch"]] for rank in range(RANKS)]
    held = max((one["held"] for rank in ended for one in rank if one["held"] is not None), default=0)
    return measured(last_common_step(ended, before_s=min(first["t"] for first in firsts)), firsts, lost_s, held=held)


def memberships(folder: Path) -> list[Event]:
    found = next(folder.glob("*/supervisor.jsonl"), None)
    return [one for one in lines(found) if one["event"] == "epoch"] if found is not None else []


def steps(folder: Path, rank: int) -> list[Event]:
    found = next(folder.glob(f"*/events-{rank:05d}.jsonl"), None)
    return [one for one in lines(found) if one["event"] == "step"] if found is not None else []


def steady(folder: Path) -> Event | None:
    """The present membership, when it is whole and has trained for a while."""
    known = memberships(folder)
    if not known or known[-1]["world"] < RANKS:
        return None
    epoch = known[-1]["epoch"]
    trained = sum(one["epoch"] == epoch for one in steps(folder, VICTIM))
    return known[-1] if trained >= STEADY else None


def followed(folder: Path, epoch: int) -> list[Event]:
    """The first steps of the first membership after `epoch` in which every rank has ended one."""
    for one in memberships(folder):
        if one["epoch"] <= epoch:
            continue
        mine = [[step for step in steps(folder, rank) if step["epoch"] == one["epoch"]] for rank in range(one["world"])]
        if all(mine):
            return [rank[0] for rank in mine]
    return []


# ---- torchrun and torchft --------------------------------------------------------------------------------------------


def torchrun(folder: Path, trials: int) -> list[Trial]:
    """One agent that restarts all workers when one is lost."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes=1", f"--nproc-per-node={RANKS}", "--max-restarts=100",
        "--monitor-interval=0.1", "--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{free_port()}", "--rdzv-id=drill",
        WORKERS, "torchrun", str(folder),
    ]  # fmt: skip
    environ = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
    with started(command, folder / "log", **environ) as process:
        return [lose_a_worker(folder, process, attempt) for attempt in range(trials)]


def lose_a_worker(folder: Path, process: subprocess.Popen[bytes], attempt: int) -> Trial:
    def of(number: int, epoch: int) -> list[Event]:
        return [one for one in lines(folder / f"steps-{number}.jsonl") if one["epoch"] == epoch]

    # Past a checkpoint, and not just: on average half an interval is lost.
    wait_for(lambda: len(of(VICTIM, attempt)) >= STEADY + 7, process, "steps")
    moment()
    lost_s = time.time()
    os.kill(of(VICTIM, attempt)[-1]["pid"], signal.SIGKILL)
    again = [wait_for(lambda n=n: of(n, attempt + 1), process, "the next step")[0] for n in range(RANKS)]
    before = last_common_step([of(number, attempt) for number in range(RANKS)], before_s=again[0]["t"])
    return measured(before, again, lost_s)


def torchft(folder: Path, trials: int) -> list[Trial]:
    """A lighthouse and four replicas; a lost one is started again for the next trial."""
    if importlib.util.find_spec("torchft") is None:
        raise RuntimeError("torchft is not installed: pip install torchft-nightly")
    with started([sys.executable, WORKERS, "lighthouse", str(folder)], folder / "log") as house:
        address = wait_for(lambda: lines(folder / "address.json"), house, "address of the lighthouse")[0]["address"]
        environ = {"TORCHFT_LIGHTHOUSE": address, "OMP_NUM_THREADS": "1"}
        running = {number: replica(folder, number, environ) for number in range(RANKS)}
        found = []
        try:
            for _ in range(trials):
                found.append(lose_a_replica(folder, running))
                running[VICTIM] = replica(folder, VICTIM, environ)
            return found
        finally:
            for process in running.values():
                process.kill()
                process.wait()


def replica(folder: Path, number: int, environ: dict[str, str]) -> subprocess.Popen[bytes]:
    with open(folder / f"log-{number}", "ab") as log:
        command = [sys.executable, WORKERS, "torchft", str(folder), str(number)]
        return subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, **environ})


def lose_a_replica(folder: Path, running: dict[int, subprocess.Popen[bytes]]) -> Trial:
    def of(number: int, world: int, since_s: float) -> list[Event]:
        mine = lines(folder / f"steps-{number}.jsonl")
        return [one for one in mine if one["world"] == world and one["t"] > since_s]

    began_s = time.time()
    others = [number for number in running if number != VICTIM]
    for number, process in running.items():
        wait_for(lambda n=number: len(of(n, RANKS, began_s)) >= STEADY, process, f"steps of all {RANKS} replicas")
    moment()
    lost_s = time.time()
    running[VICTIM].kill()
    running[VICTIM].wait()
    again = [wait_for(lambda n=n: of(n, RANKS - 1, lost_s), running[n], "the next step")[0] for n in others]
    before = last_common_step([of(number, RANKS, began_s) for number in others], before_s=again[0]["t"])
    return measured(before, again, lost_s)


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("localhost", 0))
        return int(one.getsockname()[1])


# ---- the table -------------------------------------------------------------------------------------------------------

CONTESTANTS = (
    Contestant(name="shrink", run=phalanx("fault.recovery=shrink"), floor_s=2.0),
    Contestant(name="spare", run=phalanx("fault.recovery=replace", spares=1), floor_s=5.0),
    Contestant(name="respawn", run=phalanx("fault.recovery=replace"), floor_s=10.0),
    Contestant(name="hang", run=phalanx("fault.recovery=shrink", number=signal.SIGSTOP), floor_s=DEAD_AFTER_S + 2.0),
    Contestant(name="torchrun", run=torchrun),
    Contestant(name="torchft", run=torchft),
)
TIMES_TORCHRUN = 3.0  # how much faster than torchrun a killed rank has to be made good


def report(found: dict[str, list[Trial]]) -> None:
    """A line per contestant, then the ratios to torchrun."""
    print("| contestant | trials | median | worst | floor | ranks after | steps done again | steps lost |")
    print("|---|---|---|---|---|---|---|---|")
    for contestant in CONTESTANTS:
        trials = found.get(contestant.name)
        if trials:
            print(row(contestant, trials))
    if "torchrun" not in found:
        return
    theirs = statistics.median(one.recovery_s for one in found["torchrun"])
    for name in ("shrink", "spare", "respawn"):
        if name in found:
            ratio = theirs / statistics.median(one.recovery_s for one in found[name])
            verdict = met(ratio >= TIMES_TORCHRUN)
            print(f"{name}: {ratio:.1f} times as fast as torchrun (floor {TIMES_TORCHRUN:g}): {verdict}")


def row(contestant: Contestant, trials: Sequence[Trial]) -> str:
    times = [one.recovery_s for one in trials]
    floor = "" if contestant.floor_s is None else f"{contestant.floor_s:g} s: {met(max(times) <= contestant.floor_s)}"
    worlds = ", ".join(str(world) for world in sorted({one.world for one in trials}))
    again = ", ".join(str(one.again) for one in trials)
    lost = ", ".join("–" if one.lost is None else str(one.lost) for one in trials)
    seconds = f"{statistics.median(times):.2f} s | {max(times):.2f} s"
    return f"| {contestant.name} | {len(trials)} | {seconds} | {floor} | {worlds} | {again} | {lost} |"


def met(is_met: bool) -> str:
    return "met" if is_met else "missed"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument("--only", action="append", choices=[one.name for one in CONTESTANTS])
    parser.add_argument("--keep", type=Path, help="write records here, and leave them")
    args = parser.parse_args()
    found: dict[str, list[Trial]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        for contestant in CONTESTANTS:
            if args.only and contestant.name not in args.only:
                continue
            folder = (args.keep or Path(temporary)) / contestant.name
            folder.mkdir(parents=True)
            try:
                found[contestant.name] = contestant.run(folder, args.trials)
                print(f"{contestant.name}: {found[contestant.name]}", file=sys.stderr, flush=True)
            except Exception as error:  # the others are still worth their time
                print(f"{contestant.name}: not measured: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    report(found)


if __name__ == "__main__":
    main()
