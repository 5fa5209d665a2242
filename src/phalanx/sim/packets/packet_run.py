"""Run connections over a fabric with the packet engine: set-up, the clock around the compiled loop, and the result."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from phalanx.errors import Problem, SystemFailure, mistake
from phalanx.network.fabric.fabric_types import Fabric
from phalanx.sim.fabric_links import Ints
from phalanx.sim.packets.engine_state import (
    ACTIVE,
    ARRIVED,
    BAD_PATHS,
    DELIVERED,
    DENIED,
    LOSSES_SEEN,
    MARKS,
    MOST_SLOTS,
    NOW,
    OVERFLOW,
    SENT,
    TOUCHED,
    TRIMS,
    UNSENT,
)
from phalanx.sim.packets.link_faults import Change, FabricFault, deny_paths, link_changes
from phalanx.sim.packets.result import PacketCourse, PacketResult
from phalanx.sim.packets.roce_run import run_roce
from phalanx.sim.packets.simulation_arrays import (
    PacketBudget,
    PacketWorld,
    build_world,
    check_packet_budget,
    sketch_run,
)
from phalanx.sim.packets.start_times import Schedule, at_once, check_schedule
from phalanx.sim.packets.transport import Roce, Transport, check_transport
from phalanx.sim.traffic_matrix import Flows

SAMPLE_S = 10e-6
BUDGET = PacketBudget()
PROBE_PHASES = 16  # groups of connections that probe one after the other
# Without a limit, simulate so long after the last change, and PATIENCE times the unhindered duration.
REST_S = 0.1
PATIENCE = 20


def run_connections(
    fabric: Fabric,
    traffic: Flows,
    *,
    transport: Transport | Roce,
    faults: tuple[FabricFault, ...] = (),
    denied: tuple[FabricFault, ...] = (),
    seed: int = 0,
    budget: PacketBudget = BUDGET,
    limit_s: float | None = None,
    sample_s: float = SAMPLE_S,
    watch: tuple[int, ...] = (),
    schedule: Schedule | None = None,
    each_plane: bool = False,
) -> PacketResult:
    """Simulate until every connection has finished, or `limit_s` of simulated time is over.

    Without a limit that is 0.1 s after the last fault or start, plus 20 times the unhindered duration of the traffic.
    The throughput of the connections in `watch` is recorded over time. No path over `denied` parts is used, and
    routing knows them from the start. `each_plane` simulates all planes, alike or not, as runs with faults do: use it
    for runs that are compared with such a run. Interrupted (Ctrl-C), it returns the finished part.
    """
    if isinstance(transport, Roce):
        if schedule is not None:
            raise mistake("schedule", f"{transport.name} starts everything at once", fix="use MRC or ECMP with starts")
        return run_roce(
            fabric,
            traffic,
            transport,
            faults=faults,
            denied=denied,
            seed=seed,
            budget=budget,
            limit=lambda todo, slot_s, ideal: _slot_limit(limit_s, todo, slot_s, 0.0, ideal=ideal),
            sample_s=sample_s,
            watch=_watched_flows(watch, len(traffic)),
        )
    check_transport(transport)
    starts = schedule or at_once(len(traffic))
    check_schedule(starts, len(traffic))
    # Sorted by source, the connections lie in memory in the order in which the loop visits hosts.
    order = np.argsort(traffic.source, kind="stable")
    sorted_flows = Flows(source=traffic.source[order], target=traffic.target[order], nbytes=traffic.nbytes[order])
    starts = starts.ordered(order)
    last_start_s = float(starts.start_s.max())
    plan = sketch_run(
        fabric, sorted_flows, transport, alike=not (faults or denied or each_plane), last_start_s=last_start_s
    )
    check_packet_budget(fabric.name, plan.cost, budget)
    world = build_world(plan, sorted_flows, transport, starts, seed=seed)
    converge_s = transport.converge_s if transport.recovery == "routing" else None
    if denied and converge_s is None:
        deny_paths(world, denied)
    todo = link_changes(world.links, faults, slot_s=world.slots.slot_s, converge_s=converge_s, denied=denied)
    watched = tuple(int(np.flatnonzero(order == flow)[0]) for flow in _watched_flows(watch, len(traffic)))
    clock = _Clock(
        world=world,
        todo=todo,
        starts=_timed_starts(starts, world.slots.slot_s),
        watch=watched,
        course=PacketCourse(watched=len(watched)),
        sample=max(1, round(sample_s / world.slots.slot_s)),
    )
    started = time.process_time()
    limit = _slot_limit(limit_s, todo, world.slots.slot_s, last_start_s, ideal=plan.cost.slots)
    stopped = clock.run(limit, started + budget.cpu_s)
    return _packet_result(clock, order, traffic, transport, stopped, time.process_time() - started)


def _watched_flows(watch: tuple[int, ...], connections: int) -> tuple[int, ...]:
    for flow in watch:
        if not 0 <= flow < connections:
            raise mistake("watch", f"there is no connection {flow}", fix=f"they are numbered 0 to {connections - 1:,}")
    return watch


def _timed_starts(schedule: Schedule, slot_s: float) -> list[tuple[int, Ints]]:
    """Return the connections that start by the clock, by slot, the latest first."""
    timed = np.flatnonzero(schedule.waits_for < 0)
    slot = 1 + np.round(schedule.start_s[timed] / slot_s).astype(np.int64)
    timed = timed[np.argsort(slot, kind="stable")]
    at, first = np.unique(np.sort(slot), return_index=True)
    return list(zip(at.tolist(), np.split(timed, first[1:]), strict=True))[::-1]


def _slot_limit(limit_s: float | None, todo: list[Change], slot_s: float, last_start_s: float, *, ideal: int) -> int:
    last = 0
    if limit_s is None:
        last = max(todo[-1].slot if todo else 0, round(last_start_s / slot_s)) + PATIENCE * ideal
    return min(last + round((REST_S if limit_s is None else limit_s) / slot_s) + 2, MOST_SLOTS)


@dataclass(kw_only=True, slots=True)
class _Clock:
    """The clock around the loop: advances it from one change, start, sample or probe to the next."""

    world: PacketWorld
    todo: list[Change]
    starts: list[tuple[int, Ints]]  # the next one last
    watch: tuple[int, ...]
    sample: int
    course: PacketCourse
    slot: int = 1  # a packet word of 0 is no packet, so the first slot is 1
    routed: int = 0
    probes: int = 0

    def run(self, limit: int, deadline: float) -> str:
        from phalanx.sim.packets import kernel

        w = self.world
        probe = max(1, w.knobs.probe_slots // PROBE_PHASES)
        next_sample, next_probe = self.slot + self.sample, self.slot + probe
        try:
            while w.totals[ACTIVE] > 0 and self.slot < limit:
                self._apply_changes()
                ahead = min(self.todo[0].slot if self.todo else limit, self.starts[-1][0] if self.starts else limit)
                end = min(next_sample, next_probe, ahead, limit)
                self.slot = kernel.advance(
                    w.shape, w.knobs, w.net, w.traffic, w.calendar, w.totals, self.slot, end, self.routed
                )
                if self.slot >= next_sample or w.totals[ACTIVE] == 0:
                    self._keep_course()
                    next_sample = self.slot + self.sample
                if self.slot >= next_probe:
                    kernel.probe(w.shape, w.knobs, w.net, w.traffic, w.totals, self.probes % PROBE_PHASES, PROBE_PHASES)
                    self.probes += 1
                    next_probe = self.slot + probe
                if time.process_time() > deadline:
                    return "CPU budget"
        # Raised when the compiled loop returns, before self.slot is set.
        except KeyboardInterrupt:
            self.slot = max(self.slot, int(w.totals[NOW]))
            self._keep_course()
            return "interrupted"
        if w.totals[OVERFLOW]:
            problem = f"{int(w.totals[OVERFLOW]):,} events did not fit the calendar"
            raise SystemFailure(
                Problem(where="packet engine", what=problem, why="a fault of Phalanx: please report it")
            )
        return "" if w.totals[ACTIVE] == 0 else "time limit"

    def _apply_changes(self) -> None:
        net, traffic = self.world.net, self.world.traffic
        while self.starts and self.starts[-1][0] <= self.slot:
            flows = self.starts.pop()[1]
            traffic.tally[flows, UNSENT] = traffic.packets[flows]
            traffic.began[flows] = self.slot
        while self.todo and self.todo[0].slot <= self.slot:
            change = self.todo.pop(0)
            if change.routed is not None:
                net.avoided[change.links] = change.routed
                self.routed = int(net.avoided.any())
                continue
            net.share[change.links] = change.share
            net.room[change.links] = change.room
            net.loss[change.links] = change.loss
            net.trouble[change.links] &= 2
            net.trouble[change.links] |= int(change.share < 1 or change.loss > 0)

    def _keep_course(self) -> None:
        tally = self.world.traffic.tally
        self.course.keep(self.slot, int(self.world.totals[DELIVERED]), tally[list(self.watch), ARRIVED])


def _packet_result(
    clock: _Clock, order: Ints, flows: Flows, transport: Transport, stopped: str, cpu_s: float
) -> PacketResult:
    """Return the result in the order of the given connections, for all planes."""
    w, slot_s = clock.world, clock.world.slots.slot_s
    time_s, total_gbps, watched_gbps = clock.course.gbps(slot_s, 8e-9 * transport.payload_bytes * w.copies)
    done_slots, start_slots = np.empty(len(order)), np.empty(len(order))
    done_slots[order], start_slots[order] = w.traffic.done, w.traffic.began
    touched = w.traffic.tally[:, TOUCHED]
    return PacketResult(
        transport=transport.name,
        fct_s=np.where(done_slots < 0, np.nan, (done_slots - start_slots) * slot_s),
        start_s=np.where(start_slots < 0, np.nan, (start_slots - 1) * slot_s),
        nbytes=float(flows.nbytes.sum()),
        packets=int(w.traffic.packets.sum(dtype=np.int64)) * w.copies,
        sent=int(w.totals[SENT]) * w.copies,
        sent_by_plane=tuple(w.net.sent.tolist()) * w.copies,
        delivered=int(w.totals[DELIVERED]) * w.copies,
        lost=int(w.totals[LOSSES_SEEN]) * w.copies,
        trimmed=int(w.totals[TRIMS]) * w.copies,
        marked=int(w.totals[MARKS]) * w.copies,
        touched=int((touched > 0).sum()),
        touched_by_loss=int((touched & 1).sum()),
        retired_paths=int(w.totals[BAD_PATHS]) * w.copies,
        denied_paths=int((w.traffic.path == DENIED).sum()),
        time_s=time_s,
        throughput_gbps=total_gbps,
        watched_gbps=watched_gbps,
        planes_simulated=w.fabric.planes,
        simulated_s=(clock.slot - 1) * slot_s,
        cpu_s=cpu_s,
        stopped=stopped,
    )
