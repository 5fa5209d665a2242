"""Execution of a function on several ranks of this machine, in processes forked from a server with torch.

Importing torch and its distributed modules costs 3 to 10 s, a fork some hundredths. The server starts no thread,
whatever the caller has done, so that forking is safe; new processes share no group, mesh or cache with an earlier
task. A rank that raises, dies or does not answer ends the task, with the first cause as headline. Ranks communicate
over gloo; on GPUs over NCCL, plus gloo for CPU tensors, as the trainer's do. CUDA is initialised after the fork.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import connection, get_context
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any, TypeVar

from phalanx.elastic.gpus import check_nccl, loaded_nccl, shared_settings
from phalanx.elastic.rank_process import die_with
from phalanx.errors import PhalanxError, Problem, SystemFailure, UserError
from phalanx.hardware.machine_load import crowded_limit_s
from phalanx.train.verify import server
from phalanx.units import plural

# On idle cores; a small model takes 1 to 20 s on 2 of them with 8 ranks
LIMIT_S = 120.0
# Of one collective without `limit_s`: the caller gives up earlier
COLLECTIVE_S = 3600.0
# Seconds in which other ranks may fail too, so that the cause can be distinguished from its consequences.
GRACE_S = 2.0
# For a rank that has answered to release its GPU: killing it meanwhile would end a shared MPS server.
LEAVE_CUDA_S = 30.0
SERVER = {  # environment that torch reads when it is imported
    # Checking for a GPU must not initialise CUDA: processes forked afterwards could not use it.
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    # Each rank compiles by itself: pools of compiler processes for every rank would compete for the cores.
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
}
PRELOAD = ("phalanx.train.verify.trial",)

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialPlace:
    """Device and environment of the ranks."""

    device: str = "cpu"  # or "cuda"
    shared: bool = False  # whether several ranks may use one GPU
    environ: Mapping[str, str] = field(default_factory=dict)


CORES = TrialPlace()


@dataclass(frozen=True, kw_only=True, slots=True)
class RankTask:
    """The task and settings that a rank process gets."""

    task: Callable[..., Any]
    arguments: Sequence[object]
    store: str
    rank: int
    world: int
    place: TrialPlace
    limit_s: float | None
    debug: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class RankFailure:
    """The failure that a rank sends instead of a result."""

    user: bool  # True if the job is wrong, not the machine
    died: bool
    problems: tuple[Problem, ...]


def warm_up(preload: Sequence[str] = PRELOAD) -> ForkServerContext:
    """Start the fork server in the background: it imports while the caller continues.

    A running server is kept. Server and ranks block Ctrl-C (SIGINT), which a terminal sends to all of them: otherwise
    a rank would count as failed, and a server that imports torch would print a traceback. The caller ends them.
    """
    from multiprocessing import forkserver, resource_tracker

    context = get_context("forkserver")
    context.set_forkserver_preload([server.__name__, *preload])
    # First, because it unblocks SIGINT itself
    resource_tracker.ensure_running()
    # Inherited by the children; this process gets pending signals afterwards
    previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    added_variables = {name: value for name, value in SERVER.items() if name not in os.environ} | {
        server.CALLER: str(os.getpid())
    }
    os.environ.update(added_variables)
    try:
        forkserver.ensure_running()
    finally:
        for name in added_variables:
            os.environ.pop(name, None)
        signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)
    return context


def run_ranks(
    task: Callable[..., T],
    world: int,
    *arguments: object,
    limit_s: float | None = None,
    debug: bool = True,
    place: TrialPlace = CORES,
) -> list[T]:
    """Run `task(rank, *arguments)` on every rank of a group of `world`; return the results by rank.

    `task` is a function of a module. Raises UserError or SystemFailure; all processes end either way. Without
    `limit_s` the limit is LIMIT_S, longer if other processes share the cores. `debug` shows what the ranks print, and
    the traceback of the one that failed.
    """
    context = warm_up()
    with tempfile.TemporaryDirectory(prefix="phalanx-ranks-") as folder, ExitStack() as stack:
        store = str(Path(folder) / "store")
        tasks = [
            RankTask(
                task=task,
                arguments=arguments,
                store=store,
                rank=rank,
                world=world,
                place=place,
                limit_s=limit_s,
                debug=debug,
            )
            for rank in range(world)
        ]
        return _collect_answers(
            [stack.enter_context(_rank_process(context, rank_task)) for rank_task in tasks], limit_s
        )


@contextmanager
def _rank_process(context: ForkServerContext, order: RankTask) -> Any:
    """Run one rank in a process, which is killed when the context exits."""
    parent_end, child_end = context.Pipe(duplex=False)
    worker = context.Process(target=_serve_rank, args=(child_end, order), daemon=True)
    worker.start()
    child_end.close()
    try:
        yield worker, parent_end
        worker.join(GRACE_S if order.place.device == "cpu" else LEAVE_CUDA_S)
    finally:
        worker.kill()
        worker.join()
        worker.close()
        parent_end.close()


def _collect_answers(ranks: Sequence[tuple[ForkServerProcess, Connection]], limit_s: float | None) -> list[Any]:
    answers: dict[int, Any] = {}
    failures: list[tuple[int, RankFailure]] = []
    start = time.monotonic()
    allowed_s = LIMIT_S if limit_s is None else limit_s
    deadline = start + allowed_s
    while len(answers) < len(ranks):
        waiting = {pipe: rank for rank, (_, pipe) in enumerate(ranks) if rank not in answers}
        ready = connection.wait(list(waiting), timeout=max(deadline - time.monotonic(), 0.0))
        if not ready:
            if limit_s is None and not failures and (crowded_s := crowded_limit_s(LIMIT_S)) > allowed_s:
                # Other processes share the cores with the ranks
                allowed_s, deadline = crowded_s, start + crowded_s
                continue
            break
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = waiting[pipe]
            answers[rank] = _receive_answer(ranks[rank][0], pipe)
            if isinstance(answers[rank], RankFailure):
                failures.append((rank, answers[rank]))
                deadline = min(deadline, time.monotonic() + GRACE_S)
    if failures:
        raise _headline_failure(failures, len(ranks))
    if len(answers) < len(ranks):
        raise _silent_ranks([rank for rank in range(len(ranks)) if rank not in answers], len(ranks), allowed_s)
    return [answers[rank] for rank in range(len(ranks))]


def _receive_answer(worker: ForkServerProcess, pipe: Connection) -> Any:
    try:
        return pipe.recv()
    except (EOFError, OSError):
        worker.join(1.0)
        code = worker.exitcode
        ending = f"was killed by signal {-code}" if code is not None and code < 0 else f"ended with code {code}"
        return RankFailure(user=False, died=True, problems=(Problem(where="", what=f"its process {ending}"),))


def _headline_failure(failed: Sequence[tuple[int, RankFailure]], world: int) -> PhalanxError:
    """Return the error to raise: a user's error, else a dead process, else a broken connection; first among equals."""
    rank, first = min(failed, key=lambda failure: (not failure[1].user, not failure[1].died))
    if first.user:
        return UserError(first.problems)
    problem = first.problems[0]
    note = f"{len(failed) - 1} of the {plural(world - 1, 'other rank')} failed after it" if len(failed) > 1 else ""
    return SystemFailure(Problem(where=f"rank {rank} of {world}", what=problem.what, why=note, fix=problem.fix))


