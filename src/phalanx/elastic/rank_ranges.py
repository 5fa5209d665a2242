"""Sets of ranks as ranges: of 131,072 ranks, all of them are one pair of numbers in a message."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator
from typing import Any


class RankRanges(Collection[int]):
    """A set of ranks, kept as sorted ranges that neither touch nor overlap.

    >>> some = RankRanges.of([3, 1, 2, 7])
    >>> some.to_json(), 2 in some, 4 in some, len(some)
    ([[1, 3], [7, 7]], True, False, 4)
    """

    __slots__ = ("_firsts", "_lasts")

    def __init__(self, ranges: Iterable[tuple[int, int]] = ()) -> None:
        self._firsts: list[int] = []
        self._lasts: list[int] = []
        for first, last in sorted(set(ranges)):  # hosts tell of each other's copies: most are there twice
            if self._lasts and first <= self._lasts[-1] + 1:
                self._lasts[-1] = max(self._lasts[-1], last)
            elif first <= last:
                self._firsts.append(first)
                self._lasts.append(last)

    @classmethod
    def of(cls, ranks: Iterable[int]) -> RankRanges:
        """The set of these ranks."""
        return cls((rank, rank) for rank in ranks)

    @classmethod
    def from_json(cls, ranges: Iterable[Iterable[Any]]) -> RankRanges:
        """The reverse of `to_json`, or the union of several; raises ValueError or TypeError on anything else."""
        # Hosts tell of each other's copies: most are there twice, and are looked at once.
        return cls((int(first), int(last)) for first, last in set(map(tuple, ranges)))

    def to_json(self) -> list[list[int]]:
        """First and last rank of every range."""
        return [[first, last] for first, last in zip(self._firsts, self._lasts, strict=True)]

    def covers(self, world: int) -> bool:
        """Whether every rank of so many is in it."""
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
