"""Run connections of the conventional transport over a fabric packet by packet."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from phalanx.errors import Problem, SystemFailure
from phalanx.network.fabric.types import Fabric
from phalanx.sim.links import Floats
from phalanx.sim.matrices import Flows
from phalanx.sim.packets.budget import Budget, afford
from phalanx.sim.packets.course import Course
from phalanx.sim.packets.faults import Change, Fault, changes
from phalanx.sim.packets.result import PacketResult
from phalanx.sim.packets.roce import Roce, check_roce
from phalanx.sim.packets.roce_build import RoceWorld, roce_build, roce_routes, roce_sketch
from phalanx.sim.packets.roce_state import ACTIVE, DELIVERED, DROPPED, LOST, MARKS, NOW, OVERFLOW, PAUSED, SENT


def run_roce(
    fabric: Fabric,
    traffic: Flows,
    roce: Roce,
    *,
    faults: tuple[Fault, ...],
    denied: tuple[Fault, ...],
    seed: int,
    budget: Budget,
    limit: Callable[
        [list[Change], float, int], int
    ],  # slots; from changes, a slot's length, slots of unhindered traffic
    sample_s: float,
    watch: tuple[int, ...],
) -> PacketResult:
    """Simulate until every connection has finished or the limit is reached."""
    check_roce(roce)
    plan = roce_sketch(fabric, traffic, roce)
    afford(fabric.name, plan.cost, budget)
    world = roce_build(plan, fabric, traffic, roce, seed=seed)
    slot_s = world.slots.slot_s
    todo = changes(world.links, faults, slot_s=slot_s, converge_s=roce.converge_s, denied=denied)
    clock = _Clock(
        world=world,
        roce=roce,
        traffic=traffic,
        seed=seed,
        known=np.ones(world.links.count),
        todo=todo,
        watch=watch,
        course=Course(watched=len(watch)),
        sample=max(1, round(sample_s / slot_s)),
    )
    started = time.process_time()
    stopped = clock.run(limit(todo, slot_s, plan.cost.slots), started + budget.cpu_s)
    return _result(clock, stopped, time.process_time() - started)


@dataclass(kw_only=True, slots=True)
class _Clock:
    """Advances the loop from one thing that happens outside of it to the next."""

    world: RoceWorld
    roce: Roce
    traffic: Flows
    seed: int
    known: Floats  # share of each link that routing knows of
    todo: list[Change]
    watch: tuple[int, ...]
    sample: int
    course: Course
    slot: int = 1

    def run(self, limit: int, deadline: float) -> str:
        from phalanx.sim.packets import roce_kernel as kernel

        w, next_sample = self.world, self.slot + self.sample
        try:
            while w.totals[ACTIVE] > 0 and self.slot < limit:
                self._apply()
                end = min(next_sample, self.todo[0].slot if self.todo else limit, limit)
                self.slot = kernel.advance(
                    w.form, w.rules, w.ports, w.packets, w.pairs, w.calendar, w.totals, self.slot, end
                )
                if self.slot >= next_sample or w.totals[ACTIVE] == 0:
                    self._keep()
                    next_sample = self.slot + self.sample
                if time.process_time() > deadline:
                    return "CPU budget"
        except KeyboardInterrupt:  # as in `run.py`
            self.slot = max(self.slot, int(w.totals[NOW]))
            self._keep()
            return "interrupted"
        if w.totals[OVERFLOW]:
            what = f"{int(w.totals[OVERFLOW]):,} events or packets did not fit"
            raise SystemFailure(Problem(where="packet engine", what=what, why="a fault of Phalanx: please report it"))
        return "" if w.totals[ACTIVE] == 0 else "time limit"

    def _apply(self) -> None:
        w = self.world
        while self.todo and self.todo[0].slot <= self.slot:
            change = self.todo.pop(0)
            if change.routed is None:
                w.ports.share[change.links] = change.share
                w.ports.loss[change.links] = change.loss
                continue
            self.known[change.links] = 1.0 - change.routed
            w.pairs.route[:] = roce_routes(w.links, self.traffic, self.roce, self.seed, self.known)[0]

    def _keep(self) -> None:
        w = self.world
        self.course.keep(self.slot, int(w.totals[DELIVERED]), w.pairs.arrived[list(self.watch)])


def _result(clock: _Clock, stopped: str, cpu_s: float) -> PacketResult:
    w, slot_s, roce = clock.world, clock.world.slots.slot_s, clock.roce
    time_s, total_gbps, watched_gbps = clock.course.gbps(slot_s, 8e-9 * roce.payload_bytes)
    done, lost = w.pairs.done.astype(np.float64), int(w.totals[LOST]) + int(w.totals[DROPPED])
    busy = max(clock.slot - 1, 1) * w.links.count
    return PacketResult(
        transport=roce.name,
        fct_s=np.where(done < 0, np.nan, (done - 1) * slot_s),
        start_s=np.zeros(len(done)),
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
