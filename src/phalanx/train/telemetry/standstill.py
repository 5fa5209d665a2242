"""How long this process could not run: stopped, swapped out, throttled, or without a core.

A rank that is stopped inside a collective waits like all the others, by its own clock, and nobody would be to blame. So
a thread looks at the clock a hundred times a second: where it comes late, and the process has not computed either, the
process stood still. On an idle core the thread takes about 0.2 % of it.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable

TICK_S = 0.01
LATE_S = 0.01  # a thread that wakes up later than this was held up; less is the scheduler's and the interpreter lock's


class Standstill:
    """Adds up `stood_s` while `counts` says so, from `begin` on, until nobody refers to it any more."""

    def __init__(self, counts: Callable[[], bool]) -> None:
        self.stood_s = 0.0
        self._counts = counts
        self._process = 0

    def begin(self) -> None:
        """Start to look, once in each process: a fork has no threads of its parent."""
        if self._process != os.getpid():
            self._process = os.getpid()
            threading.Thread(target=_look, args=(weakref.ref(self),), name="standstill", daemon=True).start()


def _look(found: weakref.ref[Standstill]) -> None:
    while (meter := found()) is not None:
        counts = meter._counts()
        del meter  # what sleeps must not keep it
        before_s, worked_s = time.monotonic(), time.process_time()
        time.sleep(TICK_S)
        late_s = time.monotonic() - before_s - TICK_S
        # Native code may hold the interpreter lock while it computes: that is work, and processor time.
        idle_s = late_s - (time.process_time() - worked_s)
        if counts and late_s > LATE_S and idle_s > 0.0 and (meter := found()) is not None:
            meter.stood_s += idle_s
            del meter
