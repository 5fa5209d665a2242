"""Four gloo processes shared by the tests of this folder: importing torch in each costs seconds, a test milliseconds.

A test file defines `def on_rank_<name>(rank: int, ranks: int, **arguments) -> Any`; `ranks(file, name, ...)` runs it on
every process, inside a group of that size, and returns what each rank returned, in order. A rank that raises fails the
test with that rank's traceback; a rank that dies or does not answer within LIMIT_S ends the session, and every rank
that lives says where it stands.
"""

from __future__ import annotations

import faulthandler
import importlib.util
import multiprocessing
import multiprocessing.connection
import os
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

WORLD = 4
LIMIT_S = 180.0

Run = Callable[..., list[Any]]


@pytest.fixture(scope="session")
def ranks() -> Iterator[Run]:
    """Call with (file, name, size, **arguments): run `on_rank_<name>` of that file on `size` of the four processes."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe() for _ in range(WORLD)]
        workers = [
            context.Process(target=serve, args=(rank, folder, theirs), daemon=True)
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for worker, (_, theirs) in zip(workers, pipes, strict=True):
            worker.start()
            theirs.close()  # else a dead worker's pipe stays open here, and its death looks like a hang of its peers
        ours = [pipe for pipe, _ in pipes]
        yield lambda file, name, size=WORLD, **arguments: _call(
            ours, workers, Path(folder), file, name, size, arguments
        )
        for pipe in ours:
            pipe.send(None)
        for worker in workers:
            worker.join(5)
            worker.kill()


def _call(
    pipes: list[Any], workers: list[Any], folder: Path, file: str, name: str, size: int, arguments: dict[str, Any]
) -> list[Any]:
    for pipe in pipes:
        pipe.send((file, f"on_rank_{name}", size, arguments))
    answers: dict[int, Any] = {}
    ends_s = time.monotonic() + LIMIT_S
    while len(answers) < len(pipes):
        waiting = [pipe for rank, pipe in enumerate(pipes) if rank not in answers]
        ready = multiprocessing.connection.wait(waiting, ends_s - time.monotonic())
        if not ready:
            silent = [rank for rank in range(len(pipes)) if rank not in answers]
            pytest.exit(f"ranks {silent} did not answer {name} within {LIMIT_S:g} s\n{_stacks(workers, folder)}")
        for pipe in ready:
            rank = pipes.index(pipe)
            try:
                answers[rank] = pipe.recv()
            except EOFError:
                pytest.exit(f"rank {rank} died in {name}\n{_stacks(workers, folder)}")
    failed = [f"rank {rank}:\n{text}" for rank, (fine, text) in sorted(answers.items()) if not fine]
    assert not failed, "\n".join(failed)
    return [answers[rank][1] for rank in range(size)]


def _stacks(workers: list[Any], folder: Path) -> str:
    """Where every rank that lives stands, and what the dead ones said."""
    for worker in workers:
        if worker.is_alive():
            os.kill(worker.pid, signal.SIGUSR1)
    time.sleep(1)
    files = sorted(folder.glob("said-*"))
    return "\n".join(f"{file.name}:\n{file.read_text(errors='replace')}" for file in files)


def serve(rank: int, folder: str, pipe: Connection) -> None:
    """The process of one rank: joins the world, then runs what arrives until it is told to stop."""
    os.environ["OMP_NUM_THREADS"] = "1"
    warnings.simplefilter("error")
    with open(f"{folder}/said-{rank}", "w") as said:
        faulthandler.register(signal.SIGUSR1, said)
        faulthandler.enable(said)
        try:
            _serve(rank, folder, pipe)
        except BaseException:
            traceback.print_exc(file=said)
            raise


def _serve(rank: int, folder: str, pipe: Connection) -> None:
    import torch.distributed as dist

    number = 0
    while (task := pipe.recv()) is not None:
        file, name, size, arguments = task
        number += 1
        # A world per task: groups of a world live as long as it does, with three threads each, and tests make hundreds.
        dist.init_process_group("gloo", init_method=f"file://{folder}/world-{number}", rank=rank, world_size=WORLD)
        group = dist.new_group(list(range(size)))
        # A rank with nothing to do must not leave while two others still connect: gloo then fails theirs.
        dist.barrier()
        try:
            answer = getattr(_load(file), name)(rank, group, **arguments) if rank < size else None
            pipe.send((True, answer))
        except Exception:
            pipe.send((False, traceback.format_exc()))
        finally:
            dist.destroy_process_group()


@cache
def _load(file: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
