"""The files of a run folder: events of each rank in pieces of whole lines, read on as they grow, and small files."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from phalanx.errors import PhalanxError
from phalanx.record.events import MOST_LINE_BYTES, part_numbers, part_path
from phalanx.record.provenance import job_digest
from phalanx.record.run import Run, read_json
from phalanx.record.values import at, printable
from phalanx.rules.outcome import Spot

# Read, and parsed, at once: what it becomes fits in the cache of a core. Reads of 4 MiB and of 64 KiB are 3 and 13 %
# slower.
READ_BYTES = 256 * 2**10
PIECE_BYTES = 512 * 2**10  # below MOST_LINE_BYTES: only the last line of a piece can be too long


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """Whole lines, the last newline included; `line` is the number of the first, from 1."""

    data: bytes
    file: str
    line: int
    count: int  # of lines


@dataclass(kw_only=True, slots=True)
class Tally:
    """What several feeds read together: a sum over a thousand of them, asked for after every piece, takes longer."""

    read_bytes: int = 0


class Feed:
    """Reads from where it last stopped. Lines beyond 1 MiB are passed over without being held, and counted.

    `closed`, where somebody listed the folder for many feeds at once, are the numbers of this one's closed parts.
    """

    def __init__(self, path: Path, shown: str, *, tally: Tally | None = None) -> None:
        self.closed: Sequence[int] | None = None
        self._tally = tally or Tally()
        self._path = path
        self._shown = shown  # the folder as the user named it
        self._part = 0  # number of the newest closed part that is read to its end
        self._offset = self._line = 0
        self._held = b""
        self._is_overlong = False
        self.read_bytes = 0
        self.bad = 0  # lines that are too long, torn in a closed file, or a file that is none
        self.bad_spot: Spot | None = None
        self._is_odd = False

    @property
    def left_bytes(self) -> int:
        """What there is and was not read."""
        later = [number for number in self._parts() if number > self._part]
        sizes = [_size(part_path(self._path, number)) for number in later] + [_size(self._path)]
        return max(0, sum(sizes) - self._offset)

    def _parts(self) -> Sequence[int]:
        return part_numbers(self._path) if self.closed is None else self.closed

    @property
    def is_torn(self) -> bool:
        """Whether what was read ends within a line."""
        return bool(self._held) or self._is_overlong

    @property
    def here(self) -> Spot:
        """The line that comes next."""
        return self._spot(self._path, self._line + 1)

    def pieces(self, budget_bytes: int | None = None) -> Iterator[Piece]:
        """What is new and complete; no more than about `budget_bytes` of it."""
        until = None if budget_bytes is None else self.read_bytes + budget_bytes
        if not self._part and not self._offset:
            self._part = min(self._parts(), default=1) - 1
        while True:
            after = part_path(self._path, self._part + 1)
            file = self._opened(self._path)  # before the look at the next part, as EventReader does
            closed = after.exists()
            if closed:
                if file is not None:
                    file.close()
                file = self._opened(after)
            if file is not None:
                with file:
                    yield from self._rest(file, after if closed else self._path, until)
            if not closed or (until is not None and self.read_bytes >= until):
                return
            if self.is_torn:
                self._note(self._spot(after, self._line + 1))
            self._part, self._offset, self._line = self._part + 1, 0, 0
            self._held, self._is_overlong = b"", False

    def _rest(self, file: BinaryIO, path: Path, until: int | None) -> Iterator[Piece]:
        size = os.fstat(file.fileno()).st_size
        if size < self._offset:  # it became shorter: what was read of it is gone
            self._note(self._spot(path, 0))
            self._offset, self._held, self._is_overlong = size, b"", False
        file.seek(self._offset)
        while until is None or self.read_bytes < until:
            try:
                data = file.read(READ_BYTES)
            except OSError:  # a disk that fails
                self._note(self._spot(path, self._line + 1))
                return
            if not data:
                return
            self._offset += len(data)
            self.read_bytes += len(data)
            self._tally.read_bytes += len(data)
            yield from self._cut(data, path)

    def _cut(self, data: bytes, path: Path) -> Iterator[Piece]:
        """Whole lines out of what was read and what was held back."""
        if self._is_overlong:
            end = data.find(b"\n") + 1
            if not end:
                return
            data, self._is_overlong = data[end:], False
            self._line += 1
        data = self._held + data
        stop = data.rfind(b"\n") + 1
        self._held = data[stop:]
        yield from self._split(data, stop, path)
        if len(self._held) > MOST_LINE_BYTES:
            self._note(self._spot(path, self._line + 1))
            self._held, self._is_overlong = b"", True

    def _split(self, data: bytes, stop: int, path: Path) -> Iterator[Piece]:
        start = 0
        while start < stop:
            end = data.find(b"\n", min(start + PIECE_BYTES, stop - 1)) + 1
            last = data.rfind(b"\n", start, end - 1) + 1 or start
            too_long = end - last > MOST_LINE_BYTES  # only the last line of a piece can be
            if (keep := last if too_long else end) > start:
                yield self._piece(data[start:keep], path)
            if too_long:
                self._note(self._spot(path, self._line + 1))
                self._line += 1
            start = end

    def _piece(self, data: bytes, path: Path) -> Piece:
        made = Piece(data=data, file=self._spot(path, 0).file, line=self._line + 1, count=count_of(b"\n", data))
        self._line += made.count
        return made

    def _opened(self, path: Path) -> BinaryIO | None:
        try:
            return open_inside(path)
        except FileNotFoundError:
            return None
        except OSError:
            if not self._is_odd:
                self._is_odd = True
                self._note(self._spot(path, 0))
            return None

    def _note(self, spot: Spot) -> None:
        self.bad += 1
        self.bad_spot = self.bad_spot or spot

    def _spot(self, path: Path, line: int) -> Spot:
        return Spot(file=f"{self._shown}/{path.name}", line=line)


def open_inside(path: Path) -> BinaryIO:
    """A file of a run; raises OSError for a link, which may lead anywhere, and a pipe, which may never answer."""
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(errno.EINVAL, "not a file", str(path))
    return os.fdopen(file, "rb", buffering=0)


def count_of(byte: bytes, data: bytes) -> int:
    """How often a byte is in there: `bytes.count` looks at one at a time, which was a twentieth of all."""
    return int(np.count_nonzero(np.frombuffer(data, np.uint8) == byte[0]))


def _size(path: Path) -> int:
    try:
        found = os.stat(path, follow_symlinks=False)
    except OSError:
        return 0
    return found.st_size if stat.S_ISREG(found.st_mode) else 0


# What the small files of a run folder say: where it came from, and where it listened.


MOST_ADDRESSES = 64


def launch_of(run: Run) -> Mapping[str, Any]:
    """launch.json; empty where it is missing or damaged."""
    return _json(run, "launch.json")


def has_provenance(launch: Mapping[str, Any]) -> bool | None:
    """Whether the launch says which versions ran, and which configuration and code; None where there is no launch.

    A package that was installed has no commit: a digest of its files stands for it.
    """
    if not launch:
        return None
    known = at(launch, "provenance")
    versions = at(known, "versions")
    code = known.get("commit") or known.get("code")
    return all((versions.get("phalanx"), known.get("job_digest"), code))


def is_job_changed(run: Run, launch: Mapping[str, Any]) -> bool:
    """Whether job.json is another than the launch says; False where one of them is missing."""
    told, job = at(launch, "provenance").get("job_digest"), _json(run, "job.json")
    return bool(told and job) and told != job_digest(job)


def listens(run: Run, launch: Mapping[str, Any]) -> tuple[str, ...]:
    """Addresses that the coordinator, the agents, the store and the metrics listened on."""
    return tuple(sorted(set(_addresses(run, launch)))[:MOST_ADDRESSES])


def _addresses(run: Run, launch: Mapping[str, Any]) -> Iterator[str]:
    seen = _json(run, "coordinator.json")
    named = launch.get("addresses")
    yield from (printable(one, most=100) for one in (named if isinstance(named, list) else ()) if isinstance(one, str))
    go = at(seen, "go")
    places = [seen.get("address"), go.get("store"), *at(go, "vaults").values(), *at(go, "peers").values()]
    for place in places[:10_000]:
        if isinstance(place, list) and place and isinstance(place[0], str):
            yield printable(place[0], most=100)
    telemetry = at(_json(run, "job.json"), "telemetry")
    if telemetry.get("prometheus") and isinstance(telemetry.get("listen"), str):
        yield printable(telemetry["listen"].rpartition(":")[0].strip("[]") or telemetry["listen"], most=100)


def _json(run: Run, name: str) -> Mapping[str, Any]:
    try:
        return read_json(run.path / name)
    except (PhalanxError, OSError):
        return {}
