"""Checkpoints in an object store, through fsspec: parts under the attempt's name, the manifest last and in one PUT.

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
from phalanx.train.state import names
from phalanx.train.state.streams import CHUNK_BYTES
from phalanx.train.state.url import DRIVERS, Place, Url

MOST_PARTS = 9_000  # S3 takes 10,000 parts of one upload


def connect(place: Url) -> Any:
    """The file system of a URL. Listings are never remembered: other ranks write beside us."""
    import fsspec  # here: most runs keep their checkpoints on a disk

    try:
        return fsspec.filesystem(place.protocol, use_listings_cache=False)
    except ImportError as error:
        fix = "pip install 'phalanx[s3]'" if place.protocol == "s3" else f"pip install {DRIVERS[place.protocol]}"
        raise mistake("checkpoint.path", f"{place} needs {DRIVERS[place.protocol]}", fix=fix) from error


@contextmanager
def plain_errors() -> Iterator[None]:
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

    def __init__(self, store: Any, place: Url) -> None:
        self._store, self._key = store, place.key
        with plain_errors():
            found = store.info(self._key)
        if found["type"] != "file":
            raise OSError(None, "it is not an object")
        self.size_bytes = int(found["size"])

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill `buffer` with the bytes from `offset` on, a bounded range at a time."""
        while buffer:
            wanted = min(len(buffer), CHUNK_BYTES)
            with plain_errors():
                data = self._store.cat_file(self._key, start=offset, end=offset + wanted)
            if not 0 < len(data) <= wanted:
                raise OSError(None, f"{len(data):,} bytes came for {wanted:,} from byte {offset:,} on")
            buffer[: len(data)] = data
            buffer, offset = buffer[len(data) :], offset + len(data)

    def close(self) -> None:
        """Nothing is held between two ranges."""


