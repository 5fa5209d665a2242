"""Checkpoints in an object store, through fsspec: files under the attempt's name, the manifest last and in one PUT.

prefix/step-00000100/manifest.json                       the commit: it names the attempt that counts
prefix/step-00000100/ATTEMPT/rank-00000.safetensors      as on a disk
prefix/step-00000100/ATTEMPT/notes/rank-00000.done       until the commit: apart, for they may outlive rank 0
Credentials come from the environment or the store's own configuration files, and are never seen here.
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

MOST_PARTS = 9_000  # S3 takes 10,000 parts of one upload


def connect_store(location: Url) -> Any:
    """The file system of a URL. Listings are never remembered: other ranks write beside us."""
    import fsspec  # here: most runs keep their checkpoints on a disk

    try:
        return fsspec.filesystem(location.protocol, use_listings_cache=False)
    except ImportError as error:
        driver = STORE_DRIVERS[location.protocol]
        fix = "pip install 'phalanx[s3]'" if location.protocol == "s3" else f"pip install {driver}"
        raise mistake("checkpoint.path", f"{location} needs {driver}", fix=fix) from error


@contextmanager
def as_os_errors() -> Iterator[None]:
    """Whatever a driver raises, as an OSError: each has error classes of its own."""
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
            found = store.info(self._key)
        if found["type"] != "file":
            raise OSError(None, "it is not an object")
        self.size_bytes = int(found["size"])

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill `buffer` with the bytes from `offset` on, a bounded range at a time."""
        while buffer:
            wanted = min(len(buffer), CHUNK_BYTES)
            with as_os_errors():
                data = self._store.cat_file(self._key, start=offset, end=offset + wanted)
            if not 0 < len(data) <= wanted:
                raise OSError(None, f"{len(data):,} bytes came for {wanted:,} from byte {offset:,} on")
            buffer[: len(data)] = data
            buffer, offset = buffer[len(data) :], offset + len(data)

    def close(self) -> None:
        """Nothing is held between two ranges."""


class ObjectWriter:
    """An object, uploaded in parts; memory is that of one part. It appears when the `with` block ends well."""

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
            self._file.discard()  # closing would make half an object
        self._file.closed = True  # or the garbage collector would close it


class ObjectFolder:
    """All objects under a prefix."""

    def __init__(self, store: Any, location: Url) -> None:
        self._store, self.location = store, location

    def open(self, name: str) -> ObjectReader:
        """An object of it."""
        return ObjectReader(self._store, self.location / name)

    def names(self) -> set[str]:
        """Objects right under the prefix."""
        return {name for name, kind in _list_prefix(self._store, self.location).items() if kind == "file"}

    def rank_files(self, attempt: str) -> ObjectFolder:
        """The prefix of the attempt that the manifest names, which `read_manifest` has looked at."""
        return ObjectFolder(self._store, self.location / attempt)


class ObjectDraft:
    """The files of one attempt."""

    def __init__(self, store: Any, root: Url, step: int, attempt: str) -> None:
        paths.draft_name(step, attempt)  # refuses what cannot be a name
        self._store, self._attempt = store, attempt
        self._commit = root / paths.commit_name(step)
        self.location = self._commit / attempt
        self._notes = self.location / "notes"

    def begin(self) -> None:
        """A prefix need not be made."""

    def create(self, name: str, size_bytes: int) -> ObjectWriter:
        """An object of known size."""
        return ObjectWriter(self._store, self.location / name, size_bytes)

    def put(self, name: str, data: bytes) -> None:
        """One PUT: there whole, or not at all."""
        with as_os_errors():
            self._store.pipe_file((self.location / name).key, data)

    def note(self, name: str, data: bytes) -> None:
        """One PUT, apart from the files of ranks."""
        with as_os_errors():
            self._store.pipe_file((self._notes / name).key, data)

    def notes(self) -> set[str]:
        """The notes, in one listing: 1,000 a request."""
        return ObjectFolder(self._store, self._notes).names()

    def read_notes(self, names: Sequence[str], *, most_bytes: int) -> list[bytes]:
        """All at once: one after the other, 4,096 requests of 20 ms would take over a minute."""
        keys = [(self._notes / name).key for name in names]
        with as_os_errors():
            found = self._store.cat_ranges(keys, [0] * len(keys), [most_bytes] * len(keys), on_error="raise")
        return [bytes(data) for data in found]

    def seal(self, manifest: bytes, notes: Iterable[str]) -> None:
        """Nothing: the commit is the PUT of the manifest."""

    def commit(self, manifest: bytes) -> None:
        """PUT the manifest; of two of one step the later counts, and its files have names of their own."""
        with as_os_errors():
            self._store.pipe_file((self._commit / paths.MANIFEST).key, manifest)

    def tidy(self) -> None:
        """Notes, and the files of attempts that no longer count."""
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
        """A prefix cannot be taken away from those who still write under it."""
        return False


