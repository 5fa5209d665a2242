"""Layout of a host's shared event file on disk: extents and their heads, and how a rank appends to its own extents.

An extent begins with a head of 256 bytes, one line of JSON: rank, membership generation and session (one opening of
the file by one process), how many bytes of the session lie in earlier extents, the length of the extent, and how many
of its bytes are used, which the writer updates after each write. The file is a chain of extents from its first byte
on; the unused rest of an extent is a hole.
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
# Extents begin at multiples of this. The first extent of a session has this size, each later one twice its
# predecessor.
UNIT_BYTES = 16 * 2**10
MOST_EXTENT_BYTES = 4 * 2**20
# Units without a head that are searched after a damaged extent: 1 GiB.
MOST_SKIPPED = 2**16
EVENTS, INDEX = ".jsonl", ".index"

_BEFORE, _BETWEEN = b'{"extent":1,"used":"', b'","same":"'
_USED_AT = len(_BEFORE)


def host_file_name(host: str) -> str:
    """Return the host's name as used in file names; tasks of a launcher (`machine:rank`) share one name.

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


# 131,072 ranks have many extents (16,384 ranks have 100,000): a dataclass takes five times as long to create.
class Extent(NamedTuple):
    """A contiguous range of a host's file that one session of one rank writes."""

    begin: int  # offset of its head in the file
    size: int  # including its head
    at: int  # bytes of the session in earlier extents


@dataclass(slots=True)
class Session:
    """The bytes that one process wrote as one rank into one file."""

    path: str
    rank: int
    generation: int
    opened_s: float
    name: str
    extents: list[Extent] = field(default_factory=list)

    @property
    def order(self) -> tuple[int, float, str]:
        """Sort key of a rank's sessions: generation first, since the clocks of hosts differ."""
        return self.generation, self.opened_s, self.name

    @property
    def summary(self) -> SessionSummary:
        """The session's line in the rank table."""
        return SessionSummary(self.rank, self.generation, self.opened_s, self.name, len(self.extents))


def _make_head(session: Session, extent: Extent) -> bytes:
    values = [session.rank, session.generation, session.opened_s, session.name, extent.at, extent.size]
    head_fields = dict(zip(("rank", "epoch", "t", "session", "at", "bytes"), values, strict=True))
    text = orjson.dumps(head_fields)[1:-1]
    head = _used_field(0) + b'","crc":%d,' % zlib.crc32(text) + text + b"}"
    return head.ljust(HEAD_BYTES - 1) + b"\n"


def _used_field(used: int) -> bytes:
    # Written twice: a reader during the write sees two different numbers and reads again.
    return _BEFORE + b"%010d" % used + _BETWEEN + b"%010d" % used


def read_used(file: int, extent: Extent) -> int:
    """Return the number of used bytes of an extent."""
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
    """Return the fields of an extent's head; None if it is invalid.

    They are rank, generation, time and name of the session, its bytes before this extent, and the extent's size.
    """
    if len(head) < HEAD_BYTES or not head.startswith(_BEFORE):
        return None
    try:
        head_fields = orjson.loads(head)
        rank, generation, opened_s, name = (
            head_fields["rank"],
            head_fields["epoch"],
            head_fields["t"],
            head_fields["session"],
        )
        at, size, crc = head_fields["at"], head_fields["bytes"], head_fields["crc"]
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
    """The extents of one file, refreshed while the file grows."""

    def __init__(self, path: str) -> None:
        self.path = path
        # By session name and rank. Extents after a lost extent form a separate session.
        self.sessions: dict[str, Session] = {}
        # End of the last extent: where the next one begins.
        self.end = 0
        # By session and rank, the key in `sessions` that a new extent extends.
        self._current: dict[str, str] = {}
        self._bases: dict[str, int] = {}
        self._inode = self._size = -1
        self.is_whole = True  # True if every head could be read
        self.extents = 0  # number of extents

    def is_current(self, found: os.stat_result) -> bool:
        """Return True if a file with this stat has no unknown extents: a new extent makes it longer."""
        return found.st_ino == self._inode and found.st_size == self._size and self.is_whole

    def refresh(self, file: int) -> bool:
        """Follow the chain of extents in an open file; return True if there was anything new."""
        file_stat = os.fstat(file)
        if self.is_current(file_stat):
            return False
        if file_stat.st_ino != self._inode or file_stat.st_size < self._size or not self.is_whole:
            # Another file, or a head that was damaged or had not arrived yet over a network file system.
            self.sessions, self._current, self._bases, self.end, self.extents = {}, {}, {}, 0, 0
        self._inode, self._size, self.is_whole = file_stat.st_ino, file_stat.st_size, True
        at, end, skipped = self.end, file_stat.st_size, 0
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
        session = self.sessions.get(key)
        if session is not None:
            last, base = session.extents[-1], self._bases[key]
            if 0 <= at - base - last.at <= last.size - HEAD_BYTES:
                session.extents.append(Extent(begin, size, at - base))
                return
            key = self._current[stem] = f"{stem} {begin}"
        self.sessions[key] = Session(self.path, rank, generation, opened_s, name, [Extent(begin, size, 0)])
        self._bases[key] = at


