"""Where a checkpoint lies, the names of its files, and what a file is, on a disk or in an object store.

Names are computed here and never read from a file. Credentials are never part of a location.

step-00000100/                  a commit
    manifest.json               written last
    rank-00000.safetensors      tensors of rank 0
    rank-00000.json             what is in them, with digests
.tmp-step-00000100-ATTEMPT/     the same while it is written, with rank-00000.done or rank-00000.failed per rank
.old-step-00000100-ATTEMPT/     a commit on its way out

In an object store the files of a rank lie in step-00000100/ATTEMPT/, and the manifest of step-00000100/ says which
attempt counts.
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

# What fsspec needs to reach each; memory:// is this process's own and dies with it, for tests.
STORE_DRIVERS = {"s3": "s3fs", "gs": "gcsfs", "az": "adlfs", "abfs": "adlfs", "memory": "fsspec"}
_SEGMENT = re.compile(r"[A-Za-z0-9_.=+!*'()-]{1,255}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Url:
    """A prefix of an object store: its bucket and the names below it. Joined and shown as a Path is."""

    protocol: str
    names: tuple[str, ...]

    @property
    def name(self) -> str:
        """The last name."""
        return self.names[-1]

    @property
    def parent(self) -> Url:
        """The prefix it lies under."""
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
    """The location a text names; raises UserError for one that is none.

    >>> parse_location("s3://bucket/runs/first").name, parse_location("runs/first"), parse_location("file:///srv/runs")
    ('first', PosixPath('runs/first'), PosixPath('/srv/runs'))
    """
    if not isinstance(where, str):
        return where
    protocol, found, rest = where.partition("://")
    if not found:
        return Path(where)
    return Path(rest) if protocol == "file" else _parse_url(protocol, rest)


def _parse_url(protocol: str, rest: str) -> Url:
    if protocol not in STORE_DRIVERS:
        schemes = ", ".join(f"{scheme}://" for scheme in STORE_DRIVERS if scheme != "memory")
        raise mistake(
            "checkpoint.path", f"no object store is known as {protocol[:20]!r}", fix=f"a folder, or {schemes}"
        )
    names = tuple(rest.rstrip("/").split("/"))
    # Shown without the text: what stands before an @ is a secret.
    if "@" in rest:
        why = "it would be written into the run's files"
        fix = "leave it to the environment or the store's own configuration files"
        raise mistake("checkpoint.path", f"{protocol}://… holds credentials", why=why, fix=fix)
    for name in names:
        if not _SEGMENT.fullmatch(name) or not name.strip("."):
            what = f"{protocol}://{rest[:80]}: {name[:40]!r} cannot be a part of it"
            raise mistake("checkpoint.path", what, fix=f"{protocol}://bucket/prefix of letters, digits and -_.=+!*'()")
    return Url(protocol, names)


def commit_name(step: int) -> str:
    """The folder of a committed step.

    >>> commit_name(100)
    'step-00000100'
    """
    return f"step-{step:08d}"


def draft_name(step: int, attempt: str) -> str:
    """The folder of a step that is being written; `attempt` keeps a restarted job apart from its dead predecessor."""
    if not is_attempt(attempt):
        raise mistake("attempt", f"{attempt!r} cannot be part of a folder name", fix="use letters, digits, '.' and '_'")
    return f"{DRAFT}{commit_name(step)}-{attempt}"


def attempt_family(attempt: str) -> str:
    """What all saves of one start of the job have in common: AsyncSaver numbers them.

    >>> attempt_family("64a1.12"), attempt_family("64a1")
    ('64a1', '64a1')
    """
    head, dot, number = attempt.rpartition(".")
    return head if dot and number.isdecimal() else attempt


def draft_attempt(name: str) -> str | None:
    """The attempt of a draft, or None.

    >>> draft_attempt(".tmp-step-00000100-64a1.12")
    '64a1.12'
    """
    step, _, attempt = name.removeprefix(DRAFT).rpartition("-")
    return attempt if name.startswith(DRAFT) and commit_step(step) is not None else None


def outgoing_name(step: int, attempt: str) -> str:
    """The name a commit gets before it is deleted, so that half of it is never taken for a whole."""
    return f"{OUTGOING}{commit_name(step)}-{attempt}"


def is_attempt(text: object) -> bool:
    """Whether a text from a file may stand for an attempt: one name, without a way out of its folder."""
    return isinstance(text, str) and _ATTEMPT.fullmatch(text) is not None


def commit_step(name: str) -> int | None:
    """The step a folder name stands for, or None.

    >>> commit_step("step-00000100"), commit_step(".tmp-step-00000100-a")
    (100, None)
    """
    match = _COMMIT.fullmatch(name)
    if match is None or commit_name(int(match.group(1))) != name:
        return None
    return int(match.group(1))


def outgoing_step(name: str) -> int | None:
    """The step of a commit on its way out, or None.

    >>> outgoing_step(".old-step-00000100-a")
    100
    """
    head, _, _ = name.removeprefix(OUTGOING).rpartition("-")
    return commit_step(head) if name.startswith(OUTGOING) else None


def data_name(rank: int) -> str:
    """The tensors of a rank."""
    return f"rank-{rank:05d}.safetensors"


def index_name(rank: int) -> str:
    """The index of a rank."""
    return f"rank-{rank:05d}.json"


def done_name(rank: int) -> str:
    """The note of a rank that its files are on the disk."""
    return f"rank-{rank:05d}.done"


def failed_name(rank: int) -> str:
    """The note of a rank that it gave up."""
    return f"rank-{rank:05d}.failed"


# Files: whatever fails is an OSError.

# 32 MiB: long enough that the cost of a call vanishes, short enough that hashing and writing overlap.
CHUNK_BYTES = 2**25


class ReadableFile(Protocol):
    """A file open for reading at any offset, by several threads."""

    size_bytes: int

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill `buffer` with the bytes from `offset` on."""

    def close(self) -> None:
        """Give it back."""


class WritableFile(Protocol):
    """A new file, written from start to end: safe when its `with` block ends, not there when that ends in an error."""

    def write(self, data: memoryview) -> None:
        """Append all of `data`."""


def read_small_file(file: ReadableFile, *, most_bytes: int) -> bytes:
    """All of a small file, which is then closed; raises OSError when it is larger than it can honestly be."""
    try:
        if file.size_bytes > most_bytes:
            raise OSError(None, f"it has {file.size_bytes:,} bytes, more than the {most_bytes:,} such a file may have")
        data = bytearray(file.size_bytes)
        file.read_into(memoryview(data), 0)
        return bytes(data)
    finally:
        file.close()


def os_error_text(error: OSError) -> str:
    """The plain words of an operating system's error."""
    return error.strerror or str(error)
