"""The fence: a rank of a generation that is over cannot commit a checkpoint.

The coordinator writes `epoch.json` when it begins a new generation, holding the lock; a rank that commits holds the
same lock and reads the file first. A process that was stopped in the middle and wakes up later finds that it is too
late.
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

# To wait for a commit in progress: a rename and two flushes.
WAIT_S = 5.0


@contextmanager
def commit_fence(run: Run, generation: int) -> Iterator[None]:
    """A context in which a rank may commit; raises SystemFailure when a newer generation has begun."""
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
    """Raise the fence: from now on no rank of an older generation commits.

    Waits for a commit in progress, but only `WAIT_S`: a rank that holds the lock that long is dead or cut off, and its
    rename, if it still comes, replaces a step that was complete.
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
    """Return the newest generation of the run; 0 before the first. The file calls it `epoch`, as it has since 0.1."""
    try:
        return int(load_json(run.path / "epoch.json")["epoch"])
    except FileNotFoundError:
        return 0
