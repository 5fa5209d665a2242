"""Deleting old checkpoints: never the newest good one, and never so that half of one could be taken for a whole."""

from __future__ import annotations

import shutil
import time
from contextlib import suppress
from pathlib import Path

from phalanx.train.checkpoint import names
from phalanx.train.checkpoint.damage import Damaged
from phalanx.train.checkpoint.manifest import read_manifest


def prune(root: Path, *, keep: int, stale_s: float) -> list[Path]:
    """Delete commits older than the newest `keep` sound ones, and drafts that nobody has touched for `stale_s`.

    Broken folders newer than the oldest kept one stay: they do not count, and somebody may want to look at them.
    """
    try:
        return _prune(root, keep, stale_s)
    except OSError:  # what will not go away costs space, not the run
        return []


def _prune(root: Path, keep: int, stale_s: float) -> list[Path]:
    commits = committed(root)
    sound = [folder for folder in commits if _sound(folder)]
    kept = sound[: max(keep, 1)]
    gone = commits[commits.index(kept[-1]) + 1 :] if kept else []
    for folder in gone:
        _delete(folder)
    for left in _left_behind(root, stale_s):
        shutil.rmtree(left, ignore_errors=True)
    return gone


def committed(root: Path) -> list[Path]:
    """The folders of committed steps, newest first; whether they are whole is another question."""
    if not root.is_dir():
        return []
    found = [path for path in root.iterdir() if names.step_of(path) is not None and path.is_dir()]
    return sorted(found, key=lambda path: names.step_of(path) or 0, reverse=True)


def _sound(folder: Path) -> bool:
    try:
        read_manifest(folder)
    except Damaged:
        return False
    return True


def _delete(folder: Path) -> None:
    going = folder.with_name(names.going_name(names.step_of(folder) or 0, "pruned"))
    with suppress(OSError):
        shutil.rmtree(going, ignore_errors=True)
        folder.rename(going)
        shutil.rmtree(going, ignore_errors=True)


def _left_behind(root: Path, stale_s: float) -> list[Path]:
    """Drafts and half-deleted commits of processes that died. A draft that still changes belongs to somebody."""
    now, found = time.time(), []
    for path in root.iterdir():
        with suppress(OSError):
            going = path.name.startswith(names.GOING)
            old = now - path.stat().st_mtime > stale_s
            if going or (path.name.startswith(names.DRAFT) and old):
                found.append(path)
    return found
