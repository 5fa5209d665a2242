"""What saving and loading ask of the place where checkpoints lie: a disk (posix.py) or an object store (objects.py).

A disk commits by renaming a hidden folder. An object store cannot rename: parts carry the attempt in their names, and
the manifest, one PUT, names the attempt that counts. Everything above this seam is the same for both. Whatever fails
is an OSError; what says that it never fails leaves behind what will not go away, which costs space and not the run.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from phalanx.train.state.objects import ObjectFolder, ObjectStorage, connect
from phalanx.train.state.posix import PosixFolder, PosixStorage
from phalanx.train.state.streams import Reading, Writing
from phalanx.train.state.url import Place, Url, place_of


class Folder(Protocol):
    """Files by name."""

    @property
    def place(self) -> Place:
        """Where it is, for messages and for callers."""

    def open(self, name: str) -> Reading:
        """A file of it."""

    def names(self) -> set[str]:
        """What is in it, without hidden files."""

    def parts(self, attempt: str) -> Folder:
        """Where the parts lie that the manifest of this folder vouches for."""


class Draft(Protocol):
    """A step that is being written, the same on all ranks that write it."""

    @property
    def place(self) -> Place:
        """Where its parts go."""

    def begin(self) -> None:
        """Make room for this rank's files."""

    def create(self, name: str, size_bytes: int) -> AbstractContextManager[Writing]:
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
        """All parts are there, and the notes no longer needed: whatever of the commit comes before the fence."""

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


class Storage(Protocol):
    """All checkpoints of a run; one may serve several threads."""

    @property
    def root(self) -> Place:
        """Where they are."""

    def folder(self, commit: Place) -> Folder:
        """A commit to read."""

    def commits(self) -> list[Place]:
        """Those that count, newest first; whether they are whole is another question."""

    def draft(self, step: int, attempt: str) -> Draft:
        """A step to write."""

    def delete(self, commit: Place) -> None:
        """Take a commit away so that half of it is never taken for a whole; never fails."""

    def sweep(self, older_than_s: float, *, spare: str = "") -> None:
        """Take away what dead processes left, if nobody has touched it for so long; never fails.

        Attempts of the family `spare` are alive.
        """


def storage_of(root: Place | str | Storage) -> Storage:
    """The storage at a place; a storage is its own."""
    if not isinstance(root, str | Path | Url):
        return root
    place = place_of(root)
    return ObjectStorage(connect(place), place) if isinstance(place, Url) else PosixStorage(place)


def folder_of(where: Place | str) -> Folder:
    """One checkpoint at a place."""
    place = place_of(where)
    return ObjectFolder(connect(place), place) if isinstance(place, Url) else PosixFolder(place)
