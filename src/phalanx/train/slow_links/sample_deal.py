"""Which samples each peer learns from: pure functions of what all peers agree on, so that no two draw the same.

A global batch is a range of positions of the sampler. It is dealt to the members that took part in the last committed
round, in order. What a round did not count (a peer was lost, dropped, or too slow) is dealt again in the next, so a
sample counts exactly once whoever comes and goes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

Ranges = tuple[range, ...]  # disjoint positions of the sampler, in the order in which a peer takes them


def deal_samples(samples: Ranges, members: Sequence[str]) -> dict[str, Ranges]:
    """Each member's part, in order of their ids, as evenly as whole samples allow.

    >>> deal_samples((range(0, 5),), ["b", "a"])
    {'a': (range(0, 3),), 'b': (range(3, 5),)}
    """
    ordered = sorted(set(members))
    whole, more = divmod(count_samples(samples), max(1, len(ordered)))
    counts = [whole + (place < more) for place in range(len(ordered))]
    ends = list(accumulate(counts))
    return {
        member: slice_ranges(samples, end - count, end)
        for member, count, end in zip(ordered, counts, ends, strict=True)
    }


def uncounted_samples(dealt: Mapping[str, Ranges], counted: Mapping[str, int]) -> Ranges:
    """What was dealt and not learnt from: of each member all but the first `counted`.

    >>> uncounted_samples({"a": (range(0, 3),), "b": (range(3, 6),)}, {"a": 3, "b": 1})
    (range(4, 6),)
    """
    left: list[range] = []
    for member in sorted(dealt):
        left += slice_ranges(dealt[member], counted.get(member, 0), count_samples(dealt[member]))
    return tuple(left)


def count_samples(samples: Ranges) -> int:
    """How many samples there are."""
    return sum(map(len, samples))


def slice_ranges(samples: Ranges, start: int, end: int) -> Ranges:
    """Samples from place `start` to before `end`, counted through all ranges.

    >>> slice_ranges((range(0, 3), range(10, 13)), 2, 5)
    (range(2, 3), range(10, 12))
    """
    found, before = [], 0
    for one in samples:
        part = one[max(0, start - before) : max(0, end - before)]
        if len(part):
            found.append(part)
        before += len(one)
    return tuple(found)
