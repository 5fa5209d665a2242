"""Choice of jobs to preempt: for a job of higher priority, or for a team that takes its own nodes back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from phalanx.sim.queue.job_state import JobState
from phalanx.sim.queue.node_pool import NodePool
from phalanx.sim.queue.queue_job import Domain, QueueJob
from phalanx.sim.queue.queue_policy import QueuePolicy, QueueTeam

# Preemptions of a job at most: priorities within teams and nodes taken back between them can end two jobs in turn,
# again and again, before either has done any work.
MOST_PREEMPTIONS = 100


class TeamQuota:
    """The quotas of teams. Without teams, every job may use every node."""

    def __init__(self, teams: Iterable[QueueTeam]) -> None:
        self.teams = {team.name: team for team in teams}
        self._all = sum(team.nodes for team in self.teams.values())

    def could_ever_allow(self, job: QueueJob) -> bool:
        """Return True if the job fits its team's nodes with all that it may borrow."""
        team = self.teams.get(job.team)
        if team is None:
            return True
        most = self._all if team.most_borrowed is None else min(self._all, team.nodes + team.most_borrowed)
        return job.nodes <= most

    def allows(self, job: QueueJob, running: Mapping[str, int]) -> bool:
        """Return True if the job's team may use its nodes in addition: its own, or unused ones of other teams."""
        team = self.teams.get(job.team)
        if team is None:
            return True
        borrowed = running.get(job.team, 0) + job.nodes - team.nodes
        if borrowed <= 0:
            return True
        within = team.most_borrowed is None or borrowed <= team.most_borrowed
        return within and sum(running.get(name, 0) for name in self.teams) + job.nodes <= self._all

    def borrowed(self, name: str, running: Mapping[str, int]) -> int:
        """Return the nodes beyond its own that a team uses now."""
        team = self.teams.get(name)
        return max(0, running.get(name, 0) - team.nodes) if team else 0

    def owns(self, job: QueueJob, running: Mapping[str, int]) -> bool:
        """Return True if the job stays within its team's own nodes."""
        team = self.teams.get(job.team)
        return team is not None and running.get(job.team, 0) + job.nodes <= team.nodes


def choose_victims(
    job: QueueJob,
    domain: Domain,
    running: Mapping[int, JobState],
    pool: NodePool,
    *,
    free: int,
    policy: QueuePolicy,
    quota: TeamQuota,
    team_nodes: Mapping[str, int],
) -> list[int]:
    """Return the running jobs whose end lets this one start, or an empty list where that would not be enough.

    The lowest priority is ended first, then the latest start, which loses least. Jobs that turn out not to be needed
    stay. Jobs of a team that borrows are ended only as long as it borrows.
    """
    allowed = _who_may_be_ended(job, running, policy, quota, team_nodes)
    if not allowed:
        return []
    if domain == "any":
        sizes = {number: len(running[number].nodes) - running[number].away_nodes for number in allowed}
        return _fewest_victims(allowed, sizes, job.nodes - free, running, quota, job, team_nodes)
    best: list[int] = []
    best_nodes = 0
    for racks in pool.domains(domain):
        sizes = {
            number: sum(running[number].rack_counts.get(rack, 0) for rack in racks)
            for number in allowed
            if any(rack in running[number].rack_counts for rack in racks)
        }
        order = [number for number in allowed if number in sizes]
        victims = _fewest_victims(order, sizes, job.nodes - pool.free_in(racks), running, quota, job, team_nodes)
        cost = sum(len(running[number].nodes) for number in victims)
        if victims and (not best or cost < best_nodes):
            best, best_nodes = victims, cost
    return best


def _who_may_be_ended(
    job: QueueJob,
    running: Mapping[int, JobState],
    policy: QueuePolicy,
    quota: TeamQuota,
    team_nodes: Mapping[str, int],
) -> list[int]:
    """Return the jobs that may be ended, in the order in which they are ended."""
    takes_back = policy.reclaim and quota.owns(job, team_nodes)
    borrowers = {
        name for name in quota.teams if takes_back and name != job.team and quota.borrowed(name, team_nodes) > 0
    }
    if not borrowers and not policy.preemption:
        return []

    def may(state: JobState) -> bool:
        if state.evict_at_s >= 0 or state.preemptions >= MOST_PREEMPTIONS:
            return False
        candidate = state.job
        if policy.preemption and candidate.priority < job.priority and (not quota.teams or candidate.team == job.team):
            return True
        return candidate.team in borrowers

    candidates = [number for number, state in running.items() if may(state)]
    return sorted(candidates, key=lambda number: (running[number].job.priority, -running[number].start_s, -number))


def _fewest_victims(
    order: list[int],
    sizes: Mapping[int, int],
    missing: int,
    running: Mapping[int, JobState],
    quota: TeamQuota,
    job: QueueJob,
    team_nodes: Mapping[str, int],
) -> list[int]:
    """Return as many jobs of `order` as free `missing` nodes; an empty list where all together free fewer."""
    nodes_left = dict(team_nodes)
    chosen: list[int] = []
    freed = 0
    for number in order:
        if freed >= missing:
            break
        team = running[number].job.team
        if team != job.team and quota.teams and not quota.borrowed(team, nodes_left):
            continue  # the team no longer borrows
        chosen.append(number)
        freed += sizes[number]
        nodes_left[team] = nodes_left.get(team, 0) - len(running[number].nodes)
    if freed < missing:
        return []
    for number in sorted(chosen, key=lambda candidate: -sizes[candidate]):
        if freed - sizes[number] >= missing:
            chosen.remove(number)
            freed -= sizes[number]
    return chosen