# ---- writing ---------------------------------------------------------------------------------------------------------


class HostStream:
    """Appends the bytes of one session to a host's file; raises OSError if it cannot, such as without file locks."""

    def __init__(self, path: Path, *, rank: int, generation: int, name: str = "", is_lines: bool = True) -> None:
        self._session = Session(os.fspath(path), rank, generation, time.time(), name or secrets.token_hex(6))
        # If True, no line is split between two extents, so the file itself can be read line by line.
        self._is_lines = is_lines
        self._chain = ExtentChain(self._session.path)
        self._extent = Extent(0, HEAD_BYTES, 0)  # empty: the first write takes an extent
        self._used = 0
        session = self._session
        # An index has no rank table: its readers find it through the session of the events.
        self._table = (
            RankTableWriter(
                os.fspath(Path(path).with_suffix(TABLE)),
                rank=rank,
                generation=generation,
                opened_s=session.opened_s,
                name=session.name,
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
        """The session's name, which its index shares."""
        return self._session.name

    @property
    def end(self) -> int:
        """Bytes of the session so far."""
        return self._extent.at + self._used

    def write(self, data: bytes) -> int:
        """Append as many bytes as fit, at least one; return their number."""
        room = self._extent.size - HEAD_BYTES - self._used
        fits = len(data)
        if fits > room:
            fits = data.rfind(b"\n", 0, room) + 1 if self._is_lines else room
        if not fits:
            self._take_extent(data.find(b"\n") + 1 or len(data))
            return self.write(data)
        done = os.pwrite(self._file, data[:fits], self._extent.begin + HEAD_BYTES + self._used)
        self._used += done
        with contextlib.suppress(OSError):  # the next write updates the count
            os.pwrite(self._file, _used_field(self._used), self._extent.begin)
            if self._table is not None and not self._table.has_bytes:
                with self._locked():
                    self._table.note_bytes()
        return done

    def note_block(self, block: bytes) -> None:
        """Store the newest block of this stream's index in the rank table; zeros if it has none."""
        if self._table is not None:
            with contextlib.suppress(OSError), self._locked():
                self._table.note_block(block)

    def forget_block(self) -> None:
        """Mark the newest index block in the rank table as unknown."""
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
        """Return the first bytes of the session."""
        extent = self._session.extents[0]
        length = self._used if extent is self._extent else self._session.extents[1].at
        return os.pread(self._file, min(count, length), extent.begin + HEAD_BYTES)

    def open_index(self) -> HostStream:
        """Open a stream for the index of this session, in the host's index file."""
        path, session = Path(self._session.path).with_suffix(INDEX), self._session
        return HostStream(path, rank=session.rank, generation=session.generation, name=session.name, is_lines=False)

    def close(self) -> None:
        """Close the file; nothing is written afterwards."""
        os.close(self._file)
        if self._table is not None:
            self._table.close()

    def _take_extent(self, need: int) -> None:
        """Take an extent at the end of the chain, with room for at least `need` bytes."""
        earlier = min(len(self._session.extents), 16)
        size = max(min(UNIT_BYTES << earlier, MOST_EXTENT_BYTES), _rounded_up(HEAD_BYTES + need))
        with self._locked():
            self._chain.refresh(self._file)
            begin, length = self._chain.end, os.fstat(self._file).st_size
            # An unreadable head: leave its owner the room that its extent may have.
            if length > begin:
                begin = _rounded_up(length) + MOST_EXTENT_BYTES
            extent = Extent(begin, size, self.end)
            head = _make_head(self._session, extent)
            if os.pwrite(self._file, head, begin) != len(head):
                os.ftruncate(self._file, begin)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if self._table is not None and self._chain.is_whole:
                self._table.note_extent(
                    [session.summary for session in self._chain.sessions.values()],
                    is_first=not self._session.extents,
                    last_begin=begin,
                    last_end=begin + size,
                    extents=self._chain.extents + 1,
                )
        self._extent, self._used = extent, 0
        self._session.extents.append(extent)
