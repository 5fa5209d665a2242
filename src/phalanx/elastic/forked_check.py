"""A check in a process of its own: a driver or a disk that hangs holds up nobody but that process."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from phalanx.elastic.rank_process import die_with

PATIENCE_S = 10.0  # of our own running time; the checks take milliseconds where the devices and the disk answer
TURN_S = 0.1  # of the time between two of our turns that counts at most: an agent that was stopped blames nobody
MOST_TEXT, MOST_PROBLEMS = 500, 4  # they travel in a hello, which is short; a pipe takes them without a reader


class ForkedCheck:
    """Runs `check` in a forked child; ask `found` now and then. No thread: the agent forks."""

    def __init__(self, check: Callable[[], Sequence[str]], *, forget: Callable[[], None] = lambda: None) -> None:
        self._pipe, theirs = os.pipe()
        parent, self._text = os.getpid(), b""
        self._waited_s, self._asked_s = 0.0, time.monotonic()
        self._pid = os.fork()
        if not self._pid:
            _answer(check, theirs, forget, parent)
        os.close(theirs)
        os.set_blocking(self._pipe, False)

    def found(self) -> list[str] | None:
        """The problems; None while the child still looks. One that hangs is itself the problem."""
        now = time.monotonic()
        self._waited_s += min(now - self._asked_s, TURN_S)
        self._asked_s = now
        if self._is_complete():
            self._end(0)
            return _problems(self._text)
        if self._waited_s > PATIENCE_S:
            self.close()
            return [f"its devices, its disk or the run folder did not answer within {PATIENCE_S:g} s"]
        return None

    def _is_complete(self) -> bool:
        with suppress(BlockingIOError):
            while piece := os.read(self._pipe, 1 << 16):
                self._text += piece
            return True
        return False

    def close(self) -> None:
        """End it. A child that hangs in the kernel cannot be ended: it is not waited for."""
        if self._pid:
            with suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
            self._end(os.WNOHANG)

    def _end(self, options: int) -> None:
        os.close(self._pipe)
        with suppress(ChildProcessError):
            os.waitpid(self._pid, options)
        self._pid = 0

    def forget(self) -> None:
        """In another forked child: it is the parent's."""
        os.close(self._pipe)


def _answer(check: Callable[[], Sequence[str]], pipe: int, forget: Callable[[], None], parent: int) -> None:
    """The child's whole life."""
    try:
        forget()
        die_with(parent)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            found = [str(text)[:MOST_TEXT] for text in check()][:MOST_PROBLEMS]
        except OSError as error:
            found = [f"cannot be looked at: {error}"]
        os.write(pipe, json.dumps(found).encode())
    finally:
        os._exit(0)


def _problems(text: bytes) -> list[str]:
    """What the child wrote; one that was killed found nothing, and whoever killed it will show."""
    try:
        return [str(one) for one in json.loads(text)]
    except ValueError:
        return []
