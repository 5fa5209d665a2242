"""Storage of checkpoints: what saving and loading ask of it, and a POSIX disk; object stores are in object_store.py.

A disk commits by renaming a hidden folder. An object store cannot rename: the files of ranks carry the attempt in
their names, and the manifest, one PUT, names the attempt that counts. Everything above is the same for both. Whatever
fails is an OSError; what says that it never fails leaves behind what will not go away, which costs space and not the
run.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import stat
import time
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from types import TracebackType
from typing import Protocol

from phalanx.elastic.untrusted import set_aside_step
from phalanx.train.state import paths
from phalanx.train.state.object_store import ObjectFolder, ObjectStorage, connect_store
from phalanx.train.state.paths import (
    CHUNK_BYTES,
    Location,
    ReadableFile,
    Url,
    WritableFile,
    parse_location,
    read_small_file,
)


class CheckpointFolder(Protocol):
    """Files by name."""

    @property
    def location(self) -> Location:
        """Where it is, for messages and for callers."""

    def open(self, name: str) -> ReadableFile:
        """A file of it."""

    def names(self) -> set[str]:
        """What is in it, without hidden files."""

    def rank_files(self, attempt: str) -> CheckpointFolder:
        """Where the files of ranks lie that the manifest of this folder vouches for."""


class CheckpointDraft(Protocol):
    """A step that is being written, the same on all ranks that write it."""

    @property
    def location(self) -> Location:
        """Where its files go."""

    def begin(self) -> None:
        """Make room for this rank's files."""

    def create(self, name: str, size_bytes: int) -> AbstractContextManager[WritableFile]:
        """A new file of known size."""

    def put(self, name: str, data: bytes) -> None:
        """A small new file; safe when this returns."""

    def note(self, name: str, data: bytes) -> None:
        """A small file for the ranks that live now, seen whole or not at all."""

    def notes(self) -> set[str]:
        """The names of all notes; there may be others among them."""

    def read_notes(self, names: Sequence[str], *, most_bytes: int) -> list[bytes]:
        """Several notes at once, in the order asked for."""

    def seal(self, manifest: bytes, notes: Iterable[str]) -> None:
        """All files are there and the notes no longer needed: whatever of the commit comes before the fence."""

    def commit(self, manifest: bytes) -> None:
        """Make it the checkpoint of its step, in one moment, also where there was one."""

    def tidy(self) -> None:
        """Take away what the commit replaced; never fails."""

    def withdraw(self, names: Iterable[str]) -> None:
        """Take files of this rank away again; never fails."""

    def discard(self) -> None:
        """Take all of it away; never fails."""

    def is_gone(self) -> bool:
        """Whether somebody else took it away."""


class CheckpointStorage(Protocol):
    """All checkpoints of a run; one may serve several threads."""

    @property
    def root(self) -> Location:
        """Where they are."""

    def folder(self, commit: Location) -> CheckpointFolder:
        """A commit to read."""

    def commits(self) -> list[Location]:
        """Those that count, newest first; whether they are whole is another question."""

    def draft(self, step: int, attempt: str) -> CheckpointDraft:
        """A step to write."""

    def delete(self, commit: Location) -> None:
        """Take a commit away so that half of it is never taken for a whole; never fails."""

    def set_aside(self) -> dict[Location, int]:
        """Checkpoints that a roll-back renamed, with their steps; none where nothing can be renamed."""

    def delete_set_aside(self, place: Location) -> None:
        """Delete one of those; never fails."""

    def sweep(self, older_than_s: float, *, spare: str = "") -> None:
        """Take away what dead processes left, if nobody has touched it for so long; never fails.

        Attempts of the family `spare` are alive.
        """


def open_storage(root: Location | str | CheckpointStorage) -> CheckpointStorage:
    """The storage at a location; a storage is its own."""
    if not isinstance(root, str | Path | Url):
        return root
    location = parse_location(root)
    return ObjectStorage(connect_store(location), location) if isinstance(location, Url) else PosixStorage(location)


def open_folder(where: Location | str) -> CheckpointFolder:
    """One checkpoint at a location."""
    location = parse_location(where)
    return ObjectFolder(connect_store(location), location) if isinstance(location, Url) else PosixFolder(location)


# On a disk: a hidden folder per attempt, renamed when it is whole.

