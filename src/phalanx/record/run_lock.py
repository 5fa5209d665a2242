"""The lock of a run folder: which process trains in it, and whether the run is over."""

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

# Readers hold the lock for microseconds only.
GLANCE_S = 0.2
ENDED = ("done", "stopped", "failed")  # states in which a run has ended
# Some file systems do not share flock between hosts, so a free lock counts only if the files are silent as well: ranks
# write events every few seconds, from a separate thread.
SILENT_S = 120.0


@contextmanager
def hold_folder(folder: Path) -> Iterator[None]:
    """Hold the folder's lock, so that no other process trains in it; raise UserError if another process holds it."""
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
    """Return True if a process trains in this folder now."""
    try:
        with open_regular(folder / "lock") as file:
            # Held for a moment only; `_lock_file` waits for that.
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


def _lock_file(file: TextIO, *, patience_s: float) -> bool:
    """Take a lock; wait up to `patience_s`, because processes that test the lock hold it for a moment."""
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
    """Return True if the run has ended, or if no process holds it and nothing was written for SILENT_S.

    `heard_s` is the time at which the caller saw the run grow, by the caller's clock, which may differ from the
    disk's.
    """
    if run.status().get("state") in ENDED:
        return True
    now_s = time.time() if now_s is None else now_s
    return now_s - max(heard_s, last_written(run)) >= SILENT_S and not run.is_held


def last_written(run: Run) -> float:
    """Return the Unix time at which one of the files that every run keeps writing last grew; 0 if there is none."""
    times = [0.0]
    for path in (run.events(0), run.supervisor, run.path / "status.json", run.path / "launch.json", run.plan_json):
        file_stat = stat_events(path)
        if file_stat is not None and file_stat.size:
            times.append(file_stat.mtime_ns / 1e9)
    return max(times)
