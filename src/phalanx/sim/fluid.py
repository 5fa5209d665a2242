"""The fluid engine: max-min fair rates of flows on a fabric, and when each flow is done.

It has no packets, queues or windows: a rate is the equilibrium of fair sharing, and a freed share is used at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from phalanx.errors import mistake
from phalanx.network.fabric.fabric_types import Fabric
from phalanx.sim.fabric_links import NOTHING, BrokenParts, Floats, Ints, Links, link_shares, links_of
from phalanx.sim.fair_rates import LinkTable, fair_rates_of
from phalanx.sim.packets.simulation_arrays import PacketBudget
from phalanx.sim.routes import Hops, Routes, Routing, route_flows
from phalanx.sim.traffic_matrix import Flows

# Costs of a transfer in addition to its payload at the fluid rates: headers, latency, queues, random inequality.


@dataclass(frozen=True, kw_only=True, slots=True)
class Wire:
    """Overheads of a transport; all zero is the bare fluid."""

    payload_bytes: int = 4096
    header_bytes: int = 0
    base_s: float = 0.0  # of both ends
    link_s: float = 0.0  # of each link of the path, with the switch before it
    stores: bool = False  # switches receive a whole packet before they forward it
    replies: bool = False  # a flow is done when the last ACK has returned to the sender
    # Round trips that the last packet spends in queues where links are full.
    queue_trips: float = 0.0
    unequal: float = 0.0  # sigma of the logarithm of the pull of flows on a full link

    def wire_bytes(self, nbytes: Floats) -> Floats:
        """Return the bytes of payload and headers."""
        return np.asarray(nbytes + np.ceil(nbytes / self.payload_bytes) * self.header_bytes)

    def latency_s(self, nbytes: Floats, links: Ints, port_gbps: float, queued: NDArray[np.bool_]) -> Floats:
        """Return propagation, a packet's time on each link after the first, and queues on full links, in seconds.

        Switches that store packets (`stores`) add a packet's time per link.
        """
        packet_bytes = np.minimum(nbytes, self.payload_bytes) + self.header_bytes
        packet_s = self.stores * 8.0 * packet_bytes / (port_gbps * 1e9)
        ack_s = self.stores * 8.0 * self.header_bytes / (port_gbps * 1e9)
        forward_s = self.base_s + links * self.link_s + np.maximum(links - 1, 0) * packet_s
        return_s = self.base_s + links * (self.link_s + ack_s)
        return np.asarray(forward_s + self.replies * return_s + queued * self.queue_trips * (forward_s + return_s))

    def pulls(self, rows: int, seed: int) -> Floats:
        """Return the pull of each row on full links; all 1 when sharing is fair."""
        if self.unequal == 0:
            return np.ones(rows)
        normals = np.random.default_rng([seed, rows]).standard_normal(rows)
        return np.exp(self.unequal * normals)


IDEAL = Wire()
# arXiv:2605.04333 section 5.2.1: 5.09 µs for 2 bytes under one T0 (two links), 1.45 µs more over T1 (four links); 166
# B of headers with 4,096 B give its 96 % of line rate. Calibrated, not predicted.
MRC = Wire(header_bytes=166, stores=True, base_s=3.64e-6, link_s=0.725e-6)
# uet-htsim, in its public forks: 4,150 B packets with 64 B of headers and 1 µs per link, done when the last ACK is
# back. These give its single connection (2 MB, six links of 100G) 176.2 µs, as it prints. The last two values are
# fitted, on its seven rows of three tiers alone (grid of 0 to 3 and 0 to 1, smallest largest error: 6 %); its rows of
# two tiers were held out, and are within 8 %. A reason for queue_trips: windows are up to 1.5 bandwidth-delay
# products, and what exceeds one waits in queues. A reason for unequal: 2 MB last a few dozen round trips, too short
# for windows to become equal. docs/simulation/fluid.md has the table.
HTSIM = Wire(payload_bytes=4086, header_bytes=64, link_s=1e-6, stores=True, replies=True, queue_trips=1.5, unequal=0.75)


FULL = 0.999  # load above which a link counts as full
SMALL_ROWS = 1 << 17


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """The rate of each flow, as a share of the NIC's line rate."""

    share: Floats
    load: Floats = field(repr=False)  # of each link's capacity
    stalled: int  # flows without any working path

    @property
    def mean(self) -> float:
        """The mean over flows."""
        return float(self.share.mean())

    @property
    def slowest(self) -> float:
        """The rate of the slowest flow, for which a collective waits."""
        return float(self.share.min())


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """Finish times of flows that start together; infinite for flows without a working path."""

    times_s: Floats
    rounds: int  # times the rates were computed
    stopped: str = ""  # "interrupted": flows not done by then count as never done

    @property
    def mean_s(self) -> float:
        """The mean over flows that finish."""
        finished_s = self.times_s[np.isfinite(self.times_s)]
        return float(finished_s.mean()) if len(finished_s) else float("inf")

    @property
    def tail_s(self) -> float:
        """The time of the last flow."""
        return float(self.times_s.max())


