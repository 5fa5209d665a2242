"""One builder per folder: a lock that dies with its process."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from phalanx.errors import Problem, SystemFailure

POLL_S = 0.2


@contextmanager
def only_builder(out: Path, *, wait_s: float, waiting: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Hold the lock of `out`, waiting up to `wait_s`; raises SystemFailure when another process keeps it."""
    path = out.parent / f".{out.name}.lock"
    deadline = time.monotonic() + wait_s
    told = False
    while (held := _try(path)) is None:
        if time.monotonic() >= deadline:
            what = f"another process is building it (it holds {path.name})"
            raise SystemFailure(Problem(where=str(out), what=what, fix="wait for it, or build into another folder"))
        if not told:
            waiting()
            told = True
        time.sleep(POLL_S)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(held)


def _try(path: Path) -> int | None:
    """The open lock file, or None when another has it."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Whoever had it may have removed the file between our open and our lock: then the name is another's.
        if os.fstat(handle).st_ino == os.stat(path).st_ino:
            return handle
    except (BlockingIOError, FileNotFoundError):
        pass
    os.close(handle)
    return None
