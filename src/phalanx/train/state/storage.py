"""Storage of checkpoints: the interfaces that saving and loading use, and their implementation on a POSIX disk.

Object stores are in object_store.py. A disk commits by renaming a hidden folder. An object store cannot rename: the
files of ranks carry the attempt in their names, and the manifest, one PUT, names the attempt that counts. Everything
above is the same for both. Every failure is an OSError; methods documented to never fail may leave files behind,
which costs space but does not stop the run.
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
    """A folder of files."""

    @property
    def location(self) -> Location:
        """The location, for messages and for callers."""

    def open(self, name: str) -> ReadableFile:
        """Open a file of the folder."""

    def names(self) -> set[str]:
        """Return the names of its files, without hidden files."""

    def rank_files(self, attempt: str) -> CheckpointFolder:
        """Return the folder with the files of ranks that the manifest in this folder covers."""


class CheckpointDraft(Protocol):
    """A step that is being written, the same on all ranks that write it."""

    @property
    def location(self) -> Location:
        """The location of its files."""

    def begin(self) -> None:
        """Prepare the folder for this rank's files."""

    def create(self, name: str, size_bytes: int) -> AbstractContextManager[WritableFile]:
        """Create a file of known size."""

    def put(self, name: str, data: bytes) -> None:
        """Write a small new file; it is safe when this returns."""

    def note(self, name: str, data: bytes) -> None:
        """Write a small file for the running ranks, which see all of it or nothing."""

    def notes(self) -> set[str]:
        """Return the names of all notes, possibly among other names."""

    def read_notes(self, names: Sequence[str], *, most_bytes: int) -> list[bytes]:
        """Return the contents of several notes, in the order of `names`."""

    def seal(self, manifest: bytes, notes: Iterable[str]) -> None:
        """Do everything of the commit that comes before the fence; all files exist, notes are no longer needed."""

    def commit(self, manifest: bytes) -> None:
        """Make it the checkpoint of its step atomically, also if there was one."""

    def tidy(self) -> None:
        """Delete what the commit replaced; never fails."""

    def withdraw(self, names: Iterable[str]) -> None:
        """Delete files of this rank again; never fails."""

    def discard(self) -> None:
        """Delete the draft; never fails."""

    def is_gone(self) -> bool:
        """Return whether another process deleted it."""


class CheckpointStorage(Protocol):
    """All checkpoints of a run; one storage may serve several threads."""

    @property
    def root(self) -> Location:
        """The location of the checkpoints."""

    def folder(self, commit: Location) -> CheckpointFolder:
        """Return a commit for reading."""

    def commits(self) -> list[Location]:
        """Return the committed steps, newest first, without checking that they are intact."""

    def draft(self, step: int, attempt: str) -> CheckpointDraft:
        """Return a step for writing."""

    def delete(self, commit: Location) -> None:
        """Delete a commit such that half of it is never mistaken for a complete one; never fails."""

    def set_aside(self) -> dict[Location, int]:
        """Return checkpoints that a roll-back renamed, with their steps; none if the storage cannot rename."""

    def delete_set_aside(self, place: Location) -> None:
        """Delete one of those; never fails."""

    def sweep(self, older_than_s: float, *, spare: str = "") -> None:
        """Delete files of dead processes that have not changed for `older_than_s` seconds; never fails.

        Attempts of the family `spare` are alive.
        """


def open_storage(root: Location | str | CheckpointStorage) -> CheckpointStorage:
    """Return the storage at a location; a storage is returned as it is."""
    if not isinstance(root, str | Path | Url):
        return root
    location = parse_location(root)
    return ObjectStorage(connect_store(location), location) if isinstance(location, Url) else PosixStorage(location)


def open_folder(where: Location | str) -> CheckpointFolder:
    """Return one checkpoint at a location."""
    location = parse_location(where)
    return ObjectFolder(connect_store(location), location) if isinstance(location, Url) else PosixFolder(location)


# On a disk: a hidden folder per attempt, renamed when it is complete.

# Used as the attempt in the name of a commit that is deleted for good
PRUNED = "pruned"


class PosixFolder:
    """A checkpoint folder on a disk."""

    def __init__(self, path: Path) -> None:
        self.location = path

    def open(self, name: str) -> PosixReader:
        """Open a regular file of the folder; raise OSError if the folder is a symbolic link."""
        if self.location.is_symlink():
            raise OSError(None, "its folder is a link")
        return PosixReader(self.location / name)

    def names(self) -> set[str]:
        """Return the names of everything but hidden files: .nfs… belongs to the file system."""
        return {path.name for path in self.location.iterdir() if not path.name.startswith(".")}

    def rank_files(self, attempt: str) -> PosixFolder:
        """Return the folder itself."""
        return self


