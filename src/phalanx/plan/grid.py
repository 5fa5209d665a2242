"""Layouts as products of short lists: what the search prices at once."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phalanx.plan.cases import Floats

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

GRID_CELLS = 1 << 17  # 1 MB for a term that depends on everything: the arithmetic stays in the second-level cache
WASTED_CELLS = 1 << 14  # a grid takes 2 ms however small it is: as long as these many cells that nobody asked for


@dataclass(frozen=True, kw_only=True, slots=True)
class Grid:
    """Layouts that are a product of five short lists, so that no term of the cost model is worked out twice.

    Axes, slowest first: what is sharded (ZeRO stage, group, offload), recompute, sequence parallelism, expert size, and
    the rest of the base. A term is as large as the axes it depends on, and NumPy broadcasts.
    """

    base: Ints  # [expert, rest]: rows of Space.base
    choice: Ints  # [sharing, recompute, sequence parallelism]: rows of Space.choice
    legal: Bools  # broadcasts to `shape`, as do the columns
    columns: dict[str, Floats]

    @property
    def shape(self) -> tuple[int, ...]:
        """Length of each axis."""
        return (*self.choice.shape, *self.base.shape)

    def rows(self, where: Bools) -> tuple[Ints, Ints]:
        """(base row, choice row) of the chosen layouts."""
        of_choice = where.reshape(self.choice.size, -1).sum(axis=1)
        return np.broadcast_to(self.base, self.shape)[where], np.repeat(self.choice, of_choice)

    def around(self, where: Bools) -> tuple[Grid, Bools]:
        """The smallest grid that holds the chosen layouts, and where they are in it."""
        axes = range(len(self.shape))
        kept = [np.flatnonzero(where.any(axis=tuple(other for other in axes if other != axis))) for axis in axes]
        columns = {name: cut(value, kept) for name, value in self.columns.items()}
        base, choice = cut(self.base, kept), cut(self.choice, kept[:3])
        return Grid(base=base, choice=choice, legal=cut(self.legal, kept), columns=columns), cut(where, kept)


def alike(legal: tuple[Bools, ...]) -> list[Ints]:
    """Columns of the masks in groups with nearly the same legal ways; those without any are left out."""
    bits = np.packbits(np.concatenate(legal), axis=0, bitorder="little").T
    codes = np.ascontiguousarray(bits).view(f"S{bits.shape[1]}").reshape(-1)
    known, kind, counts = np.unique(codes, return_inverse=True, return_counts=True)
    ends = accumulate(len(one) for one in legal)
    masks = [(1 << end) - (1 << (end - len(one))) for end, one in zip(ends, legal, strict=True)]

    def cells(ways: int, count: int) -> int:
        return count * math.prod([(ways & mask).bit_count() for mask in masks])

    patterns = [
        (int.from_bytes(one, "little"), count, [index])
        for index, (one, count) in enumerate(zip(known.tolist(), counts.tolist(), strict=True))
    ]
    found: list[tuple[int, int, list[int]]] = []  # legal ways, columns, their kinds
    for ways, count, kinds in sorted(patterns, key=lambda one: -cells(*one[:2])):
        own = cells(ways, count)
        wasted = [cells(ways | other, count + some) - own - cells(other, some) for other, some, _ in found]
        if wasted and own and min(wasted) < WASTED_CELLS:
            nearest = wasted.index(min(wasted))
            other, some, joined = found[nearest]
            found[nearest] = (ways | other, count + some, [*joined, *kinds])
        elif own:
            found.append((ways, count, kinds))
    return [np.flatnonzero(np.isin(kind, kinds)) for *_, kinds in found]


def cut(values: NDArray[Any], kept: list[Ints]) -> NDArray[Any]:
    """Only the kept entries of each axis the values have."""
    for axis in range(1, values.ndim + 1):
        if values.shape[-axis] > kept[-axis].size:
            values = values.take(kept[-axis], axis=-axis)
    return values