class ObjectWriter:
    """An object, uploaded in parts; memory is that of one part. It appears when the `with` block ends well."""

    def __init__(self, store: Any, place: Url, size_bytes: int) -> None:
        self._part_bytes = max(CHUNK_BYTES, -(-size_bytes // MOST_PARTS))
        with plain_errors():
            self._file = store.open(place.key, "wb", block_size=self._part_bytes)

    def write(self, data: memoryview) -> None:
        """Append all of `data`."""
        while data:
            with plain_errors():
                self._file.write(data[: self._part_bytes])
            data = data[self._part_bytes :]

    def __enter__(self) -> ObjectWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if kind is None:
            with plain_errors():
                self._file.close()
            return
        with suppress(Exception):
            self._file.discard()  # closing would make half an object
        self._file.closed = True  # or the garbage collector would close it


class ObjectFolder:
    """All objects under a prefix."""

    def __init__(self, store: Any, place: Url) -> None:
        self._store, self.place = store, place

    def open(self, name: str) -> ObjectReader:
        """An object of it."""
        return ObjectReader(self._store, self.place / name)

    def names(self) -> set[str]:
        """Objects right under the prefix."""
        return {name for name, kind in _listed(self._store, self.place).items() if kind == "file"}

    def parts(self, attempt: str) -> ObjectFolder:
        """The prefix of the attempt that the manifest names, which `read_manifest` has looked at."""
        return ObjectFolder(self._store, self.place / attempt)


class ObjectDraft:
    """The parts of one attempt."""

    def __init__(self, store: Any, root: Url, step: int, attempt: str) -> None:
        names.draft_name(step, attempt)  # refuses what cannot be a name
        self._store, self._attempt = store, attempt
        self._commit = root / names.commit_name(step)
        self.place = self._commit / attempt
        self._notes = self.place / "notes"

    def begin(self) -> None:
        """A prefix need not be made."""

    def create(self, name: str, size_bytes: int) -> ObjectWriter:
        """An object of known size."""
        return ObjectWriter(self._store, self.place / name, size_bytes)

    def put(self, name: str, data: bytes) -> None:
        """One PUT: there whole, or not at all."""
        with plain_errors():
            self._store.pipe_file((self.place / name).key, data)

    def note(self, name: str, data: bytes) -> None:
        """One PUT, apart from the parts."""
        with plain_errors():
            self._store.pipe_file((self._notes / name).key, data)

    def notes(self) -> set[str]:
        """The notes, in one listing: 1,000 a request."""
        return ObjectFolder(self._store, self._notes).names()

    def read_notes(self, names: Sequence[str], *, most_bytes: int) -> list[bytes]:
        """All at once: one after the other, 4,096 requests of 20 ms would take over a minute."""
        keys = [(self._notes / name).key for name in names]
        with plain_errors():
            found = self._store.cat_ranges(keys, [0] * len(keys), [most_bytes] * len(keys), on_error="raise")
        return [bytes(data) for data in found]

    def seal(self, manifest: bytes, notes: Iterable[str]) -> None:
        """Nothing: the commit is the PUT of the manifest."""

    def commit(self, manifest: bytes) -> None:
        """PUT the manifest; of two of one step the later counts, and its parts have names of their own."""
        with plain_errors():
            self._store.pipe_file((self._commit / names.MANIFEST).key, manifest)

    def tidy(self) -> None:
        """Notes, and the parts of attempts that no longer count."""
        with suppress(OSError):
            _remove(self._store, self._notes.key)
            for name, kind in _listed(self._store, self._commit).items():
                if kind == "directory" and name != self._attempt:
                    _remove(self._store, (self._commit / name).key)

    def withdraw(self, names: Iterable[str]) -> None:
        """Delete objects of the attempt."""
        for name in names:
            for place in (self.place, self._notes):
                with suppress(OSError), plain_errors():
                    self._store.rm_file((place / name).key)

    def discard(self) -> None:
        """Delete the attempt."""
        _remove(self._store, self.place.key)

    def is_gone(self) -> bool:
        """A prefix cannot be taken away from those who still write under it."""
        return False


class ObjectStorage:
    """The prefix that holds all checkpoints of a run."""

    def __init__(self, store: Any, root: Url) -> None:
        self._store, self.root = store, root

    def folder(self, commit: Place) -> ObjectFolder:
        """A commit to read."""
        return ObjectFolder(self._store, self.root / commit.name)

    def commits(self) -> list[Place]:
        """Steps with a manifest, newest first; parts without one are somebody's unfinished work."""
        return [place for place in self._steps() if self._is_committed(place)]

    def _steps(self) -> list[Url]:
        found = map(names.step_of, _listed(self._store, self.root))
        steps = sorted((step for step in found if step is not None), reverse=True)
        return [self.root / names.commit_name(step) for step in steps]

    def _is_committed(self, place: Url) -> bool:
        with plain_errors():
            return bool(self._store.isfile((place / names.MANIFEST).key))

    def draft(self, step: int, attempt: str) -> ObjectDraft:
        """A step to write."""
        return ObjectDraft(self._store, self.root, step, attempt)

    def delete(self, commit: Place) -> None:
        """The manifest goes first, so that half of it is never taken for a whole."""
        key = (self.root / commit.name).key
        with suppress(OSError), plain_errors():
            self._store.rm_file(f"{key}/{names.MANIFEST}")
            _remove(self._store, key)

    def sweep(self, older_than_s: float, *, spare: str = "") -> None:
        """Steps without a manifest that nobody has written to for so long."""
        with suppress(OSError):
            for place in self._steps():
                alive = spare in map(names.family, _listed(self._store, place))
                if not alive and not self._is_committed(place) and self._age_s(place) >= older_than_s:
                    _remove(self._store, place.key)

    def _age_s(self, place: Url) -> float:
        with plain_errors():
            found = self._store.find(place.key, detail=True)
        times = [_written_s(entry) for entry in found.values()]
        return time.time() - max(times, default=0.0)


def _written_s(entry: dict[str, Any]) -> float:
    when = entry.get("LastModified") or entry.get("created") or entry.get("updated")
    return when.timestamp() if isinstance(when, datetime) else time.time()  # unknown: somebody may still write it


def _listed(store: Any, place: Url) -> dict[str, str]:
    """Names right under a prefix, each with whether it is a file or a directory; none when there is no such prefix."""
    try:
        with plain_errors():
            found = store.ls(place.key, detail=True)
    except FileNotFoundError:
        return {}
    return {entry["name"].rstrip("/").rpartition("/")[2]: entry["type"] for entry in found}


def _remove(store: Any, key: str) -> None:
    with suppress(OSError), plain_errors():
        store.rm(key, recursive=True)
