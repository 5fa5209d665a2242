"""Whether anything more is to come from a run: one answer for all who follow one."""

from __future__ import annotations

import time

from phalanx.record.run import Run

ENDED = ("done", "stopped", "failed")  # states that a run gives itself at its end
# The lock of a run is not seen on every host (flock is not shared by all file systems), so it is believed only where
# nobody writes either: ranks tell of themselves every few seconds, from a thread of their own.
SILENT_S = 120.0


def is_over(run: Run, *, heard_s: float = 0.0, now_s: float | None = None) -> bool:
    """Ended, or gone without a word: nobody holds it, and nothing was written for SILENT_S.

    `heard_s`: when the caller saw it grow, by its own clock, which may not be the one of the disk.
    """
    if run.status().get("state") in ENDED:
        return True
    now_s = time.time() if now_s is None else now_s
    return now_s - max(heard_s, written(run)) >= SILENT_S and not run.is_held


def written(run: Run) -> float:
    """Unix time at which one of the files that every run keeps writing last grew; 0 when there is none."""
    times = [0.0]
    for path in (run.events(0), run.supervisor, run.path / "status.json", run.path / "launch.json", run.plan_json):
        try:
            found = path.stat()
        except OSError:
            continue
        if found.st_size:
            times.append(found.st_mtime)
    return max(times)
