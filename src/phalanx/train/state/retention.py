"""When the next checkpoint is due, and which old ones are deleted.

Never the newest good one, and never so that half of one could be taken for a whole.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
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


def delete_commits_after(root: Location | str, step: int) -> list[Location]:
    """Delete commits of more steps than `step`: what was saved after it is not to be trusted."""
    storage = open_storage(root)
    gone = [place for place in list_commits(root) if (commit_step(place.name) or 0) > step]
    for place in gone:
        storage.delete(place)
    return gone


def prune_commits(storage: CheckpointStorage, *, keep: int, stale_s: float, spare: str = "") -> list[Location]:
    """Delete commits older than the newest `keep` sound ones, and drafts that nobody has touched for `stale_s`.

    Broken folders newer than the oldest kept one stay: they do not count, and somebody may want to look at them.
    Drafts of the family of attempts `spare` stay whatever their age.
    """
    storage.sweep(stale_s, spare=spare)
    try:
        commits = storage.commits()
        kept = [place for place in commits if _is_intact(storage.folder(place))][: max(keep, 1)]
    except OSError:  # what will not go away costs space, not the run
        return []
    gone = commits[commits.index(kept[-1]) + 1 :] if kept else []
    for place in gone:
        storage.delete(place)
    return gone


def make_room(storage: CheckpointStorage, fence: Callable[[], AbstractContextManager[None]] = nullcontext) -> list[int]:
    """Delete old commits, oldest first, until another like the newest sound one fits on the disk; the steps that went.

    The newest sound one stays whatever happens. Deletes inside `fence()`, which is entered where there is something to
    delete. An object store has no end that could be asked for.
    """
    root, gone = storage.root, []
    if not isinstance(root, Path):
        return []
    try:
        commits = storage.commits()
        newest = next((place for place in commits if _is_intact(storage.folder(place))), None)
        if newest is None:
            return []
        ranks = read_manifest(storage.folder(newest)).ranks
        needed_bytes = ROOM * sum(one.data_bytes + one.index_bytes for one in ranks)
        for place in reversed(commits[commits.index(newest) + 1 :]):
            disk = os.statvfs(root)
            if disk.f_bavail * disk.f_frsize >= needed_bytes:
                break
            with fence():
                storage.delete(place)
            gone.append(commit_step(place.name) or 0)
    except (OSError, DamagedCheckpoint):  # then the save itself tells what is wrong
        pass
    return gone


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
