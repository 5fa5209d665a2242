"""Deleting old checkpoints: never the newest good one, and never so that half of one could be taken for a whole."""

from __future__ import annotations

from phalanx.errors import Problem, SystemFailure
from phalanx.train.state.damage import Damaged
from phalanx.train.state.manifest import read_manifest
from phalanx.train.state.names import step_of
from phalanx.train.state.storage import Folder, Storage, storage_of
from phalanx.train.state.streams import reason
from phalanx.train.state.url import Place


def committed(root: Place | str) -> list[Place]:
    """The committed steps, newest first; whether they are whole is another question. Raises SystemFailure."""
    try:
        return storage_of(root).commits()
    except OSError as error:
        what = f"its checkpoints cannot be listed: {reason(error)}"
        raise SystemFailure(Problem(where=str(root), what=what, why="there may be some to go on from")) from error


def sweep(root: Place | str) -> None:
    """Take away what dead processes left half written. For a moment when no process saves, as between two epochs."""
    storage_of(root).sweep(0.0)


def drop_after(root: Place | str, step: int) -> list[Place]:
    """Delete commits of more steps than `step`: what was saved after it is not to be trusted."""
    storage = storage_of(root)
    gone = [place for place in committed(root) if (step_of(place.name) or 0) > step]
    for place in gone:
        storage.delete(place)
    return gone


def prune(storage: Storage, *, keep: int, stale_s: float, spare: str = "") -> list[Place]:
    """Delete commits older than the newest `keep` sound ones, and drafts that nobody has touched for `stale_s`.

    Broken folders newer than the oldest kept one stay: they do not count, and somebody may want to look at them.
    Drafts of the family of attempts `spare` stay whatever their age.
    """
    storage.sweep(stale_s, spare=spare)
    try:
        commits = storage.commits()
        kept = [place for place in commits if _sound(storage.folder(place))][: max(keep, 1)]
    except OSError:  # what will not go away costs space, not the run
        return []
    gone = commits[commits.index(kept[-1]) + 1 :] if kept else []
    for place in gone:
        storage.delete(place)
    return gone


def _sound(folder: Folder) -> bool:
    try:
        read_manifest(folder)
    except Damaged:
        return False
    return True