class PosixDraft:
    """A hidden folder next to the commits."""

    def __init__(self, root: Path, step: int, attempt: str) -> None:
        self.location = root / paths.draft_name(step, attempt)
        self._final = root / paths.commit_name(step)
        self._going = root / paths.outgoing_name(step, attempt)

    def begin(self) -> None:
        """Create the folder, if this rank is the first."""
        self.location.mkdir(parents=True, exist_ok=True)

    def create(self, name: str, size_bytes: int) -> PosixWriter:
        """Create a file that is flushed when it is closed."""
        return PosixWriter(self.location / name)

    def put(self, name: str, data: bytes) -> None:
        """Write a small file, and flush it."""
        write_synced_file(self.location / name, data)

    def note(self, name: str, data: bytes) -> None:
        """Write a note and rename it into place, without a flush."""
        publish_file(self.location / name, data)

    def notes(self) -> set[str]:
        """Return the names of all files: notes are next to the files of ranks."""
        return PosixFolder(self.location).names()

    def read_notes(self, names: Sequence[str], *, most_bytes: int) -> list[bytes]:
        """Read notes one after the other: a few bytes each, so that 4,096 take well under a second."""
        return [read_small_file(PosixReader(self.location / name), most_bytes=most_bytes) for name in names]

    def seal(self, manifest: bytes, notes: Iterable[str]) -> None:
        """Delete the notes, write the manifest, and flush the folder."""
        for name in notes:
            (self.location / name).unlink()
        write_synced_file(self.location / paths.MANIFEST, manifest)
        sync_folder(self.location)

    def commit(self, manifest: bytes) -> None:
        """Rename the folder; if the job fell back and reached this step again, the new commit replaces the old one."""
        if not self._final.exists():
            self.location.rename(self._final)
        elif not exchange_names(self.location, self._final):
            self._rename_twice()
        sync_folder(self._final.parent)

    def _rename_twice(self) -> None:
        """Replace on network file systems that cannot exchange names.

        `sweep` repairs a crash between the two renames.
        """
        self._final.rename(self._going)
        try:
            self.location.rename(self._final)
        except BaseException:
            self._going.rename(self._final)
            raise

    def tidy(self) -> None:
        """Delete the replaced commit, which now has one of this draft's names."""
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
        """Return whether the folder no longer exists."""
        return not self.location.exists()


class PosixStorage:
    """The folder that holds all checkpoints of a run."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def folder(self, commit: Location) -> PosixFolder:
        """Return a commit for reading."""
        return PosixFolder(self.root / commit.name)

    def commits(self) -> list[Location]:
        """Return the folders named after a step, newest first."""
        if not self.root.is_dir():
            return []
        steps = {path: paths.commit_step(path.name) for path in self.root.iterdir() if path.is_dir()}
        steps_and_paths = [(step, path) for path, step in steps.items() if step is not None]
        return [path for _, path in sorted(steps_and_paths, reverse=True)]

    def draft(self, step: int, attempt: str) -> PosixDraft:
        """Return a step for writing."""
        return PosixDraft(self.root, step, attempt)

    def delete(self, commit: Location) -> None:
        """Rename and delete a commit, so that half of it is never mistaken for a complete one."""
        going = self.root / paths.outgoing_name(paths.commit_step(commit.name) or 0, PRUNED)
        with suppress(OSError):
            shutil.rmtree(going, ignore_errors=True)
            (self.root / commit.name).rename(going)
            shutil.rmtree(going, ignore_errors=True)

    def set_aside(self) -> dict[Location, int]:
        """Return the folders renamed by `set_untrusted_aside`."""
        steps = {path: set_aside_step(path.name) for path in self.root.iterdir() if not path.is_symlink()}
        return {path: step for path, step in steps.items() if step is not None}

    def delete_set_aside(self, place: Location) -> None:
        """Delete a folder; half of it is never mistaken for a checkpoint, because its name is not a commit's."""
        shutil.rmtree(self.root / place.name, ignore_errors=True)

    def sweep(self, older_than_s: float, *, spare: str = "") -> None:
        """Delete drafts and half-deleted commits, except for drafts that still change."""
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
        """Return whether a commit was set aside by a process that died before it put another in its place."""
        replaced = (self.root / paths.commit_name(step)).exists()
        return not replaced and not path.name.endswith(f"-{PRUNED}") and (path / paths.MANIFEST).is_file()


# Files on a disk: written once and flushed, read with a bound, never through a symbolic link.

AT_FDCWD, RENAME_EXCHANGE = -100, 2  # linux/fcntl.h, linux/fs.h


class PosixWriter:
    """A new file, written from start to end; it is on the disk when the `with` block ends, and not before."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        self.size_bytes = 0

    def write(self, data: memoryview) -> None:
        """Append all of `data`; raise OSError if the disk is full."""
        while data:
            written = os.write(self._descriptor, data[:CHUNK_BYTES])
            self._start_write_back(written)
            data = data[written:]

    def _start_write_back(self, written: int) -> None:
        """Start write-back of full chunks now instead of at fsync: DONTNEED begins the write-back of dirty pages."""
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
    """Write a small new file, which is on the disk when this returns."""
    with PosixWriter(path) as writer:
        writer.write(memoryview(data))


def publish_file(path: Path, data: bytes) -> None:
    """Write a small file that a waiting reader sees complete or not at all.

    It is not flushed, because only running ranks read it.
    """
    hidden = path.with_name(f".{path.name}")
    hidden.write_bytes(data)
    hidden.replace(path)


def sync_folder(folder: Path) -> None:
    """Flush a folder, so that its file names survive a power failure."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def exchange_names(one: Path, other: Path) -> bool:
    """Swap two names atomically (Linux 3.15); return False if the file system or the C library cannot."""
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
    """A regular file open for reading at any offset.

    Not a memory map: a failing disk must be an error, not a SIGBUS.
    """

    def __init__(self, path: Path) -> None:
        # O_NONBLOCK: opening a pipe at this path must not hang; it has no effect on regular files.
        self._descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        file_stat = os.fstat(self._descriptor)
        if not stat.S_ISREG(file_stat.st_mode):
            os.close(self._descriptor)
            raise OSError(None, "it is not a plain file")
        self.size_bytes = file_stat.st_size

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill `buffer` with the bytes from `offset`; raise OSError if the file ends early."""
        while buffer:
            count = os.preadv(self._descriptor, [buffer[:CHUNK_BYTES]], offset)
            if not count:
                raise OSError(None, f"it ends at byte {offset:,}")
            buffer, offset = buffer[count:], offset + count

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self._descriptor)

    def __enter__(self) -> PosixReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
