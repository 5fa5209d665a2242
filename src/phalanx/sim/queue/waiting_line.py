"""The waiting line: priority, then fair share between teams where it is set, then the time of submission."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping

from phalanx.sim.queue.queue_job import QueueJob
from phalanx.units import HOUR_S

Place = tuple[int, int]  # (-priority, number of the job in order of submission)


class WaitingLine:
    """The waiting jobs by number. With fair share there is a line per team, else one for all."""

    def __init__(self, jobs: tuple[QueueJob, ...], *, fair_share: bool) -> None:
        self._jobs, self._fair = jobs, fair_share
        self._lines: dict[str, list[Place]] = {}
        self._needs: list[int] = []  # nodes of the waiting jobs, sorted

    def __len__(self) -> int:
        return len(self._needs)

    @property
    def smallest_need(self) -> int:
        """The number of nodes of the smallest waiting job."""
        return self._needs[0]

    def add(self, number: int) -> None:
        """Add a waiting job; a preempted one takes the place of its submission time."""
        job = self._jobs[number]
        insort(self._lines.setdefault(job.team if self._fair else "", []), (-job.priority, number))
        insort(self._needs, job.nodes)

    def remove(self, number: int) -> None:
        """Remove a job from the line."""
        job = self._jobs[number]
        line = self._lines[job.team if self._fair else ""]
        del line[bisect_left(line, (-job.priority, number))]
        del self._needs[bisect_left(self._needs, job.nodes)]

    def in_order(self, used: Mapping[str, float]) -> Iterator[int]:
        """Yield the numbers of the waiting jobs, the next first.

        `used` is each team's use over its weight; it may change during the iteration. The line itself must not.
        """
        if not self._fair:
            yield from (number for _, number in self._lines.get("", ()))
            return
        heads = [(line[0][0], used.get(team, 0.0), line[0][1], team, 0) for team, line in self._lines.items() if line]
        heapq.heapify(heads)
        while heads:
            priority, share_then, number, team, position = heads[0]
            # A job of this team was started since: another team may be next.
            if used.get(team, 0.0) != share_then:
                heapq.heapreplace(heads, (priority, used.get(team, 0.0), number, team, position))
                continue
            yield number
            line = self._lines[team]
            if position + 1 < len(line):
                next_place = line[position + 1]
                heapq.heapreplace(heads, (next_place[0], used.get(team, 0.0), next_place[1], team, position + 1))
            else:
                heapq.heappop(heads)


class TeamUse:
    """The current and past use of each team over its weight; past use decays with a half-life."""

    def __init__(self, weights: Mapping[str, float], half_life_h: float) -> None:
        self._weights, self._half_life_s = weights, half_life_h * HOUR_S
        self.running: dict[str, int] = {}  # nodes that each team uses now
        self._past: dict[str, float] = {}  # decayed node-seconds
        self._at = 0.0
        self.shares: dict[str, float] = {}

    def advance(self, now: float) -> None:
        """Account for the time since the last call."""
        passed = now - self._at
        if passed <= 0:
            return
        self._at = now
        decay = 0.5 ** (passed / self._half_life_s) if self._half_life_s else 0.0
        for team in self.running.keys() | self._past.keys():
            fresh = self.running.get(team, 0) * passed if self._half_life_s else 0.0
            self._past[team] = self._past.get(team, 0.0) * decay + fresh
            self._set_share(team)

    def change(self, team: str, nodes: int) -> None:
        """Add the nodes of a team's job that starts; negative `nodes` for a job that ends."""
        self.running[team] = self.running.get(team, 0) + nodes
        self._set_share(team)

    def _set_share(self, team: str) -> None:
        # Without a half-life only current use counts. With it, current use counts like one hour, so that many jobs
        # that start at the same moment do not all belong to one team.
        now = self.running.get(team, 0) * HOUR_S
        self.shares[team] = (self._past.get(team, 0.0) + now) / self._weights.get(team, 1.0)
