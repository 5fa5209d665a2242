"""Sets of ranks as ranges: the set of all 131,072 ranks is one pair of numbers in a message."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator
from typing import Any


class RankRanges(Collection[int]):
    """A set of ranks, stored as sorted ranges that neither touch nor overlap.

    >>> some = RankRanges.of([3, 1, 2, 7])
    >>> some.to_json(), 2 in some, 4 in some, len(some)
    ([[1, 3], [7, 7]], True, False, 4)
    """

    __slots__ = ("_firsts", "_lasts")

    def __init__(self, ranges: Iterable[tuple[int, int]] = ()) -> None:
        self._firsts: list[int] = []
        self._lasts: list[int] = []
        # Hosts report each other's replicas, so most ranges are there twice.
        for first, last in sorted(set(ranges)):
            if self._lasts and first <= self._lasts[-1] + 1:
                self._lasts[-1] = max(self._lasts[-1], last)
            elif first <= last:
                self._firsts.append(first)
                self._lasts.append(last)

    @classmethod
    def of(cls, ranks: Iterable[int]) -> RankRanges:
        """Return the set of these ranks."""
        return cls((rank, rank) for rank in ranks)

    @classmethod
    def from_json(cls, ranges: Iterable[Iterable[Any]]) -> RankRanges:
        """Read what `to_json` returned, or the union of several; raises ValueError or TypeError on anything else."""
        # Hosts report each other's replicas, so most ranges are there twice, and are converted once.
        return cls((int(first), int(last)) for first, last in set(map(tuple, ranges)))

    def to_json(self) -> list[list[int]]:
        """Return the first and last rank of every range."""
        return [[first, last] for first, last in zip(self._firsts, self._lasts, strict=True)]

    def covers(self, world: int) -> bool:
        """True when the set contains every rank of a world of this size."""
        return not world or (self._firsts[:1] == [0] and self._lasts[0] >= world - 1)

    def __contains__(self, rank: object) -> bool:
        if not isinstance(rank, int):
            return False
        place = bisect_right(self._firsts, rank)
        return place > 0 and rank <= self._lasts[place - 1]

    def __iter__(self) -> Iterator[int]:
        for first, last in zip(self._firsts, self._lasts, strict=True):
            yield from range(first, last + 1)

    def __len__(self) -> int:
        return sum(last - first + 1 for first, last in zip(self._firsts, self._lasts, strict=True))
