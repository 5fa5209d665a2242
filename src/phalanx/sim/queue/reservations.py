"""Nodes promised to waiting jobs: what may be started now without delaying them."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from math import inf


@dataclass(frozen=True, slots=True)
class Reservation:
    """From `time`, a waiting job is to have its nodes. `racks`: the domain kept for it; empty: any nodes will do."""

    time: float
    racks: frozenset[int]


class FreeProfile:
    """How many nodes will be free from now on, by the limits of what runs and what was promised.

    `times[i]` is where a piece begins, `free[i]` what is free in it; the last piece never ends.
    """

    def __init__(self, now: float, free: int, ends: Iterable[tuple[float, int]]) -> None:
        """`ends` are (time, nodes) of what runs, by time."""
        self.times, self.free = [now], [free]
        # Nodes -> (seconds, not before, found) of the last search: less is free from search to search, so whoever needs
        # as many for as long cannot start before.
        self._searched: dict[int, tuple[float, float, float]] = {}
        times, counts = self.times, self.free
        for time, nodes in ends:
            if time <= times[-1]:  # ends together with another, or is late already
                counts[-1] += nodes
            else:
                times.append(time)
                counts.append(counts[-1] + nodes)

    def fits_now(self, now: float, need: int, duration_s: float) -> bool:
        """Whether so many nodes are free from now for so long."""
        first = max(0, bisect_right(self.times, now) - 1)
        last = bisect_left(self.times, now + duration_s, lo=first + 1)
        return min(self.free[first:last]) >= need

    def earliest(self, need: int, duration_s: float, *, not_before: float = 0.0) -> float | None:
        """When so many nodes are free for so long; None: never, because nodes are out of service."""
        times, free, count = self.times, self.free, len(self.times)
        asked = not_before
        lasted, before, found = self._searched.get(need, (inf, inf, -inf))
        if duration_s >= lasted and not_before >= before and found > not_before:
            not_before = found
        piece = max(0, bisect_right(times, not_before) - 1)
        while piece < count:
            if free[piece] < need:
                piece += 1
                continue
            start = max(times[piece], not_before)
            last = bisect_left(times, start + duration_s, lo=piece + 1) - 1
            if min(free[piece : last + 1]) >= need:
                self._searched[need] = (duration_s, asked, start)
                return start
            # Whatever begins before the last piece that is short would hold it too.
            while free[last] >= need:
                last -= 1
            piece = last + 1
        return None

    def promise(self, start: float, duration_s: float, need: int) -> None:
        """Take so many nodes out, from `start` for so long."""
        first = self._cut(start)
        last = self._cut(start + duration_s)
        self.free[first:last] = [count - need for count in self.free[first:last]]

    def _cut(self, time: float) -> int:
        """The piece that begins at `time`, made where there is none."""
        piece = bisect_left(self.times, time)
        if piece == len(self.times) or self.times[piece] != time:
            self.times.insert(piece, time)
            self.free.insert(piece, self.free[piece - 1] if piece else self.free[0])
        return piece
