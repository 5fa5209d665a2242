"""Checkpoints in an object store, through fsspec: files under the attempt's name, the manifest last and in one PUT.

prefix/step-00000100/manifest.json                       the commit: it names the attempt that counts
prefix/step-00000100/ATTEMPT/rank-00000.safetensors      as on a disk
prefix/step-00000100/ATTEMPT/notes/rank-00000.done       until the commit: apart, for they may outlive rank 0

Credentials come from the environment or the store's own configuration files; Phalanx does not read them.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from types import TracebackType
from typing import Any

from phalanx.errors import mistake
from phalanx.train.state import paths
from phalanx.train.state.paths import CHUNK_BYTES, STORE_DRIVERS, Location, Url

MOST_PARTS = 9_000  # S3 allows 10,000 parts per upload


def connect_store(location: Url) -> Any:
    """Return the file system of a URL. Listings are not cached, because other ranks write at the same time."""
    # Imported here because most runs keep their checkpoints on a disk
    import fsspec

    try:
        return fsspec.filesystem(location.protocol, use_listings_cache=False)
    except ImportError as error:
        driver = STORE_DRIVERS[location.protocol]
        fix = "pip install 'phalanx[s3]'" if location.protocol == "s3" else f"pip install {driver}"
        raise mistake("checkpoint.path", f"{location} needs {driver}", fix=fix) from error


@contextmanager
def as_os_errors() -> Iterator[None]:
    """Convert any exception of a driver to OSError, since each driver has its own exception classes."""
    try:
        yield
    except FileNotFoundError as error:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT)) from error
    except OSError:
        raise
    except Exception as error:
        raise OSError(None, f"{type(error).__name__}: {error}") from error


class ObjectReader:
    """An object, read by ranges."""

    def __init__(self, store: Any, location: Url) -> None:
        self._store, self._key = store, location.key
        with as_os_errors():
            info = store.info(self._key)
        if info["type"] != "file":
            raise OSError(None, "it is not an object")
        self.size_bytes = int(info["size"])

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill `buffer` with the bytes from `offset`, in ranges of bounded size."""
        while buffer:
            count = min(len(buffer), CHUNK_BYTES)
            with as_os_errors():
                data = self._store.cat_file(self._key, start=offset, end=offset + count)
            if not 0 < len(data) <= count:
                raise OSError(None, f"{len(data):,} bytes came for {count:,} from byte {offset:,} on")
            buffer[: len(data)] = data
            buffer, offset = buffer[len(data) :], offset + len(data)

    def close(self) -> None:
        """Do nothing: no connection is open between two ranges."""


