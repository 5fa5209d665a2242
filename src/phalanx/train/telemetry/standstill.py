"""Detection of time in which this process could not run: stopped, swapped out, throttled, or without a core.

By its own clock, a rank that is stopped inside a collective waits like all the others, and none would appear slow. So
a thread reads the clock a hundred times a second: if it wakes late, and the process has not computed either, the
process stood still. On an idle core the thread takes about 0.2 % of it.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable

TICK_S = 0.01
# A thread that wakes later than this was held up; less is due to the scheduler and the interpreter lock
LATE_S = 0.01


class Standstill:
    """Sums `stood_s` while `counts` returns true, from `begin` on, until the object is garbage-collected."""

    def __init__(self, counts: Callable[[], bool]) -> None:
        self.stood_s = 0.0
        self._counts = counts
        self._process = 0

    def begin(self) -> None:
        """Start the thread, once in each process: a fork does not inherit its parent's threads."""
        if self._process != os.getpid():
            self._process = os.getpid()
            threading.Thread(target=_look, args=(weakref.ref(self),), name="standstill", daemon=True).start()


def _look(found: weakref.ref[Standstill]) -> None:
    while (meter := found()) is not None:
        counts = meter._counts()
        # The sleeping thread must not keep it alive
        del meter
        before_s, worked_s = time.monotonic(), time.process_time()
        time.sleep(TICK_S)
        late_s = time.monotonic() - before_s - TICK_S
        # Native code may hold the interpreter lock while it computes: that is work, and shows as processor time.
        idle_s = late_s - (time.process_time() - worked_s)
        if counts and late_s > LATE_S and idle_s > 0.0 and (meter := found()) is not None:
            meter.stood_s += idle_s
            del meter
