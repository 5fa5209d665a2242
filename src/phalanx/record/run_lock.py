"""Who trains in a run folder, and whether anything more is to come."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from phalanx.errors import mistake
from phalanx.io.files import open_regular
from phalanx.record.host_file import stat_events

if TYPE_CHECKING:
    from phalanx.record.run import Run

GLANCE_S = 0.2  # a look at a lock takes microseconds
ENDED = ("done", "stopped", "failed")  # states that a run gives itself at its end
# The lock of a run is not seen on every host (flock is not shared by all file systems), so it is believed only where
# nobody writes either: ranks tell of themselves every few seconds, from a thread of their own.
SILENT_S = 120.0


@contextmanager
def hold_folder(folder: Path) -> Iterator[None]:
    """Be the only one who trains in this folder; raises UserError when somebody else does."""
    with open(folder / "lock", "a+", encoding="utf-8") as file:
        if not _lock_file(file, patience_s=GLANCE_S):
            file.seek(0)
            raise mistake(
                str(folder),
                f"this run is going on: process {file.read(20).strip() or 'unknown'} trains in it",
                why="two would write the same steps and checkpoints",
                fix="wait, or stop it: Ctrl-C there, or make a file called stop in the folder",
            )
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield


def is_folder_held(folder: Path) -> bool:
    """Whether a process trains in this folder now."""
    try:
        with open_regular(folder / "lock") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # for a moment: see `_lock_file`
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


def _lock_file(file: TextIO, *, patience_s: float) -> bool:
    """Take a lock; somebody who only looks whether it is taken holds it for a moment."""
    until_s = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError:
            if time.monotonic() > until_s:
                return False
        time.sleep(0.01)


def is_run_over(run: Run, *, heard_s: float = 0.0, now_s: float | None = None) -> bool:
    """Ended, or gone without a word: nobody holds it, and nothing was written for SILENT_S.

    `heard_s`: when the caller saw it grow, by its own clock, which may not be the one of the disk.
    """
    if run.status().get("state") in ENDED:
        return True
    now_s = time.time() if now_s is None else now_s
    return now_s - max(heard_s, last_written(run)) >= SILENT_S and not run.is_held


def last_written(run: Run) -> float:
    """Unix time at which one of the files that every run keeps writing last grew; 0 when there is none."""
    times = [0.0]
    for path in (run.events(0), run.supervisor, run.path / "status.json", run.path / "launch.json", run.plan_json):
        found = stat_events(path)
        if found is not None and found.size:
            times.append(found.mtime_ns / 1e9)
    return max(times)