PRUNED = "pruned"  # stands for the attempt in the name of a commit that is deleted for good


class PosixFolder:
    """A folder."""

    def __init__(self, path: Path) -> None:
        self.location = path

    def open(self, name: str) -> PosixReader:
        """A plain file of it."""
        if self.location.is_symlink():
            raise OSError(None, "its folder is a link")
        return PosixReader(self.location / name)

    def names(self) -> set[str]:
        """Everything but hidden files: .nfs… is the file system's own."""
        return {path.name for path in self.location.iterdir() if not path.name.startswith(".")}

    def rank_files(self, attempt: str) -> PosixFolder:
        """The folder itself."""
        return self


class PosixDraft:
    """A hidden folder beside the commits."""

    def __init__(self, root: Path, step: int, attempt: str) -> None:
        self.location = root / paths.draft_name(step, attempt)
        self._final = root / paths.commit_name(step)
        self._going = root / paths.outgoing_name(step, attempt)

    def begin(self) -> None:
        """Make the folder, if this rank is the first."""
        self.location.mkdir(parents=True, exist_ok=True)

    def create(self, name: str, size_bytes: int) -> PosixWriter:
        """A file that is flushed when it is closed."""
        return PosixWriter(self.location / name)

    def put(self, name: str, data: bytes) -> None:
        """A small file, flushed."""
        write_synced_file(self.location / name, data)

    def note(self, name: str, data: bytes) -> None:
        """Renamed into place, and not flushed."""
        publish_file(self.location / name, data)

    def notes(self) -> set[str]:
        """They lie beside the files of ranks."""
        return PosixFolder(self.location).names()

    def read_notes(self, names: Sequence[str], *, most_bytes: int) -> list[bytes]:
        """One after the other: a few bytes each, so that 4,096 are read in well under a second."""
        return [read_small_file(PosixReader(self.location / name), most_bytes=most_bytes) for name in names]

    def seal(self, manifest: bytes, notes: Iterable[str]) -> None:
        """Make the folder what it will be, down to the disk."""
        for name in notes:
            (self.location / name).unlink()
        write_synced_file(self.location / paths.MANIFEST, manifest)
        sync_folder(self.location)

    def commit(self, manifest: bytes) -> None:
        """Rename. Where the job fell back behind this step and came here again, the new one replaces the old one."""
        if not self._final.exists():
            self.location.rename(self._final)
        elif not exchange_names(self.location, self._final):
            self._rename_twice()
        sync_folder(self._final.parent)

    def _rename_twice(self) -> None:
        """Some network file systems cannot exchange two names; a process that dies between leaves it to `sweep`."""
        self._final.rename(self._going)
        try:
            self.location.rename(self._final)
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
                (self.location / name).unlink(missing_ok=True)

    def discard(self) -> None:
        """Delete the folder."""
        shutil.rmtree(self.location, ignore_errors=True)

    def is_gone(self) -> bool:
        """Whether the folder is no longer there."""
        return not self.location.exists()