@dataclass(frozen=True, kw_only=True, slots=True)
class FluidCase:
    """Sub-flows as rows of a table of links, ready to compute rates."""

    table: LinkTable
    capacity: Floats
    # Links of the fabric; capacities beyond them are limits of single sub-flows.
    links: int
    routes: Routes

    @property
    def owner(self) -> NDArray[np.int32]:
        """The flow of each row."""
        return self.routes.flow


@dataclass(frozen=True, kw_only=True, slots=True)
class FlowParts:
    """The data to send in parts: a whole flow that any of its paths may carry, or the fixed share of a QP."""

    of_row: Ints
    flow: Ints
    bits: Floats


def solve_rates(
    fabric: Fabric, flows: Flows, *, routing: Routing, broken: BrokenParts = NOTHING, engine: str = "auto"
) -> Rates:
    """Return the rates while all flows are active."""
    case = _fluid_case(fabric, flows, routing, broken)
    rates = fair_rates_of(case.table, case.capacity, engine=engine)
    share = np.bincount(case.owner, weights=rates, minlength=len(flows)) / (fabric.nic_gbps * 1e9)
    return Rates(share=share, load=_link_load(case, rates), stalled=int((share <= 0).sum()))


def batch_of(rows: int) -> float:
    """Return by how much time may grow, relatively, before finished flows free their shares.

    A hundred rounds of a million rows are minutes, so large cases take larger steps (8,192 hosts at 0.05 instead of
    0.01: equal means, the last flow 0.3 % later).
    """
    return 0.01 if rows <= SMALL_ROWS else 0.05


def complete_flows(
    fabric: Fabric,
    flows: Flows,
    *,
    routing: Routing,
    broken: BrokenParts = NOTHING,
    wire: Wire = MRC,
    batch: float = 0.01,
    engine: str = "auto",
) -> Completion:
    """Return the times at which flows are done, when finished ones free their share.

    Flows that finish before time has grown by `batch` leave together: each at its own time, but their shares are free
    only when the last of them is done. 0 is exact; one per cent needs at most a few hundred rounds at any size.
    """
    case = _fluid_case(fabric, flows, routing, broken)
    if routing.spread != "all":  # over many paths unequal pulls average out
        case = replace(case, table=replace(case.table, pull=wire.pulls(len(case.owner), routing.seed)))
    parts = parts_of(case, 8.0 * wire.wire_bytes(flows.nbytes), routing)
    rates = fair_rates_of(case.table, case.capacity, engine=engine)
    times, rounds, stopped = _drain_flows(case, parts, rates, batch, engine)
    done_s, hops = np.zeros(len(flows)), np.zeros(len(flows), dtype=np.int64)
    np.maximum.at(done_s, parts.flow, times)
    np.maximum.at(hops, case.owner, case.routes.hops)
    queued = _queued_flows(case, rates, len(flows))
    late_s = wire.latency_s(flows.nbytes, hops, fabric.port_gbps, queued)
    return Completion(times_s=done_s + late_s, rounds=rounds, stopped=stopped)


def parts_of(case: FluidCase, bits: Floats, routing: Routing) -> FlowParts:
    """Return the parts of flows: a QP's fixed share belongs to its row, sprayed data to its flow on any path."""
    owner = case.owner.astype(np.int64)
    if routing.spread == "qp":
        return FlowParts(of_row=np.arange(len(owner)), flow=owner, bits=(bits / routing.paths)[owner])
    return FlowParts(of_row=owner, flow=np.arange(len(bits)), bits=bits)


def _drain_flows(
    case: FluidCase, parts: FlowParts, rates: Floats, batch: float, engine: str
) -> tuple[Floats, int, str]:
    """Return the finish times of parts, how often rates were computed, and "interrupted" after Ctrl-C."""
    remaining_bits, times = parts.bits.copy(), np.full(len(parts.bits), np.inf)
    now, rounds, rows = 0.0, 1, np.arange(len(case.owner))
    try:
        while True:
            speed = np.bincount(parts.of_row[rows], weights=rates, minlength=len(remaining_bits))
            needs = np.divide(remaining_bits, speed, out=np.full(len(remaining_bits), np.inf), where=speed > 0)
            first = float(needs.min())
            if not np.isfinite(first):
                return times, rounds, ""
            leaves = needs <= first + batch * (now + first)
            step = float(needs[leaves].max())
            times[leaves] = now + needs[leaves]
            remaining_bits = np.where(leaves, np.inf, remaining_bits - speed * step)
            now += step
            rows = rows[~leaves[parts.of_row[rows]]]
            if not len(rows):
                return times, rounds, ""
            rates = fair_rates_of(case.table.some(rows), case.capacity, engine=engine)
            rounds += 1
    except KeyboardInterrupt:
        return times, rounds, "interrupted"