class ObjectWriter:
    """An object, uploaded in parts with the memory of one part.

    It appears when the `with` block ends without an error.
    """

    def __init__(self, store: Any, location: Url, size_bytes: int) -> None:
        self._part_bytes = max(CHUNK_BYTES, -(-size_bytes // MOST_PARTS))
        with as_os_errors():
            self._file = store.open(location.key, "wb", block_size=self._part_bytes)

    def write(self, data: memoryview) -> None:
        """Append all of `data`."""
        while data:
            with as_os_errors():
                self._file.write(data[: self._part_bytes])
            data = data[self._part_bytes :]

    def __enter__(self) -> ObjectWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if kind is None:
            with as_os_errors():
                self._file.close()
            return
        with suppress(Exception):
            self._file.discard()  # closing would create half an object
        self._file.closed = True  # otherwise the garbage collector would close it


class ObjectFolder:
    """All objects under a prefix."""

    def __init__(self, store: Any, location: Url) -> None:
        self._store, self.location = store, location

    def open(self, name: str) -> ObjectReader:
        """Open one of the objects."""
        return ObjectReader(self._store, self.location / name)

    def names(self) -> set[str]:
        """Return the names of objects directly under the prefix."""
        return {name for name, kind in _list_prefix(self._store, self.location).items() if kind == "file"}

    def rank_files(self, attempt: str) -> ObjectFolder:
        """Return the prefix of the attempt that the manifest names, which `read_manifest` has validated."""
        return ObjectFolder(self._store, self.location / attempt)


class ObjectDraft:
    """The files of one attempt."""

    def __init__(self, store: Any, root: Url, step: int, attempt: str) -> None:
        # Raises UserError for an invalid attempt
        paths.draft_name(step, attempt)
        self._store, self._attempt = store, attempt
        self._commit = root / paths.commit_name(step)
        self.location = self._commit / attempt
        self._notes = self.location / "notes"

    def begin(self) -> None:
        """Do nothing: a prefix need not be created."""

    def create(self, name: str, size_bytes: int) -> ObjectWriter:
        """Create an object of known size."""
        return ObjectWriter(self._store, self.location / name, size_bytes)

    def put(self, name: str, data: bytes) -> None:
        """Write an object in one PUT: it appears complete or not at all."""
        with as_os_errors():
            self._store.pipe_file((self.location / name).key, data)

    def note(self, name: str, data: bytes) -> None:
        """Write a note in one PUT, apart from the files of ranks."""
        with as_os_errors():
            self._store.pipe_file((self._notes / name).key, data)

    def notes(self) -> set[str]:
        """Return the names of the notes from one listing, which takes a request per 1,000."""
        return ObjectFolder(self._store, self._notes).names()

    def read_notes(self, names: Sequence[str], *, most_bytes: int) -> list[bytes]:
        """Read the notes concurrently: one after the other, 4,096 requests of 20 ms would take over a minute."""
        keys = [(self._notes / name).key for name in names]
        with as_os_errors():
            contents = self._store.cat_ranges(keys, [0] * len(keys), [most_bytes] * len(keys), on_error="raise")
        return [bytes(data) for data in contents]

    def seal(self, manifest: bytes, notes: Iterable[str]) -> None:
        """Do nothing: the commit is the PUT of the manifest."""

    def commit(self, manifest: bytes) -> None:
        """PUT the manifest; of two commits of one step the later counts, and its files have different names."""
        with as_os_errors():
            self._store.pipe_file((self._commit / paths.MANIFEST).key, manifest)

    def tidy(self) -> None:
        """Delete notes, and the files of attempts that no longer count."""
        with suppress(OSError):
            _remove_key(self._store, self._notes.key)
            for name, kind in _list_prefix(self._store, self._commit).items():
                if kind == "directory" and name != self._attempt:
                    _remove_key(self._store, (self._commit / name).key)

    def withdraw(self, names: Iterable[str]) -> None:
        """Delete objects of the attempt."""
        for name in names:
            for location in (self.location, self._notes):
                with suppress(OSError), as_os_errors():
                    self._store.rm_file((location / name).key)

    def discard(self) -> None:
        """Delete the attempt."""
        _remove_key(self._store, self.location.key)

    def is_gone(self) -> bool:
        """Return False: a prefix cannot be taken away from ranks that still write under it."""
        return False


class ObjectStorage:
    """The prefix that holds all checkpoints of a run."""

    def __init__(self, store: Any, root: Url) -> None:
        self._store, self.root = store, root

    def folder(self, commit: Location) -> ObjectFolder:
        """Return a commit for reading."""
        return ObjectFolder(self._store, self.root / commit.name)

    def commits(self) -> list[Location]:
        """Return steps with a manifest, newest first; files without one are unfinished work."""
        return [location for location in self._step_prefixes() if self._is_committed(location)]

    def _step_prefixes(self) -> list[Url]:
        all_steps = map(paths.commit_step, _list_prefix(self._store, self.root))
        steps = sorted((step for step in all_steps if step is not None), reverse=True)
        return [self.root / paths.commit_name(step) for step in steps]

    def _is_committed(self, location: Url) -> bool:
        with as_os_errors():
            return bool(self._store.isfile((location / paths.MANIFEST).key))

    def draft(self, step: int, attempt: str) -> ObjectDraft:
        """Return a step for writing."""
        return ObjectDraft(self._store, self.root, step, attempt)

    def delete(self, commit: Location) -> None:
        """Delete the manifest first, so that a half-deleted commit is never mistaken for a complete one."""
        key = (self.root / commit.name).key
        with suppress(OSError), as_os_errors():
            self._store.rm_file(f"{key}/{paths.MANIFEST}")
            _remove_key(self._store, key)

    def set_aside(self) -> dict[Location, int]:
        """Return nothing: a store cannot rename."""
        return {}

    def delete_set_aside(self, place: Location) -> None:
        """Do nothing: there are none."""

    def sweep(self, older_than_s: float, *, spare: str = "") -> None:
        """Delete steps without a manifest that have not been written to for `older_than_s` seconds."""
        with suppress(OSError):
            for location in self._step_prefixes():
                alive = spare in map(paths.attempt_family, _list_prefix(self._store, location))
                if not alive and not self._is_committed(location) and self._age_s(location) >= older_than_s:
                    _remove_key(self._store, location.key)

    def _age_s(self, location: Url) -> float:
        with as_os_errors():
            objects = self._store.find(location.key, detail=True)
        times = [_written_s(entry) for entry in objects.values()]
        return time.time() - max(times, default=0.0)


def _written_s(entry: dict[str, Any]) -> float:
    written = entry.get("LastModified") or entry.get("created") or entry.get("updated")
    # unknown: it may still be written
    return written.timestamp() if isinstance(written, datetime) else time.time()


def _list_prefix(store: Any, location: Url) -> dict[str, str]:
    """Return the names directly under a prefix, each with "file" or "directory".

    Returns nothing if the prefix does not exist.
    """
    try:
        with as_os_errors():
            entries = store.ls(location.key, detail=True)
    except FileNotFoundError:
        return {}
    return {entry["name"].rstrip("/").rpartition("/")[2]: entry["type"] for entry in entries}


def _remove_key(store: Any, key: str) -> None:
    with suppress(OSError), as_os_errors():
        store.rm(key, recursive=True)
