"""Max-min fair rates of flows that share links, compiled where numba is installed, and the effect of PFC pauses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phalanx.errors import mistake
from phalanx.sim.fabric_links import Floats, Ints


def has_numba() -> bool:
    """Return True if numba is installed."""
    return find_spec("numba") is not None


def compile_loop(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function compiled by numba; raises UserError without numba.

    The machine code is cached on disk where numba can write, otherwise it is compiled again by each process.
    """
    if not has_numba():
        raise mistake(
            "simulation",
            "numba is not installed",
            why="this loop runs over millions of packets or links and needs compiling",
            fix="pip install 'phalanx[sim]'",
        )
    numba: Any = import_module("numba")
    try:
        compiled: Callable[..., Any] = numba.njit(cache=True, nogil=True)(function)
    # numba's "no locator available": neither the package nor the home folder is writable.
    except RuntimeError:
        compiled = numba.njit(nogil=True)(function)
    return compiled


# Max-min fair rates by progressive filling: raise all rates together, and stop each row at its first full link.
# A link's level is its remaining capacity over the pull of the rows that still move on it. Levels only rise while
# slower rows stop, so the link with the lowest level is full first and stops its rows (Bertsekas and Gallager, Data
# Networks, section 6.5.2).


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkTable:
    """The links of each row, as CSR: entries start[r] to start[r + 1]; every row has at least one."""

    start: Ints
    link: NDArray[np.int32]
    pull: Floats  # a row's weight relative to others on a full link

    def some(self, rows: Ints) -> LinkTable:
        """Return the table of some of its rows."""
        width = np.diff(self.start)
        if len(rows) == len(width):
            return self
        start = np.concatenate([[0], np.cumsum(width[rows])])
        entries = np.repeat(self.start[rows] - start[:-1], width[rows]) + np.arange(start[-1])
        return LinkTable(start=start, link=self.link[entries], pull=self.pull[rows])


def fair_rates_of(table: LinkTable, capacity: Floats, *, engine: str = "auto") -> Floats:
    """Return the rate of every row, in the unit of the capacities; `engine` is auto, numba or numpy."""
    if len(table.start) < 2:
        return np.empty(0)
    link, room = table.link, capacity.astype(np.float64)
    # Few links are used: omit the others.
    if len(link) < len(capacity) // 4:
        used, packed = np.unique(link, return_inverse=True)
        link, room = packed.astype(np.int32), room[used]
    quick = engine == "numba" or (engine == "auto" and has_numba())
    run = _compiled_filling() if quick else _fill_in_rounds
    return np.asarray(table.pull * run(table.start, link, table.pull, room))


@cache
def _compiled_filling() -> Callable[..., Any]:
    return compile_loop(_fill_by_heap)


def _fill_in_rounds(start: Ints, link: NDArray[np.int32], pull: Floats, room: Floats) -> Floats:
    """Return the levels of rows; each round stops the rows of links that are the lowest of all their rows."""
    row = np.repeat(np.arange(len(pull)), np.diff(start))
    levels = np.zeros(len(pull))
    moving = np.ones(len(pull), dtype=bool)
    while moving.any():
        is_moving = moving[row]
        share = np.bincount(link[is_moving], weights=pull[row[is_moving]], minlength=len(room))
        level = np.divide(room, share, out=np.full(len(room), np.inf), where=share > 0)
        row_level = np.minimum.reduceat(level[link], start[:-1])
        lowest = np.full(len(room), np.inf)
        np.minimum.at(lowest, link[is_moving], row_level[row[is_moving]])
        stops = np.zeros(len(pull), dtype=bool)
        stops[row[is_moving & (level <= lowest * (1 + 1e-12))[link]]] = True
        levels[stops] = row_level[stops]
        is_stopped = stops[row]
        used = np.bincount(link[is_stopped], weights=(pull * levels)[row[is_stopped]], minlength=len(room))
        room = np.maximum(room - used, 0.0)
        moving &= ~stops
    return levels


