"""Synthetic jobs of a cluster: many small ones, few huge ones, more by day than by night.

Sizes are powers of two. Nine in ten jobs have 1 to 8 nodes; one in a hundred has 64 or more and most of the work, as
in published traces of GPU clusters (MLaaS, Philly, Acme). Times are lognormal by class, then all are scaled so that
the jobs together request `load` of the cluster. Requested times are 1.2 to 5 times the needed ones, the spread of the
Parallel Workloads Archive.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace

from phalanx.errors import mistake
from phalanx.io.limits import MAX_SEED
from phalanx.sim.queue.job_trace_file import JobTrace
from phalanx.sim.queue.queue_job import MOST_JOBS, QueueJob, in_order_of_submission
from phalanx.units import DAY_S, HOUR_S, MINUTE_S, number_text


@dataclass(frozen=True, kw_only=True, slots=True)
class SizeClass:
    """Jobs of one class: its share of all jobs, nodes as powers of two, median time and the spread of its logarithm."""

    share: float
    least_nodes: int
    most_nodes: int
    median_s: float
    log_spread: float
    priority: int = 0


CLASSES = (
    SizeClass(share=0.70, least_nodes=1, most_nodes=2, median_s=20 * MINUTE_S, log_spread=1.3),
    SizeClass(share=0.22, least_nodes=4, most_nodes=8, median_s=1.5 * HOUR_S, log_spread=1.2),
    SizeClass(share=0.07, least_nodes=16, most_nodes=32, median_s=4 * HOUR_S, log_spread=1.1),
    SizeClass(share=0.0095, least_nodes=64, most_nodes=512, median_s=9 * HOUR_S, log_spread=1.0, priority=1),
    SizeClass(share=0.0005, least_nodes=1024, most_nodes=2048, median_s=36 * HOUR_S, log_spread=0.6, priority=2),
)
# Of a job's work, before scaling: a minute to a week.
LEAST_S, MOST_S = 60.0, 7 * DAY_S
NIGHT = 0.4  # arrivals in the deepest hour of the night, relative to noon
TEAMS = ("red", "green", "blue", "gold")  # used where the policy has no teams


def synthetic_jobs(
    *, nodes: int, jobs: int, days: float, load: float, seed: int, teams: tuple[str, ...] = ()
) -> JobTrace:
    """Generate jobs that are submitted over `days` to a cluster of `nodes`; the same seed gives the same jobs.

    `load` is the requested share of the cluster's node-time. Raises UserError for values out of range.

    >>> trace = synthetic_jobs(nodes=100, jobs=3, days=1, load=0.5, seed=0)
    >>> len(trace.jobs), trace == synthetic_jobs(nodes=100, jobs=3, days=1, load=0.5, seed=0)
    (3, True)
    """
    for name, value, least, most in (
        ("jobs", jobs, 1, MOST_JOBS),
        ("days", days, 0.01, 3653),
        ("load", load, 0.01, 5),
        ("seed", seed, 0, MAX_SEED),
    ):
        if not least <= value <= most:
            raise mistake(
                "--queue synthetic", f"{name} {number_text(value)} is out of range", fix=f"use {least:g} to {most:,}"
            )
    chance = random.Random(seed)
    names = teams or TEAMS
    drawn = []
    for number in range(jobs):
        size_class = chance.choices(CLASSES, weights=[candidate.share for candidate in CLASSES])[0]
        powers = range(int(math.log2(size_class.least_nodes)), int(math.log2(size_class.most_nodes)) + 1)
        duration = size_class.median_s * math.exp(chance.gauss(0.0, size_class.log_spread))
        drawn.append(
            QueueJob(
                name=f"job {number + 1}",
                submit_s=_arrival_time(chance, days),
                nodes=min(2 ** chance.choice(powers), max(1, nodes // 2)),
                duration_s=min(MOST_S, max(LEAST_S, duration)),
                limit_s=1.2 + 3.8 * chance.random() ** 2,  # a factor, until the scale is known
                team=chance.choice(names),
                priority=size_class.priority,
            )
        )
    requested = math.fsum(job.nodes * job.duration_s for job in drawn)
    scale = load * nodes * days * DAY_S / requested
    scaled = [
        replace(job, duration_s=job.duration_s * scale, limit_s=_round_up(job.duration_s * scale * job.limit_s))
        for job in drawn
    ]
    source = f"synthetic, {jobs:,} jobs in {days:g} days, load {load:g}, seed {seed}"
    return JobTrace(source=source, jobs=in_order_of_submission(scaled, source))


def _arrival_time(chance: random.Random, days: float) -> float:
    """Draw a time of the period by rejection, so that nights have fewer arrivals."""
    while True:
        time = chance.random() * days * DAY_S
        busy = (1 + NIGHT) / 2 - (1 - NIGHT) / 2 * math.cos(2 * math.pi * time / DAY_S)  # midnight is the minimum
        if chance.random() <= busy:
            return time


def _round_up(seconds: float) -> float:
    """Round up to whole minutes, as limits are usually given."""
    return max(1.0, math.ceil(seconds / MINUTE_S)) * MINUTE_S
