"""Which share of a vector each peer averages, so that the slowest finishes first (water-filling).

A peer with share s of a vector of P bytes moves P · (1 + (n - 2) · s) bytes each way (`slow_codecs.exchange_bytes`), so
the time of a round is the largest of that over the peers' bandwidths. The smallest T for which the shares
((T · bandwidth / P) - 1) / (n - 2), none below 0, sum to 1 is the best that can be done. A peer that cannot be
connected to takes no share and still moves P.

Which part of a batch each peer learns from follows its pace, so that all are done at the same time.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

# Peers whose paces differ by less are dealt alike: one step of the same machine differs from the next by as much.
ALIKE = 1.5
# A peer is dealt at most so many times what the median one is, and at least as small a part: one that overstates its
# pace makes the others wait, and one that has a bad minute must stay in the deal to be seen to recover.
MOST_TIMES = 4.0


def water_filling(bandwidths: Sequence[float], client_only: Sequence[bool] = ()) -> list[float]:
    """Shares that sum to 1, one for each peer; bandwidth is the slower direction of each, in any unit.

    >>> water_filling([80, 10, 10, 10]), water_filling([10, 10], [False, True])
    ([1.0, 0.0, 0.0, 0.0], [1.0, 0.0])
    """
    count = len(bandwidths)
    blocked = [*client_only, *[False] * (count - len(client_only))]
    if any(not speed > 0.0 for speed in bandwidths):
        raise ValueError(f"a bandwidth of {min(bandwidths):g}: each must be above 0")
    owners = [place for place in range(count) if not blocked[place]]
    if not owners:
        raise ValueError("every peer is client-only: one must accept connections, or nobody can average")
    if count <= 2:  # each moves the whole vector whatever its share
        return [1.0 / len(owners) if place in owners else 0.0 for place in range(count)]
    # From the fastest on: with the m fastest above water, T/P is what makes their shares sum to 1.
    fastest = sorted(owners, key=lambda place: (-bandwidths[place], place))
    time, total = 0.0, 0.0
    for above, place in enumerate(fastest, start=1):
        total += bandwidths[place]
        time = (above + count - 2) / total
        if above == len(fastest) or time * bandwidths[fastest[above]] <= 1.0:
            break
    # Nobody is done before it has moved P: a slow peer may leave the owners more time than they need.
    time = max(time, 1.0 / min(bandwidths))
    most = [max(0.0, time * bandwidths[place] - 1.0) if place in owners else 0.0 for place in range(count)]
    return [one / sum(most) for one in most]


def round_seconds(encoded_bytes: float, bandwidths: Sequence[float], shares: Sequence[float]) -> float:
    """Time of a round in which both directions are always busy; bandwidths in bytes a second.

    >>> equal = round_seconds(1.0, [80, 10, 10, 10], [0.25] * 4)
    >>> round(equal / round_seconds(1.0, [80, 10, 10, 10], water_filling([80, 10, 10, 10])), 12)
    1.5
    """
    if len(bandwidths) < 2:
        return 0.0
    moved = (encoded_bytes * (1.0 + (len(bandwidths) - 2) * share) for share in shares)
    return max(size / speed for size, speed in zip(moved, bandwidths, strict=True))


def pace_weights(paces: Sequence[float]) -> list[float]:
    """What peers are dealt of a batch that all learn from together, in proportion; paces in samples a second.

    Alike where one is not known (0), or none is far from the others.

    >>> pace_weights([30.0, 10.0]), pace_weights([12.0, 10.0]), pace_weights([1000.0, 10.0, 10.0])
    ([30.0, 10.0], [1.0, 1.0], [40.0, 10.0, 10.0])
    """
    if not paces or min(paces) <= 0.0 or max(paces) < ALIKE * min(paces):
        return [1.0] * len(paces)
    middle = statistics.median(paces)
    return [min(max(pace, middle / MOST_TIMES), middle * MOST_TIMES) for pace in paces]
