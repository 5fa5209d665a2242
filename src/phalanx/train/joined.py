"""One rank among those that torchrun, srun, mpirun or Kubernetes started; `launchers.py` finds which."""

from __future__ import annotations

import contextlib
import hashlib
import ipaddress
import json
import os
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from phalanx.elastic.failure import write_error
from phalanx.elastic.launchers import RankPlace
from phalanx.errors import Problem, SystemFailure, UserError, mistake
from phalanx.plan.plan import Plan
from phalanx.record.provenance import redact
from phalanx.record.run import Run
from phalanx.units import plural

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined, unused-ignore]

ONE_BY_ONE = "in a Slurm job: srun --ntasks=1 --exact phalanx train …"
LOOK_S = 1.0  # between looks for the stop file, which may lie on a slow shared disk
MEETING_S = 300.0  # for the other ranks to arrive before the plan, and with it comm.init_timeout_s, is known


def join(
    place: RankPlace,
    prepare: Callable[[], tuple[Plan, Run]],
    watch: Callable[[Plan, Run], Callable[[], None]],
    *,
    call: Sequence[str] = (),
    environ: Mapping[str, str] = os.environ,
) -> tuple[Plan, Run] | None:
    """Train as this one rank. Rank 0 calls `prepare`, names the run folder to the others, and gets both back.

    `watch` gives what rank 0 calls after every step, to show how it goes. `call` is the command line: ranks that were
    called otherwise than rank 0 are refused.
    """
    rank, world = place.rank, place.world
    store = _meet(place, environ)
    _agree(store, place, call)
    if rank:
        _train(_named(store, rank), store, rank=rank, world=world, tick=lambda: None)
        return None
    plan, run = _prepared(store, prepare)
    run.set_status("running", pid=os.getpid(), world=world, started=round(time.time(), 3))
    stopped = _train(run, store, rank=0, world=world, tick=watch(plan, run))
    saved = max(run.saved_steps(), default=None)
    run.set_status("stopped" if stopped else "done", exit_code=0, message="", step=saved)
    return plan, run


def _train(run: Run, store: Store, *, rank: int, world: int, tick: Callable[[], None]) -> bool:
    """Run this rank; returns whether it was asked to stop. What goes wrong is also left in the run folder."""
    from phalanx.train.worker import run_rank

    at_step = [-1]

    def heartbeat(step: int) -> None:
        at_step[0] = step
        tick()

    try:
        with _stop_wish(run) as stop:
            run_rank(run=run.path, rank=rank, world=world, store=store, stop=stop, heartbeat=heartbeat)
            return stop()
    except BaseException as error:
        write_error(run, rank, error, step=at_step[0])
        with run.log(rank).open("a", encoding="utf-8") as log:
            log.write(redact(traceback.format_exc(), os.environ))
        if rank == 0:
            run.set_status("failed", exit_code=3, message=f"rank 0: {redact(str(error), os.environ)}", step=at_step[0])
        raise