def _link_load(case: FluidCase, rates: Floats) -> Floats:
    each = np.repeat(rates, np.diff(case.table.start))
    bits = np.bincount(case.table.link, weights=each, minlength=len(case.capacity))
    works = case.capacity > 0
    return np.asarray(np.divide(bits, case.capacity, out=np.zeros(len(bits)), where=works)[: case.links])


def _queued_flows(case: FluidCase, rates: Floats, flows: int) -> NDArray[np.bool_]:
    """Return the flows that meet a full link shared with other flows, where packets wait for each other."""
    entry_flow = np.repeat(case.owner, np.diff(case.table.start))
    lowest, highest = np.full(len(case.capacity), flows), np.full(len(case.capacity), -1)
    np.minimum.at(lowest, case.table.link, entry_flow)
    np.maximum.at(highest, case.table.link, entry_flow)
    full = np.zeros(len(case.capacity), dtype=bool)
    full[: case.links] = (_link_load(case, rates) >= FULL) & (lowest < highest)[: case.links]
    queued = np.zeros(flows, dtype=bool)
    queued[entry_flow[full[case.table.link]]] = True
    return queued


def _fluid_case(fabric: Fabric, flows: Flows, routing: Routing, broken: BrokenParts) -> FluidCase:
    links = links_of(fabric)
    shares = None if broken.nothing else link_shares(links, broken)
    routes = route_flows(links, flows, routing, shares)
    return case_of(links, routes, links.capacity() if shares is None else links.capacity() * shares, routing)


def case_of(links: Links, routes: Routes, capacity: Floats, routing: Routing) -> FluidCase:
    """Return routes on links of the given capacity, as rows of a fluid case."""
    hops = routes.links
    if routing.spread == "all":
        capacity = links.bundled(capacity)
    if routing.spread == "oblivious":
        # Each path begins with its own link of an equal part of the NIC's rate: senders take paths in turn, and what
        # a full link drops is sent again on the next.
        source_link = np.arange(links.count, links.count + len(hops), dtype=np.int32)
        hops = np.column_stack([source_link, hops])
        capacity = np.concatenate([capacity, np.full(len(source_link), links.fabric.nic_gbps * 1e9 / routing.paths)])
    return FluidCase(table=_hop_table(hops), capacity=capacity, links=links.count, routes=routes)


def _hop_table(hops: Hops) -> LinkTable:
    present = hops >= 0
    start = np.concatenate([[0], np.cumsum(present.sum(axis=1))])
    return LinkTable(start=start, link=hops[present], pull=np.ones(len(hops)))


# Budgets of CPU time and memory, checked before a simulation starts.


# On one core of the machine of benchmarks/2026-11-15-fluid-speed.md, a row (one path of one flow) takes 1.2 to 1.5 µs
# each time rates are computed. Rows that are done leave, so that all rounds together cost about twenty full ones
# where paths collide and eight where packets are sprayed.
ROW_S = 1.5e-6
ROUNDS = {"flow": 20, "qp": 20, "oblivious": 8, "adaptive": 8, "all": 4}
ROW_BYTES = 220  # path, table of links, heap and rates: 0.9 GB with 4.2 million rows
LINK_BYTES = 40


def fluid_cost(links: Links, flows: int, routing: Routing) -> tuple[float, float]:
    """Return the expected CPU seconds and bytes of memory."""
    rows = float(flows) * routing.paths
    return rows * ROW_S * (1 + ROUNDS[routing.spread]), rows * ROW_BYTES + links.count * LINK_BYTES


def check_fluid_budget(links: Links, flows: int, routing: Routing, budget: PacketBudget) -> None:
    """Raise UserError when rates and completion times would exceed the budget."""
    cpu_s, nbytes = fluid_cost(links, flows, routing)
    if cpu_s <= budget.cpu_s and nbytes <= budget.memory_bytes:
        return
    share = min(budget.cpu_s / cpu_s, budget.memory_bytes / nbytes)
    raise mistake(
        f"fluid on {links.fabric.name}",
        f"{flows:,} flows on {routing.paths} paths each need about {cpu_s:,.0f} s of CPU and {nbytes / 1e9:,.1f} GB; "
        f"the budget is {budget.cpu_s:,.3g} s and {budget.memory_bytes / 1e9:,.1f} GB",
        why="every path of every flow is a row to be filled",
        fix=" or ".join(_what_fits(links, flows, routing, share, enough=nbytes <= budget.memory_bytes)),
    )


def _what_fits(links: Links, flows: int, routing: Routing, share: float, *, enough: bool) -> list[str]:
    """Return options that would fit: fewer paths, cables as one, fewer flows, or more time where memory is enough."""
    planes = links.fabric.planes
    fewer = int(routing.paths * share) // planes * planes
    options = [f"use --paths {fewer:,}".replace(",", "")] if fewer and routing.spread not in ("flow", "all") else []
    options += ["--routing all"] if routing.spread not in ("flow", "all") and routing.paths * share >= planes else []
    return [*options, f"simulate about {max(2, int(flows * share)):,} flows", *(["raise --cpu"] if enough else [])]
