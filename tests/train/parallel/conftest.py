"""Four gloo processes shared by the tests of this folder: importing torch in each costs seconds, a test milliseconds.

A test file defines `def on_rank_<name>(rank: int, ranks: int, **arguments) -> Any`; `ranks(file, name, ...)` runs it on
every process, inside a group of that size, and returns what each rank returned, in order. A rank that raises fails the
test with that rank's traceback; a rank that does not answer within LIMIT_S fails it too.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import tempfile
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
        for worker in workers:
            worker.start()
        yield lambda file, name, size=WORLD, **arguments: _call(pipes, file, name, size, arguments)
        for ours, _ in pipes:
            ours.send(None)
        for worker in workers:
            worker.join(5)
            worker.kill()


def _call(pipes: list[Any], file: str, name: str, size: int, arguments: dict[str, Any]) -> list[Any]:
    for ours, _ in pipes:
        ours.send((file, f"on_rank_{name}", size, arguments))
    answers: list[Any] = []
    for rank, (ours, _) in enumerate(pipes):
        if not ours.poll(LIMIT_S):
            pytest.exit(f"rank {rank} did not answer {name} within {LIMIT_S:g} s: a collective hangs")
        answers.append(ours.recv())
    failed = [f"rank {rank}:\n{text}" for rank, (fine, text) in enumerate(answers) if not fine]
    assert not failed, "\n".join(failed)
    return [answer for _, answer in answers[:size]]


def serve(rank: int, folder: str, pipe: Connection) -> None:
    """The process of one rank: joins the world, then runs what arrives until it is told to stop."""
    os.environ["OMP_NUM_THREADS"] = "1"
    warnings.simplefilter("error")
    import torch.distributed as dist

    number = 0
    while (task := pipe.recv()) is not None:
        file, name, size, arguments = task
        number += 1
        # A world per task: groups of a world live as long as it does, with three threads each, and tests make hundreds.
        dist.init_process_group("gloo", init_method=f"file://{folder}/world-{number}", rank=rank, world_size=WORLD)
        group = dist.new_group(list(range(size)))
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
