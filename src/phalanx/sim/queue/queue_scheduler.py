"""The scheduler of the simulated cluster: starts, reservations and preemptions.

After all events of one moment it makes a pass over the waiting jobs, as Slurm does: in order, starting what fits. The
first job that does not fit (EASY), or each of the first ones (conservative), gets a reservation at the earliest time
that the limits of running jobs allow; later jobs start only if they delay no reservation. Reservations are made anew
in every pass, so they move forward when jobs end early.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from itertools import islice
from math import inf

from phalanx.sim.queue.job_state import KEPT, NO_JOB, QUOTA, TOO_FEW, TOPOLOGY
from phalanx.sim.queue.queue_job import Domain
from phalanx.sim.queue.reservations import FreeProfile, Reservation
from phalanx.sim.queue.simulated_cluster import BACKFILL, SimulatedCluster
from phalanx.sim.queue.victims import TeamQuota, choose_victims


class QueueScheduler:
    """The passes over the waiting jobs, and the state kept between passes."""

    def __init__(self, cluster: SimulatedCluster, quota: TeamQuota) -> None:
        self.cluster, self.policy, self.quota = cluster, cluster.policy, quota
        self.lowest_priority = min((state.job.priority for state in cluster.states), default=0)
        # State of the last pass; None when nodes came or went since.
        self.profile: FreeProfile | None = None
        self.reservations: list[Reservation] = []
        self.needs = [state.job.nodes for state in cluster.states]
        self.domains = [cluster.pool.domain_of(state.job.nodes, state.job.domain) for state in cluster.states]
        # Of the current pass. During a pass less becomes free and more is reserved, so a refusal also holds for jobs
        # with as many nodes and as long, or longer.
        self.kept_from: dict[int, float] = {}  # nodes -> the shortest time that was refused
        self.over_quota: dict[str, int] = {}  # team -> the fewest nodes that were refused
        # Since the last start or preemption: (team, priority) -> the fewest nodes, in any domain, for which no
        # victims were found. A start may make its team a borrower, whose older jobs can then be ended.
        self.no_victims: dict[tuple[str, int], int] = {}
        self.most_promises = 1 if self.policy.backfill == "easy" else self.policy.promises
        self.blocked_teams: set[str] = set()
        self.stale = True
        self.next_backfill, self.backfill_planned = 0.0, False
        self.reason = NO_JOB  # reason for idle free nodes
        self.passes = 0

    def schedule_jobs(self, fresh: list[int]) -> None:
        """Make passes until no further job is preempted."""
        interval_s = self.policy.backfill_every_s
        backfill = self.policy.backfill != "none"
        if interval_s and backfill and self.cluster.now < self.next_backfill:
            backfill = False
            if not self.backfill_planned:
                heapq.heappush(self.cluster.heap, (self.next_backfill, BACKFILL, 0, 0))
                self.backfill_planned = True
        elif interval_s and backfill:
            self.next_backfill = self.cluster.now + interval_s
        while self._pass(fresh, backfill):
            fresh = []

    def _pass(self, fresh: list[int], backfill: bool) -> bool:
        """Start the jobs that may start now; True when jobs were preempted at once and another pass is needed."""
        line, pool = self.cluster.line, self.cluster.pool
        self.reason = NO_JOB if not len(line) else TOO_FEW
        ends_others = self.policy.preemption or (self.policy.reclaim and bool(self.quota.teams))
        if not len(line) or (pool.free < line.smallest_need and not ends_others):
            self.stale = True  # no job was considered
            return False
        self.passes += 1
        # When only submissions happened since the last pass, older jobs still have to wait: consider only the new
        # ones.
        only_new = (
            not self.stale
            and self.policy.backfill != "none"
            and not self.policy.fair_share
            and not ends_others
            and all(self.cluster.states[number].job.priority <= self.lowest_priority for number in fresh)
        )
        if not only_new:
            self.profile, self.reservations, self.blocked_teams = None, [], set()
        self.stale = not backfill and self.policy.backfill != "none"
        self.kept_from, self.over_quota, self.no_victims = {}, {}, {}
        reasons: list[tuple[int, str]] = []
        started: list[int] = []
        preempted = False
        # Nodes are kept for jobs whose victims have ended: jobs before them in the line may wait for the same nodes.
        for number in [waiting_number for waiting_number, (victims, _) in self.cluster.awaiting.items() if not victims]:
            self._try_start(number, started)
        order: Iterable[int] = fresh if only_new else line.in_order(self.cluster.use.shares)
        # The line does not change during a pass.
        smallest, needs = line.smallest_need, self.needs
        for number in islice(order, self.policy.depth):
            need = needs[number]
            if not ends_others and pool.free < smallest:
                # The jobs behind were not considered.
                self.stale = True
                break
            # No job gets victims or a reservation while jobs before it wait for theirs.
            waits = need > pool.free and len(self.reservations) >= self.most_promises and not self.quota.teams
            if waits and number not in self.cluster.awaiting:
                continue
            if ends_others and number in started:
                continue
            reason = self._try_start(number, started)
            if reason is None:
                continue
            reasons.append((need, reason))
            if ends_others and reason != QUOTA and self._preempt_for(number, started):
                # The preempted jobs are in the line again.
                preempted = True
                break
            if reason == QUOTA or (backfill and len(self.reservations) >= self.most_promises):
                continue
            if not self._reserve(number, backfill):
                break
        for number in started:
            line.remove(number)
        if not len(line):
            self.reason = NO_JOB
        else:
            self.reason = next((idle_reason for need, idle_reason in reasons if need <= pool.free), TOO_FEW)
            if self.policy.backfill == "none" and self.reason == TOO_FEW and line.smallest_need <= pool.free:
                self.reason = KEPT
        self.stale = self.stale or preempted
        return preempted

    def _try_start(self, number: int, started: list[int]) -> str | None:
        """Start a job; returns None, or the reason why it may not start."""
        state, pool = self.cluster.states[number], self.cluster.pool
        job = state.job
        team = job.team if self.quota.teams else ""
        if team and (
            job.nodes >= self.over_quota.get(team, inf) or not self.quota.allows(job, self.cluster.use.running)
        ):
            self.over_quota[team] = min(job.nodes, self.over_quota.get(team, job.nodes))
            return QUOTA
        # Its victims have ended: it takes their nodes, even if they are reserved for others.
        pledged = number in self.cluster.awaiting and not self.cluster.awaiting[number][0]
        if team in self.blocked_teams and not pledged:
            return KEPT
        domain = self.domains[number]
        duration_s = self.cluster.expected_s(state)
        barred: set[int] = set()
        if self.reservations and self.profile is not None and not pledged:
            if job.nodes > pool.free:
                return TOO_FEW
            if duration_s >= self.kept_from.get(job.nodes, inf):
                return KEPT
            if not self.profile.fits_now(self.cluster.now, job.nodes, duration_s):
                self.kept_from[job.nodes] = duration_s
                return KEPT
            barred = {
                rack
                for reservation in self.reservations
                if self.cluster.now + duration_s > reservation.time
                for rack in reservation.racks
            }
        if self.cluster.awaiting:
            kept_free = sum(
                free for waiting_number, (_, free) in self.cluster.awaiting.items() if waiting_number != number
            )
            if kept_free and job.nodes > pool.free - kept_free:
                return KEPT
        nodes = pool.take(job.nodes, domain, barred)
        if nodes is None:
            if pledged:
                # The nodes it was to get have failed in the meantime.
                del self.cluster.awaiting[number]
                self.no_victims = {}
            return TOPOLOGY if job.nodes <= pool.free else TOO_FEW
        if self.profile is not None:
            self.profile.promise(self.cluster.now, duration_s, job.nodes)
        self._start(number, nodes, started)
        return None

    def _start(self, number: int, nodes: list[int], started: list[int]) -> None:
        self.cluster.start_job(number, nodes)
        started.append(number)
        self.no_victims = {}

    def _reserve(self, number: int, backfill: bool) -> bool:
        """Reserve nodes for a job that must wait; False when no job after it may be considered."""
        if self.policy.backfill == "none" or not backfill:
            if not self.quota.teams:
                return False
            # The other teams have their own lines.
            self.blocked_teams.add(self.cluster.states[number].job.team)
            return True
        state = self.cluster.states[number]
        if self.profile is None:
            running = self.cluster.running
            ends = (
                (time, len(running[running_number].nodes) - running[running_number].away_nodes)
                for time, running_number in self.cluster.ends
            )
            self.profile = FreeProfile(self.cluster.now, self.cluster.pool.free, ends)
        domain = self.domains[number]
        time, racks = (0.0, frozenset[int]()) if domain == "any" else self._free_domain(state.job.nodes, domain)
        duration_s = self.cluster.expected_s(state)
        start_s = self.profile.earliest(state.job.nodes, duration_s, not_before=max(self.cluster.now, time))
        if start_s is not None:
            self.profile.promise(start_s, duration_s, state.job.nodes)
            self.reservations.append(Reservation(start_s, racks))
        # Where nodes are missing permanently, no reservation is possible and no other job is delayed.
        return True

    def _free_domain(self, need: int, domain: Domain) -> tuple[float, frozenset[int]]:
        """Return the time and racks of the unreserved domain that has enough nodes first, by the limits of jobs."""
        pool = self.cluster.pool
        domains, size = pool.domains(domain), 1 if domain == "rack" else pool.per_block
        free = pool.domain_free(domain)
        reserved = {rack // size for reservation in self.reservations for rack in reservation.racks}
        for index, count in enumerate(free):
            if count >= need and index not in reserved:
                return self.cluster.now, frozenset(domains[index])
        for time, number in self.cluster.ends:
            for rack, count in self.cluster.running[number].rack_counts.items():
                index = rack // size
                free[index] += count
                if free[index] >= need and index not in reserved:
                    return time, frozenset(domains[index])
        return self.cluster.now, frozenset()

    def _settled_nodes(self) -> Mapping[str, int]:
        """Return the nodes of each team after all pending preemptions and the starts they are for.

        By the current use, a team could be made to give up its own nodes after those it borrowed, and jobs of two
        teams could end each other forever.
        """
        if not self.quota.teams or not self.cluster.awaiting:
            return self.cluster.use.running
        states, settled = self.cluster.states, dict(self.cluster.use.running)
        for number, (victims, _) in self.cluster.awaiting.items():
            job = states[number].job
            settled[job.team] = settled.get(job.team, 0) + job.nodes
            for victim in victims:
                settled[states[victim].job.team] -= len(states[victim].nodes)
        return settled

    def _preempt_for(self, number: int, started: list[int]) -> bool:
        """Preempt jobs for a waiting job; True when jobs were ended at once and the next pass is needed."""
        state = self.cluster.states[number]
        if number in self.cluster.awaiting and self.cluster.awaiting[number][0]:
            return False  # its victims are still ending
        if not self.quota.teams and (self.reservations or state.job.priority <= self.lowest_priority):
            # A job before it waits for nodes too, or no job has a lower priority.
            return False
        domain = self.domains[number]
        alike = (state.job.team, state.job.priority)
        if domain == "any" and state.job.nodes >= self.no_victims.get(alike, inf):
            return False
        free = self.cluster.pool.free - sum(count for _, count in self.cluster.awaiting.values())
        victims = choose_victims(
            state.job,
            domain,
            self.cluster.running,
            self.cluster.pool,
            free=max(0, free),
            policy=self.policy,
            quota=self.quota,
            team_nodes=self._settled_nodes(),
        )
        if not victims:
            # Where enough is free, no victim would help.
            if domain == "any" and state.job.nodes > free:
                self.no_victims[alike] = state.job.nodes
            return False
        self.no_victims = {}
        for victim in victims:
            self.cluster.preempt_job(victim)
        if self.policy.grace_s:
            self.cluster.awaiting[number] = (set(victims), max(0, min(free, state.job.nodes)))
            return False
        nodes = self.cluster.pool.take(state.job.nodes, domain)
        if nodes is not None:
            self._start(number, nodes, started)
        return True