class ObjectStorage:
    """The prefix that holds all checkpoints of a run."""

    def __init__(self, store: Any, root: Url) -> None:
        self._store, self.root = store, root

    def folder(self, commit: Location) -> ObjectFolder:
        """A commit to read."""
        return ObjectFolder(self._store, self.root / commit.name)

    def commits(self) -> list[Location]:
        """Steps with a manifest, newest first; files without one are somebody's unfinished work."""
        return [location for location in self._step_prefixes() if self._is_committed(location)]

    def _step_prefixes(self) -> list[Url]:
        found = map(paths.commit_step, _list_prefix(self._store, self.root))
        steps = sorted((step for step in found if step is not None), reverse=True)
        return [self.root / paths.commit_name(step) for step in steps]

    def _is_committed(self, location: Url) -> bool:
        with as_os_errors():
            return bool(self._store.isfile((location / paths.MANIFEST).key))

    def draft(self, step: int, attempt: str) -> ObjectDraft:
        """A step to write."""
        return ObjectDraft(self._store, self.root, step, attempt)

    def delete(self, commit: Location) -> None:
        """The manifest goes first, so that half of it is never taken for a whole."""
        key = (self.root / commit.name).key
        with suppress(OSError), as_os_errors():
            self._store.rm_file(f"{key}/{paths.MANIFEST}")
            _remove_key(self._store, key)

    def set_aside(self) -> dict[Location, int]:
        """None: a store cannot rename."""
        return {}

    def delete_set_aside(self, place: Location) -> None:
        """Nothing: there are none."""

    def sweep(self, older_than_s: float, *, spare: str = "") -> None:
        """Steps without a manifest that nobody has written to for so long."""
        with suppress(OSError):
            for location in self._step_prefixes():
                alive = spare in map(paths.attempt_family, _list_prefix(self._store, location))
                if not alive and not self._is_committed(location) and self._age_s(location) >= older_than_s:
                    _remove_key(self._store, location.key)

    def _age_s(self, location: Url) -> float:
        with as_os_errors():
            found = self._store.find(location.key, detail=True)
        times = [_written_s(entry) for entry in found.values()]
        return time.time() - max(times, default=0.0)


def _written_s(entry: dict[str, Any]) -> float:
    when = entry.get("LastModified") or entry.get("created") or entry.get("updated")
    return when.timestamp() if isinstance(when, datetime) else time.time()  # unknown: somebody may still write it


def _list_prefix(store: Any, location: Url) -> dict[str, str]:
    """Names right under a prefix, each with whether it is a file or a directory; none when there is no such prefix."""
    try:
        with as_os_errors():
            found = store.ls(location.key, detail=True)
    except FileNotFoundError:
        return {}
    return {entry["name"].rstrip("/").rpartition("/")[2]: entry["type"] for entry in found}


def _remove_key(store: Any, key: str) -> None:
    with suppress(OSError), as_os_errors():
        store.rm(key, recursive=True)