def _fill_by_heap(  # pragma: no cover - runs compiled
    start: Ints, link: NDArray[np.int32], pull: Floats, room: Floats
) -> Floats:
    """Return the levels of rows, lowest link first.

    A level on the heap may be out of date, but only too low: then the link goes back on the heap.
    """
    rows, links = len(start) - 1, len(room)
    # The table transposed: rows of each link.
    begin = np.zeros(links + 1, dtype=np.int64)
    for e in range(len(link)):
        begin[link[e] + 1] += 1
    for i in range(links):
        begin[i + 1] += begin[i]
    row_of = np.empty(len(link), dtype=np.int32)
    movers = np.zeros(links, dtype=np.int32)
    share = np.zeros(links)
    for r in range(rows):
        for e in range(start[r], start[r + 1]):
            i = link[e]
            row_of[begin[i] + movers[i]] = r
            movers[i] += 1
            share[i] += pull[r]
    key, heap_link, size = np.empty(links), np.empty(links, dtype=np.int32), 0
    for i in range(links):
        if movers[i] > 0:
            key[size], heap_link[size] = room[i] / share[i], i
            size += 1
    levels = np.full(rows, -1.0)
    # The first steps sift down each parent, until the array is a heap.
    parent, moving_rows = size // 2, rows
    while moving_rows > 0:
        if parent > 0:
            parent -= 1
            hole, level, now = parent, key[parent], heap_link[parent]
        else:
            hole, now = 0, heap_link[0]
            level = room[now] / share[now] if movers[now] > 0 else np.inf
            if level <= key[0] * (1 + 1e-12):
                for index in range(begin[now], begin[now + 1]):
                    r = row_of[index]
                    if levels[r] >= 0:
                        continue
                    levels[r] = level
                    moving_rows -= 1
                    for e in range(start[r], start[r + 1]):
                        i = link[e]
                        room[i] = max(room[i] - pull[r] * level, 0.0)
                        share[i] -= pull[r]
                        movers[i] -= 1
                level = np.inf
            # No row moves on this link any more: the last entry of the heap replaces it.
            if level == np.inf:
                size -= 1
                level, now = key[size], heap_link[size]
        child = 2 * hole + 1
        while child < size:
            if child + 1 < size and key[child + 1] < key[child]:
                child += 1
            if key[child] >= level:
                break
            key[hole], heap_link[hole] = key[child], heap_link[child]
            hole, child = child, 2 * child + 1
        key[hole], heap_link[hole] = level, now
    return levels


# The effect of pauses (PFC) on fair rates: a queue that may not overflow stops the links that feed it.
# A flow that is held up at a link fills the queues on its way there. Each of them is paused and serves its packets in
# order, so all flows through it become as slow. Those are held up in turn, and the links that feed them are paused
# too. Capacity that slowed flows leave free on later links is not given to others here: rates are those of the worst
# case.


FULL = 0.999  # load above which a link counts as full
ALIKE = 1e-9
# A pause travels up one path at a time; paths have at most six links, and few rounds are needed.
ROUNDS = 64


def paused_rates(table: LinkTable, rates: Floats, capacity: Floats) -> Floats:
    """Return the rates of rows after pauses have spread against the direction of travel."""
    if not len(rates):
        return rates
    first = table.start[:-1]
    row = np.repeat(np.arange(len(rates)), np.diff(table.start))
    hop = np.arange(len(row)) - table.start[row]
    is_limited = _full_entries(table, rates, capacity, row)
    nowhere = len(row)
    limit_hop = np.minimum.reduceat(np.where(is_limited, hop, nowhere), first)
    limit_hop = np.where(limit_hop == nowhere, 0, limit_hop)
    for _ in range(ROUNDS):
        level, before = np.full(len(capacity), np.inf), hop < limit_hop[row]
        np.minimum.at(level, table.link[before], rates[row[before]])
        link_level = level[table.link]
        lowest = np.minimum.reduceat(link_level, first)
        slowed = lowest < rates * (1 - ALIKE)
        if not slowed.any():
            break
        slowest_hop = np.maximum.reduceat(np.where(link_level <= lowest[row] * (1 + ALIKE), hop, 0), first)
        limit_hop = np.where(slowed, slowest_hop, limit_hop)
        rates = np.where(slowed, lowest, rates)
    return rates


def _full_entries(table: LinkTable, rates: Floats, capacity: Floats, row: np.ndarray) -> np.ndarray:
    """Return the entries at which a full link limits the row: no other row there has a higher rate."""
    load = np.bincount(table.link, weights=rates[row], minlength=len(capacity))
    highest_rate = np.zeros(len(capacity))
    np.maximum.at(highest_rate, table.link, rates[row])
    # A dead port has no queue that could fill: packets for it are dropped.
    full = (capacity > 0) & (load >= FULL * capacity)
    return np.asarray(full[table.link] & (rates[row] >= highest_rate[table.link] * (1 - ALIKE)))
