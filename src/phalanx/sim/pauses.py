"""What pauses (PFC) do to fair rates: a queue that may not overflow stops whatever feeds it.

A flow that is held up at a link makes the queues on its way there fill; each of them is paused and serves its packets
in order, so whoever shares one of them goes as slowly. Those are held up in turn, and what feeds them is paused too.
What the slowed ones leave free on links further on is not given to others here: rates are those of the worst case.
"""

from __future__ import annotations

import numpy as np

from phalanx.sim.fill import Table
from phalanx.sim.links import Floats

FULL = 0.999  # load from which a link counts as full
ALIKE = 1e-9
ROUNDS = 64  # a pause travels up one path at a time; paths have at most six links, and few rounds are ever needed


def paused(table: Table, rates: Floats, capacity: Floats) -> Floats:
    """Rates of rows after pauses have spread against the direction of travel."""
    if not len(rates):
        return rates
    first = table.start[:-1]
    row = np.repeat(np.arange(len(rates)), np.diff(table.start))
    place = np.arange(len(row)) - table.start[row]
    held = _held(table, rates, capacity, row)
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


def _held(table: Table, rates: Floats, capacity: Floats, row: np.ndarray) -> np.ndarray:
    """Entries at which a row gets no more because the link is full: nobody there has a higher rate."""
    load = np.bincount(table.link, weights=rates[row], minlength=len(capacity))
    most = np.zeros(len(capacity))
    np.maximum.at(most, table.link, rates[row])
    # A dead port has no queue to fill: what is meant for it is dropped.
    full = (capacity > 0) & (load >= FULL * capacity)
    return np.asarray(full[table.link] & (rates[row] >= most[table.link] * (1 - ALIKE)))
