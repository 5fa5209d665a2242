"""The scheduler of the simulated cluster: who starts now, who is promised nodes, who gives way.

After all events of one moment it makes a pass over the waiting jobs, as Slurm does: in order, starting what fits; the
first job that does not fit (EASY), or each of the first ones (conservative), is promised nodes at the earliest time
that the limits of running jobs allow, and whatever comes after it starts only if that delays nobody who was promised
something. Promises are made anew in every pass, so they move forward when jobs end early.
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
    """Passes over the waiting jobs, and what the last pass left behind."""

    def __init__(self, cluster: SimulatedCluster, quota: TeamQuota) -> None:
        self.cluster, self.policy, self.quota = cluster, cluster.policy, quota
        self.lowest_priority = min((state.job.priority for state in cluster.states), default=0)
        # What the last pass left behind; None when nodes came or went since.
        self.profile: FreeProfile | None = None
        self.reservations: list[Reservation] = []
        self.needs = [state.job.nodes for state in cluster.states]
        self.domains = [cluster.pool.domain_of(state.job.nodes, state.job.domain) for state in cluster.states]
        # Of this pass. As it goes on, less is free and more is promised and used: what was refused once is refused to
        # whoever asks for as many nodes and as long, or longer.
        self.kept_from: dict[int, float] = {}  # nodes -> the shortest time that was refused
        self.over_quota: dict[str, int] = {}  # team -> the fewest nodes that were refused
        # Since the last job that started or gave way: (team, priority) -> the fewest nodes anywhere that nobody's
        # end would free. A start may make its team a borrower, whose older jobs can then be ended.
        self.no_victims: dict[tuple[str, int], int] = {}
        self.most_promises = 1 if self.policy.backfill == "easy" else self.policy.promises
        self.blocked_teams: set[str] = set()
        self.stale = True
        self.next_backfill, self.backfill_planned = 0.0, False
        self.reason = NO_JOB  # why free nodes stand idle
        self.passes = 0

    def schedule_jobs(self, fresh: list[int]) -> None:
        """Passes until nobody more is preempted."""
        every = self.policy.backfill_every_s
        backfill = self.policy.backfill != "none"
        if every and backfill and self.cluster.now < self.next_backfill:
            backfill = False
            if not self.backfill_planned:
                heapq.heappush(self.cluster.heap, (self.next_backfill, BACKFILL, 0, 0))
                self.backfill_planned = True
        elif every and backfill:
            self.next_backfill = self.cluster.now + every
        while self._pass(fresh, backfill):
            fresh = []

    def _pass(self, fresh: list[int], backfill: bool) -> bool:
        """Starts what may start now; True when somebody was preempted at once and all must be looked at again."""
        line, pool = self.cluster.line, self.cluster.pool
        self.reason = NO_JOB if not len(line) else TOO_FEW
        ends_others = self.policy.preemption or (self.policy.reclaim and bool(self.quota.teams))
        if not len(line) or (pool.free < line.smallest_need and not ends_others):
            self.stale = True  # nobody was looked at
            return False
        self.passes += 1
        # When only submissions happened since the last pass, whoever waited then still has to: look at the new ones.
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
        # Nodes are kept for those whom others gave way to: whoever is before them in the line may wait for just these.
        for number in [one for one, (victims, _) in self.cluster.awaiting.items() if not victims]:
            self._try_start(number, started)
        order: Iterable[int] = fresh if only_new else line.in_order(self.cluster.use.shares)
        smallest, needs = line.smallest_need, self.needs  # the line does not change during a pass
        for number in islice(order, self.policy.depth):
            need = needs[number]
            if not ends_others and pool.free < smallest:
                self.stale = True  # those behind were not looked at
                break
            # Nobody is ended for a job, or promised it nodes, while others before it wait for theirs.
            waits = need > pool.free and len(self.reservations) >= self.most_promises and not self.quota.teams
            if waits and number not in self.cluster.awaiting:
                continue
            if ends_others and number in started:
                continue
            why = self._try_start(number, started)
            if why is None:
                continue
            reasons.append((need, why))
            if ends_others and why != QUOTA and self._preempt_for(number, started):
                preempted = True  # and those who gave way are in the line again
                break
            if why == QUOTA or (backfill and len(self.reservations) >= self.most_promises):
                continue
            if not self._reserve(number, backfill):
                break
        for number in started:
            line.remove(number)
        if not len(line):
            self.reason = NO_JOB
        else:
            self.reason = next((why for need, why in reasons if need <= pool.free), TOO_FEW)
            if self.policy.backfill == "none" and self.reason == TOO_FEW and line.smallest_need <= pool.free:
                self.reason = KEPT
        self.stale = self.stale or preempted
        return preempted

    def _try_start(self, number: int, started: list[int]) -> str | None:
        """Starts a job; returns why not where it may not start."""
        state, pool = self.cluster.states[number], self.cluster.pool
        job = state.job
        team = job.team if self.quota.teams else ""
        if team and (
            job.nodes >= self.over_quota.get(team, inf) or not self.quota.allows(job, self.cluster.use.running)
        ):
            self.over_quota[team] = min(job.nodes, self.over_quota.get(team, job.nodes))
            return QUOTA
        # Others gave way to it: it takes their nodes, whoever else was promised some.
        pledged = number in self.cluster.awaiting and not self.cluster.awaiting[number][0]
        if team in self.blocked_teams and not pledged:
            return KEPT
        domain = self.domains[number]
        lasts = self.cluster.expected_s(state)
        barred: set[int] = set()
        if self.reservations and self.profile is not None and not pledged:
            if job.nodes > pool.free:
                return TOO_FEW
            if lasts >= self.kept_from.get(job.nodes, inf):
                return KEPT
            if not self.profile.fits_now(self.cluster.now, job.nodes, lasts):
                self.kept_from[job.nodes] = lasts
                return KEPT
            barred = {rack for one in self.reservations if self.cluster.now + lasts > one.time for rack in one.racks}
        if self.cluster.awaiting:
            kept_free = sum(free for other, (_, free) in self.cluster.awaiting.items() if other != number)
            if kept_free and job.nodes > pool.free - kept_free:
                return KEPT
        nodes = pool.take(job.nodes, domain, barred)
        if nodes is None:
            if pledged:
                del self.cluster.awaiting[number]  # what it was to get failed meanwhile
                self.no_victims = {}
            return TOPOLOGY if job.nodes <= pool.free else TOO_FEW
        if self.profile is not None:
            self.profile.promise(self.cluster.now, lasts, job.nodes)
        self._start(number, nodes, started)
        return None

    def _start(self, number: int, nodes: list[int], started: list[int]) -> None:
        self.cluster.start_job(number, nodes)
        started.append(number)
        self.no_victims = {}

    def _reserve(self, number: int, backfill: bool) -> bool:
        """Promises nodes to a job that must wait; False when nobody after it may be looked at."""
        if self.policy.backfill == "none" or not backfill:
            if not self.quota.teams:
                return False
            self.blocked_teams.add(self.cluster.states[number].job.team)  # the others have their own line
            return True
        state = self.cluster.states[number]
        if self.profile is None:
            running = self.cluster.running
            ends = ((time, len(running[one].nodes) - running[one].away_nodes) for time, one in self.cluster.ends)
            self.profile = FreeProfile(self.cluster.now, self.cluster.pool.free, ends)
        domain = self.domains[number]
        time, racks = (0.0, frozenset[int]()) if domain == "any" else self._free_domain(state.job.nodes, domain)
        lasts = self.cluster.expected_s(state)
        found = self.profile.earliest(state.job.nodes, lasts, not_before=max(self.cluster.now, time))
        if found is not None:
            self.profile.promise(found, lasts, state.job.nodes)
            self.reservations.append(Reservation(found, racks))
        return True  # where nodes are missing for good, nothing can be promised and nobody is held up

    def _free_domain(self, need: int, domain: Domain) -> tuple[float, frozenset[int]]:
        """The rack or block that has enough nodes first, by the limits of what runs, and is not promised yet."""
        pool = self.cluster.pool
        domains, size = pool.domains(domain), 1 if domain == "rack" else pool.per_block
        free = pool.domain_free(domain)
        taken = {rack // size for one in self.reservations for rack in one.racks}
        for index, count in enumerate(free):
            if count >= need and index not in taken:
                return self.cluster.now, frozenset(domains[index])
        for time, number in self.cluster.ends:
            for rack, count in self.cluster.running[number].rack_counts.items():
                index = rack // size
                free[index] += count
                if free[index] >= need and index not in taken:
                    return time, frozenset(domains[index])
        return self.cluster.now, frozenset()

    def _settled_nodes(self) -> Mapping[str, int]:
        """Nodes of each team when all who have to give way are gone and those they give way to have started.

        By what runs now, a team would be made to give its own nodes up after what it borrowed, and jobs of two teams
        could end each other for ever.
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
        """Ends others for a waiting job; True when it started at once in their place."""
        state = self.cluster.states[number]
        if number in self.cluster.awaiting and self.cluster.awaiting[number][0]:
            return False  # its victims are still ending
        if not self.quota.teams and (self.reservations or state.job.priority <= self.lowest_priority):
            return False  # somebody before it waits for nodes too, or nobody has a lower priority
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
            if domain == "any" and state.job.nodes > free:  # where enough is free, nobody's end would help
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
