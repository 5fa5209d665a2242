"""Run a check of the host in a forked process: a driver or disk that hangs holds up only that process."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from phalanx.elastic.rank_process import die_with

# Of this process's own running time; the checks take milliseconds where the devices and the disk answer.
PATIENCE_S = 10.0
# Longest time between two calls that counts: an agent that was stopped must not blame the check.
TURN_S = 0.1
# The problems travel in a hello, which is short; a pipe takes them without a reader.
MOST_TEXT, MOST_PROBLEMS = 500, 4


class ForkedCheck:
    """Runs `check` in a forked child; call `found` now and then. No thread, because the agent forks."""

    def __init__(self, check: Callable[[], Sequence[str]], *, forget: Callable[[], None] = lambda: None) -> None:
        self._pipe, child_end = os.pipe()
        parent, self._text = os.getpid(), b""
        self._waited_s, self._asked_s = 0.0, time.monotonic()
        self._pid = os.fork()
        if not self._pid:
            _answer(check, child_end, forget, parent)
        os.close(child_end)
        os.set_blocking(self._pipe, False)

    def found(self) -> list[str] | None:
        """Return the problems; None while the child still checks. A check that hangs is itself the problem."""
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
        """Kill the child. One that hangs in the kernel cannot be killed: it is not waited for."""
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
        """Close this forked child's copy of the pipe; the check belongs to the parent."""
        os.close(self._pipe)


def _answer(check: Callable[[], Sequence[str]], pipe: int, forget: Callable[[], None], parent: int) -> None:
    """Run the check in the child, write its result into the pipe, and exit."""
    try:
        forget()
        die_with(parent)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            problems = [str(text)[:MOST_TEXT] for text in check()][:MOST_PROBLEMS]
        except OSError as error:
            problems = [f"cannot be looked at: {error}"]
        os.write(pipe, json.dumps(problems).encode())
    finally:
        os._exit(0)


def _problems(text: bytes) -> list[str]:
    """Parse the problems that the child wrote.

    There are none from a child that was killed, because its killer will show up itself.
    """
    try:
        return [str(problem) for problem in json.loads(text)]
    except ValueError:
        return []