def _meet(place: RankPlace, environ: Mapping[str, str]) -> Store:
    """The store where ranks find each other; rank 0 holds it, unless the launcher already does."""
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined, unused-ignore]

    if place.derived:
        _require_known(place)
    held = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    holds = place.rank == 0 and not held
    try:
        store = TCPStore(
            place.address,
            place.port,
            place.world,
            is_master=holds,
            timeout=timedelta(seconds=MEETING_S),
            wait_for_workers=False,
            master_listen_fd=_loopback_socket(place) if holds else None,
        )
    except (RuntimeError, ValueError, OSError) as error:
        raise _no_meeting(place.address, place.port, place.rank, str(error)) from error
    # torchrun keeps its store when it starts the ranks again; what the ranks before wrote must not be taken for news.
    return PrefixStore(f"phalanx/attempt-{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def _require_known(place: RankPlace) -> None:
    """The name of a node leads to an address; torch would look it up for five minutes."""
    try:
        socket.getaddrinfo(place.address, place.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise SystemFailure(
            Problem(
                where=f"rank {place.rank}",
                what=f"the first node of {place.launcher}, {place.address}, is no host that can be looked up: {error}",
                why="rank 0 is expected there, and the ranks find each other at its address",
                fix="export MASTER_ADDR with an address of that node before the start",
            )
        ) from error


def _loopback_socket(place: RankPlace) -> int | None:
    """A socket that only this host reaches, where the address says so: torch itself would listen on every address."""
    try:
        if not ipaddress.ip_address(place.address).is_loopback:
            return None
    except ValueError:  # a name: torch looks it up
        return None
    family = socket.AF_INET6 if ":" in place.address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as bound:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((place.address, place.port))
        bound.listen(1024)
        return bound.detach()


def _agree(store: Store, place: RankPlace, call: Sequence[str]) -> None:
    """Every rank is there once, and all were started by the same command with the same number of ranks.

    Rank 0 waits for all answers before it makes anything: ranks that never come, or belong to another run, leave no
    folder behind.
    """
    rank = place.rank
    if store.add(f"claims/{rank}", 1) > 1:
        raise mistake(
            f"rank {rank}",
            "another process has the same rank",
            why="two processes would train in one place of the layout",
            fix="give every process its own RANK (a batch script that exports RANK gives all the same)",
        )
    digest = hashlib.sha256("\0".join(call).encode()).hexdigest()
    if rank == 0:
        store.set("launch", json.dumps({"world": place.world, "call": digest}))
        _hear_all(store, place)
        return
    first = json.loads(store.get("launch"))
    problem = _disagreement(place, theirs=int(first["world"]), same_call=first["call"] == digest)
    store.set(f"answer/{rank}", problem.render() if problem is not None else "")
    if problem is not None:
        raise UserError(problem)


def _disagreement(place: RankPlace, *, theirs: int, same_call: bool) -> Problem | None:
    where = f"rank {place.rank}"
    if theirs != place.world:
        return Problem(
            where=where,
            what=f"was told of {place.world:,} ranks, and rank 0 of {theirs:,}",
            why="they belong to two launches that meet at one address",
            fix="give each launch its own MASTER_PORT, and every rank of it the same WORLD_SIZE",
        )
    if not same_call:
        return Problem(
            where=where,
            what="was started with another job or other settings than rank 0",
            why="the ranks of a run train one job",
            fix=f"start every rank with the same command; for runs of their own, start each by itself ({ONE_BY_ONE})",
        )
    return None


def _hear_all(store: Store, place: RankPlace) -> None:
    """The answer of every other rank; raises the first refusal, or names who did not come."""
    names = [f"answer/{rank}" for rank in range(1, place.world)]
    try:
        if names:
            store.wait(names, timedelta(seconds=MEETING_S))
    except RuntimeError as error:  # torch's DistStoreError is one
        missing = [name.rpartition("/")[2] for name in names if not store.check([name])]
        shown = ", ".join(missing[:8]) + (f" and {len(missing) - 8:,} more" if len(missing) > 8 else "")
        raise SystemFailure(
            Problem(
                where="rank 0",
                what=f"{len(missing):,} of {place.world:,} ranks did not come within {MEETING_S:g} s: {shown}",
                why=f"all meet at {place.address}:{place.port}",
                fix="look at their logs; check that every host reaches that address",
            )
        ) from error
    for name in names:
        if refusal := store.get(name).decode("utf-8"):
            raise mistake("rank 0", "nothing was started, because not all ranks belong together", why=refusal)


def _no_meeting(host: str, port: int, rank: int, text: str) -> SystemFailure:
    lines = text.strip().splitlines() or ["no reason given"]
    if "EADDRINUSE" in text or "address already in use" in text.lower():
        return SystemFailure(
            Problem(
                where=f"rank {rank}",
                what=f"port {port} of {host} is in use",
                why="rank 0 listens there for the others",
                fix="set MASTER_PORT to a free port on every rank, or end the job that holds it",
            )
        )
    return SystemFailure(
        Problem(
            where=f"rank {rank}",
            what=f"cannot reach {host}:{port}: {lines[0][:200]}",
            why="ranks find each other there",
            fix="check MASTER_ADDR and MASTER_PORT, and that rank 0 is running",
        )
    )


def _prepared(store: Store, prepare: Callable[[], tuple[Plan, Run]]) -> tuple[Plan, Run]:
    """Rank 0 prepares the run and tells the others its folder, or that it failed."""
    try:
        plan, run = prepare()
    except BaseException:
        store.set("run", "")
        raise
    run.stop_file.unlink(missing_ok=True)  # it stopped the run once; it does not stop it again
    store.set("run", str(run.path.resolve()))
    return plan, run


def _named(store: Store, rank: int) -> Run:
    """The run that rank 0 made."""
    answer = store.get("run").decode("utf-8")
    if not answer:
        raise SystemFailure(
            Problem(where=f"rank {rank}", what="rank 0 could not prepare the run", fix="see its message")
        )
    return Run(path=_visible(Path(answer), rank))


def _visible(path: Path, rank: int) -> Path:
    until = time.monotonic() + 30.0  # a network file system shows a new folder late
    while not (path / "plan.json").is_file():
        if time.monotonic() > until:
            raise SystemFailure(
                Problem(
                    where=f"rank {rank}",
                    what=f"does not see the run folder {path} that rank 0 made",
                    why="all ranks write their events and checkpoints there",
                    fix="put --runs on a disk that all hosts share",
                )
            )
        time.sleep(0.2)
    return path


def check_world(plan: Plan, place: RankPlace) -> None:
    """As many ranks were started as the plan has places."""
    needed, world = plan.layout.devices, place.world
    if needed != world:
        raise mistake(
            plan.cluster.name,
            f"the plan needs {plural(needed, 'rank')}, and {place.launcher} started {world:,}",
            why="every process it starts is one rank of one run",
            fix=f"start {needed:,} (srun --ntasks={needed}, mpirun -n {needed}), or name the cluster you have with "
            f"--cluster. Runs of their own are started one by one; {ONE_BY_ONE}",
        )


@contextlib.contextmanager
def _stop_wish(run: Run) -> Iterator[Callable[[], bool]]:
    """A function that turns true once a signal or the stop file asks; the loop agrees on it over all ranks."""
    asked: list[int] = []
    looked_s = [0.0]

    def note(number: int, frame: FrameType | None) -> None:
        if asked:  # the second time somebody means it
            os.write(2, b"ending at once\n")  # sys.stderr may be in use by what this interrupts
            os._exit(128 + number)
        asked.append(number)

    def stop() -> bool:
        if not asked and time.monotonic() - looked_s[0] >= LOOK_S:
            looked_s[0] = time.monotonic()
            if run.stop_file.exists():
                asked.append(0)
        return bool(asked)

    if threading.current_thread() is not threading.main_thread():  # where Python takes no signals
        yield stop
        return
    before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
