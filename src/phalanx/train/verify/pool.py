"""Gloo processes on this machine that stay warm between tasks: importing torch costs seconds, a small task milliseconds.

They are forked from a server process that has imported torch but started no thread, whatever the caller has done. Every
task gets a fresh process group. A rank that raises, dies or does not answer ends the task with that rank as headline.
"""

from __future__ import annotations

import os
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection, get_context
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, TypeVar

from phalanx.errors import PhalanxError, Problem, UserError, WorldError

LIMIT_S = 120.0  # a task of a small model takes 1 to 15 s on 2 cores with 8 ranks
GRACE_S = 2.0  # how long the other ranks may take to fail too, so that the first cause can be told from its echoes

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """What a rank sends instead of an answer."""

    user: bool  # the job is wrong, not the machine
    problems: tuple[Problem, ...]


class Pool:
    """Up to `most` processes; `run` uses the first ones. Close it, or use it in a `with`."""

    def __init__(self, most: int, *, limit_s: float = LIMIT_S) -> None:
        self._most, self._limit_s = most, limit_s
        self._context = get_context("forkserver")
        self._context.set_forkserver_preload(["phalanx.train.verify.warm"])
        self._workers: list[tuple[ForkServerProcess, Connection]] = []

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, task: Callable[..., T], world: int, *arguments: object) -> list[T]:
        """`task(rank, *arguments)` on every rank of a fresh group of `world`; what each returned, in order.

        `task` is a function of a module. Raises UserError or WorldError with the first failing rank; the processes are
        then replaced, because the others may be stuck in a collective.
        """
        self._grow(world)
        with tempfile.TemporaryDirectory(prefix="phalanx-group-") as folder:
            for rank in range(world):
                self._workers[rank][1].send((task, str(Path(folder) / "store"), rank, world, arguments))
            try:
                return self._collect(world)
            except BaseException:
                self.close()
                raise

    def close(self) -> None:
        """End the processes; a later `run` starts new ones."""
        for worker, pipe in self._workers:
            with suppress(OSError):
                pipe.send(None)
            worker.kill()
            worker.join()
            pipe.close()
        self._workers.clear()

    def _grow(self, world: int) -> None:
        if world > self._most:
            raise ValueError(f"{world} ranks in a pool of {self._most}")
        while len(self._workers) < world:
            ours, theirs = self._context.Pipe()
            worker = self._context.Process(target=_serve, args=(theirs,), daemon=True)
            worker.start()
            theirs.close()
            self._workers.append((worker, ours))

    def _collect(self, world: int) -> list[Any]:
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + self._limit_s
        failed: list[tuple[int, Failure]] = []
        while len(answers) < world:
            waiting = {self._workers[rank][1]: rank for rank in range(world) if rank not in answers}
            left_s = deadline - time.monotonic()
            ready = connection.wait(list(waiting), timeout=max(left_s, 0.0))
            if not ready:
                break
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = waiting[pipe]
                answers[rank] = self._receive(rank, pipe)
                if isinstance(answers[rank], Failure):
                    failed.append((rank, answers[rank]))
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        if failed:
            raise _headline(failed, world)
        if len(answers) < world:
            raise _silent([rank for rank in range(world) if rank not in answers], world, self._limit_s)
        return [answers[rank] for rank in range(world)]

    def _receive(self, rank: int, pipe: Connection) -> Any:
        try:
            return pipe.recv()
        except (EOFError, OSError):
            worker = self._workers[rank][0]
            worker.join(1.0)
            what = f"the process ended with code {worker.exitcode}"
            return Failure(user=False, problems=(Problem(where="", what=what),))


def _headline(failed: Sequence[tuple[int, Failure]], world: int) -> PhalanxError:
    """A wrong job before a dead process before its neighbours' broken connections; among equals the first to fail."""
    rank, first = min(failed, key=lambda one: (not one[1].user, "ended with code" not in one[1].problems[0].what))
    kind = UserError if first.user else WorldError
    if first.user:
        return kind(first.problems)
    problem = first.problems[0]
    why = f"{len(failed) - 1} of the {world - 1} other ranks failed after it" if len(failed) > 1 else problem.why
    return kind(Problem(where=f"rank {rank} of {world}", what=problem.what, why=why, fix=problem.fix))


def _silent(ranks: Sequence[int], world: int, limit_s: float) -> WorldError:
    names = ", ".join(str(rank) for rank in ranks)
    what = f"rank {names} of {world} did not answer within {limit_s:g} s"
    return WorldError(Problem(where="process pool", what=what, why="a collective that not every rank joins would do this"))


def _serve(pipe: Connection) -> None:
    """A process of the pool: runs what arrives until it is told to stop or the caller is gone."""
    import torch

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # nothing of one machine listens beyond it
    with suppress(EOFError, OSError, KeyboardInterrupt):
        while (order := pipe.recv()) is not None:
            pipe.send(_answer(*order))


def _answer(task: Callable[..., Any], store: str, rank: int, world: int, arguments: Sequence[object]) -> Any:
    from phalanx.train.verify.group import fresh_group

    try:
        with fresh_group(store, rank, world), warnings.catch_warnings():
            return task(rank, *arguments)
    except PhalanxError as error:
        return Failure(user=isinstance(error, UserError), problems=error.problems)
    except Exception as error:
        text = "".join(traceback.format_exception(error)).strip()
        return Failure(user=False, problems=(Problem(where="", what=f"{type(error).__name__}: {error}", fix=text),))


__all__ = ["LIMIT_S", "Failure", "Pool", "timedelta"]
