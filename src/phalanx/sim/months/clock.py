"""The event kernel: a heap of (time, order, action), and a clock that jumps from one to the next."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable


class Clock:
    """Simulated seconds. Actions of one instant run in the order they were asked for.

    >>> clock, seen = Clock(), []
    >>> clock.after(5.0, lambda: seen.append(clock.now_s))
    >>> clock.after(2.0, lambda: clock.after(1.0, lambda: seen.append(clock.now_s)))
    >>> clock.run(until_s=10.0)
    >>> seen, clock.now_s, clock.events
    ([3.0, 5.0], 10.0, 3)
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self.events = 0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        """Do something that many seconds from now; never, when they are infinite."""
        if math.isfinite(seconds):
            heapq.heappush(self._heap, (self.now_s + seconds, next(self._order), action))

    def run(self, *, until_s: float) -> None:
        """Everything that happens before `until_s`."""
        while self._heap and self._heap[0][0] < until_s:
            self.now_s, _, action = heapq.heappop(self._heap)
            self.events += 1
            action()
        self.now_s = until_s
