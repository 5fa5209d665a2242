"""Reservations of waiting jobs: which nodes may be used now without delaying them."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from math import inf


@dataclass(frozen=True, slots=True)
class Reservation:
    """The start that a waiting job is promised at `time`.

    `racks` are the domain kept for it; empty means that any nodes will do.
    """

    time: float
    racks: frozenset[int]


class FreeProfile:
    """The number of free nodes from now on, by the limits of running jobs and by reservations.

    `times[i]` is the start of an interval, `free[i]` the number of free nodes in it; the last interval never ends.
    """

    def __init__(self, now: float, free: int, ends: Iterable[tuple[float, int]]) -> None:
        """Build the profile; `ends` are the (time, nodes) of running jobs, by time."""
        self.times, self.free = [now], [free]
        # Nodes -> (seconds, not before, found) of the last search: less is free from search to search, so a job with
        # as many nodes for as long cannot start earlier.
        self._searched: dict[int, tuple[float, float, float]] = {}
        times, counts = self.times, self.free
        for time, nodes in ends:
            # Ends at the same time as another, or is late already.
            if time <= times[-1]:
                counts[-1] += nodes
            else:
                times.append(time)
                counts.append(counts[-1] + nodes)

    def fits_now(self, now: float, need: int, duration_s: float) -> bool:
        """Return True if `need` nodes are free from now for `duration_s`."""
        first = max(0, bisect_right(self.times, now) - 1)
        last = bisect_left(self.times, now + duration_s, lo=first + 1)
        return min(self.free[first:last]) >= need

    def earliest(self, need: int, duration_s: float, *, not_before: float = 0.0) -> float | None:
        """Return when `need` nodes are free for `duration_s`; None if never, because nodes are out of service."""
        times, free, count = self.times, self.free, len(self.times)
        requested = not_before
        known_duration_s, known_not_before, known_start = self._searched.get(need, (inf, inf, -inf))
        if duration_s >= known_duration_s and not_before >= known_not_before and known_start > not_before:
            not_before = known_start
        piece = max(0, bisect_right(times, not_before) - 1)
        while piece < count:
            if free[piece] < need:
                piece += 1
                continue
            start = max(times[piece], not_before)
            last = bisect_left(times, start + duration_s, lo=piece + 1) - 1
            if min(free[piece : last + 1]) >= need:
                self._searched[need] = (duration_s, requested, start)
                return start
            # Every start before the last interval with too few nodes would include it.
            while free[last] >= need:
                last -= 1
            piece = last + 1
        return None

    def promise(self, start: float, duration_s: float, need: int) -> None:
        """Reserve `need` nodes from `start` for `duration_s`."""
        first = self._cut(start)
        last = self._cut(start + duration_s)
        self.free[first:last] = [count - need for count in self.free[first:last]]

    def _cut(self, time: float) -> int:
        """Return the interval that starts at `time`, after splitting one if needed."""
        piece = bisect_left(self.times, time)
        if piece == len(self.times) or self.times[piece] != time:
            self.times.insert(piece, time)
            self.free.insert(piece, self.free[piece - 1] if piece else self.free[0])
        return piece
