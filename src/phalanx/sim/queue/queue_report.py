"""The figures of a simulated queue: use of the nodes, waiting times by job size, and lost work."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from phalanx.sim.queue.job_state import IDLE_REASONS, JobState, Period, QueueOutcome

# Numbers of nodes at which a size class ends; the last class has no end.
SIZE_EDGES = (1, 8, 64, 512)


@dataclass(frozen=True, kw_only=True, slots=True)
class Waiting:
    """Seconds from submission to the first start."""

    mean_s: float
    median_s: float
    p90_s: float
    p99_s: float
    most_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class JobGroup:
    """The jobs of one size class, or of one team."""

    name: str
    jobs: int
    finished: int
    waiting: Waiting | None  # None: no job of the group started
    node_hours: float  # of work that was not lost
    preemptions: int
    interrupted_by_failures: int


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeUse:
    """Shares of all node-time of a period; they add up to 1. `idle` is by reason."""

    hours: float
    busy: float
    out_of_service: float
    idle: dict[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class QueueReport:
    """All figures of the page. Policies are compared by `first_to_last_submission`."""

    nodes: int
    jobs: int
    finished: int
    unfinished: int
    never_fit: int
    first_to_last_submission: NodeUse
    whole: NodeUse
    useful_node_hours: float
    lost_node_hours: float  # work since the last checkpoint, which was repeated
    overhead_node_hours: float  # starting, restarting, grace
    preemptions: int
    node_failures: int
    job_interruptions: int
    racks_over_least: float  # racks used by jobs over the fewest possible; 1 is perfect
    by_size: tuple[JobGroup, ...]
    by_team: tuple[JobGroup, ...]


def queue_report(outcome: QueueOutcome, *, nodes_per_rack: int) -> QueueReport:
    """Return the figures of an outcome."""
    states = outcome.states
    finished = [state for state in states if state.end_s >= 0]
    started = [state for state in states if state.starts]
    least = sum(math.ceil(state.job.nodes / nodes_per_rack) for state in started)
    teams = sorted({state.job.team for state in states})
    return QueueReport(
        nodes=outcome.nodes,
        jobs=len(states) + len(outcome.never_fit),
        finished=len(finished),
        unfinished=len(states) - len(finished),
        never_fit=len(outcome.never_fit),
        first_to_last_submission=_node_use(outcome.while_submitting, outcome.nodes),
        whole=_node_use(outcome.whole, outcome.nodes),
        useful_node_hours=sum(_useful_hours(state) for state in states),
        lost_node_hours=sum(state.lost_s * state.job.nodes for state in states) / 3600,
        overhead_node_hours=sum(state.overhead_s * state.job.nodes for state in states) / 3600,
        preemptions=sum(state.preemptions for state in states),
        node_failures=outcome.node_failures,
        job_interruptions=sum(state.failures for state in states),
        racks_over_least=sum(state.racks for state in started) / least if least else 1.0,
        by_size=_by_size(states),
        by_team=tuple(
            _job_group(name or "no team", [state for state in states if state.job.team == name]) for name in teams
        ),
    )


def _by_size(states: Sequence[JobState]) -> tuple[JobGroup, ...]:
    groups = []
    for low, high in zip((0, *SIZE_EDGES), (*SIZE_EDGES, math.inf), strict=True):
        members = [state for state in states if low < state.job.nodes <= high]
        if members:
            name = f"{low + 1:,} and more" if high == math.inf else "1" if high == 1 else f"{low + 1:,} to {high:,}"
            groups.append(_job_group(name, members))
    return tuple(groups)


def _job_group(name: str, states: Sequence[JobState]) -> JobGroup:
    """Summarise the jobs of a group: waiting times, work, preemptions and failures."""
    waits = sorted(state.first_start_s - state.job.submit_s for state in states if state.starts)
    waiting = None
    if waits:
        waiting = Waiting(
            mean_s=math.fsum(waits) / len(waits),
            median_s=quantile(waits, 0.5),
            p90_s=quantile(waits, 0.9),
            p99_s=quantile(waits, 0.99),
            most_s=waits[-1],
        )
    return JobGroup(
        name=name,
        jobs=len(states),
        finished=sum(state.end_s >= 0 for state in states),
        waiting=waiting,
        node_hours=sum(map(_useful_hours, states)),
        preemptions=sum(state.preemptions for state in states),
        interrupted_by_failures=sum(state.failures for state in states),
    )


def _useful_hours(state: JobState) -> float:
    return (state.job.run_s - state.left_s) * state.job.nodes / 3600


def quantile(ordered: Sequence[float], share: float) -> float:
    """Return the smallest of sorted values that at least this share of them does not exceed (nearest rank).

    >>> quantile([1.0, 2.0, 3.0, 4.0], 0.5), quantile([1.0, 2.0, 3.0, 4.0], 0.9)
    (2.0, 4.0)
    """
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def _node_use(period: Period, nodes: int) -> NodeUse:
    node_s = period.seconds * nodes
    share = (lambda value: value / node_s) if node_s else (lambda value: 0.0)
    return NodeUse(
        hours=period.seconds / 3600,
        busy=share(period.busy_node_s),
        out_of_service=share(period.away_node_s),
        idle={reason: share(period.idle_node_s[reason]) for reason in IDLE_REASONS},
    )
