"""Simulate a cluster and its queue over time: jobs come, start, end and are interrupted; nodes fail and are drained.

The simulation is a heap of events. After all events of one moment the scheduler considers the waiting jobs
(queue_scheduler.py), and jobs get nodes or return them (simulated_cluster.py).
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence

from phalanx.errors import mistake
from phalanx.sim.queue.job_state import IDLE_REASONS, Period, QueueOutcome
from phalanx.sim.queue.node_pool import NodePool
from phalanx.sim.queue.queue_job import QueueJob
from phalanx.sim.queue.queue_policy import QueuePolicy
from phalanx.sim.queue.queue_scheduler import QueueScheduler
from phalanx.sim.queue.simulated_cluster import (
    BACKFILL,
    DRAIN,
    END,
    EVICT,
    FAIL,
    REPAIR,
    UNDRAIN,
    JournalEntry,
    SimulatedCluster,
)
from phalanx.sim.queue.victims import TeamQuota
from phalanx.units import DAY_S, HOUR_S

# After the last submission: a job that has not ended by then never will (too many failures).
TAIL_S = 365 * DAY_S
MOST_FAILURES = 5_000_000


def simulate_jobs(
    jobs: Sequence[QueueJob],
    *,
    nodes: int,
    policy: QueuePolicy,
    failures_per_node_day: float = 0.0,
    seed: int = 0,
    journal: list[JournalEntry] | None = None,
) -> QueueOutcome:
    """Simulate jobs, in order of submission, on equal nodes. The same seed gives the same outcome.

    `journal` receives an entry whenever a job gets nodes or returns them.
    """
    span_days = (jobs[-1].submit_s if jobs else 0.0) / DAY_S
    if nodes * failures_per_node_day * span_days > MOST_FAILURES:
        problem = f"{nodes:,} nodes would fail {nodes * failures_per_node_day * span_days:,.0f} times"
        raise mistake(
            "failures_per_node_day", problem, fix=f"use fewer: {MOST_FAILURES:,} failures are simulated at most"
        )
    chance = random.Random(seed)
    return _Simulation(tuple(jobs), nodes, policy, failures_per_node_day / DAY_S, chance, journal).run()


class _Simulation:
    """A simulation: its cluster, scheduler, and the sums of node-time."""

    def __init__(
        self,
        jobs: tuple[QueueJob, ...],
        nodes: int,
        policy: QueuePolicy,
        rate: float,
        chance: random.Random,
        journal: list[JournalEntry] | None,
    ) -> None:
        self.policy = policy
        pool = NodePool(
            nodes=nodes,
            nodes_per_rack=policy.nodes_per_rack,
            racks_per_block=policy.racks_per_block,
            packing=policy.packing,
        )
        quota = TeamQuota(policy.team)
        possible: list[QueueJob] = []
        never: list[QueueJob] = []
        for job in jobs:
            fits = pool.could_ever_hold(job.nodes, pool.domain_of(job.nodes, job.domain))
            (possible if fits and quota.could_ever_allow(job) else never).append(job)
        self.never_fit = tuple(never)
        self.cluster = SimulatedCluster(tuple(possible), pool, policy, rate, chance, journal)
        self.scheduler = QueueScheduler(self.cluster, quota)
        self.busy_s = self.away_s = 0.0
        self.idle_s = dict.fromkeys(IDLE_REASONS, 0.0)
        self.events = 0

    def run(self) -> QueueOutcome:
        """Run from the first submission to the last end."""
        count, submitted = len(self.cluster.states), 0
        if self.cluster.rate and count:
            self.cluster.plan_failure()
        for index, drain in enumerate(self.policy.drain):
            heapq.heappush(self.cluster.heap, (drain.start_h * HOUR_S, DRAIN, index, 0))
        last = self.cluster.states[-1].job.submit_s if count else 0.0
        while_submitting: Period | None = None
        while submitted < count or self.cluster.running or len(self.cluster.line):
            next_submit_s = self.cluster.states[submitted].job.submit_s if submitted < count else None
            if next_submit_s is None and (not self.cluster.heap or self.cluster.now > last + TAIL_S):
                # No further event is possible, or none that matters.
                break
            time = (
                min(next_submit_s, self.cluster.heap[0][0])
                if next_submit_s is not None and self.cluster.heap
                else next_submit_s
            )
            self._advance(self.cluster.heap[0][0] if time is None else time)
            while self.cluster.heap and self.cluster.heap[0][0] <= self.cluster.now:
                self._handle(*heapq.heappop(self.cluster.heap)[1:])
            fresh: list[int] = []
            while submitted < count and self.cluster.states[submitted].job.submit_s <= self.cluster.now:
                self.cluster.line.add(submitted)
                fresh.append(submitted)
                submitted += 1
            if submitted == count and while_submitting is None:
                while_submitting = self._period()
            self.scheduler.schedule_jobs(fresh)
        return QueueOutcome(
            nodes=self.cluster.pool.nodes,
            states=self.cluster.states,
            never_fit=self.never_fit,
            while_submitting=while_submitting or self._period(),
            whole=self._period(),
            node_failures=self.cluster.failures,
            events=self.events,
            passes=self.scheduler.passes,
        )

    def _advance(self, time: float) -> None:
        passed, pool = time - self.cluster.now, self.cluster.pool
        busy = pool.in_service - pool.free
        self.busy_s += busy * passed
        self.away_s += (pool.nodes - pool.in_service) * passed
        self.idle_s[self.scheduler.reason] += pool.free * passed
        self.cluster.now = time
        if self.policy.fair_share:
            self.cluster.use.advance(time)

    def _period(self) -> Period:
        return Period(
            seconds=self.cluster.now, busy_node_s=self.busy_s, away_node_s=self.away_s, idle_node_s=dict(self.idle_s)
        )

    def _handle(self, kind: int, number: int, start_id: int) -> None:
        """Process one event; events of an earlier start of a job are ignored."""
        self.events += 1
        if kind in (END, EVICT):
            state = self.cluster.states[number]
            if state.start_id != start_id or not state.nodes:
                return  # an event of an earlier start
            self.cluster.end_job(number) if kind == END else self.cluster.interrupt_job(
                number, saved=self.policy.save_on_signal
            )
        elif kind == REPAIR:
            self.cluster.pool.return_to_service(number)
        elif kind == FAIL:
            self.cluster.fail_node(number)
        elif kind in (DRAIN, UNDRAIN):
            self.cluster.drain_nodes(number, begins=kind == DRAIN)
        elif kind == BACKFILL:
            self.scheduler.backfill_planned = False
        self.scheduler.stale = True
