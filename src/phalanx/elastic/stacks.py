"""Where ranks are that do not answer: each writes down its Python stack when asked, and one of them is not waiting."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from phalanx.elastic.process import STACK_SIGNAL
from phalanx.record.run import Run

ANSWER_S = 0.5  # a rank that runs writes its stack within milliseconds; the machine may be busy
_FRAME = re.compile(r'File "([^"]+)", line (\d+) in (\S+)')
_WAITS = ("distributed_c10d.py", "_functional_collectives", "distributed/pipelining", "fsdp/_fully_shard")


@dataclass(frozen=True, kw_only=True, slots=True)
class Whereabouts:
    """Where a rank is."""

    place: str
    waits: bool  # for other ranks, so that it is hardly the one to blame


def find_ranks(run: Run, alive: Mapping[int, int]) -> dict[int, Whereabouts]:
    """Ask living ranks (rank -> process) where they are; takes half a second."""
    sizes = {rank: _size(run.stack(rank)) for rank in alive}
    for pid in alive.values():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, STACK_SIGNAL)
    time.sleep(ANSWER_S)
    found = {}
    for rank, pid in alive.items():
        stack = _tail(run.stack(rank), sizes[rank])
        waits = any(word in stack for word in _WAITS)
        found[rank] = Whereabouts(place=_place(stack, pid), waits=waits)
    return found


def _place(stack: str, pid: int) -> str:
    if not stack:
        return "a stopped process (state T)" if state_of(pid) == "T" else "a process that cannot answer"
    main = stack.split("Current thread", 1)[-1] if "Current thread" in stack else stack
    frame = _FRAME.search(main)
    return f"{frame.group(3)} ({Path(frame.group(1)).name}:{frame.group(2)})" if frame else ""


def state_of(pid: int) -> str:
    """The letter of a process's state, as in /proc; empty when it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(") ")[2][:1]
    except OSError:
        return ""


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _tail(path: Path, start: int) -> str:
    try:
        return path.read_bytes()[start:].decode("utf-8", errors="replace")
    except OSError:
        return ""
