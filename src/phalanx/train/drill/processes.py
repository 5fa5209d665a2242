"""The processes of a run, found through the ranks that its record names; a drill touches no others."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

from phalanx.record.run import Run

COORDINATOR = "phalanx.elastic.coordinator"


def parent_of(pid: int) -> int | None:
    """The parent of a process; None when it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return int(text.rpartition(")")[2].split()[1])  # the name in brackets may hold anything


def children_of(pid: int) -> list[int]:
    """Direct children, spares and coordinator included."""
    return [other for other in _all() if parent_of(other) == pid]


def command_of(pid: int) -> list[str]:
    """The command line of a process; empty when it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode("utf-8", "replace").split("\0")
    except OSError:
        return []


def coordinator_of(run: Run) -> int | None:
    """The process that coordinates this run."""
    return next((pid for pid in _all() if COORDINATOR in (words := command_of(pid)) and str(run.path) in words), None)


def tell(pids: list[int], number: signal.Signals) -> int:
    """Send a signal; how many of the processes were there to get it."""
    reached = 0
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)
            reached += 1
    return reached


def _all() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()]
