"""Run connections of the conventional transport (RoCE) over a fabric packet by packet: set-up, clock, and arrays."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from phalanx.errors import Problem, SystemFailure
from phalanx.network.fabric.fabric_types import Fabric
from phalanx.sim.fabric_links import Floats, Links, links_of
from phalanx.sim.packets.engine_state import Calendar, Ints, Ints32
from phalanx.sim.packets.link_faults import Change, FabricFault, link_changes
from phalanx.sim.packets.result import PacketCourse, PacketResult
from phalanx.sim.packets.roce_state import (
    ACTIVE,
    ALPHA,
    ALPHA_AT,
    CNP_AT,
    DELIVERED,
    DROPPED,
    FREE,
    LOST,
    MARKS,
    NOW,
    OVERFLOW,
    PAUSED,
    RANDOM,
    RATE,
    SENT,
    TARGET,
    TIMER_AT,
    TOTAL,
    Form,
    Packets,
    Pairs,
    Ports,
    Rules,
)
from phalanx.sim.packets.simulation_arrays import (
    PacketBudget,
    PacketCost,
    calendar_of,
    check_packet_budget,
    packet_cost,
)
from phalanx.sim.packets.transport import Dcqcn, Roce, RoceSlots, check_roce, roce_slots
from phalanx.sim.routes import Routing, route_flows
from phalanx.sim.traffic_matrix import Flows


def run_roce(
    fabric: Fabric,
    traffic: Flows,
    roce: Roce,
    *,
    faults: tuple[FabricFault, ...],
    denied: tuple[FabricFault, ...],
    seed: int,
    budget: PacketBudget,
    # Returns slots from the changes, the length of a slot, and the slots of unhindered traffic.
    limit: Callable[[list[Change], float, int], int],
    sample_s: float,
    watch: tuple[int, ...],
) -> PacketResult:
    """Simulate until every connection has finished or the limit is reached."""
    check_roce(roce)
    plan = roce_sketch(fabric, traffic, roce)
    check_packet_budget(fabric.name, plan.cost, budget)
    world = roce_build(plan, fabric, traffic, roce, seed=seed)
    slot_s = world.slots.slot_s
    todo = link_changes(world.links, faults, slot_s=slot_s, converge_s=roce.converge_s, denied=denied)
    clock = _RoceClock(
        world=world,
        roce=roce,
        traffic=traffic,
        seed=seed,
        known=np.ones(world.links.count),
        todo=todo,
        watch=watch,
        course=PacketCourse(watched=len(watch)),
        sample=max(1, round(sample_s / slot_s)),
    )
    started = time.process_time()
    stopped = clock.run(limit(todo, slot_s, plan.cost.slots), started + budget.cpu_s)
    return _packet_result(clock, stopped, time.process_time() - started)


@dataclass(kw_only=True, slots=True)
class _RoceClock:
    """The clock around the loop: advances it from one change or sample to the next."""

    world: RoceWorld
    roce: Roce
    traffic: Flows
    seed: int
    known: Floats  # share of each link as routing knows it
    todo: list[Change]
    watch: tuple[int, ...]
    sample: int
    course: PacketCourse
    slot: int = 1

    def run(self, limit: int, deadline: float) -> str:
        from phalanx.sim.packets import roce_kernel as kernel

        w, next_sample = self.world, self.slot + self.sample
        try:
            while w.totals[ACTIVE] > 0 and self.slot < limit:
                self._apply_changes()
                end = min(next_sample, self.todo[0].slot if self.todo else limit, limit)
                self.slot = kernel.advance(
                    w.form, w.rules, w.ports, w.packets, w.pairs, w.calendar, w.totals, self.slot, end
                )
                if self.slot >= next_sample or w.totals[ACTIVE] == 0:
                    self._keep_course()
                    next_sample = self.slot + self.sample
                if time.process_time() > deadline:
                    return "CPU budget"
        except KeyboardInterrupt:  # as in `packet_run.py`
            self.slot = max(self.slot, int(w.totals[NOW]))
            self._keep_course()
            return "interrupted"
        if w.totals[OVERFLOW]:
            problem = f"{int(w.totals[OVERFLOW]):,} events or packets did not fit"
            raise SystemFailure(
                Problem(where="packet engine", what=problem, why="a fault of Phalanx: please report it")
            )
        return "" if w.totals[ACTIVE] == 0 else "time limit"

    def _apply_changes(self) -> None:
        w = self.world
        while self.todo and self.todo[0].slot <= self.slot:
            change = self.todo.pop(0)
            if change.routed is None:
                w.ports.share[change.links] = change.share
                w.ports.loss[change.links] = change.loss
                continue
            self.known[change.links] = 1.0 - change.routed
            w.pairs.route[:] = roce_routes(w.links, self.traffic, self.roce, self.seed, self.known)[0]

    def _keep_course(self) -> None:
        w = self.world
        self.course.keep(self.slot, int(w.totals[DELIVERED]), w.pairs.arrived[list(self.watch)])


def _packet_result(clock: _RoceClock, stopped: str, cpu_s: float) -> PacketResult:
    w, slot_s, roce = clock.world, clock.world.slots.slot_s, clock.roce
    time_s, total_gbps, watched_gbps = clock.course.gbps(slot_s, 8e-9 * roce.payload_bytes)
    done_slots, lost = w.pairs.done.astype(np.float64), int(w.totals[LOST]) + int(w.totals[DROPPED])
    busy = max(clock.slot - 1, 1) * w.links.count
    return PacketResult(
        transport=roce.name,
        fct_s=np.where(done_slots < 0, np.nan, (done_slots - 1) * slot_s),
        start_s=np.zeros(len(done_slots)),
        nbytes=float(clock.traffic.nbytes.sum()),
        packets=int(w.pairs.counts[:, 0].sum(dtype=np.int64)),
        sent=int(w.totals[SENT]),
        delivered=int(w.totals[DELIVERED]),
        lost=lost,
        trimmed=0,
        marked=int(w.totals[MARKS]),
        touched=int((w.pairs.touched > 0).sum()),
        touched_by_loss=int((w.pairs.touched > 0).sum()),
        retired_paths=0,
        time_s=time_s,
        throughput_gbps=total_gbps,
        watched_gbps=watched_gbps,
        planes_simulated=w.links.fabric.planes,
        simulated_s=(clock.slot - 1) * slot_s,
        cpu_s=cpu_s,
        stopped=stopped,
        dropped=int(w.totals[DROPPED]),
        paused_share=int(w.totals[PAUSED]) / busy,
    )


# Arrays of a simulation of the conventional transport.


TOTALS, COUNTS, RATES = 14, 9, 8
MOST_LINKS_OF_PATH = 6
TICK_S = 1e-6  # between checks of the timers, whose times are tens of microseconds
BYTES_PER_PACKET, BYTES_PER_PAIR, BYTES_PER_EVENT = 4 * 4 + 2, 4 * (COUNTS + 8) + 8 * RATES + 20, 12


@dataclass(frozen=True, kw_only=True, slots=True)
class RoceSketch:
    """Sizes and cost of a simulation, computed before any large array is allocated."""

    links: Links
    slots: RoceSlots
    packets: Ints  # of each queue pair
    room: int  # packets that can be in the fabric at once
    events: int  # events that can be pending at once
    cost: PacketCost


@dataclass(frozen=True, kw_only=True, slots=True)
class RoceWorld:
    """All data that the loop runs on."""

    links: Links
    slots: RoceSlots
    form: Form
    rules: Rules
    ports: Ports
    packets: Packets
    pairs: Pairs
    calendar: Calendar
    totals: Ints


def roce_sketch(fabric: Fabric, flows: Flows, roce: Roce) -> RoceSketch:
    """Compute sizes and expected cost; all planes are simulated, because each queue pair is on a single one."""
    links, slots = links_of(fabric), roce_slots(fabric, roce)
    packets_per_pair = np.ceil(np.minimum(flows.nbytes / roce.payload_bytes / roce.qps, 2.0**30)).astype(np.int64)
    packets = np.repeat(packets_per_pair, roce.qps)
    into = np.bincount(flows.target, weights=packets_per_pair * roce.qps, minlength=fabric.hosts)
    out = np.bincount(flows.source, weights=packets_per_pair * roce.qps, minlength=fabric.hosts)
    # Every switch full, and on every link the packets that are sent before a pause arrives.
    room = int(min(fabric.switches * slots.buffer + links.count * (3 * slots.wire + 4), packets.sum() * 2.0 + 1024))
    events = fabric.hosts * fabric.planes * (_longest_path(fabric, slots) + 2) + len(packets) + 1024
    memory = room * BYTES_PER_PACKET + events * BYTES_PER_EVENT + len(packets) * BYTES_PER_PAIR
    expected = packet_cost(
        packets=int(packets.sum(dtype=np.float64)),
        hops=int(packets.sum(dtype=np.float64) * (fabric.hops + 1)),
        slots=int(max(into.max(), out.max()) / min(fabric.planes, roce.qps) + _longest_path(fabric, slots)),
        links=links.count,
        memory_bytes=memory + links.count * (4.0 * slots.wire + 8.0 * (slots.back + 2) + 60),
    )
    return RoceSketch(links=links, slots=slots, packets=packets, room=room, events=int(events), cost=expected)


def _longest_path(fabric: Fabric, slots: RoceSlots) -> int:
    return (fabric.hops + 1) * slots.back + slots.host


def roce_build(plan: RoceSketch, fabric: Fabric, flows: Flows, roce: Roce, *, seed: int) -> RoceWorld:
    """Allocate and fill the arrays."""
    totals = np.zeros(TOTALS, dtype=np.int64)
    # The generator must not start at 0; the odd constant spreads neighbouring seeds.
    totals[RANDOM] = (seed * 0x9E3779B97F4A7C1 + 0x2545F4914F6CDD1) & 0x7FFFFFFFFFFFFFFF or 1
    totals[ACTIVE], totals[FREE] = len(flows), 0
    slots = plan.slots
    form = Form(
        hosts=fabric.hosts,
        planes=fabric.planes,
        per_plane=plan.links.per_plane,
        wire=slots.wire,
        back=slots.back,
        host_slots=slots.host,
        ring=_longest_path(fabric, slots) + 2,
        timeout=slots.timeout,
        tick=max(1, round(TICK_S / slots.slot_s)),
    )
    return RoceWorld(
        links=plan.links,
        slots=slots,
        form=form,
        rules=_roce_rules(slots, roce),
        ports=_port_arrays(plan.links, form),
        packets=_packet_arrays(plan.room),
        pairs=_pair_arrays(plan, flows, roce, seed),
        calendar=calendar_of(form.ring, plan.events),
        totals=totals,
    )


def _roce_rules(slots: RoceSlots, roce: Roce) -> Rules:
    d = roce.dcqcn or Dcqcn()
    return Rules(
        pfc=int(roce.pfc),
        dcqcn=int(roce.dcqcn is not None),
        ack_every=roce.ack_every,
        buffer=slots.buffer,
        pause_share=roce.pause_share,
        mark_low=slots.mark_low,
        mark_high=slots.mark_high,
        mark_most=roce.mark_most,
        gain=d.gain,
        cnp=slots.slots(d.cnp_s),
        alpha=slots.slots(d.alpha_s),
        timer=slots.slots(d.timer_s),
        counter=d.counter_bytes / roce.packet_bytes,
        fast_rounds=d.fast_rounds,
        add=d.add_share,
        hyper=d.hyper_share,
        least=d.least_share,
    )


def _port_arrays(links: Links, form: Form) -> Ports:
    count = links.count
    node = switch_at_end(links)
    # A link pauses and resumes at most once per slot of that message's propagation time.
    signals = count * (form.back + 2)
    return Ports(
        first=np.full(count, -1, dtype=np.int32),
        last=np.full(count, -1, dtype=np.int32),
        waiting=np.zeros(count, dtype=np.int32),
        wire=np.zeros((form.wire, count), dtype=np.int32),
        node=node,
        held=np.zeros(count, dtype=np.int32),
        used=np.zeros(links.fabric.switches + 1, dtype=np.int32),
        asked=np.zeros(count, dtype=np.uint8),
        paused=np.zeros(count, dtype=np.uint8),
        share=np.ones(count),
        loss=np.zeros(count),
        signal_slot=np.zeros(signals, dtype=np.int32),
        signal_link=np.zeros(signals, dtype=np.int32),
    )


def switch_at_end(links: Links) -> Ints32:
    """Return the number of the switch at the end of each link; -1 for a host."""
    f = links.fabric
    node = np.full(links.count, -1, dtype=np.int32)
    for plane in range(f.planes):
        base, at = plane * f.switches_per_plane, np.array(plane)
        hosts = np.arange(f.hosts)
        node[links.nic_up(at, hosts)] = base + links.host_t0(hosts)
        if f.tiers > 1:
            t0, port = (grid.ravel() for grid in np.meshgrid(np.arange(f.t0), np.arange(f.t0_up), indexing="ij"))
            node[links.t0_up(at, t0, port)] = base + f.t0 + links.t1_of(t0, port)
            node[links.t0_down(at, t0, port)] = base + t0
        if f.tiers > 2:
            t1, port = (grid.ravel() for grid in np.meshgrid(np.arange(f.t1), np.arange(links.t1_up), indexing="ij"))
            node[links.t1_up_link(at, t1, port)] = base + f.t0 + f.t1 + links.t2_of(t1, port)
            node[links.t1_down_link(at, t1, port)] = base + f.t0 + t1
    return node


def _packet_arrays(room: int) -> Packets:
    following = np.arange(1, room + 1, dtype=np.int32)
    following[-1] = -1
    return Packets(
        pair=np.zeros(room, dtype=np.int32),
        number=np.zeros(room, dtype=np.int32),
        hop=np.zeros(room, dtype=np.uint8),
        marked=np.zeros(room, dtype=np.uint8),
        came=np.zeros(room, dtype=np.int32),
        next=following,
    )


def _pair_arrays(plan: RoceSketch, flows: Flows, roce: Roce, seed: int) -> Pairs:
    number, f = len(plan.packets), plan.links.fabric
    owner = np.repeat(np.arange(len(flows), dtype=np.int32), roce.qps)
    routes, hops = roce_routes(plan.links, flows, roce, seed, None)
    count, rate = np.zeros((number, COUNTS), dtype=np.int32), np.zeros((number, RATES))
    count[:, TOTAL] = plan.packets
    rate[:, RATE] = rate[:, TARGET] = rate[:, ALPHA] = 1.0
    rate[:, ALPHA_AT] = rate[:, TIMER_AT] = math.inf
    rate[:, CNP_AT] = -math.inf
    first = routes[:, 0].astype(np.int64)
    port = first // plan.links.per_plane * f.hosts + first % plan.links.per_plane
    order = np.argsort(port, kind="stable")
    return Pairs(
        owner=owner,
        route=routes,
        hops=hops,
        counts=count,
        rate=rate,
        mine=order.astype(np.int32),
        begin=np.searchsorted(port[order], np.arange(f.hosts * f.planes + 1)).astype(np.int32),
        turn=np.zeros(f.hosts * f.planes, dtype=np.int32),
        left=np.full(len(flows), roce.qps, dtype=np.int32),
        done=np.full(len(flows), -1, dtype=np.int32),
        arrived=np.zeros(len(flows), dtype=np.int64),
        touched=np.zeros(len(flows), dtype=np.uint8),
    )


def roce_routes(
    links: Links, flows: Flows, roce: Roce, seed: int, left: Floats | None
) -> tuple[Ints32, np.ndarray[tuple[int], np.dtype[np.uint8]]]:
    """Return the links of every queue pair's path, and their number.

    `left` is the remaining share of each link as routing knows it; None means that all links work.
    """
    # Queue pairs of a connection take planes in turn, and ports by hash.
    routing = Routing(spread="qp", paths=roce.qps, planes="equal", seed=seed, recovery="conventional")
    hops = route_flows(links, flows, routing, left).links
    is_link = hops >= 0
    order = np.argsort(~is_link, axis=1, kind="stable")  # short paths to the front
    routes = np.full((len(hops), MOST_LINKS_OF_PATH), -1, dtype=np.int32)
    routes[:, : hops.shape[1]] = np.take_along_axis(hops, order, axis=1)
    return routes, is_link.sum(axis=1).astype(np.uint8)
