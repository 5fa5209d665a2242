"""What became of each job, and the nodes it has now."""

from __future__ import annotations

from dataclasses import dataclass, field

from phalanx.sim.queue.queue_job import QueueJob


@dataclass(kw_only=True, slots=True)
class JobState:
    """A job in the simulation. Times are seconds since the first submission; -1 for what has not happened."""

    job: QueueJob
    left_s: float  # work that is not saved yet
    first_start_s: float = -1.0
    end_s: float = -1.0  # of the whole job
    starts: int = 0
    preemptions: int = 0
    failures: int = 0
    lost_s: float = 0.0  # work that was done again, on each of its nodes
    overhead_s: float = 0.0  # starting, restarting and ending early, on each of its nodes
    racks: int = 0  # of its first start
    # Of the present start; nodes is empty while it waits.
    nodes: list[int] = field(default_factory=list)
    rack_counts: dict[int, int] = field(default_factory=dict)
    away_nodes: int = 0  # of its nodes, those that leave service when it ends
    start_s: float = -1.0
    work_from_s: float = -1.0  # when its first step begins
    done_at_s: float = -1.0  # when it will have done its work
    limit_end_s: float = -1.0  # by when the scheduler expects its end
    evict_at_s: float = -1.0  # when it must be gone, because it is preempted
    start_id: int = 0  # events of an earlier start are void


@dataclass(frozen=True, kw_only=True, slots=True)
class Period:
    """Node-seconds of a stretch of time; idle ones by reason."""

    seconds: float
    busy_node_s: float
    away_node_s: float  # failed or drained, and without a job
    idle_node_s: dict[str, float]


# Why nodes stand idle.
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
    never_fit: tuple[QueueJob, ...]  # jobs that no empty cluster of this kind and policy would start
    while_submitting: Period
    whole: Period
    node_failures: int
    events: int
    passes: int
