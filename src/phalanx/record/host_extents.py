"""The file of all ranks of a host as it lies on the disk: extents, their heads, and how a rank appends to its own.

An extent begins with a head of 256 bytes, one line of JSON: rank, membership generation and session (one opening of
the file by one process), how many bytes of the session lie in earlier extents, how long the extent is, and how many of
its bytes are used, which the writer brings up to date after each write. The file is a chain of extents, from its first
byte on; what an extent does not use is a hole.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import secrets
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import orjson

from phalanx.record.rank_table import TABLE, RankTableWriter, SessionSummary

HEAD_BYTES = 256
UNIT_BYTES = 16 * 2**10  # extents begin at a multiple of this; the first of a session is so long, each later one twice
MOST_EXTENT_BYTES = 4 * 2**20
MOST_SKIPPED = 2**16  # places without a head that are looked at behind damage: 1 GiB
EVENTS, INDEX = ".jsonl", ".index"

_BEFORE, _BETWEEN = b'{"extent":1,"used":"', b'","same":"'
_USED_AT = len(_BEFORE)


def host_file_name(host: str) -> str:
    """The name of a host in the names of its files; tasks that a launcher started (`machine:rank`) share their machine.

    >>> host_file_name("gpu-04"), host_file_name("gpu-04:17"), host_file_name("a/b")
    ('gpu-04', 'gpu-04', 'a_b-c14cddc0')
    """
    machine = host.partition(":")[0]
    safe = re.sub(r"[^A-Za-z0-9._-]", "_", machine)[:60]
    if safe == machine and safe[:1].isalnum() and safe.isascii():
        return safe
    return f"{safe.lstrip('._-') or 'host'}-{hashlib.sha256(machine.encode()).hexdigest()[:8]}"


def _rounded_up(size: int) -> int:
    return -(-size // UNIT_BYTES) * UNIT_BYTES


# ---- extents ---------------------------------------------------------------------------------------------------------


class Extent(NamedTuple):  # of 16,384 ranks there are 100,000: a dataclass takes five times as long to make
    """A stretch of a host's file that one session of one rank writes."""

    begin: int  # of its head, in the file
    size: int  # with its head
    at: int  # bytes of the session in earlier extents


@dataclass(slots=True)
class Session:
    """What one process wrote as one rank into one file."""

    path: str
    rank: int
    generation: int
    opened_s: float
    name: str
    extents: list[Extent] = field(default_factory=list)

    @property
    def order(self) -> tuple[int, float, str]:
        """Sorts the sessions of a rank: by generation first, since clocks of hosts differ."""
        return self.generation, self.opened_s, self.name

    @property
    def summary(self) -> SessionSummary:
        """For the rank table."""
        return SessionSummary(self.rank, self.generation, self.opened_s, self.name, len(self.extents))


def _make_head(session: Session, extent: Extent) -> bytes:
    known = [session.rank, session.generation, session.opened_s, session.name, extent.at, extent.size]
    told = dict(zip(("rank", "epoch", "t", "session", "at", "bytes"), known, strict=True))
    text = orjson.dumps(told)[1:-1]
    head = _used_field(0) + b'","crc":%d,' % zlib.crc32(text) + text + b"}"
    return head.ljust(HEAD_BYTES - 1) + b"\n"


def _used_field(used: int) -> bytes:
    # Twice: a reader that looks while it is written sees two different numbers, and looks again.
    return _BEFORE + b"%010d" % used + _BETWEEN + b"%010d" % used


def read_used(file: int, extent: Extent) -> int:
    """Bytes that are used of an extent."""
    used = 0
    for _ in range(3):
        head = os.pread(file, _USED_AT + 20 + len(_BETWEEN), extent.begin)
        first, second = head[_USED_AT : _USED_AT + 10], head[-10:]
        if not (first.isdigit() and second.isdigit()):
            return 0
        used = min(int(first), int(second))
        if first == second:
            break
    return min(used, extent.size - HEAD_BYTES)


def _read_head(head: bytes) -> tuple[int, int, float, str, int, int] | None:
    """Rank, generation, time and name of the session, its bytes before this extent, and its size; None for no head."""
    if len(head) < HEAD_BYTES or not head.startswith(_BEFORE):
        return None
    try:
        told = orjson.loads(head)
        rank, generation, opened_s, name = told["rank"], told["epoch"], told["t"], told["session"]
        at, size, crc = told["at"], told["bytes"], told["crc"]
        if zlib.crc32(head[head.index(b',"rank":') + 1 : head.rindex(b"}")]) != crc:
            return None
    except (ValueError, KeyError, TypeError):
        return None
    if not (type(rank) is type(generation) is type(at) is type(size) is type(crc) is int):
        return None
    if type(opened_s) is not float or type(name) is not str:
        return None
    if not 0 <= rank < 10**7 or size % UNIT_BYTES or not 0 < size < 2**31 or not 0 <= at < 2**62:
        return None
    return rank, generation, opened_s, name, at, size


