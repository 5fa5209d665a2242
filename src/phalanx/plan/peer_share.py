"""The share of a job that one of several peers trains."""

from __future__ import annotations

from dataclasses import replace

from phalanx.hardware.types import Cluster
from phalanx.job.schema import Job


def planned_share(job: Job, cluster: Cluster) -> Job:
    """Return the job to plan on one cluster: a peer's share, or the whole job if the share has no whole passes."""
    if not job.sync.has_peers or job.sync.peers < 2:
        return job
    share = job_of_peer(job, job.sync.peers, cluster.devices)
    pass_sequences = cluster.devices * (job.batch.micro if isinstance(job.batch.micro, int) else 1)
    share_sequences, total_sequences = share.batch.global_sequences, job.batch.global_sequences
    return job if share_sequences % pass_sequences or share_sequences >= total_sequences else share


def job_of_peer(job: Job, peers: int, devices: int) -> Job:
    """Return the job of one of `peers` peers: its part of the global batch, in whole passes of its devices."""
    batch = job.batch
    pass_sequences = devices * (batch.micro if isinstance(batch.micro, int) else 1)
    exact_sequences = batch.global_sequences / peers
    # A batch too small for one pass of every device is left to the planner, which may use fewer of them.
    sequences = (
        round(exact_sequences / pass_sequences) * pass_sequences
        if exact_sequences >= pass_sequences
        else max(1, round(exact_sequences))
    )
    ramp = tuple(
        replace(stage, global_tokens=max(job.data.sequence, stage.global_tokens // peers)) for stage in batch.ramp
    )
    tokens = sequences * job.data.sequence
    return replace(job, batch=replace(batch, global_sequences=sequences, global_tokens=tokens, ramp=ramp))
