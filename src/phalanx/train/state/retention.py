"""When the next checkpoint is due, and which old ones are deleted.

Never the newest intact one, never the newest from before steps that may be unsound, and never so that half of one could
be taken for a whole.
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

ROOM = 1.05  # of a checkpoint's bytes: blocks, folders, the manifest, and the events of the steps until then


def remove_drafts(root: Location | str) -> None:
    """Take away what dead processes left half written. For when no process saves, as between two generations."""
    open_storage(root).sweep(0.0)


# Which checkpoints go: decided from steps alone.


@dataclass(frozen=True, kw_only=True, slots=True)
class CommitState:
    """A committed step, and whether its manifest can be read."""

    step: int
    is_intact: bool


def newest_trusted(commits: Sequence[CommitState], trusted_step: int | None) -> int | None:
    """The newest intact step up to `trusted_step`, of any step without one; None where there is none.

    >>> commits = [CommitState(step=step, is_intact=step != 20) for step in (24, 22, 20, 19)]
    >>> newest_trusted(commits, None), newest_trusted(commits, 20), newest_trusted(commits, 18)
    (24, 19, None)
    """
    steps = (one.step for one in commits if one.is_intact and (trusted_step is None or one.step <= trusted_step))
    return max(steps, default=None)


def steps_to_prune(commits: Sequence[CommitState], *, keep: int, trusted_step: int | None = None) -> set[int]:
    """Steps of `commits`, newest first, that need not be kept.

    The newest `keep` intact ones stay. What was saved after `trusted_step` may be unsound: the newest intact one up to
    there stays too, in the place of the oldest of them, so that a long streak of bad steps takes no more disk. Damaged
    ones stay where they are newer than the oldest that is kept: a person may want to look at them.

    >>> commits = [CommitState(step=step, is_intact=True) for step in (23, 22, 21, 20, 19)]
    >>> sorted(steps_to_prune(commits, keep=3)), sorted(steps_to_prune(commits, keep=3, trusted_step=20))
    ([19, 20], [19, 21])
    """
    kept = [one.step for one in commits if one.is_intact][: max(keep, 1)]
    if not kept:
        return set()
    trusted = newest_trusted(commits, trusted_step)
    if trusted is not None and trusted not in kept:
        kept = [*kept[: max(keep - 1, 1)], trusted]
    return {one.step for one in commits if one.step not in kept and (one.is_intact or one.step < min(kept))}


def expendable_steps(commits: Sequence[CommitState], *, trusted_step: int | None = None) -> list[int]:
    """Steps that a full disk may cost, the first to go first: neither the newest intact one nor the newest trusted one.

    >>> commits = [CommitState(step=step, is_intact=True) for step in (23, 22, 20, 19)]
    >>> expendable_steps(commits), expendable_steps(commits, trusted_step=20)
    ([19, 20, 22], [19, 22])
    """
    newest, trusted = newest_trusted(commits, None), newest_trusted(commits, trusted_step)
    return sorted(one.step for one in commits if newest is not None and one.step < newest and one.step != trusted)


def replaced_steps(set_aside: Iterable[int], commits: Sequence[CommitState], *, trusted_step: int) -> set[int]:
    """Steps set aside by a roll-back that training has come past: a trusted checkpoint is as far as they were.

    >>> replaced_steps([22, 24], [CommitState(step=23, is_intact=True)], trusted_step=23)
    {22}
    """
    trusted = newest_trusted(commits, trusted_step)
    return {step for step in set_aside if trusted is not None and step <= trusted}


# Deleting them.


def delete_commits_after(root: Location | str, step: int) -> list[int]:
    """Delete commits of more than `step` steps, which are not to be trusted; the steps that went.

    Only where an intact one up to there is left: what has no replacement yet is not deleted.
    """
    storage = open_storage(root)
    commits = list_commits(root)
    if newest_trusted(_commit_states(storage, commits), step) is None:
        return []
    gone = [place for place in commits if (commit_step(place.name) or 0) > step]
    for place in gone:
        storage.delete(place)
    return [commit_step(place.name) or 0 for place in gone]


def prune_commits(
    storage: CheckpointStorage, *, keep: int, stale_s: float, spare: str = "", trusted_step: int | None = None
) -> list[Location]:
    """Delete commits that `steps_to_prune` names, and drafts that were not changed for `stale_s`.

    Drafts of the family of attempts `spare` stay whatever their age.
    """
    storage.sweep(stale_s, spare=spare)
    try:
        commits = storage.commits()
        surplus = steps_to_prune(_commit_states(storage, commits), keep=keep, trusted_step=trusted_step)
    except OSError:  # what will not go away costs space, not the run
        return []
    gone = [place for place in commits if commit_step(place.name) in surplus]
    for place in gone:
        storage.delete(place)
    return gone


def delete_replaced(storage: CheckpointStorage, *, trusted_step: int) -> list[int]:
    """Delete the checkpoints that a roll-back set aside and training has replaced; their steps."""
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
    """The line for a person once the checkpoints that a roll-back gave up are deleted.

    >>> untrusted_deleted([24, 22], step=25)
    'step 25: the checkpoints of step 22, 24, given up by a roll-back, are replaced and deleted'
    """
    named = ", ".join(f"{one:,}" for one in sorted(steps))
    return f"step {step:,}: the checkpoints of step {named}, given up by a roll-back, are replaced and deleted"


def make_room(
    storage: CheckpointStorage,
    fence: Callable[[], AbstractContextManager[None]] = nullcontext,
    *,
    trusted_step: int | None = None,
) -> list[int]:
    """Delete old commits, oldest first, until another like the newest sound one fits on the disk; the steps that went.

    What a roll-back set aside goes first; `expendable_steps` says what else may go. Deletes inside `fence()`, which is
    entered where there is something to delete. An object store has no end that could be asked for.
    """
    root = storage.root
    gone: list[int] = []
    if not isinstance(root, Path):
        return []
    try:
        commits = storage.commits()
        newest = next((place for place in commits if _is_intact(storage.folder(place))), None)
        if newest is None:
            return []
        ranks = read_manifest(storage.folder(newest)).ranks
        needed_bytes = ROOM * sum(one.data_bytes + one.index_bytes for one in ranks)
        if _free_bytes(root) >= needed_bytes:
            return []
        for place, step in sorted(storage.set_aside().items(), key=lambda item: item[1]):
            if _free_bytes(root) >= needed_bytes:
                return gone
            with fence():
                storage.delete_set_aside(place)
            gone.append(step)
        places = {commit_step(place.name) or 0: place for place in commits}
        for step in expendable_steps(_commit_states(storage, commits), trusted_step=trusted_step):
            if _free_bytes(root) >= needed_bytes:
                break
            with fence():
                storage.delete(places[step])
            gone.append(step)
    except (OSError, DamagedCheckpoint):  # then the save itself tells what is wrong
        pass
    return gone


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


RECENT = 5  # saves whose median counts: one held up by a busy disk changes nothing


class CheckpointInterval:
    """When rank 0 saves: Daly's interval, from the plan at first and from measured costs after that.

    An interval that the job sets in seconds stays as it is.
    """

    def __init__(self, *, interval_s: float, mtbf_s: float, measured: bool, now_s: float) -> None:
        self.interval_s = interval_s
        self._mtbf_s, self._measured = mtbf_s, measured
        self._began_s = now_s
        self._blocked_s: deque[float] = deque(maxlen=RECENT)
        self._persist_s: deque[float] = deque(maxlen=RECENT)

    @staticmethod
    def of(reliability: Reliability, checkpoint: Checkpoint, *, now_s: float) -> CheckpointInterval:
        """That of a plan and its job."""
        return CheckpointInterval(
            interval_s=reliability.interval_s,
            mtbf_s=reliability.mtbf_s,
            measured=checkpoint.interval_s == "auto",
            now_s=now_s,
        )

    def due(self, now_s: float) -> bool:
        """Whether the interval has passed since the last save began."""
        return now_s - self._began_s >= self.interval_s

    def saved(self, *, now_s: float, blocked_s: float) -> None:
        """A save began at `now_s` and held the training up for `blocked_s`."""
        self._began_s = now_s
        self._blocked_s.append(blocked_s)
        self._update_interval()

    def persisted(self, seconds: float) -> None:
        """The save was committed `seconds` after it began: the next may not begin sooner."""
        self._persist_s.append(seconds)
        self._update_interval()

    def _update_interval(self) -> None:
        if self._measured and self._blocked_s:
            best_s = daly_interval(median(self._blocked_s), self._mtbf_s)
            self.interval_s = max(best_s, median(self._persist_s) if self._persist_s else 0.0)
