"""The share of a vector that each peer averages, chosen so that the slowest peer finishes first (water-filling).

A peer with share s of a vector of P bytes moves P · (1 + (n - 2) · s) bytes each way (`slow_codecs.exchange_bytes`),
so the time of a round is the largest of that over the peers' bandwidths. The optimum is the smallest T for which the
shares ((T · bandwidth / P) - 1) / (n - 2), none below 0, sum to 1. A peer that accepts no connections takes no share
and still moves P.

The part of a batch that each peer trains on is proportional to its pace, so that all finish at the same time.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

# Peers whose paces differ by less get equal parts: steps of the same machine differ by as much.
ALIKE = 1.5
# A peer gets at most this many times the part of the median peer, and at least its inverse: a peer that overstates
# its pace delays the others, and a peer that is slow for a minute must keep a part to show that it recovers.
MOST_TIMES = 4.0


def water_filling(bandwidths: Sequence[float], client_only: Sequence[bool] = ()) -> list[float]:
    """Return shares that sum to 1, one for each peer; a bandwidth is the slower direction of its peer, in any unit.

    `client_only` marks peers that accept no connections. Raises ValueError where every peer is marked, or a bandwidth
    is not above 0.

    >>> water_filling([80, 10, 10, 10]), water_filling([10, 10], [False, True])
    ([1.0, 0.0, 0.0, 0.0], [1.0, 0.0])
    """
    count = len(bandwidths)
    blocked = [*client_only, *[False] * (count - len(client_only))]
    if any(not speed > 0.0 for speed in bandwidths):
        raise ValueError(f"a bandwidth of {min(bandwidths):g}: each must be above 0")
    owners = [peer for peer in range(count) if not blocked[peer]]
    if not owners:
        raise ValueError("every peer is client-only: one must accept connections, or nobody can average")
    # Each of two peers moves the whole vector whatever its share.
    if count <= 2:
        return [1.0 / len(owners) if peer in owners else 0.0 for peer in range(count)]
    # Starting with the fastest: with the m fastest above the water level, T/P makes their shares sum to 1.
    fastest = sorted(owners, key=lambda peer: (-bandwidths[peer], peer))
    time, total = 0.0, 0.0
    for above, peer in enumerate(fastest, start=1):
        total += bandwidths[peer]
        time = (above + count - 2) / total
        if above == len(fastest) or time * bandwidths[fastest[above]] <= 1.0:
            break
    # Every peer must move at least P: a slow peer may leave the owners more time than they need.
    time = max(time, 1.0 / min(bandwidths))
    unscaled = [max(0.0, time * bandwidths[peer] - 1.0) if peer in owners else 0.0 for peer in range(count)]
    return [weight / sum(unscaled) for weight in unscaled]


def round_seconds(encoded_bytes: float, bandwidths: Sequence[float], shares: Sequence[float]) -> float:
    """Return the seconds of a round in which both directions are always busy; bandwidths in bytes per second.

    >>> equal = round_seconds(1.0, [80, 10, 10, 10], [0.25] * 4)
    >>> round(equal / round_seconds(1.0, [80, 10, 10, 10], water_filling([80, 10, 10, 10])), 12)
    1.5
    """
    if len(bandwidths) < 2:
        return 0.0
    moved = (encoded_bytes * (1.0 + (len(bandwidths) - 2) * share) for share in shares)
    return max(size / speed for size, speed in zip(moved, bandwidths, strict=True))


def pace_weights(paces: Sequence[float]) -> list[float]:
    """Return weights of the parts of a batch that peers train on; paces in samples per second.

    All weights are 1 where a pace is unknown (0), or where no pace differs from the others by ALIKE or more.

    >>> pace_weights([30.0, 10.0]), pace_weights([12.0, 10.0]), pace_weights([1000.0, 10.0, 10.0])
    ([30.0, 10.0], [1.0, 1.0], [40.0, 10.0, 10.0])
    """
    if not paces or min(paces) <= 0.0 or max(paces) < ALIKE * min(paces):
        return [1.0] * len(paces)
    middle = statistics.median(paces)
    return [min(max(pace, middle / MOST_TIMES), middle * MOST_TIMES) for pace in paces]
