"""Locations and file names of checkpoints, on a disk or in an object store, and the interfaces of their files.

Names are computed here and never read from a file. Credentials are never part of a location.

step-00000100/                  a commit
    manifest.json               written last
    rank-00000.safetensors      tensors of rank 0
    rank-00000.json             their index, with digests
.tmp-step-00000100-ATTEMPT/     the same while it is written, with rank-00000.done or rank-00000.failed per rank
.old-step-00000100-ATTEMPT/     a commit about to be deleted

In an object store the files of a rank are in step-00000100/ATTEMPT/, and the manifest in step-00000100/ names the
attempt that counts.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeAlias

from phalanx.errors import mistake

MANIFEST = "manifest.json"
DRAFT = ".tmp-"
OUTGOING = ".old-"
_COMMIT = re.compile(r"step-(\d{8,18})", re.ASCII)
_ATTEMPT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._]{0,63}", re.ASCII)

# The fsspec driver of each scheme; memory:// is private to the process and lost with it, for tests.
STORE_DRIVERS = {"s3": "s3fs", "gs": "gcsfs", "az": "adlfs", "abfs": "adlfs", "memory": "fsspec"}
_SEGMENT = re.compile(r"[A-Za-z0-9_.=+!*'()-]{1,255}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Url:
    """A prefix of an object store: its bucket and the names below it. Joined and printed like a Path."""

    protocol: str
    names: tuple[str, ...]

    @property
    def name(self) -> str:
        """The last name."""
        return self.names[-1]

    @property
    def parent(self) -> Url:
        """The prefix that contains it."""
        return Url(self.protocol, self.names[:-1])

    @property
    def key(self) -> str:
        """Bucket and names, as fsspec takes them."""
        return "/".join(self.names)

    def __truediv__(self, name: str) -> Url:
        return Url(self.protocol, (*self.names, name))

    def __str__(self) -> str:
        return f"{self.protocol}://{self.key}"


Location: TypeAlias = Path | Url


def parse_location(where: Location | str) -> Location:
    """Return the location that a text names; raise UserError if it is invalid.

    >>> parse_location("s3://bucket/runs/first").name, parse_location("runs/first"), parse_location("file:///srv/runs")
    ('first', PosixPath('runs/first'), PosixPath('/srv/runs'))
    """
    if not isinstance(where, str):
        return where
    protocol, separator, path = where.partition("://")
    if not separator:
        return Path(where)
    return Path(path) if protocol == "file" else _parse_url(protocol, path)


def _parse_url(protocol: str, rest: str) -> Url:
    if protocol not in STORE_DRIVERS:
        schemes = ", ".join(f"{scheme}://" for scheme in STORE_DRIVERS if scheme != "memory")
        raise mistake(
            "checkpoint.path", f"no object store is known as {protocol[:20]!r}", fix=f"a folder, or {schemes}"
        )
    names = tuple(rest.rstrip("/").split("/"))
    # Printed without the text, because the part before an @ is a secret.
    if "@" in rest:
        reason = "it would be written into the run's files"
        fix = "leave it to the environment or the store's own configuration files"
        raise mistake("checkpoint.path", f"{protocol}://… holds credentials", why=reason, fix=fix)
    for name in names:
        if not _SEGMENT.fullmatch(name) or not name.strip("."):
            problem = f"{protocol}://{rest[:80]}: {name[:40]!r} cannot be a part of it"
            raise mistake(
                "checkpoint.path", problem, fix=f"{protocol}://bucket/prefix of letters, digits and -_.=+!*'()"
            )
    return Url(protocol, names)


def commit_name(step: int) -> str:
    """Return the folder name of a committed step.

    >>> commit_name(100)
    'step-00000100'
    """
    return f"step-{step:08d}"


def draft_name(step: int, attempt: str) -> str:
    """Return the folder name of a step being written; `attempt` separates a restarted job from its dead predecessor."""
    if not is_attempt(attempt):
        raise mistake("attempt", f"{attempt!r} cannot be part of a folder name", fix="use letters, digits, '.' and '_'")
    return f"{DRAFT}{commit_name(step)}-{attempt}"


def attempt_family(attempt: str) -> str:
    """Return the common part of the attempts of one start of the job, whose saves AsyncSaver numbers.

    >>> attempt_family("64a1.12"), attempt_family("64a1")
    ('64a1', '64a1')
    """
    head, dot, number = attempt.rpartition(".")
    return head if dot and number.isdecimal() else attempt


def draft_attempt(name: str) -> str | None:
    """Return the attempt in a draft's folder name, or None for another name.

    >>> draft_attempt(".tmp-step-00000100-64a1.12")
    '64a1.12'
    """
    step, _, attempt = name.removeprefix(DRAFT).rpartition("-")
    return attempt if name.startswith(DRAFT) and commit_step(step) is not None else None


def outgoing_name(step: int, attempt: str) -> str:
    """Return the name a commit gets before it is deleted, so that half of it never counts as complete."""
    return f"{OUTGOING}{commit_name(step)}-{attempt}"


def is_attempt(text: object) -> bool:
    """Return whether a value from a file is a valid attempt: one name that cannot leave its folder."""
    return isinstance(text, str) and _ATTEMPT.fullmatch(text) is not None


def commit_step(name: str) -> int | None:
    """Return the step of a commit's folder name, or None for another name.

    >>> commit_step("step-00000100"), commit_step(".tmp-step-00000100-a")
    (100, None)
    """
    match = _COMMIT.fullmatch(name)
    if match is None or commit_name(int(match.group(1))) != name:
        return None
    return int(match.group(1))


def outgoing_step(name: str) -> int | None:
    """Return the step in the folder name of a commit about to be deleted, or None for another name.

    >>> outgoing_step(".old-step-00000100-a")
    100
    """
    head, _, _ = name.removeprefix(OUTGOING).rpartition("-")
    return commit_step(head) if name.startswith(OUTGOING) else None


def data_name(rank: int) -> str:
    """Return the name of the file with the tensors of a rank."""
    return f"rank-{rank:05d}.safetensors"


def index_name(rank: int) -> str:
    """Return the name of the index file of a rank."""
    return f"rank-{rank:05d}.json"


def done_name(rank: int) -> str:
    """Return the name of a rank's note that its files are on the disk."""
    return f"rank-{rank:05d}.done"


def failed_name(rank: int) -> str:
    """Return the name of a rank's note that it gave up."""
    return f"rank-{rank:05d}.failed"


# Files; every failure is an OSError.

# 32 MiB: long enough that the cost of a call is negligible, short enough that hashing and writing overlap.
CHUNK_BYTES = 2**25


class ReadableFile(Protocol):
    """A file open for reading at any offset, by several threads."""

    size_bytes: int

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill `buffer` with the bytes from `offset`."""

    def close(self) -> None:
        """Close the file."""


class WritableFile(Protocol):
    """A new file, written from start to end: safe when its `with` block ends, absent if that ends in an error."""

    def write(self, data: memoryview) -> None:
        """Append all of `data`."""


def read_small_file(file: ReadableFile, *, most_bytes: int) -> bytes:
    """Read and close a small file; raise OSError if it is larger than such a file can be."""
    try:
        if file.size_bytes > most_bytes:
            raise OSError(None, f"it has {file.size_bytes:,} bytes, more than the {most_bytes:,} such a file may have")
        data = bytearray(file.size_bytes)
        file.read_into(memoryview(data), 0)
        return bytes(data)
    finally:
        file.close()


def os_error_text(error: OSError) -> str:
    """Return the plain text of an operating system's error."""
    return error.strerror or str(error)
