"""Deal of samples to peers: pure functions of facts that all peers agree on, so that no sample is drawn twice.

A global batch is a range of positions of the sampler. It is dealt to the members that took part in the last committed
round, in order. Samples that a round did not count (a peer was lost, dropped, or too slow) are dealt again in the
next, so a sample counts exactly once even as peers come and go.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

from phalanx.network.slow_shares import pace_weights

# Disjoint positions of the sampler, in the order in which a peer takes them.
Ranges = tuple[range, ...]


def deal_samples(
    samples: Ranges, members: Sequence[str], paces: Mapping[str, float] | None = None
) -> dict[str, Ranges]:
    """Return each member's samples, in order of the ids: in proportion to the paces if those are known and far apart.

    >>> deal_samples((range(0, 5),), ["b", "a"])
    {'a': (range(0, 3),), 'b': (range(3, 5),)}
    >>> deal_samples((range(0, 8),), ["b", "a"], {"a": 30.0, "b": 10.0})
    {'a': (range(0, 6),), 'b': (range(6, 8),)}
    """
    ordered = sorted(set(members))
    # Equal parts below a factor of 1.5 between the paces: steps of one machine differ by that much (decision 0051).
    weights = pace_weights([(paces or {}).get(member, 0.0) for member in ordered])
    counts = _whole_parts(count_samples(samples), weights)
    ends = list(accumulate(counts))
    return {
        member: slice_ranges(samples, end - count, end)
        for member, count, end in zip(ordered, counts, ends, strict=True)
    }


def _whole_parts(total: int, weights: Sequence[float]) -> list[int]:
    """Return whole numbers that sum to `total`, as near to the proportion as possible.

    Units left over by rounding go to the largest remainders; of equal ones the first gets more.

    >>> _whole_parts(5, [1.0, 1.0]), _whole_parts(7, [3.0, 1.0, 1.0])
    ([3, 2], [4, 2, 1])
    """
    exact = [total * weight / sum(weights) for weight in weights]
    parts = [int(amount) for amount in exact]
    rests = sorted(range(len(parts)), key=lambda place: (parts[place] - exact[place], place))
    for place in rests[: total - sum(parts)]:
        parts[place] += 1
    return parts


def uncounted_samples(dealt: Mapping[str, Ranges], counted: Mapping[str, int]) -> Ranges:
    """Return samples that were dealt and not learnt from: of each member all but the first `counted`.

    >>> uncounted_samples({"a": (range(0, 3),), "b": (range(3, 6),)}, {"a": 3, "b": 1})
    (range(4, 6),)
    """
    uncounted: list[range] = []
    for member in sorted(dealt):
        uncounted += slice_ranges(dealt[member], counted.get(member, 0), count_samples(dealt[member]))
    return tuple(uncounted)


def count_samples(samples: Ranges) -> int:
    """Return the number of samples."""
    return sum(map(len, samples))


def slice_ranges(samples: Ranges, start: int, end: int) -> Ranges:
    """Return the samples from place `start` to before `end`, counted through all ranges.

    >>> slice_ranges((range(0, 3), range(10, 13)), 2, 5)
    (range(2, 3), range(10, 12))
    """
    slices, before = [], 0
    for positions in samples:
        piece = positions[max(0, start - before) : max(0, end - before)]
        if len(piece):
            slices.append(piece)
        before += len(positions)
    return tuple(slices)