class ExtentChain:
    """The extents of one file, looked for again and again while it grows."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.sessions: dict[str, Session] = {}  # by name and rank; what follows a lost extent is a session of its own
        self.end = 0  # behind the last extent: where the next one begins
        self._current: dict[str, str] = {}  # which of them an extent goes on
        self._bases: dict[str, int] = {}
        self._inode = self._size = -1
        self.is_whole = True  # every head could be read
        self.extents = 0  # how many there are

    def is_current(self, found: os.stat_result) -> bool:
        """Whether a file like this has no extents that are not known: a new one makes it longer."""
        return found.st_ino == self._inode and found.st_size == self._size and self.is_whole

    def refresh(self, file: int) -> bool:
        """Follow the chain in an opened file; whether there was anything new."""
        found = os.fstat(file)
        if self.is_current(found):
            return False
        if found.st_ino != self._inode or found.st_size < self._size or not self.is_whole:
            # Another file, or a head was damaged or still on its way through a network file system.
            self.sessions, self._current, self._bases, self.end, self.extents = {}, {}, {}, 0, 0
        self._inode, self._size, self.is_whole = found.st_ino, found.st_size, True
        at, end, skipped = self.end, found.st_size, 0
        while at < end and skipped < MOST_SKIPPED:
            head = _read_head(os.pread(file, HEAD_BYTES, at))
            if head is None:
                at, skipped, self.is_whole = at + UNIT_BYTES, skipped + 1, False
                continue
            self._add_extent(head, at)
            at += head[5]
            self.end, skipped = at, 0
        return True

    def _add_extent(self, head: tuple[int, int, float, str, int, int], begin: int) -> None:
        rank, generation, opened_s, name, at, size = head
        self.extents += 1
        stem = f"{name} {rank}"
        key = self._current.get(stem, stem)
        known = self.sessions.get(key)
        if known is not None:
            last, base = known.extents[-1], self._bases[key]
            if 0 <= at - base - last.at <= last.size - HEAD_BYTES:
                known.extents.append(Extent(begin, size, at - base))
                return
            key = self._current[stem] = f"{stem} {begin}"
        self.sessions[key] = Session(self.path, rank, generation, opened_s, name, [Extent(begin, size, 0)])
        self._bases[key] = at


# ---- writing ---------------------------------------------------------------------------------------------------------


class HostStream:
    """Appends one session's bytes to a host's file; raises OSError where it cannot, as where locks do not work."""

    def __init__(self, path: Path, *, rank: int, generation: int, name: str = "", is_lines: bool = True) -> None:
        self._session = Session(os.fspath(path), rank, generation, time.time(), name or secrets.token_hex(6))
        self._is_lines = is_lines  # no line lies in two extents: whoever reads the file itself finds whole lines
        self._chain = ExtentChain(self._session.path)
        self._extent = Extent(0, HEAD_BYTES, 0)  # no room
        self._used = 0
        known = self._session
        # An index needs no table of its own: who looks for one knows its session.
        self._table = (
            RankTableWriter(
                os.fspath(Path(path).with_suffix(TABLE)),
                rank=rank,
                generation=generation,
                opened_s=known.opened_s,
                name=known.name,
            )
            if is_lines
            else None
        )
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        try:
            self._take_extent(0)
        except BaseException:
            self.close()
            raise

    @property
    def name(self) -> str:
        """The session's; its index has the same."""
        return self._session.name

    @property
    def end(self) -> int:
        """Bytes of the session so far."""
        return self._extent.at + self._used

    def write(self, data: bytes) -> int:
        """Append; how many of the bytes, at least one."""
        room = self._extent.size - HEAD_BYTES - self._used
        fits = len(data)
        if fits > room:
            fits = data.rfind(b"\n", 0, room) + 1 if self._is_lines else room
        if not fits:
            self._take_extent(data.find(b"\n") + 1 or len(data))
            return self.write(data)
        done = os.pwrite(self._file, data[:fits], self._extent.begin + HEAD_BYTES + self._used)
        self._used += done
        with contextlib.suppress(OSError):  # told with the next write
            os.pwrite(self._file, _used_field(self._used), self._extent.begin)
            if self._table is not None and not self._table.has_bytes:
                with self._locked():
                    self._table.note_bytes()
        return done

    def note_block(self, block: bytes) -> None:
        """The newest block of the index of what is written here; zeros where it has none. For the rank table."""
        if self._table is not None:
            with contextlib.suppress(OSError), self._locked():
                self._table.note_block(block)

    def forget_block(self) -> None:
        """Which block of the index is the newest is not known here any more."""
        if self._table is not None:
            with contextlib.suppress(OSError), self._locked():
                self._table.forget_block()

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def first_bytes(self, count: int) -> bytes:
        """What the session begins with."""
        extent = self._session.extents[0]
        length = self._used if extent is self._extent else self._session.extents[1].at
        return os.pread(self._file, min(count, length), extent.begin + HEAD_BYTES)

    def open_index(self) -> HostStream:
        """A stream for the index of what is written here, in the host's other file."""
        path, known = Path(self._session.path).with_suffix(INDEX), self._session
        return HostStream(path, rank=known.rank, generation=known.generation, name=known.name, is_lines=False)

    def close(self) -> None:
        """No more is written."""
        os.close(self._file)
        if self._table is not None:
            self._table.close()

    def _take_extent(self, need: int) -> None:
        """Take an extent at the end of the chain, for lines of at least `need` bytes."""
        earlier = min(len(self._session.extents), 16)
        size = max(min(UNIT_BYTES << earlier, MOST_EXTENT_BYTES), _rounded_up(HEAD_BYTES + need))
        with self._locked():
            self._chain.refresh(self._file)
            begin, length = self._chain.end, os.fstat(self._file).st_size
            if length > begin:  # a head that cannot be read: leave its owner the room that it may have
                begin = _rounded_up(length) + MOST_EXTENT_BYTES
            extent = Extent(begin, size, self.end)
            head = _make_head(self._session, extent)
            if os.pwrite(self._file, head, begin) != len(head):
                os.ftruncate(self._file, begin)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if self._table is not None and self._chain.is_whole:
                self._table.note_extent(
                    [one.summary for one in self._chain.sessions.values()],
                    is_first=not self._session.extents,
                    last_begin=begin,
                    last_end=begin + size,
                    extents=self._chain.extents + 1,
                )
        self._extent, self._used = extent, 0
        self._session.extents.append(extent)
