"""The difference between the clocks of two hosts, and its limit."""

from __future__ import annotations

from collections.abc import Iterator

from phalanx.errors import Problem
from phalanx.units import format_seconds

# Timestamps of the record are compared between hosts.
MOST_SKEW_S = 5.0


def clock_skew_s(their_s: float, round_trip_s: float, *, now_s: float) -> float:
    """Return how far another clock is ahead (negative: behind) that read `their_s`, beyond the round trip.

    `now_s` is this host's clock when the answer came, `round_trip_s` after the request.

    >>> [clock_skew_s(their_s, 0.5, now_s=100.0) for their_s in (99.75, 110.0, 90.0)]
    [0.0, 10.0, -9.5]
    """
    asked_s = now_s - round_trip_s
    if asked_s <= their_s <= now_s:
        return 0.0
    return their_s - now_s if their_s > now_s else their_s - asked_s


def check_skew(skew_s: float, *, host: str) -> Iterator[Problem]:
    """The clocks of two hosts agree well enough to put their records in order."""
    if abs(skew_s) > MOST_SKEW_S:
        yield Problem(
            where=host,
            what=f"its clock is {format_seconds(abs(skew_s))} {'ahead' if skew_s > 0 else 'behind'}; "
            f"{MOST_SKEW_S:g} s are allowed",
            why="events of different hosts could not be ordered",
            fix="start chrony or systemd-timesyncd on it",
        )
