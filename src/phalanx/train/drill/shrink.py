"""The smallest part of a schedule that still fails: delta debugging (Zeller and Hildebrandt 2002), bounded by time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TypeVar

T = TypeVar("T")


def shrink(
    items: Sequence[T],
    fails: Callable[[Sequence[T]], bool],
    *,
    budget_s: float,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[T, ...]:
    """A part of `items` that still fails, as small as the time allows; `items` themselves are known to fail.

    >>> shrink(range(100), lambda some: {7, 42} <= set(some), budget_s=10)
    (7, 42)
    """
    until_s = clock() + budget_s
    left, parts = tuple(items), 2
    while len(left) >= 2:
        for candidate in _candidates(left, parts):
            if clock() >= until_s:
                return left
            if fails(candidate):
                # A part that fails alone is cut in two again; one that only shed something keeps its grain.
                parts = 2 if len(candidate) <= len(left) // parts + 1 else max(parts - 1, 2)
                left = candidate
                break
        else:
            if parts >= len(left):
                break
            parts = min(2 * parts, len(left))
    return left


def _candidates(items: tuple[T, ...], parts: int) -> list[tuple[T, ...]]:
    """Each part alone, then all but each part."""
    size, more = divmod(len(items), parts)
    cuts = [0]
    for number in range(parts):
        cuts.append(cuts[-1] + size + (number < more))
    ranges = list(pairwise(cuts))
    alone = [items[low:high] for low, high in ranges]
    without = [items[:low] + items[high:] for low, high in ranges] if parts > 2 else []
    return [one for one in (*alone, *without) if one]
