"""Checks of [sync] that involve two keys, and warnings about keys without effect in the chosen mode."""

from __future__ import annotations

from phalanx.job.draft import Draft
from phalanx.job.schema import Job
from phalanx.job.sync_section import SyncSettings

DEFAULTS = SyncSettings()
# The modes in which a key has an effect; keys that are not listed have one in every mode with peers.
USED_BY = {
    "inner_steps": ("diloco", "quorum"),
    "outer_learning_rate": ("diloco", "quorum"),
    "outer_momentum": ("diloco", "quorum"),
    "synchronous_steps": ("diloco", "quorum"),
    "fragments": ("diloco", "quorum"),
    "delay_steps": ("diloco", "quorum"),
    "gate_sequences": ("diloco", "quorum"),
    "local_share": ("diloco", "quorum"),
    "quorum": ("quorum",),
    "grace_s": ("quorum",),
    "late": ("quorum",),
}


def check_sync(draft: Draft, job: Job) -> None:
    """Check the keys of [sync] against each other and against the rest of the job."""
    sync = job.sync
    if not sync.has_peers:
        keys_by_hand = [key for key, origin in draft.origins.items() if key.startswith("sync.") and origin.by_hand]
        for key in sorted(set(keys_by_hand) - {"sync.mode"}):
            draft.warn(key, f'{key} has no effect with sync.mode = "every-step"')
        return
    _check_counts(draft, job)
    if sync.dead_after_s <= 2 * sync.heartbeat_s:
        draft.complain(
            "sync.dead_after_s",
            f"sync.dead_after_s = {sync.dead_after_s:g} with sync.heartbeat_s = {sync.heartbeat_s:g}",
            why="one heartbeat that is late would count as the death of a peer",
            fix=f"use dead_after_s above {2 * sync.heartbeat_s:g}",
        )
    if job.fault.on_loss == "leave-out":
        draft.complain(
            "fault.on_loss",
            f'fault.on_loss = "leave-out" with sync.mode = "{sync.mode}"',
            why="a lost peer is left out anyway, and both would decide on it",
            fix='use fault.on_loss = "rebuild", which holds for the ranks inside a peer',
        )
    _check_trainer(draft, job)
    _warn_of_quality(draft, job)
    if sync.screening == "loss" and (sync.mode == "target-batch" or sync.delay_steps):
        what = "on gradients" if sync.mode == "target-batch" else "with sync.delay_steps"
        draft.warn("sync.screening", f'sync.screening = "loss" has no effect {what}: norms are looked at')
    for name, modes in USED_BY.items():
        key = f"sync.{name}"
        # A job that was written out completely, as in an invitation, has every key.
        is_default = getattr(sync, name) == getattr(DEFAULTS, name)
        if sync.mode not in modes and key in draft.origins and draft.origins[key].by_hand and not is_default:
            draft.warn(key, f'{key} has no effect with sync.mode = "{sync.mode}"')


def _check_counts(draft: Draft, job: Job) -> None:
    sync = job.sync
    if sync.peers and sync.quorum > sync.peers:
        draft.complain(
            "sync.quorum",
            f"sync.quorum = {sync.quorum} is more than sync.peers = {sync.peers}",
            why="no round could ever be complete",
            fix=f"use quorum = {sync.peers} or less; 0 waits for all",
        )
    if sync.mode == "target-batch" and sync.peers > job.batch.global_sequences:
        draft.complain(
            "sync.peers",
            f"sync.peers = {sync.peers} share a global batch of {job.batch.global_sequences} sequences",
            why="some peers would have nothing to do",
            fix=f"use at most {job.batch.global_sequences} peers, or a larger batch",
        )
    if sync.mode not in ("diloco", "quorum"):
        return
    if sync.fragments > sync.inner_steps:
        draft.complain(
            "sync.fragments",
            f"sync.fragments = {sync.fragments} with sync.inner_steps = {sync.inner_steps}",
            why="one fragment at most is exchanged in a step",
            fix=f"use fragments = {sync.inner_steps} or less",
        )
    if sync.delay_steps > (period := sync.inner_steps // sync.fragments) - 1 and sync.delay_steps:
        draft.complain(
            "sync.delay_steps",
            f"sync.delay_steps = {sync.delay_steps} with a fragment sent every {period} steps",
            why="a result must be applied before the next fragment is sent",
            fix=f"use delay_steps = {period - 1} or less, or fewer fragments" if period > 1 else "use delay_steps = 0",
        )


def _check_trainer(draft: Draft, job: Job) -> None:
    """Refuse settings that training with peers does not support."""
    setting = f'sync.mode = "{job.sync.mode}"'
    unsupported = (
        (job.model.is_moe, "a model with experts", "peers would balance their experts each in its own way"),
        (job.precision.compute == "fp16", 'precision.compute = "fp16"', "each peer would find its own loss scale"),
        (bool(job.plugins.data), "plugins.data", "peers share out positions of a dataset folder"),
    )
    for is_set, what, why in unsupported:
        if is_set:
            draft.complain("sync.mode", f"{setting} with {what}", why=why, fix='use sync.mode = "every-step"')


def _warn_of_quality(draft: Draft, job: Job) -> None:
    """Warn of settings that work but were measured to cost loss: shared/design/frontier.md, a3 and 4."""
    sync = job.sync
    if sync.mode in ("diloco", "quorum") and sync.synchronous_steps == 0:
        draft.warn(
            "sync.synchronous_steps",
            "sync.synchronous_steps = 0: without a warm-up, peers that started apart learnt no more in our short runs "
            "than one peer alone",
        )
    if sync.mode == "target-batch" and sync.codec == "topk-2bit":
        draft.warn(
            "sync.codec",
            'sync.codec = "topk-2bit" on gradients of every step cost 0.57 nats in our runs; it is for the updates of '
            'sync.mode = "diloco"',
        )
    if sync.codec in ("int4", "topk-2bit") and sync.feedback == 0:
        draft.warn("sync.feedback", f'sync.feedback = 0: what codec = "{sync.codec}" leaves out is lost')
