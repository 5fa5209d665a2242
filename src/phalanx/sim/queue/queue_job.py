"""A job in a queue: its submission time, the number of whole nodes it needs, and its duration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from phalanx.errors import mistake
from phalanx.units import DAY_S, plural

Domain = Literal["", "any", "rack", "block"]  # "" leaves it to the policy
DOMAINS: tuple[str, ...] = get_args(Domain)
MOST_JOBS = 1_000_000
MOST_NODES = 131_072
MOST_TIME_S = 3653 * DAY_S  # ten years: more is taken for a typing error
MOST_PRIORITY = 1_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class QueueJob:
    """One line of a trace. A job gets all its nodes at once (a gang) and shares them with no other job.

    `duration_s` is the work it has to do. `limit_s` is the requested time, which is all that schedulers know; a job
    whose work is longer is ended there. A greater `priority` goes first.
    """

    name: str
    submit_s: float
    nodes: int
    duration_s: float
    limit_s: float
    team: str = ""
    priority: int = 0
    domain: Domain = ""  # where all its nodes must lie

    @property
    def run_s(self) -> float:
        """The time it runs undisturbed."""
        return min(self.duration_s, self.limit_s)


def job_faults(job: QueueJob) -> list[str]:
    """Return the mistakes in a job's values, as sentences."""
    faults = []
    if not 0 <= job.submit_s <= MOST_TIME_S:
        faults.append(f"submit_s {job.submit_s:g} is out of range: use 0 to {MOST_TIME_S:g}")
    if not 1 <= job.nodes <= MOST_NODES:
        faults.append(f"{plural(job.nodes, 'node')}: use 1 to {MOST_NODES:,}")
    for name, value in (("duration_s", job.duration_s), ("limit_s", job.limit_s)):
        if not 0 < value <= MOST_TIME_S:
            faults.append(f"{name} {value:g} is out of range: use seconds above 0, up to {MOST_TIME_S:g}")
    if abs(job.priority) > MOST_PRIORITY:
        faults.append(f"priority {job.priority} is out of range: use at most {MOST_PRIORITY:,}")
    if job.domain not in DOMAINS:
        faults.append(f"domain {job.domain!r} is none of any, rack, block")
    return faults


def in_order_of_submission(jobs: list[QueueJob], where: str) -> tuple[QueueJob, ...]:
    """Return the jobs by time of submission, stable within a second; raises UserError for no jobs, or too many."""
    if not jobs:
        raise mistake(where, "holds no job", fix="a trace has one line per job")
    if len(jobs) > MOST_JOBS:
        raise mistake(where, f"holds {len(jobs):,} jobs", fix=f"use at most {MOST_JOBS:,}")
    return tuple(sorted(jobs, key=lambda job: job.submit_s))
