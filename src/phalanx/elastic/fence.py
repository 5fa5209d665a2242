"""The fence: a rank of a generation that is over cannot commit a checkpoint.

The coordinator writes `epoch.json` when it begins a new generation, holding the lock; whoever commits holds the same
lock and looks at the file first. A process that was stopped in the middle and wakes up later finds that it is too late.
"""

from __future__ import annotations

import fcntl
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager

from phalanx.errors import Problem, SystemFailure
from phalanx.io.files import load_json, replace_text
from phalanx.record.run import Run

WAIT_S = 5.0  # for a commit that is going on: a rename and two flushes


@contextmanager
def commit_fence(run: Run, generation: int) -> Iterator[None]:
    """Commit inside; raises SystemFailure when a newer generation has begun."""
    with open(run.path / "commit.lock", "a", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        newest = current_generation(run)
        if newest > generation:
            raise SystemFailure(
                Problem(
                    where=str(run.path),
                    what=f"this rank is of generation {generation}, and {newest} has begun: it may not commit",
                    why="others train in its place",
                )
            )
        yield


def begin_generation(run: Run, generation: int) -> None:
    """From now on nobody of an older generation commits.

    Waits for a commit that is going on, but not for ever: whoever holds the lock that long is dead or cut off, and its
    rename, if it still comes, replaces a step that was whole.
    """
    with open(run.path / "commit.lock", "a", encoding="utf-8") as lock:
        until_s = time.monotonic() + WAIT_S
        while not _taken(lock.fileno()) and time.monotonic() < until_s:
            time.sleep(0.01)
        replace_text(run.path / "epoch.json", json.dumps({"epoch": generation}) + "\n")


def _taken(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def current_generation(run: Run) -> int:
    """The newest generation of the run; 0 before the first. The file calls it `epoch`, as since 0.1."""
    try:
        return int(load_json(run.path / "epoch.json")["epoch"])
    except FileNotFoundError:
        return 0
