"""Checkpoints on a disk: a hidden folder per attempt, renamed when it is whole."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from phalanx.train.state import names
from phalanx.train.state.disk import Reader, Writer, exchange, publish, sync_folder, write_file
from phalanx.train.state.streams import read_whole
from phalanx.train.state.url import Place

PRUNED = "pruned"  # stands for the attempt in the name of a commit that is deleted for good


class PosixFolder:
    """A folder."""

    def __init__(self, path: Path) -> None:
        self.place = path

    def open(self, name: str) -> Reader:
        """A plain file of it."""
        if self.place.is_symlink():
            raise OSError(None, "its folder is a link")
        return Reader(self.place / name)

    def names(self) -> set[str]:
        """Everything but hidden files: .nfs… is the file system's own."""
        return {path.name for path in self.place.iterdir() if not path.name.startswith(".")}

    def parts(self, attempt: str) -> PosixFolder:
        """The folder itself."""
        return self


class PosixDraft:
    """A hidden folder beside the commits."""

    def __init__(self, root: Path, step: int, attempt: str) -> None:
        self.place = root / names.draft_name(step, attempt)
        self._final = root / names.commit_name(step)
        self._going = root / names.going_name(step, attempt)

    def begin(self) -> None:
        """Make the folder, if this rank is the first."""
        self.place.mkdir(parents=True, exist_ok=True)

    def create(self, name: str, size_bytes: int) -> Writer:
        """A file that is flushed when it is closed."""
        return Writer(self.place / name)

    def put(self, name: str, data: bytes) -> None:
        """A small file, flushed."""
        write_file(self.place / name, data)

    def note(self, name: str, data: bytes) -> None:
        """Renamed into place, and not flushed."""
        publish(self.place / name, data)

    def notes(self) -> set[str]:
        """They lie beside the parts."""
        return PosixFolder(self.place).names()

    def read_notes(self, names: Sequence[str], *, most_bytes: int) -> list[bytes]:
        """One after the other: a few bytes each, so that 4,096 are read in well under a second."""
        return [read_whole(Reader(self.place / name), most_bytes=most_bytes) for name in names]

    def seal(self, manifest: bytes, notes: Iterable[str]) -> None:
        """Make the folder what it will be, down to the disk."""
        for name in notes:
            (self.place / name).unlink()
        write_file(self.place / names.MANIFEST, manifest)
        sync_folder(self.place)

    def commit(self, manifest: bytes) -> None:
        """Rename. Where the job fell back behind this step and came here again, the new one replaces the old one."""
        if not self._final.exists():
            self.place.rename(self._final)
        elif not exchange(self.place, self._final):
            self._rename_twice()
        sync_folder(self._final.parent)

    def _rename_twice(self) -> None:
        """Some network file systems cannot exchange two names; a process that dies between leaves it to `sweep`."""
        self._final.rename(self._going)
        try:
            self.place.rename(self._final)
        except BaseException:
            self._going.rename(self._final)
            raise

    def tidy(self) -> None:
        """The commit that was replaced lies under one of our names."""
        self.discard()
        shutil.rmtree(self._going, ignore_errors=True)

    def withdraw(self, names: Iterable[str]) -> None:
        """Delete files of the folder."""
        for name in names:
            with suppress(OSError):
                (self.place / name).unlink(missing_ok=True)

    def discard(self) -> None:
        """Delete the folder."""
        shutil.rmtree(self.place, ignore_errors=True)

    def is_gone(self) -> bool:
        """Whether the folder is no longer there."""
        return not self.place.exists()


class PosixStorage:
    """The folder that holds all checkpoints of a run."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def folder(self, commit: Place) -> PosixFolder:
        """A commit to read."""
        return PosixFolder(self.root / commit.name)

    def commits(self) -> list[Place]:
        """Folders named after a step, newest first."""
        if not self.root.is_dir():
            return []
        steps = {path: names.step_of(path.name) for path in self.root.iterdir() if path.is_dir()}
        found = [(step, path) for path, step in steps.items() if step is not None]
        return [path for _, path in sorted(found, reverse=True)]

    def draft(self, step: int, attempt: str) -> PosixDraft:
        """A step to write."""
        return PosixDraft(self.root, step, attempt)

    def delete(self, commit: Place) -> None:
        """Rename it first, so that half of it is never taken for a whole."""
        going = self.root / names.going_name(names.step_of(commit.name) or 0, PRUNED)
        with suppress(OSError):
            shutil.rmtree(going, ignore_errors=True)
            (self.root / commit.name).rename(going)
            shutil.rmtree(going, ignore_errors=True)

    def sweep(self, older_than_s: float, *, spare: str = "") -> None:
        """Drafts and half-deleted commits. A draft that still changes belongs to somebody."""
        with suppress(OSError):
            for path in list(self.root.iterdir()):
                with suppress(OSError):
                    if names.family(names.draft_attempt(path.name) or "") != spare or not spare:
                        self._sweep(path, older_than_s)

    def _sweep(self, path: Path, older_than_s: float) -> None:
        step = names.going_step(path.name)
        if step is None and not path.name.startswith(names.DRAFT):
            return
        if step is not None and self._is_orphan(path, step):
            path.rename(self.root / names.commit_name(step))
        elif step is not None or time.time() - path.stat().st_mtime >= older_than_s:
            shutil.rmtree(path, ignore_errors=True)

    def _is_orphan(self, path: Path, step: int) -> bool:
        """Whether a commit was set aside by a process that died before it put another in its place."""
        replaced = (self.root / names.commit_name(step)).exists()
        return not replaced and not path.name.endswith(f"-{PRUNED}") and (path / names.MANIFEST).is_file()
