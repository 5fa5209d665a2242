"""What one of several peers trains of a job."""

from __future__ import annotations

from dataclasses import replace

from phalanx.hardware.types import Cluster
from phalanx.job.schema import Job


def planned_share(job: Job, cluster: Cluster) -> Job:
    """The job that the plan of one cluster is for: a peer's share, or the whole where there is none in whole passes."""
    if not job.sync.has_peers or job.sync.peers < 2:
        return job
    share = job_of_peer(job, job.sync.peers, cluster.devices)
    each = cluster.devices * (job.batch.micro if isinstance(job.batch.micro, int) else 1)
    part, whole = share.batch.global_sequences, job.batch.global_sequences
    return job if part % each or part >= whole else share


def job_of_peer(job: Job, peers: int, devices: int) -> Job:
    """What one of so many peers trains in a step: its part of the global batch, in whole passes of its devices."""
    batch = job.batch
    each = devices * (batch.micro if isinstance(batch.micro, int) else 1)
    part = batch.global_sequences / peers
    # A batch too small for one pass of every device is left to the planner, which may use fewer of them.
    sequences = round(part / each) * each if part >= each else max(1, round(part))
    ramp = tuple(
        replace(stage, global_tokens=max(job.data.sequence, stage.global_tokens // peers)) for stage in batch.ramp
    )
    tokens = sequences * job.data.sequence
    return replace(job, batch=replace(batch, global_sequences=sequences, global_tokens=tokens, ramp=ramp))
