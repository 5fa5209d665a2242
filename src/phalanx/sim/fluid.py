"""The fluid engine: max-min fair rates of flows on a fabric, and when each flow is done.

It has no packets, queues or windows: a rate is what fair sharing settles to, and a freed share is used at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from phalanx.network.fabric.types import Fabric
from phalanx.sim.broken import NOTHING, Broken, shares
from phalanx.sim.fill import Table, fill
from phalanx.sim.links import Floats, Ints, Links, links_of
from phalanx.sim.matrices import Flows
from phalanx.sim.routes import Hops, Routes, Routing, route
from phalanx.sim.wire import MRC, Wire

FULL = 0.999  # load from which a link counts as full
SMALL_ROWS = 1 << 17


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
    stopped: str = ""  # "interrupted": flows that were not done then count as never done

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
class Case:
    """Sub-flows as rows of a table of links, ready to be filled."""

    table: Table
    capacity: Floats
    links: int  # of the fabric; capacities beyond are limits of single sub-flows
    routes: Routes

    @property
    def owner(self) -> NDArray[np.int32]:
        """Flow of each row."""
        return self.routes.flow


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """What must be sent: a flow that any of its paths may carry, or the fixed part of a QP."""

    of_row: Ints
    flow: Ints
    bits: Floats


def solve(fabric: Fabric, flows: Flows, *, routing: Routing, broken: Broken = NOTHING, engine: str = "auto") -> Rates:
    """Rates while all flows are active."""
    case = _case(fabric, flows, routing, broken)
    rates = fill(case.table, case.capacity, engine=engine)
    share = np.bincount(case.owner, weights=rates, minlength=len(flows)) / (fabric.nic_gbps * 1e9)
    return Rates(share=share, load=_load(case, rates), stalled=int((share <= 0).sum()))


def batch_of(rows: int) -> float:
    """By how much time may grow before finished flows free their shares.

    A hundred rounds of a million rows are minutes, so large cases take larger steps (8,192 hosts at 0.05 instead of
    0.01: equal means, the last flow 0.3 % later).
    """
    return 0.01 if rows <= SMALL_ROWS else 0.05


def complete(
    fabric: Fabric,
    flows: Flows,
    *,
    routing: Routing,
    broken: Broken = NOTHING,
    wire: Wire = MRC,
    batch: float = 0.01,
    engine: str = "auto",
) -> Completion:
    """Times at which flows are done when finished ones free their share.

    Flows that finish before time has grown by `batch` leave together: each at its own time, but their shares are free
    only when the last of them is done. 0 is exact; one per cent needs at most a few hundred rounds at any size.
    """
    case = _case(fabric, flows, routing, broken)
    if routing.spread != "all":  # over many paths luck evens out
        case = replace(case, table=replace(case.table, pull=wire.pulls(len(case.owner), routing.seed)))
    parts = parts_of(case, 8.0 * wire.wire_bytes(flows.nbytes), routing)
    rates = fill(case.table, case.capacity, engine=engine)
    times, rounds, stopped = _drain(case, parts, rates, batch, engine)
    done, hops = np.zeros(len(flows)), np.zeros(len(flows), dtype=np.int64)
    np.maximum.at(done, parts.flow, times)
    np.maximum.at(hops, case.owner, case.routes.hops)
    queued = _queued(case, rates, len(flows))
    late_s = wire.latency_s(flows.nbytes, hops, fabric.port_gbps, queued)
    return Completion(times_s=done + late_s, rounds=rounds, stopped=stopped)


def parts_of(case: Case, bits: Floats, routing: Routing) -> Parts:
    """A QP's fixed part is its row's; what is sprayed is the flow's, whichever path takes it."""
    owner = case.owner.astype(np.int64)
    if routing.spread == "qp":
        return Parts(of_row=np.arange(len(owner)), flow=owner, bits=(bits / routing.paths)[owner])
    return Parts(of_row=owner, flow=np.arange(len(bits)), bits=bits)


def _drain(case: Case, parts: Parts, rates: Floats, batch: float, engine: str) -> tuple[Floats, int, str]:
    """Finish times of parts, how often rates were computed, and whether Ctrl-C ended it."""
    left, times = parts.bits.copy(), np.full(len(parts.bits), np.inf)
    now, rounds, rows = 0.0, 1, np.arange(len(case.owner))
    try:
        while True:
            speed = np.bincount(parts.of_row[rows], weights=rates, minlength=len(left))
            needs = np.divide(left, speed, out=np.full(len(left), np.inf), where=speed > 0)
            first = float(needs.min())
            if not np.isfinite(first):
                return times, rounds, ""
            leaves = needs <= first + batch * (now + first)
            step = float(needs[leaves].max())
            times[leaves] = now + needs[leaves]
            left = np.where(leaves, np.inf, left - speed * step)
            now += step
            rows = rows[~leaves[parts.of_row[rows]]]
            if not len(rows):
                return times, rounds, ""
            rates = fill(case.table.some(rows), case.capacity, engine=engine)
            rounds += 1
    except KeyboardInterrupt:
        return times, rounds, "interrupted"


def _load(case: Case, rates: Floats) -> Floats:
    each = np.repeat(rates, np.diff(case.table.start))
    bits = np.bincount(case.table.link, weights=each, minlength=len(case.capacity))
    works = case.capacity > 0
    return np.asarray(np.divide(bits, case.capacity, out=np.zeros(len(bits)), where=works)[: case.links])


def _queued(case: Case, rates: Floats, flows: int) -> NDArray[np.bool_]:
    """Flows that meet a full link which is not theirs alone: there packets wait for each other."""
    owner = np.repeat(case.owner, np.diff(case.table.start))
    lowest, highest = np.full(len(case.capacity), flows), np.full(len(case.capacity), -1)
    np.minimum.at(lowest, case.table.link, owner)
    np.maximum.at(highest, case.table.link, owner)
    full = np.zeros(len(case.capacity), dtype=bool)
    full[: case.links] = (_load(case, rates) >= FULL) & (lowest < highest)[: case.links]
    queued = np.zeros(flows, dtype=bool)
    queued[owner[full[case.table.link]]] = True
    return queued


def _case(fabric: Fabric, flows: Flows, routing: Routing, broken: Broken) -> Case:
    links = links_of(fabric)
    left = None if broken.nothing else shares(links, broken)
    routes = route(links, flows, routing, left)
    return case_of(links, routes, links.capacity() if left is None else links.capacity() * left, routing)


def case_of(links: Links, routes: Routes, capacity: Floats, routing: Routing) -> Case:
    """Routes on links of some capacity, as rows to be filled."""
    hops = routes.links
    if routing.spread == "all":
        capacity = links.bundled(capacity)
    if routing.spread == "oblivious":
        # Each path begins behind a link of its own that lets an equal part of the NIC through: senders take paths in
        # turn, and what a full link drops is sent again on the next.
        own = np.arange(links.count, links.count + len(hops), dtype=np.int32)
        hops = np.column_stack([own, hops])
        capacity = np.concatenate([capacity, np.full(len(own), links.fabric.nic_gbps * 1e9 / routing.paths)])
    return Case(table=_table(hops), capacity=capacity, links=links.count, routes=routes)


def _table(hops: Hops) -> Table:
    present = hops >= 0
    start = np.concatenate([[0], np.cumsum(present.sum(axis=1))])
    return Table(start=start, link=hops[present], pull=np.ones(len(hops)))
