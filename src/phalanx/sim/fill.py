"""Max-min fair rates by progressive filling: raise all rates together, stop whoever meets a full link.

The problem is sparse: row r of a CSR table lists the links that a flow of rate 1 loads and with how much. A link's
level is what is left of it over the weight of its moving flows; levels only rise while slower flows stop, so the link
with the lowest level is full first and stops its flows there (Bertsekas and Gallager, Data Networks, section 6.5.2).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from phalanx.sim.compiled import available, compiled

if TYPE_CHECKING:
    from collections.abc import Callable

    from phalanx.sim.links import Floats, Ints


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """Which links each flow loads: entries start[r] to start[r + 1] belong to row r. Every row has an entry."""

    start: Ints
    link: Ints
    weight: Floats  # load on the link when the row's rate is 1


def fill(table: Table, capacity: Floats, *, engine: str = "auto") -> Floats:
    """Rate of every row, in the unit of the capacities; `engine` is auto, numba or numpy."""
    if len(table.start) <= 1:
        return np.empty(0)
    used, packed = np.unique(table.link, return_inverse=True) if len(table.link) < len(capacity) // 4 else (None, None)
    link = table.link if packed is None else packed.astype(np.int64)
    room = capacity.astype(np.float64, copy=True) if used is None else capacity[used].astype(np.float64)
    if engine == "numba" or (engine == "auto" and available()):
        rates: Floats = _heap_filling()(table.start, link, table.weight, room)
        return rates
    return _level_filling(table.start, link, table.weight, room)


def _level_filling(start: Ints, link: Ints, weight: Floats, room: Floats) -> Floats:
    """In rounds: every link that is the lowest of all its flows' links is full, wherever it is in the fabric."""
    rows = np.repeat(np.arange(len(start) - 1), np.diff(start))
    rates = np.zeros(len(start) - 1)
    moving = np.ones(len(start) - 1, dtype=bool)
    while moving.any():
        on = moving[rows]
        share = np.bincount(link, weights=weight * on, minlength=len(room))
        level = np.divide(room, share, out=np.full(len(room), np.inf), where=share > 0)
        mine = np.minimum.reduceat(level[link], start[:-1])
        lowest = np.full(len(room), np.inf)
        np.minimum.at(lowest, link[on], mine[rows[on]])
        full = level <= lowest * (1 + 1e-12)
        stops = np.zeros(len(moving), dtype=bool)
        stops[rows[on & full[link]]] = True
        rates[stops] = mine[stops]
        taken = np.bincount(link, weights=weight * (stops[rows] * mine[rows]), minlength=len(room))
        room = np.maximum(room - taken, 0.0)
        moving &= ~stops
    return rates


@cache
def _heap_filling() -> Callable[..., Any]:
    return compiled(_fill_by_heap)


def _fill_by_heap(start: Ints, link: Ints, weight: Floats, room: Floats) -> Floats:  # pragma: no cover - compiled
    """The same with a heap of levels. A level on the heap may be out of date, but only too low: then it goes back."""
    rows = len(start) - 1
    links = len(room)
    # The table turned round: entries of each link.
    begin = np.zeros(links + 1, dtype=np.int64)
    for e in range(len(link)):
        begin[link[e] + 1] += 1
    for i in range(links):
        begin[i + 1] += begin[i]
    row_of = np.empty(len(link), dtype=np.int32)
    at = begin[:-1].copy()
    share = np.zeros(links)
    for r in range(rows):
        for e in range(start[r], start[r + 1]):
            row_of[at[link[e]]] = r
            at[link[e]] += 1
            share[link[e]] += weight[e]
    # A binary heap, built by sifting from the last parent down.
    key = np.empty(links)
    who = np.empty(links, dtype=np.int64)
    size = 0
    for i in range(links):
        if begin[i + 1] > begin[i]:
            key[size] = room[i] / share[i]
            who[size] = i
            size += 1
    rates = np.zeros(rows)
    moving = np.ones(rows, dtype=np.bool_)
    left = rows
    build = size // 2
    while left > 0:
        if build > 0:
            build -= 1
            hole, level, bottleneck = build, key[build], who[build]
        else:
            bottleneck = who[0]
            if share[bottleneck] > 1e-12:
                level = room[bottleneck] / share[bottleneck]
            else:
                level = np.inf
            if level <= key[0] * (1 + 1e-12):
                for e in range(begin[bottleneck], begin[bottleneck + 1]):
                    r = row_of[e]
                    if moving[r]:
                        moving[r] = False
                        left -= 1
                        rates[r] = level
                        for m in range(start[r], start[r + 1]):
                            room[link[m]] = max(room[link[m]] - weight[m] * level, 0.0)
                            share[link[m]] -= weight[m]
                level = np.inf
            hole = 0
            if level == np.inf:  # done with this link: the heap's last takes its place
                size -= 1
                level, bottleneck = key[size], who[size]
        while True:
            child = 2 * hole + 1
            if child >= size:
                break
            if child + 1 < size and key[child + 1] < key[child]:
                child += 1
            if key[child] >= level:
                break
            key[hole], who[hole] = key[child], who[child]
            hole = child
        key[hole], who[hole] = level, bottleneck
    return rates
