"""Schedule of checkpoints, and deletion of old ones.

Deletion spares the newest intact checkpoint and the newest from before steps that may be damaged, and never leaves a
half-deleted one that could be mistaken for a complete one.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from phalanx.job.run_sections import Checkpoint
from phalanx.plan.reliability import Reliability, daly_interval
from phalanx.train.state.checkpoint_index import DamagedCheckpoint, read_manifest
from phalanx.train.state.paths import Location, commit_step
from phalanx.train.state.reader import list_commits
from phalanx.train.state.storage import CheckpointFolder, CheckpointStorage, open_storage

# Factor on a checkpoint's bytes: blocks, folders, the manifest, and the events of the steps until then
ROOM = 1.05


def remove_drafts(root: Location | str) -> None:
    """Delete drafts of dead processes. Only valid while no process saves, as between two generations."""
    open_storage(root).sweep(0.0)


# The choice of checkpoints to delete, from steps alone.


@dataclass(frozen=True, kw_only=True, slots=True)
class CommitState:
    """A committed step, and whether its manifest can be read."""

    step: int
    is_intact: bool


def newest_trusted(commits: Sequence[CommitState], trusted_step: int | None) -> int | None:
    """Return the newest intact step up to `trusted_step`, if given; None if there is none.

    >>> commits = [CommitState(step=step, is_intact=step != 20) for step in (24, 22, 20, 19)]
    >>> newest_trusted(commits, None), newest_trusted(commits, 20), newest_trusted(commits, 18)
    (24, 19, None)
    """
    steps = (
        commit.step for commit in commits if commit.is_intact and (trusted_step is None or commit.step <= trusted_step)
    )
    return max(steps, default=None)


def steps_to_prune(commits: Sequence[CommitState], *, keep: int, trusted_step: int | None = None) -> set[int]:
    """Return the steps of `commits`, newest first, that need not be kept.

    The newest `keep` intact ones stay. Steps after `trusted_step` may be damaged: the newest intact one up to there
    stays too, in place of the oldest of the `keep`, so that a long series of bad steps takes no more disk. Damaged
    checkpoints newer than the oldest kept one stay, because a person may want to examine them.

    >>> commits = [CommitState(step=step, is_intact=True) for step in (23, 22, 21, 20, 19)]
    >>> sorted(steps_to_prune(commits, keep=3)), sorted(steps_to_prune(commits, keep=3, trusted_step=20))
    ([19, 20], [19, 21])
    """
    kept_steps = [commit.step for commit in commits if commit.is_intact][: max(keep, 1)]
    if not kept_steps:
        return set()
    trusted = newest_trusted(commits, trusted_step)
    if trusted is not None and trusted not in kept_steps:
        kept_steps = [*kept_steps[: max(keep - 1, 1)], trusted]
    return {
        commit.step
        for commit in commits
        if commit.step not in kept_steps and (commit.is_intact or commit.step < min(kept_steps))
    }


def expendable_steps(commits: Sequence[CommitState], *, trusted_step: int | None = None) -> list[int]:
    """Return the steps that may be deleted on a full disk, in order: not the newest intact or newest trusted one.

    >>> commits = [CommitState(step=step, is_intact=True) for step in (23, 22, 20, 19)]
    >>> expendable_steps(commits), expendable_steps(commits, trusted_step=20)
    ([19, 20, 22], [19, 22])
    """
    newest, trusted = newest_trusted(commits, None), newest_trusted(commits, trusted_step)
    return sorted(
        commit.step for commit in commits if newest is not None and commit.step < newest and commit.step != trusted
    )


def replaced_steps(set_aside: Iterable[int], commits: Sequence[CommitState], *, trusted_step: int) -> set[int]:
    """Return the steps set aside by a roll-back that a trusted checkpoint of the same or a later step replaces.

    >>> replaced_steps([22, 24], [CommitState(step=23, is_intact=True)], trusted_step=23)
    {22}
    """
    trusted = newest_trusted(commits, trusted_step)
    return {step for step in set_aside if trusted is not None and step <= trusted}


# Deletion.


def delete_commits_after(root: Location | str, step: int) -> list[int]:
    """Delete commits after step `step`, which are not trusted; return the deleted steps.

    Does nothing unless an intact commit up to `step` exists: a commit without a replacement is not deleted.
    """
    storage = open_storage(root)
    commits = list_commits(root)
    if newest_trusted(_commit_states(storage, commits), step) is None:
        return []
    untrusted = [place for place in commits if (commit_step(place.name) or 0) > step]
    for place in untrusted:
        storage.delete(place)
    return [commit_step(place.name) or 0 for place in untrusted]


def prune_commits(
    storage: CheckpointStorage, *, keep: int, stale_s: float, spare: str = "", trusted_step: int | None = None
) -> list[Location]:
    """Delete commits that `steps_to_prune` returns, and drafts that were not changed for `stale_s` seconds.

    Drafts of the family of attempts `spare` stay whatever their age. Returns the deleted commits.
    """
    storage.sweep(stale_s, spare=spare)
    try:
        commits = storage.commits()
        surplus = steps_to_prune(_commit_states(storage, commits), keep=keep, trusted_step=trusted_step)
    # A commit that cannot be deleted costs space, but must not fail the run
    except OSError:
        return []
    deleted = [place for place in commits if commit_step(place.name) in surplus]
    for place in deleted:
        storage.delete(place)
    return deleted


def delete_replaced(storage: CheckpointStorage, *, trusted_step: int) -> list[int]:
    """Delete the checkpoints that a roll-back set aside and training has replaced; return their steps."""
    try:
        set_aside = storage.set_aside()
        if not set_aside:
            return []
        commits = _commit_states(storage, storage.commits())
    except OSError:
        return []
    replaced = replaced_steps(set_aside.values(), commits, trusted_step=trusted_step)
    for place, step in set_aside.items():
        if step in replaced:
            storage.delete_set_aside(place)
    return sorted(replaced)


def untrusted_deleted(steps: Sequence[int], *, step: int) -> str:
    """Return the log line for deleted checkpoints that a roll-back had set aside.

    >>> untrusted_deleted([24, 22], step=25)
    'step 25: the checkpoints of step 22, 24, given up by a roll-back, are replaced and deleted'
    """
    step_list = ", ".join(f"{deleted_step:,}" for deleted_step in sorted(steps))
    return f"step {step:,}: the checkpoints of step {step_list}, given up by a roll-back, are replaced and deleted"


def make_room(
    storage: CheckpointStorage,
    fence: Callable[[], AbstractContextManager[None]] = nullcontext,
    *,
    trusted_step: int | None = None,
) -> list[int]:
    """Delete old commits, oldest first, until another like the newest intact one fits on the disk.

    Returns the deleted steps. Checkpoints that a roll-back set aside are deleted first; then those of
    `expendable_steps`. Deletes inside `fence()`, which is entered only if there is something to delete. Does nothing
    for an object store, whose free space cannot be queried.
    """
    root = storage.root
    deleted_steps: list[int] = []
    if not isinstance(root, Path):
        return []
    try:
        commits = storage.commits()
        newest = next((place for place in commits if _is_intact(storage.folder(place))), None)
        if newest is None:
            return []
        ranks = read_manifest(storage.folder(newest)).ranks
        needed_bytes = ROOM * sum(rank_files.data_bytes + rank_files.index_bytes for rank_files in ranks)
        if _free_bytes(root) >= needed_bytes:
            return []
        for place, step in sorted(storage.set_aside().items(), key=lambda item: item[1]):
            if _free_bytes(root) >= needed_bytes:
                return deleted_steps
            with fence():
                storage.delete_set_aside(place)
            deleted_steps.append(step)
        places = {commit_step(place.name) or 0: place for place in commits}
        for step in expendable_steps(_commit_states(storage, commits), trusted_step=trusted_step):
            if _free_bytes(root) >= needed_bytes:
                break
            with fence():
                storage.delete(places[step])
            deleted_steps.append(step)
    # The save itself then reports the error
    except (OSError, DamagedCheckpoint):
        pass
    return deleted_steps


def _free_bytes(root: Path) -> int:
    disk = os.statvfs(root)
    return disk.f_bavail * disk.f_frsize


def _commit_states(storage: CheckpointStorage, commits: Iterable[Location]) -> list[CommitState]:
    return [
        CommitState(step=commit_step(place.name) or 0, is_intact=_is_intact(storage.folder(place))) for place in commits
    ]


def _is_intact(folder: CheckpointFolder) -> bool:
    try:
        read_manifest(folder)
    except DamagedCheckpoint:
        return False
    return True


# Number of saves in the median: one delayed by a busy disk changes nothing
RECENT = 5


class CheckpointInterval:
    """Decides when rank 0 saves: at Daly's interval, from the plan at first and then from measured costs.

    An interval that the job sets in seconds stays fixed.
    """

    def __init__(self, *, interval_s: float, mtbf_s: float, measured: bool, now_s: float) -> None:
        self.interval_s = interval_s
        self._mtbf_s, self._measured = mtbf_s, measured
        self._began_s = now_s
        self._blocked_s: deque[float] = deque(maxlen=RECENT)
        self._persist_s: deque[float] = deque(maxlen=RECENT)

    @staticmethod
    def of(reliability: Reliability, checkpoint: Checkpoint, *, now_s: float) -> CheckpointInterval:
        """Build the interval of a plan and its job."""
        return CheckpointInterval(
            interval_s=reliability.interval_s,
            mtbf_s=reliability.mtbf_s,
            measured=checkpoint.interval_s == "auto",
            now_s=now_s,
        )

    def due(self, now_s: float) -> bool:
        """Return whether the interval has passed since the last save began."""
        return now_s - self._began_s >= self.interval_s

    def saved(self, *, now_s: float, blocked_s: float) -> None:
        """Record a save that began at `now_s` and blocked training for `blocked_s` seconds."""
        self._began_s = now_s
        self._blocked_s.append(blocked_s)
        self._update_interval()

    def persisted(self, seconds: float) -> None:
        """Record that the save was committed `seconds` after it began: the next may not begin sooner."""
        self._persist_s.append(seconds)
        self._update_interval()

    def _update_interval(self) -> None:
        if self._measured and self._blocked_s:
            best_s = daly_interval(median(self._blocked_s), self._mtbf_s)
            self.interval_s = max(best_s, median(self._persist_s) if self._persist_s else 0.0)
