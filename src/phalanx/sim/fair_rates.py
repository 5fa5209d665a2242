"""Max-min fair rates of flows that share links, compiled where numba is installed; and what PFC pauses do to them."""

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
    """Whether numba can be imported."""
    return find_spec("numba") is not None


def compile_loop(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as machine code; kept on disk where numba finds a place to write, else compiled again next time."""
    if not has_numba():
        raise mistake(
            "simulation",
            "numba is not installed",
            why="this loop runs over millions of packets or links and needs compiling",
            fix="pip install 'phalanx[sim]'",
        )
    numba: Any = import_module("numba")
    try:
        made: Callable[..., Any] = numba.njit(cache=True, nogil=True)(function)
    except RuntimeError:  # numba: "no locator available": neither the package nor the home folder can be written
        made = numba.njit(nogil=True)(function)
    return made


# Max-min fair rates by progressive filling: raise all rates together, stop whoever meets a full link.
#
# A link's level is what is left of it over the pull of the rows that still move on it. Levels only rise while slower
# rows stop, so the lowest link is full first and stops its rows (Bertsekas and Gallager, Data Networks, section 6.5.2).


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkTable:
    """Which links each row takes, as CSR: entries start[r] to start[r + 1]; every row has at least one."""

    start: Ints
    link: NDArray[np.int32]
    pull: Floats  # a row's weight beside others on a full link

    def some(self, rows: Ints) -> LinkTable:
        """The table of some of its rows."""
        width = np.diff(self.start)
        if len(rows) == len(width):
            return self
        start = np.concatenate([[0], np.cumsum(width[rows])])
        entries = np.repeat(self.start[rows] - start[:-1], width[rows]) + np.arange(start[-1])
        return LinkTable(start=start, link=self.link[entries], pull=self.pull[rows])


def fair_rates_of(table: LinkTable, capacity: Floats, *, engine: str = "auto") -> Floats:
    """Rate of every row, in the unit of the capacities; `engine` is auto, numba or numpy."""
    if len(table.start) < 2:
        return np.empty(0)
    link, room = table.link, capacity.astype(np.float64)
    if len(link) < len(capacity) // 4:  # few links are used: leave the others out
        used, packed = np.unique(link, return_inverse=True)
        link, room = packed.astype(np.int32), room[used]
    quick = engine == "numba" or (engine == "auto" and has_numba())
    run = _compiled_filling() if quick else _fill_in_rounds
    return np.asarray(table.pull * run(table.start, link, table.pull, room))


@cache
def _compiled_filling() -> Callable[..., Any]:
    return compile_loop(_fill_by_heap)


def _fill_in_rounds(start: Ints, link: NDArray[np.int32], pull: Floats, room: Floats) -> Floats:
    """Levels of rows; in every round all links stop that are the lowest link of each of their rows."""
    row = np.repeat(np.arange(len(pull)), np.diff(start))
    levels = np.zeros(len(pull))
    moving = np.ones(len(pull), dtype=bool)
    while moving.any():
        on = moving[row]
        share = np.bincount(link[on], weights=pull[row[on]], minlength=len(room))
        level = np.divide(room, share, out=np.full(len(room), np.inf), where=share > 0)
        mine = np.minimum.reduceat(level[link], start[:-1])
        lowest = np.full(len(room), np.inf)
        np.minimum.at(lowest, link[on], mine[row[on]])
        stops = np.zeros(len(pull), dtype=bool)
        stops[row[on & (level <= lowest * (1 + 1e-12))[link]]] = True
        levels[stops] = mine[stops]
        gone = stops[row]
        taken = np.bincount(link[gone], weights=(pull * levels)[row[gone]], minlength=len(room))
        room = np.maximum(room - taken, 0.0)
        moving &= ~stops
    return levels


def _fill_by_heap(  # pragma: no cover - runs compiled
    start: Ints, link: NDArray[np.int32], pull: Floats, room: Floats
) -> Floats:
    """Levels of rows, lowest link first. A level on the heap may be out of date, but only too low: it goes back."""
    rows, links = len(start) - 1, len(room)
    begin = np.zeros(links + 1, dtype=np.int64)  # the table turned round: rows of each link
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
    key, who, size = np.empty(links), np.empty(links, dtype=np.int32), 0
    for i in range(links):
        if movers[i] > 0:
            key[size], who[size] = room[i] / share[i], i
            size += 1
    levels = np.full(rows, -1.0)
    parent, left = size // 2, rows  # parents still to be sifted, until the array is a heap
    while left > 0:
        if parent > 0:
            parent -= 1
            hole, level, now = parent, key[parent], who[parent]
        else:
            hole, now = 0, who[0]
            level = room[now] / share[now] if movers[now] > 0 else np.inf
            if level <= key[0] * (1 + 1e-12):
                for place in range(begin[now], begin[now + 1]):
                    r = row_of[place]
                    if levels[r] >= 0:
                        continue
                    levels[r] = level
                    left -= 1
                    for e in range(start[r], start[r + 1]):
                        i = link[e]
                        room[i] = max(room[i] - pull[r] * level, 0.0)
                        share[i] -= pull[r]
                        movers[i] -= 1
                level = np.inf
            if level == np.inf:  # nobody moves here any more: the heap's last takes the place
                size -= 1
                level, now = key[size], who[size]
        child = 2 * hole + 1
        while child < size:
            if child + 1 < size and key[child + 1] < key[child]:
                child += 1
            if key[child] >= level:
                break
            key[hole], who[hole] = key[child], who[child]
            hole, child = child, 2 * child + 1
        key[hole], who[hole] = level, now
    return levels


# What pauses (PFC) do to fair rates: a queue that may not overflow stops whatever feeds it.
#
# A flow that is held up at a link makes the queues on its way there fill; each of them is paused and serves its packets
# in order, so whoever shares one of them goes as slowly. Those are held up in turn, and what feeds them is paused too.
# What the slowed ones leave free on links further on is not given to others here: rates are those of the worst case.


FULL = 0.999  # load from which a link counts as full
ALIKE = 1e-9
ROUNDS = 64  # a pause travels up one path at a time; paths have at most six links, and few rounds are ever needed


def paused_rates(table: LinkTable, rates: Floats, capacity: Floats) -> Floats:
    """Rates of rows after pauses have spread against the direction of travel."""
    if not len(rates):
        return rates
    first = table.start[:-1]
    row = np.repeat(np.arange(len(rates)), np.diff(table.start))
    place = np.arange(len(row)) - table.start[row]
    held = _full_entries(table, rates, capacity, row)
    nowhere = len(row)
    at = np.minimum.reduceat(np.where(held, place, nowhere), first)
    at = np.where(at == nowhere, 0, at)
    for _ in range(ROUNDS):
        level, before = np.full(len(capacity), np.inf), place < at[row]
        np.minimum.at(level, table.link[before], rates[row[before]])
        seen = level[table.link]
        lowest = np.minimum.reduceat(seen, first)
        slowed = lowest < rates * (1 - ALIKE)
        if not slowed.any():
            break
        where = np.maximum.reduceat(np.where(seen <= lowest[row] * (1 + ALIKE), place, 0), first)
        at = np.where(slowed, where, at)
        rates = np.where(slowed, lowest, rates)
    return rates


def _full_entries(table: LinkTable, rates: Floats, capacity: Floats, row: np.ndarray) -> np.ndarray:
    """Entries at which a row gets no more because the link is full: nobody there has a higher rate."""
    load = np.bincount(table.link, weights=rates[row], minlength=len(capacity))
    most = np.zeros(len(capacity))
    np.maximum.at(most, table.link, rates[row])
    # A dead port has no queue to fill: what is meant for it is dropped.
    full = (capacity > 0) & (load >= FULL * capacity)
    return np.asarray(full[table.link] & (rates[row] >= most[table.link] * (1 - ALIKE)))
