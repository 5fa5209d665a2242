"""Rows about a ring on hashed paths: RoCE with so many queue pairs per connection.

A ring is as fast as its slowest step. How the NICs of arXiv:2605.04333's Cluster C share T0s is not published; ours are
eight to a T0, a server each, on T0s of 64 ports down and 64 up (a 51.2T box at 400G), and the range is from 4 to 32.
"""

from __future__ import annotations

import functools
from itertools import pairwise

import numpy as np

from phalanx.network.fabric.parse import parse_fabric
from phalanx.sim.fluid import solve
from phalanx.sim.matrices import flows
from phalanx.sim.routes import by_flow, by_qp
from phalanx.validate.network.outcome import Context, Outcome, Reader, ranged
from phalanx.validate.network.table import Row
from phalanx.validate.network.words import NotSaid, count, said

T0_DOWN, RADIX = 64, 128
TOGETHER, RANGE = 8, (4, 32)  # NICs of the ring under one T0
SEEDS = range(20)  # of the hashes: one draw of 64 flows says little
MOST = 512  # ranks: four to a T0 of 64 are as many as two tiers join
QPS = (1, 2, 4, 8, 16, 32, 64)
LITTLE = 0.05  # of gain from twice as many queue pairs


def fraction(row: Row, _: Context) -> Outcome:
    """The slowest step's share of line rate."""
    ranks, qps = _ranks(row), said(count(row.quantity, "QPs?"), "how many QPs")
    ours, *ends = (_slowest(ranks, together, min(qps, QPS[-1])) for together in (TOGETHER, *RANGE))
    note = f"sim/fluid, {TOGETHER} to a T0 of {T0_DOWN}; {ends[0]:.2f} with {RANGE[0]}, {ends[1]:.2f} with {RANGE[1]}"
    return ranged(row, ours, note, between=(min(ours, *ends), max(ours, *ends)))


def enough(row: Row, _: Context) -> Outcome:
    """The fewest queue pairs of which twice as many add little."""
    ranks = _ranks(row)
    ours, *ends = (_enough(ranks, together) for together in (TOGETHER, *RANGE))
    note = f"sim/fluid, {TOGETHER} to a T0 of {T0_DOWN}; {ends[0]} with {RANGE[0]}, {ends[1]} with {RANGE[1]}"
    return ranged(row, ours, note, between=(min(ours, *ends), max(ours, *ends)))


def _enough(ranks: int, together: int) -> int:
    for fewer, more in pairwise(QPS):
        if _slowest(ranks, together, more) / _slowest(ranks, together, fewer) - 1 < LITTLE:
            return fewer
    return QPS[-1]


def _ranks(row: Row) -> int:
    ranks = said(count(row.conditions, "(?:way|ranks?|GPUs?|hosts?)"), "how many ranks")
    if ranks % TOGETHER or not 2 * RANGE[1] <= ranks <= MOST:
        raise NotSaid(f"a ring that is run here: {ranks:,} ranks are not 64, 72, … {MOST:,}")
    return ranks


@functools.lru_cache(maxsize=64)
def _slowest(ranks: int, together: int, qps: int) -> float:
    """Mean over hashes; every step leaves its T0."""
    place = np.arange(ranks)
    host = place // together * T0_DOWN + place % together
    fabric = parse_fabric(f"clos2:{-(-ranks // together) * T0_DOWN}x400G/1p/{RADIX}/wide")
    ring = flows(host, host[(place + together) % ranks], 1.0)
    hashed = (by_qp(qps, seed=seed) if qps > 1 else by_flow(seed=seed) for seed in SEEDS)
    return float(np.mean([solve(fabric, ring, routing=one).slowest for one in hashed]))


READERS: tuple[tuple[str, Reader], ...] = (
    (r"^RoCE \d+ QPs? fraction", fraction),
    (r"^RoCE QPs beyond", enough),
)
