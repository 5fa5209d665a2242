"""Places: a folder of this machine, or a prefix of an object store. Credentials are never part of one."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from phalanx.errors import mistake

# What fsspec needs to reach each; memory:// is this process's own and dies with it, for tests.
DRIVERS = {"s3": "s3fs", "gs": "gcsfs", "az": "adlfs", "abfs": "adlfs", "memory": "fsspec"}
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


Place: TypeAlias = Path | Url


def place_of(where: Place | str) -> Place:
    """The place a text names; raises UserError for one that is none.

    >>> place_of("s3://bucket/runs/first").name, place_of("runs/first"), place_of("file:///srv/runs")
    ('first', PosixPath('runs/first'), PosixPath('/srv/runs'))
    """
    if not isinstance(where, str):
        return where
    protocol, found, rest = where.partition("://")
    if not found:
        return Path(where)
    return Path(rest) if protocol == "file" else _url(protocol, rest)


def _url(protocol: str, rest: str) -> Url:
    if protocol not in DRIVERS:
        schemes = ", ".join(f"{scheme}://" for scheme in DRIVERS if scheme != "memory")
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
