"""Explanations of Slurm's reasons for waiting and ending, with a remedy for each."""

from __future__ import annotations

# Reason of squeue -> (meaning, remedy). A prefix matches too, so that QOSMaxNodePerUserLimit and its forty variants
# need one line. `{queue}` and `{id}` are filled in.
REASONS: dict[str, tuple[str, str]] = {
    "Resources": (
        "it is next in the queue, waiting for nodes that other jobs use",
        "wait, ask for fewer --hosts, or for another --queue; squeue --start --job {id} says when",
    ),
    "Priority": (
        "jobs with higher priority are waiting for the same nodes",
        "wait; sprio --jobs {id} shows the priority, a shorter --time-s may fit into a gap",
    ),
    "PartitionNodeLimit": (
        "it asks for more nodes than partition {queue} allows per job, or has available",
        "ask for fewer --hosts, or for another --queue",
    ),
    "PartitionConfig": (
        "partition {queue} does not allow what it asks for",
        "ask for fewer --hosts or another --queue",
    ),
    "PartitionTimeLimit": (
        "its time limit is above that of partition {queue}",
        "launch it with a smaller --time-s: it saves a checkpoint, is requeued and resumes",
    ),
    "PartitionDown": ("partition {queue} is down", "ask the operator, or launch it in another --queue"),
    "PartitionInactive": ("partition {queue} is inactive", "ask the operator, or launch it in another --queue"),
    "JobHeldUser": ("it is held by its owner", "phalanx requeue {id} releases it"),
    "JobHeldAdmin": ("an operator holds it", "ask the operator"),
    "BeginTime": (
        "it was just requeued, and Slurm holds requeued jobs for about two minutes",
        "wait; it resumes from its newest checkpoint",
    ),
    "Dependency": ("it waits for another job to end", "phalanx queue shows the state of that job"),
    "DependencyNeverSatisfied": ("the job it waits for failed", "cancel it, and launch it without the dependency"),
    "ReqNodeNotAvail": (
        "nodes that it needs are drained, down or reserved",
        "sinfo --list-reasons says why; launch it without naming nodes, or wait",
    ),
    "NodeDown": ("a node that it needs is down", "sinfo --list-reasons says why; wait, or launch it elsewhere"),
    "Nodes_required_for_job_are_DOWN": (
        "nodes that it needs are down, drained or reserved for others",
        "sinfo --list-reasons says why; ask for fewer --hosts, or wait for the operator",
    ),
    "BadConstraints": ("no node of the cluster can provide what it asks for", "look at launch.options, and at sinfo"),
    "Constraints": ("no free node has the features it asks for", "look at launch.options, or wait"),
    "Reservation": ("it waits for its reservation to begin", "wait, or launch it without the reservation"),
    "Licenses": ("it waits for a licence", "wait, or take the licence out of launch.options"),
    "JobArrayTaskLimit": ("its job array is at its limit of running tasks", "wait for the others of its group"),
    "QOS": (
        "the limit of its quality of service (QOS) is reached",
        "wait for your other jobs, or use another launch.qos",
    ),
    "Assoc": ("the limit of its account is reached", "wait for your other jobs, or use another launch.account"),
    "MaxCpuPerAccount": ("the core limit of its account is reached", "wait for your other jobs"),
    "InvalidAccount": ("its account does not exist", "set launch.account to one of: sacctmgr show associations"),
    "InvalidQOS": ("its quality of service (QOS) does not exist", "set launch.qos to one of: sacctmgr show qos"),
    "Prolog": ("its nodes are being prepared", "wait a minute"),
    "Cleaning": ("its last attempt is being cleaned up", "wait a minute"),
    "launch_failed_requeued_held": (
        "it failed to start, and Slurm put it on hold",
        "phalanx logs {id} shows why; phalanx requeue {id} releases it",
    ),
    "SystemFailure": ("Slurm itself failed", "ask the operator"),
    "None": ("Slurm has not considered it yet", "ask again in a minute"),
}

# End states of a job that is no longer in the queue -> (meaning, remedy).
ENDS: dict[str, tuple[str, str]] = {
    "TIMEOUT": (
        "it reached its time limit before it could save",
        "phalanx requeue {id} resumes from the newest checkpoint; set launch.time_s higher",
    ),
    "NODE_FAIL": ("its first node failed", "phalanx requeue {id} resumes from the newest checkpoint"),
    "OUT_OF_MEMORY": ("it ran out of host memory", "plan with a smaller batch.micro, or more hosts"),
    "PREEMPTED": (
        "it was preempted by a job with higher priority",
        "phalanx requeue {id} resumes from the newest checkpoint",
    ),
    "BOOT_FAIL": ("its nodes did not boot", "phalanx requeue {id}"),
    "DEADLINE": ("its deadline passed", "launch it again"),
    "CANCELLED": ("it was cancelled", "phalanx requeue {id} resumes from its newest checkpoint"),
}


def explain_reason(reason: str, *, job: str, queue: str) -> tuple[str, str]:
    """Return the meaning of a reason and a remedy; for an unknown reason, Slurm's own words.

    >>> explain_reason("QOSMaxNodePerUserLimit", job="7", queue="big")[0]
    'the limit of its quality of service (QOS) is reached'
    >>> explain_reason("Nodes required for job are DOWN, DRAINED or reserved", job="7", queue="big")[0]
    'nodes that it needs are down, drained or reserved for others'
    """
    word = reason.strip("()").replace(" ", "_") or "None"
    exact_keys = [key for key in REASONS if word == key]
    prefix_keys = [key for key in sorted(REASONS, key=len, reverse=True) if word.startswith(key)]
    for key in (*exact_keys, *prefix_keys):
        meaning, remedy = REASONS[key]
        return meaning.format(id=job, queue=queue), remedy.format(id=job, queue=queue)
    return f"Slurm says {reason[:120]!r}", f"scontrol show job {job} says more"
