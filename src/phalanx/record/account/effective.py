"""Effective training time as a curve: cumulative, which hides what happens now, and over the last hour."""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from phalanx.record.account.book import Point
from phalanx.units import HOUR_S, format_seconds

LEAST_WINDOWS = 4  # a run shorter than this many hours is looked at through a shorter window
LEAST_S = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Effective:
    """Shares of the time until each moment `t`; unpacks as (t, cumulative, last_hour)."""

    t: tuple[float, ...]  # Unix time
    cumulative: tuple[float, ...]
    last_hour: tuple[float, ...]  # over the last `window_s`
    window_s: float

    def __iter__(self) -> Iterator[tuple[float, ...]]:
        return iter((self.t, self.cumulative, self.last_hour))

    @property
    def window(self) -> str:
        """What `last_hour` looks back on, in words."""
        return "the last hour" if self.window_s >= HOUR_S else f"the last {format_seconds(self.window_s)}"


def from_trail(trail: Sequence[Point], points: int = 400) -> Effective:
    """At most `points` moments of a run, by the trail of `ledger.walk`; pauses between launches are not its time."""
    wall_s = trail[-1][1] if trail else 0.0
    window_s = min(HOUR_S, max(LEAST_S, wall_s / LEAST_WINDOWS))
    kept = [point for point in _thin(trail, max(2, points)) if point[1] > 0.0]
    walls = [wall for _, wall, _ in trail]
    return Effective(
        t=tuple(point[0] for point in kept),
        cumulative=tuple(_share(spent_s, wall_s) for _, wall_s, spent_s in kept),
        last_hour=tuple(_recent(point, trail, walls, window_s) for point in kept),
        window_s=window_s,
    )


def _thin(trail: Sequence[Point], points: int) -> list[Point]:
    if len(trail) <= points:
        return list(trail)
    return [trail[round(number * (len(trail) - 1) / (points - 1))] for number in range(points)]


def _recent(point: Point, trail: Sequence[Point], walls: Sequence[float], window_s: float) -> float:
    """The share since `window_s` before; between two points of the trail time is taken to have been spent evenly."""
    _, wall_s, spent_s = point
    since_s = wall_s - window_s
    if since_s <= 0.0:
        return _share(spent_s, wall_s)
    index = bisect.bisect_left(walls, since_s)
    _, after_wall, after_spent = trail[min(index, len(trail) - 1)]
    _, before_wall, before_spent = trail[index - 1] if index else (0.0, 0.0, 0.0)
    gap_s = after_wall - before_wall
    part = (since_s - before_wall) / gap_s if gap_s > 0.0 else 1.0
    return _share(spent_s - before_spent - part * (after_spent - before_spent), window_s)


def _share(spent_s: float, wall_s: float) -> float:
    return min(1.0, max(0.0, spent_s / wall_s)) if wall_s > 0.0 else 0.0