class PosixStorage:
    """The folder that holds all checkpoints of a run."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def folder(self, commit: Location) -> PosixFolder:
        """A commit to read."""
        return PosixFolder(self.root / commit.name)

    def commits(self) -> list[Location]:
        """Folders named after a step, newest first."""
        if not self.root.is_dir():
            return []
        steps = {path: paths.commit_step(path.name) for path in self.root.iterdir() if path.is_dir()}
        found = [(step, path) for path, step in steps.items() if step is not None]
        return [path for _, path in sorted(found, reverse=True)]

    def draft(self, step: int, attempt: str) -> PosixDraft:
        """A step to write."""
        return PosixDraft(self.root, step, attempt)

    def delete(self, commit: Location) -> None:
        """Rename it first, so that half of it is never taken for a whole."""
        going = self.root / paths.outgoing_name(paths.commit_step(commit.name) or 0, PRUNED)
        with suppress(OSError):
            shutil.rmtree(going, ignore_errors=True)
            (self.root / commit.name).rename(going)
            shutil.rmtree(going, ignore_errors=True)

    def set_aside(self) -> dict[Location, int]:
        """Folders renamed by `set_untrusted_aside`."""
        steps = {path: set_aside_step(path.name) for path in self.root.iterdir() if not path.is_symlink()}
        return {path: step for path, step in steps.items() if step is not None}

    def delete_set_aside(self, place: Location) -> None:
        """Half of one is never taken for a checkpoint: its name is none."""
        shutil.rmtree(self.root / place.name, ignore_errors=True)

    def sweep(self, older_than_s: float, *, spare: str = "") -> None:
        """Drafts and half-deleted commits. A draft that still changes belongs to somebody."""
        with suppress(OSError):
            for path in list(self.root.iterdir()):
                with suppress(OSError):
                    if paths.attempt_family(paths.draft_attempt(path.name) or "") != spare or not spare:
                        self._sweep_path(path, older_than_s)

    def _sweep_path(self, path: Path, older_than_s: float) -> None:
        step = paths.outgoing_step(path.name)
        if step is None and not path.name.startswith(paths.DRAFT):
            return
        if step is not None and self._is_orphan(path, step):
            path.rename(self.root / paths.commit_name(step))
        elif step is not None or time.time() - path.stat().st_mtime >= older_than_s:
            shutil.rmtree(path, ignore_errors=True)

    def _is_orphan(self, path: Path, step: int) -> bool:
        """Whether a commit was set aside by a process that died before it put another in its place."""
        replaced = (self.root / paths.commit_name(step)).exists()
        return not replaced and not path.name.endswith(f"-{PRUNED}") and (path / paths.MANIFEST).is_file()


# Files on a disk: written once and flushed, read with a bound, never through a link.

AT_FDCWD, RENAME_EXCHANGE = -100, 2  # linux/fcntl.h, linux/fs.h


class PosixWriter:
    """A new file, written from start to end; it is on the disk when the `with` block ends, and not before."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        self.size_bytes = 0

    def write(self, data: memoryview) -> None:
        """Append all of `data`; raises OSError when the disk is full."""
        while data:
            written = os.write(self._descriptor, data[:CHUNK_BYTES])
            self._start_write_back(written)
            data = data[written:]

    def _start_write_back(self, written: int) -> None:
        """Have the kernel start on full chunks now, not at fsync: DONTNEED begins the write-back of dirty pages."""
        begin = self.size_bytes // CHUNK_BYTES * CHUNK_BYTES
        self.size_bytes += written
        end = self.size_bytes // CHUNK_BYTES * CHUNK_BYTES
        if end > begin:
            os.posix_fadvise(self._descriptor, begin, end - begin, os.POSIX_FADV_DONTNEED)

    def __enter__(self) -> PosixWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        try:
            if kind is None:
                os.fsync(self._descriptor)
        finally:
            os.close(self._descriptor)


def write_synced_file(path: Path, data: bytes) -> None:
    """A small new file, on the disk when this returns."""
    with PosixWriter(path) as writer:
        writer.write(memoryview(data))


def publish_file(path: Path, data: bytes) -> None:
    """A small file that a waiting reader sees whole or not at all. Not flushed: it is for the living only."""
    hidden = path.with_name(f".{path.name}")
    hidden.write_bytes(data)
    hidden.replace(path)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def exchange_names(one: Path, other: Path) -> bool:
    """Swap two names in one moment (Linux 3.15); False where the file system or the C library cannot."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is None:
        return False
    if call(AT_FDCWD, os.fsencode(one), AT_FDCWD, os.fsencode(other), RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        return False
    raise OSError(code, os.strerror(code))


class PosixReader:
    """A plain file open for reading at any offset. Not a memory map: a failing disk must be an error, not a SIGBUS."""

    def __init__(self, path: Path) -> None:
        # O_NONBLOCK: opening a pipe somebody left here must not hang; it has no effect on plain files.
        self._descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        found = os.fstat(self._descriptor)
        if not stat.S_ISREG(found.st_mode):
            os.close(self._descriptor)
            raise OSError(None, "it is not a plain file")
        self.size_bytes = found.st_size

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill `buffer` with the bytes from `offset` on; raises OSError where the file ends early."""
        while buffer:
            count = os.preadv(self._descriptor, [buffer[:CHUNK_BYTES]], offset)
            if not count:
                raise OSError(None, f"it ends at byte {offset:,}")
            buffer, offset = buffer[count:], offset + count

    def close(self) -> None:
        """Give the descriptor back."""
        os.close(self._descriptor)

    def __enter__(self) -> PosixReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