def _silent_ranks(ranks: Sequence[int], world: int, limit_s: float) -> SystemFailure:
    names = ", ".join(str(rank) for rank in ranks)
    return SystemFailure(
        Problem(
            where=f"rank {names} of {world}",
            what=f"no answer within {limit_s:g} s",
            why="a collective that not every rank joins looks like this, and so does a machine with too much to do",
        )
    )


def _serve_rank(pipe: Connection, order: RankTask) -> None:
    """Run a rank process."""
    # The server ends with the caller; it may have ended before this line, and then this process's parent is
    # another, living process.
    die_with(server.SERVER_PID)
    if not order.debug:
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, 1)
        os.dup2(silence, 2)
    with suppress(BrokenPipeError):
        pipe.send(_rank_answer(order))


def _rank_answer(order: RankTask) -> Any:
    import torch
    import torch.distributed as dist

    place = order.place
    torch.set_num_threads(1)  # ranks share the cores
    os.environ.update(place.environ)
    os.environ.update(
        GLOO_SOCKET_IFNAME="lo", NCCL_SOCKET_IFNAME="lo"
    )  # no socket of the ranks is reachable from other machines
    if place.shared:
        os.environ.update(shared_settings(os.environ))
    try:
        device = _take_device(order)
        dist.init_process_group(
            "gloo" if device is None else "cpu:gloo,cuda:nccl",
            init_method=f"file://{order.store}",
            rank=order.rank,
            world_size=order.world,
            timeout=timedelta(seconds=order.limit_s or COLLECTIVE_S),
            device_id=device,
        )
        result = order.task(order.rank, *order.arguments)
        dist.barrier()
        dist.destroy_process_group()
        return result
    except PhalanxError as error:
        return RankFailure(user=isinstance(error, UserError), died=False, problems=error.problems)
    except Exception as error:
        trace_text = "".join(traceback.format_exception(error)).strip().replace("\n", "\n  ")
        advice = trace_text if order.debug else "PHALANX_DEBUG=1 shows the trace of that rank"
        return RankFailure(
            user=False, died=False, problems=(Problem(where="", what=_innermost_cause(error), fix=advice),)
        )


def _take_device(order: RankTask) -> Any:
    """Return the GPU of a rank, assigned in turn; None on CPUs."""
    import torch

    if order.place.device == "cpu":
        return None
    if order.place.shared and (problem := check_nccl(loaded_nccl(), where="NCCL")) is not None:
        raise UserError(problem)
    device = torch.device("cuda", order.rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _innermost_cause(error: BaseException) -> str:
    """Return the first line of the innermost exception: torch wraps causes in its own exceptions."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
