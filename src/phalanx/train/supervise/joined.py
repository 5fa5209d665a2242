"""One rank among those that torchrun, srun or Kubernetes started: RANK, WORLD_SIZE and MASTER_ADDR are given."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from phalanx.errors import Problem, WorldError, mistake
from phalanx.plan.plan import Plan
from phalanx.record.redact import redact
from phalanx.record.run import Run
from phalanx.train.supervise.failure import write_error

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined, unused-ignore]

DEFAULT_PORT = 29500  # torchrun's
LOOK_S = 1.0  # between looks for the stop file, which may lie on a slow shared disk
MEETING_S = 300.0  # for the other ranks to arrive before the plan, and with it comm.init_timeout_s, is known


def join(
    environ: Mapping[str, str],
    prepare: Callable[[], tuple[Plan, Run]],
    watch: Callable[[Plan, Run], Callable[[], None]],
) -> tuple[Plan, Run] | None:
    """Train as this one rank. Rank 0 calls `prepare`, names the run folder to the others, and gets both back.

    `watch` gives what rank 0 calls after every step, to show how it goes.
    """
    rank, world = _number(environ, "RANK"), _number(environ, "WORLD_SIZE")
    if not 0 <= rank < world:
        raise mistake("RANK", f"{rank} is not below WORLD_SIZE = {world}", fix="let torchrun or srun set them")
    store = _meet(environ, rank, world)
    if rank:
        _train(_named(store, rank), store, rank=rank, world=world, tick=lambda: None)
        return None
    plan, run = _prepared(store, prepare)
    run.set_status("running", pid=os.getpid(), world=world, started=round(time.time(), 3))
    stopped = _train(run, store, rank=0, world=world, tick=watch(plan, run))
    saved = max(run.saved_steps(), default=None)
    run.set_status("stopped" if stopped else "done", exit_code=0, message="", step=saved)
    return plan, run


def _train(run: Run, store: TCPStore, *, rank: int, world: int, tick: Callable[[], None]) -> bool:
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


def _number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name, "" if default is None else str(default))
    if not text.isascii() or not text.isdigit() or int(text) > 10**7:
        raise mistake(name, f"{text[:40]!r} is not a whole number", fix="let torchrun or srun set it")
    return int(text)


def _meet(environ: Mapping[str, str], rank: int, world: int) -> TCPStore:
    """The store where ranks find each other; rank 0 holds it, unless the launcher already does."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined, unused-ignore]

    host, port = environ["MASTER_ADDR"], _number(environ, "MASTER_PORT", DEFAULT_PORT)
    held = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        return TCPStore(
            host,
            port,
            world,
            is_master=rank == 0 and not held,
            timeout=timedelta(seconds=MEETING_S),
            wait_for_workers=False,
        )
    except (RuntimeError, ValueError) as error:
        raise _no_meeting(host, port, rank, str(error)) from error


def _no_meeting(host: str, port: int, rank: int, text: str) -> WorldError:
    lines = text.strip().splitlines() or ["no reason given"]
    if "EADDRINUSE" in text or "address already in use" in text.lower():
        return WorldError(
            Problem(
                where=f"rank {rank}",
                what=f"port {port} of {host} is in use",
                why="rank 0 listens there for the others",
                fix="set MASTER_PORT to a free port on every rank, or end the job that holds it",
            )
        )
    return WorldError(
        Problem(
            where=f"rank {rank}",
            what=f"cannot reach {host}:{port}: {lines[0][:200]}",
            fix="check MASTER_ADDR and MASTER_PORT, and that rank 0 is running",
        )
    )


def _prepared(store: TCPStore, prepare: Callable[[], tuple[Plan, Run]]) -> tuple[Plan, Run]:
    """Rank 0 prepares the run and tells the others its folder, or that it failed."""
    try:
        plan, run = prepare()
    except BaseException:
        store.set("phalanx/run", "")
        raise
    run.stop_file.unlink(missing_ok=True)  # it stopped the run once; it does not stop it again
    store.set("phalanx/run", str(run.path.resolve()))
    return plan, run


def _named(store: TCPStore, rank: int) -> Run:
    """The run that rank 0 made."""
    answer = store.get("phalanx/run").decode("utf-8")
    if not answer:
        raise WorldError(Problem(where=f"rank {rank}", what="rank 0 could not prepare the run", fix="see its message"))
    return Run(path=_visible(Path(answer), rank))


def _visible(path: Path, rank: int) -> Path:
    until = time.monotonic() + 30.0  # a network file system shows a new folder late
    while not (path / "plan.json").is_file():
        if time.monotonic() > until:
            raise WorldError(
                Problem(
                    where=f"rank {rank}",
                    what=f"does not see the run folder {path} that rank 0 made",
                    why="all ranks write their events and checkpoints there",
                    fix="put --runs on a disk that all hosts share",
                )
            )
        time.sleep(0.2)
    return path


def check_world(plan: Plan, environ: Mapping[str, str]) -> None:
    """As many ranks were started as the plan has places."""
    world = _number(environ, "WORLD_SIZE")
    if plan.layout.devices != world:
        raise mistake(
            plan.cluster.name,
            f"the plan needs {plan.layout.devices:,} ranks, and {world:,} were started",
            why="every rank has a place in the layout",
            fix=f"start {plan.layout.devices:,}, or name the cluster you have with --cluster",
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
