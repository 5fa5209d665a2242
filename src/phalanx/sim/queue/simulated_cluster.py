"""The simulated cluster: jobs get nodes and return them; nodes fail, are repaired and drained."""

from __future__ import annotations

import heapq
import random
from bisect import bisect_left, insort

from phalanx.sim.queue.job_state import JobState
from phalanx.sim.queue.node_pool import NodePool
from phalanx.sim.queue.queue_job import QueueJob
from phalanx.sim.queue.queue_policy import QueuePolicy
from phalanx.sim.queue.waiting_line import TeamUse, WaitingLine
from phalanx.units import HOUR_S

# Order of events of the same moment: nodes return before they are requested.
END, EVICT, REPAIR, UNDRAIN, FAIL, DRAIN, BACKFILL = range(7)

# Time; True if the job begins, False if it ends; its number; its nodes.
JournalEntry = tuple[float, bool, int, tuple[int, ...]]


class SimulatedCluster:
    """Jobs by number, their nodes, the waiting line, and the events to come."""

    def __init__(
        self,
        jobs: tuple[QueueJob, ...],
        pool: NodePool,
        policy: QueuePolicy,
        rate: float,
        chance: random.Random,
        journal: list[JournalEntry] | None,
    ) -> None:
        self.pool, self.policy, self.rate, self.chance, self.journal = pool, policy, rate, chance, journal
        self.states = tuple(JobState(job=job, left_s=job.run_s) for job in jobs)
        self.line = WaitingLine(jobs, fair_share=policy.fair_share)
        self.use = TeamUse({team.name: team.weight for team in policy.team}, policy.half_life_h)
        self.running: dict[int, JobState] = {}
        self.ends: list[tuple[float, int]] = []  # (limit_end_s, number) of running jobs, sorted
        self.owner = [-1] * pool.nodes
        self.heap: list[tuple[float, int, int, int]] = []  # time, kind, number or node, start_id
        self.now = 0.0
        self.admitted_until = 0.0  # the scheduler is busy with admissions until then
        # Job -> its victims that still run, and the free nodes it counts on.
        self.awaiting: dict[int, tuple[set[int], int]] = {}
        self.failures = 0

    # ---- jobs --------------------------------------------------------------------------------------------------------

    def start_job(self, number: int, nodes: list[int]) -> None:
        """Give a job its nodes, and schedule its end."""
        state, policy = self.states[number], self.policy
        self.admitted_until = max(self.now, self.admitted_until) + policy.admission_s
        delay = self.admitted_until - self.now
        if policy.started_nodes_per_s:
            delay += len(nodes) / policy.started_nodes_per_s
        if state.starts:
            delay += policy.restart_s
        if state.first_start_s < 0:
            state.first_start_s = self.admitted_until
        state.starts += 1
        state.start_id += 1
        state.nodes, state.start_s, state.work_from_s = nodes, self.now, self.now + delay
        state.rack_counts = self.pool.rack_counts(nodes)
        state.racks = state.racks or len(state.rack_counts)
        state.done_at_s = state.work_from_s + state.left_s
        state.limit_end_s = state.work_from_s + state.job.limit_s
        state.evict_at_s, state.away_nodes = -1.0, 0
        for node in nodes:
            self.owner[node] = number
        self._note(number, begins=True)
        self.running[number] = state
        insort(self.ends, (state.limit_end_s, number))
        self.use.change(state.job.team, len(nodes))
        self.awaiting.pop(number, None)
        heapq.heappush(self.heap, (state.done_at_s, END, number, state.start_id))

    def expected_s(self, state: JobState) -> float:
        """Return the seconds from now until the job's limit."""
        if not self.policy.admission_s and not self.policy.started_nodes_per_s:
            return state.job.limit_s + (self.policy.restart_s if state.starts else 0.0)
        ahead = max(self.now, self.admitted_until) + self.policy.admission_s - self.now
        if self.policy.started_nodes_per_s:
            ahead += state.job.nodes / self.policy.started_nodes_per_s
        return ahead + state.job.limit_s + (self.policy.restart_s if state.starts else 0.0)

    def end_job(self, number: int) -> None:
        """End a job that has done its work, and return its nodes."""
        state = self.states[number]
        state.left_s, state.end_s = 0.0, self.now
        state.overhead_s += state.work_from_s - state.start_s
        self._release(number)

    def preempt_job(self, number: int) -> None:
        """End a job for another one: at once, or after its grace time to save."""
        state, grace = self.states[number], self.policy.grace_s
        state.preemptions += 1
        if not grace:
            self.interrupt_job(number, saved=False)
            return
        state.evict_at_s = self.now + grace
        del self.ends[bisect_left(self.ends, (state.limit_end_s, number))]
        state.limit_end_s = min(state.limit_end_s, state.evict_at_s)
        insort(self.ends, (state.limit_end_s, number))
        if state.evict_at_s < state.done_at_s:
            heapq.heappush(self.heap, (state.evict_at_s, EVICT, number, state.start_id))

    def interrupt_job(self, number: int, *, saved: bool) -> None:
        """End a job early; it waits again, with the work of its last checkpoint."""
        state = self.states[number]
        signalled = state.evict_at_s - self.policy.grace_s if state.evict_at_s >= 0 else self.now
        work_s = self._lose_work(state, at=signalled, saved=saved)
        state.overhead_s += self.now - state.start_s - work_s
        self._release(number)
        self.line.add(number)

    def _lose_work(self, state: JobState, *, at: float, saved: bool) -> float:
        """Split the work of this start into saved and lost at an interruption; returns its seconds."""
        work_s = max(0.0, at - state.work_from_s)
        interval_s = self.policy.checkpoint_s
        saved_s = work_s if saved else work_s // interval_s * interval_s if interval_s else 0.0
        state.left_s -= saved_s
        state.lost_s += work_s - saved_s
        return work_s

    def _release(self, number: int) -> None:
        """Return a job's nodes to the pool and update the jobs that wait for them."""
        state = self.running.pop(number)
        del self.ends[bisect_left(self.ends, (state.limit_end_s, number))]
        self._note(number, begins=False)
        for node in state.nodes:
            self.owner[node] = -1
        self.pool.give_back(state.nodes)
        self.use.change(state.job.team, -len(state.nodes))
        for waiting, (victims, pledged) in self.awaiting.items():
            if number in victims:
                need = self.states[waiting].job.nodes
                self.awaiting[waiting] = (victims - {number}, min(need, pledged + len(state.nodes)))
        state.nodes, state.rack_counts, state.evict_at_s = [], {}, -1.0

    def _note(self, number: int, *, begins: bool) -> None:
        if self.journal is not None:
            self.journal.append((self.now, begins, number, tuple(self.states[number].nodes)))

    # ---- nodes -------------------------------------------------------------------------------------------------------

    def plan_failure(self) -> None:
        """Schedule the next failure of a node."""
        gap = self.chance.expovariate(self.rate * self.pool.nodes)
        heapq.heappush(self.heap, (self.now + gap, FAIL, self.chance.randrange(self.pool.nodes), 0))

    def fail_node(self, node: int) -> None:
        """Fail a node; its job gets a spare one or waits again."""
        self.plan_failure()
        self.failures += 1
        number = self.owner[node]
        self.pool.withdraw(node)
        heapq.heappush(self.heap, (self.now + self.policy.repair_h * HOUR_S, REPAIR, node, 0))
        if number < 0:
            return
        state = self.states[number]
        state.failures += 1
        spare = self._spare_for(state) if self.policy.on_failure == "replace" and state.evict_at_s < 0 else None
        if spare is None:
            self.interrupt_job(number, saved=False)
            return
        # The other nodes stay with the job; all repeat the work that was not saved.
        work_s = self._lose_work(state, at=self.now, saved=False)
        self._note(number, begins=False)
        state.nodes[state.nodes.index(node)] = spare
        self._note(number, begins=True)
        self.owner[node], self.owner[spare] = -1, number
        self.pool.give_back([node])
        state.rack_counts = self.pool.rack_counts(state.nodes)
        state.overhead_s += self.now - state.start_s - work_s
        state.start_s, state.work_from_s = self.now, self.now + self.policy.restart_s
        state.start_id += 1
        state.done_at_s = state.work_from_s + state.left_s
        del self.ends[bisect_left(self.ends, (state.limit_end_s, number))]
        state.limit_end_s = max(state.limit_end_s, state.done_at_s)
        insort(self.ends, (state.limit_end_s, number))
        heapq.heappush(self.heap, (state.done_at_s, END, number, state.start_id))

    def _spare_for(self, state: JobState) -> int | None:
        """Return a free node to replace a failed one, in the domain that the job must keep."""
        pool = self.pool
        domain = pool.domain_of(state.job.nodes, state.job.domain)
        barred: set[int] = set()
        if domain != "any":
            home = next(racks for racks in pool.domains(domain) if next(iter(state.rack_counts)) in racks)
            barred = {rack for racks in pool.domains("rack") for rack in racks if rack not in home}
        nodes = pool.take(1, "any", barred)
        return nodes[0] if nodes else None

    def drain_nodes(self, index: int, *, begins: bool) -> None:
        """Take nodes out of service once they are free, or return them."""
        drain = self.policy.drain[index]
        for node in range(drain.first_node, min(drain.first_node + drain.nodes, self.pool.nodes)):
            if begins:
                self.pool.withdraw(node)
            else:
                self.pool.return_to_service(node)
            if self.owner[node] >= 0:
                self.states[self.owner[node]].away_nodes += 1 if begins else -1
        if begins:
            heapq.heappush(self.heap, (self.now + drain.hours * HOUR_S, UNDRAIN, index, 0))
