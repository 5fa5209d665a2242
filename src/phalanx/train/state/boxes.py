"""Boxes: parts of a tensor with sides along its dimensions; where two meet, and whether many cover one exactly once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from operator import add

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class Box:
    """The elements from `start` on, `size` many along each dimension. A scalar's box has no dimensions."""

    start: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def end(self) -> tuple[int, ...]:
        """One past the last element of each dimension."""
        return tuple(map(add, self.start, self.size))

    @property
    def volume(self) -> int:
        """Elements in it."""
        return prod(self.size)

    def within(self, outer: Box) -> tuple[slice, ...]:
        """The slices that cut this box out of a tensor that holds `outer`."""
        return tuple(
            slice(start - base, start - base + size)
            for start, base, size in zip(self.start, outer.start, self.size, strict=True)
        )


def whole(shape: tuple[int, ...]) -> Box:
    """The box of a whole tensor."""
    return Box((0,) * len(shape), shape)


def overlap(one: Box, other: Box) -> Box | None:
    """What two boxes share, or None.

    >>> overlap(Box((0, 0), (4, 4)), Box((2, 1), (4, 2)))
    Box(start=(2, 1), size=(2, 2))
    """
    start = tuple(map(max, one.start, other.start))
    end = tuple(map(min, one.end, other.end))
    if any(low >= high for low, high in zip(start, end, strict=True)):
        return None
    return Box(start, tuple(high - low for low, high in zip(start, end, strict=True)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Gap:
    """A part of a box that is covered not once but `times` times."""

    box: Box
    times: int


# Above this the boxes cut each other so irregularly that no layout of ours wrote them: 2**22 counts are 16 MiB.
MOST_CELLS = 2**22


def first_gap(target: Box, parts: Sequence[Box]) -> Gap | None:
    """The first part of `target` that `parts`, all inside it, cover not exactly once; None when they tile it."""
    if not target.volume or list(parts) == [target]:
        return None
    cuts = [_cuts(target, parts, dim) for dim in range(len(target.start))]
    cells = tuple(len(cut) - 1 for cut in cuts)
    if prod(cells) > MOST_CELLS:
        raise OverflowError(f"{len(parts)} boxes make {prod(cells):,} cells, more than {MOST_CELLS:,}")
    times = np.zeros(cells, dtype=np.int32)
    for part in parts:
        times[_cells(cuts, part)] += 1
    wrong = np.argwhere(times != 1)
    return _gap(cuts, wrong[0], int(times[tuple(wrong[0])])) if len(wrong) else None


def _cuts(target: Box, parts: Sequence[Box], dim: int) -> npt.NDArray[np.int64]:
    edges = [target.start[dim], target.end[dim]]
    edges += [edge for part in parts for edge in (part.start[dim], part.end[dim])]
    return np.unique(np.array(edges, dtype=np.int64))


def _cells(cuts: Sequence[npt.NDArray[np.int64]], part: Box) -> tuple[slice, ...]:
    ends = part.end
    return tuple(
        slice(*(int(place) for place in np.searchsorted(cut, (part.start[dim], ends[dim]))))
        for dim, cut in enumerate(cuts)
    )


def _gap(cuts: Sequence[npt.NDArray[np.int64]], cell: npt.NDArray[np.intp], times: int) -> Gap:
    start = tuple(int(cut[place]) for cut, place in zip(cuts, cell, strict=True))
    end = tuple(int(cut[place + 1]) for cut, place in zip(cuts, cell, strict=True))
    return Gap(box=Box(start, tuple(high - low for low, high in zip(start, end, strict=True))), times=times)
