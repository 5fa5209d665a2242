"""State and outcome of the jobs in a simulated queue."""

from __future__ import annotations

from dataclasses import dataclass, field

from phalanx.sim.queue.queue_job import QueueJob


@dataclass(kw_only=True, slots=True)
class JobState:
    """A job in the simulation. Times are seconds since the first submission; -1 where the event has not occurred."""

    job: QueueJob
    left_s: float  # remaining work that is not saved yet
    first_start_s: float = -1.0
    end_s: float = -1.0  # of the whole job
    starts: int = 0
    preemptions: int = 0
    failures: int = 0
    lost_s: float = 0.0  # work that was repeated, on each of its nodes
    overhead_s: float = 0.0  # starting, restarting and early ends, on each of its nodes
    racks: int = 0  # used by its first start
    # Of the current start; `nodes` is empty while the job waits.
    nodes: list[int] = field(default_factory=list)
    rack_counts: dict[int, int] = field(default_factory=dict)
    away_nodes: int = 0  # of its nodes, those that leave service when it ends
    start_s: float = -1.0
    work_from_s: float = -1.0  # when its first step begins
    done_at_s: float = -1.0  # when it will have done its work
    limit_end_s: float = -1.0  # by when the scheduler expects its end
    evict_at_s: float = -1.0  # when it must end because of a preemption
    start_id: int = 0  # events of an earlier start are ignored


@dataclass(frozen=True, kw_only=True, slots=True)
class Period:
    """Node-seconds of a time interval; idle ones by reason."""

    seconds: float
    busy_node_s: float
    away_node_s: float  # failed or drained, and without a job
    idle_node_s: dict[str, float]


# Reasons for idle nodes.
NO_JOB, TOO_FEW, KEPT, TOPOLOGY, QUOTA = (
    "no job waiting",
    "too few for any job",
    "reserved for a larger job",
    "topology",
    "quota",
)
IDLE_REASONS = (NO_JOB, TOO_FEW, KEPT, TOPOLOGY, QUOTA)


@dataclass(frozen=True, kw_only=True, slots=True)
class QueueOutcome:
    """All jobs, and the use of the cluster until the last submission and until the last end."""

    nodes: int
    states: tuple[JobState, ...]
    # Jobs that would not start even on an empty cluster with this policy.
    never_fit: tuple[QueueJob, ...]
    while_submitting: Period
    whole: Period
    node_failures: int
    events: int
    passes: int
