"""The fluid engine: max-min fair rates of flows on a fabric, and when each flow is done.

It has no packets, queues or windows: a rate is what fair sharing settles to, and a freed share is used at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from phalanx.network.fabric.types import Fabric
from phalanx.sim.broken import NOTHING, Broken, shares
from phalanx.sim.fill import Table, fill
from phalanx.sim.links import Floats, Ints, links_of
from phalanx.sim.matrices import Flows
from phalanx.sim.overhead import MRC, Overhead
from phalanx.sim.routes import Routes, Routing, route


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """What each flow gets, as a share of the NIC's line rate."""

    share: Floats
    load: Floats = field(repr=False)  # of each link's capacity
    stalled: int  # flows without any working path

    @property
    def mean(self) -> float:
        """Over flows."""
        return float(self.share.mean())

    @property
    def slowest(self) -> float:
        """The flow that a collective waits for."""
        return float(self.share.min())


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """When flows that start together are done; infinite for those that no path carries."""

    times_s: Floats
    rounds: int  # times the rates were computed

    @property
    def mean_s(self) -> float:
        """Over flows that finish."""
        done = self.times_s[np.isfinite(self.times_s)]
        return float(done.mean()) if len(done) else float("inf")

    @property
    def tail_s(self) -> float:
        """The last flow."""
        return float(self.times_s.max())


@dataclass(frozen=True, kw_only=True, slots=True)
class _Case:
    """Sub-flows as rows of a table of links, ready to be filled."""

    table: Table
    owner: NDArray[np.int32]  # flow of each row
    capacity: Floats
    routes: Routes


def solve(
    fabric: Fabric, flows: Flows, *, routing: Routing, broken: Broken = NOTHING, engine: str = "auto"
) -> Rates:
    """Rates while all flows are active."""
    case = _case(fabric, flows, routing, broken)
    rates = fill(case.table, case.capacity, engine=engine)
    share = np.bincount(case.owner, weights=rates, minlength=len(flows)) / (fabric.nic_gbps * 1e9)
    each = np.repeat(rates, np.diff(case.table.start))
    load = np.bincount(case.table.link, weights=each, minlength=len(case.capacity))
    load = np.divide(load, case.capacity, out=np.zeros_like(load), where=case.capacity > 0)
    return Rates(share=share, load=load, stalled=int((share <= 0).sum()))


def complete(
    fabric: Fabric,
    flows: Flows,
    *,
    routing: Routing,
    broken: Broken = NOTHING,
    overhead: Overhead = MRC,
    batch: float = 0.005,
    engine: str = "auto",
) -> Completion:
    """Times at which flows are done when finished ones free their share.

    Flows that would finish within `batch` of the next one's remaining time leave together, each at its own time: 0 is
    exact, and half a per cent bounds the number of rounds to a few hundred at any size.
    """
    case = _case(fabric, flows, routing, broken)
    bits = 8.0 * overhead.wire_bytes(flows.nbytes)
    parts = _Parts.of(case, bits, whole=routing.spread != "qp")
    times, rounds = _drain(case, parts, batch, engine)
    hops = np.zeros(len(flows), dtype=np.int64)
    np.maximum.at(hops, case.routes.flow, case.routes.hops)
    done = np.zeros(len(flows))
    np.maximum.at(done, parts.flow, times)
    return Completion(times_s=done + overhead.latency_s(hops, fabric.port_gbps), rounds=rounds)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Parts:
    """What must be sent: a flow that any of its paths may carry, or the fixed part of a QP."""

    of_row: Ints
    flow: Ints
    bits: Floats

    @classmethod
    def of(cls, case: _Case, bits: Floats, *, whole: bool) -> _Parts:
        if whole:
            return cls(of_row=case.owner.astype(np.int64), flow=np.arange(len(bits)), bits=bits)
        each = np.bincount(case.owner, minlength=len(bits))
        rows = np.arange(len(case.owner))
        return cls(of_row=rows, flow=case.owner.astype(np.int64), bits=(bits / each)[case.owner])


def _drain(case: _Case, parts: _Parts, batch: float, engine: str) -> tuple[Floats, int]:
    left, times = parts.bits.copy(), np.full(len(parts.bits), np.inf)
    now, rounds = 0.0, 0
    rows = np.arange(len(case.owner))
    while len(rows):
        rates = fill(case.table.some(rows), case.capacity, engine=engine)
        speed = np.bincount(parts.of_row[rows], weights=rates, minlength=len(left))
        needs = np.divide(left, speed, out=np.full(len(left), np.inf), where=speed > 0)
        step = float(needs.min())
        rounds += 1
        if not np.isfinite(step):
            break
        step *= 1.0 + batch
        leave = needs <= step
        times[leave] = now + needs[leave]
        left = np.where(leave, np.inf, left - speed * step)
        now += step
        rows = rows[~leave[parts.of_row[rows]]]
    return times, rounds


def _case(fabric: Fabric, flows: Flows, routing: Routing, broken: Broken) -> _Case:
    links = links_of(fabric)
    left = None if broken.nothing else shares(links, broken)
    routes = route(links, flows, routing, left)
    capacity = links.capacity() if left is None else links.capacity() * left
    if routing.spread == "oblivious":
        return _limited(fabric, routes, routing, capacity)
    return _Case(table=_table(routes.links), owner=routes.flow, capacity=capacity, routes=routes)


def _table(links: NDArray[np.int32]) -> Table:
    present = links >= 0
    start = np.concatenate([[0], np.cumsum(present.sum(axis=1))])
    return Table(start=start, link=links[present], pull=np.ones(len(links)))


def _limited(fabric: Fabric, routes: Routes, routing: Routing, capacity: Floats) -> _Case:
    """Each path behind a link of its own that lets through an equal part of the NIC: senders take paths in turn."""
    own = np.arange(len(capacity), len(capacity) + len(routes.links), dtype=np.int32)
    part = np.full(len(own), fabric.nic_gbps * 1e9 / routing.paths)
    table = _table(np.column_stack([own, routes.links]))
    return _Case(table=table, owner=routes.flow, capacity=np.concatenate([capacity, part]), routes=routes)
