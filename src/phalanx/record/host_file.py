"""One file of events for all ranks of a host: `events-host-NAME.jsonl`, and `events-host-NAME.index` beside it.

131,072 ranks with a file of events and an index each are more files than a shared file system likes. From 1,024 ranks
on (`telemetry.host_files_from`) the ranks of a host share one file of each. Every rank appends to extents of its own,
so no rank's lines mix with another's, and a killed rank leaves at most its own last line torn. Only taking an extent
needs a lock, once in some hundred steps.

An extent begins with a head of 256 bytes, one line of JSON: rank, membership generation and session (one opening of
the file by one process), how many bytes of the session lie in earlier extents, how long the extent is, and how many of
its bytes are used, which the writer brings up to date after each write. The file is a chain of extents, from its first
byte on; what an extent does not use is a hole.

Readers see none of this. A session is what a file that was closed for its size is otherwise: a numbered part of the
rank's events. `open_events`, `stat_events`, `has_events` and `session_counts` answer for `events-00005.jsonl`,
`events-00005-0001.jsonl` and their indexes, wherever the bytes lie.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import io
import os
import re
import secrets
import stat
import threading
import time
import zlib
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import orjson

from phalanx.io.files import open_regular

HEAD_BYTES = 256
UNIT_BYTES = 16 * 2**10  # extents begin at a multiple of this; the first of a session is so long, each later one twice
MOST_EXTENT_BYTES = 4 * 2**20
MOST_SKIPPED = 2**16  # places without a head that are looked at behind damage: 1 GiB
SHARE = 20  # looking for new extents takes at most one part in so many of a reader's time
LONG_LOOK_S = 0.005
EVENTS, INDEX = ".jsonl", ".index"

_HOST_FILE = re.compile(r"events-host-[A-Za-z0-9][A-Za-z0-9._-]{0,99}\.jsonl")
_RANK_FILE = re.compile(r"events-(\d{5}|[1-9]\d{5,6})(?:-(\d{4,9}))?(\.jsonl|\.index)")
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


def _make_head(session: Session, extent: Extent) -> bytes:
    known = [session.rank, session.generation, session.opened_s, session.name, extent.at, extent.size]
    told = dict(zip(("rank", "epoch", "t", "session", "at", "bytes"), known, strict=True))
    text = orjson.dumps(told)[1:-1]
    head = _used_field(0) + b'","crc":%d,' % zlib.crc32(text) + text + b"}"
    return head.ljust(HEAD_BYTES - 1) + b"\n"


def _used_field(used: int) -> bytes:
    # Twice: a reader that looks while it is written sees two different numbers, and looks again.
    return _BEFORE + b"%010d" % used + _BETWEEN + b"%010d" % used


def _read_used(file: int, extent: Extent) -> int:
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


def _read_extent(head: bytes, begin: int, path: str) -> tuple[Session, Extent] | None:
    """The extent that a head tells of; None where it is none."""
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
    return Session(path, rank, generation, opened_s, name), Extent(begin, size, at)


class ExtentChain:
    """The extents of one file, looked for again and again while it grows."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.sessions: dict[str, Session] = {}  # by name and rank; what follows a lost extent is a session of its own
        self.end = 0  # behind the last extent: where the next one begins
        self._current: dict[str, str] = {}  # which of them an extent goes on
        self._bases: dict[str, int] = {}
        self._inode = self._size = -1
        self._is_whole = True  # every head could be read

    def is_current(self, found: os.stat_result) -> bool:
        """Whether a file like this has no extents that are not known: a new one makes it longer."""
        return found.st_ino == self._inode and found.st_size == self._size and self._is_whole

    def refresh(self, file: int) -> bool:
        """Follow the chain in an opened file; whether there was anything new."""
        found = os.fstat(file)
        if self.is_current(found):
            return False
        if found.st_ino != self._inode or found.st_size < self._size or not self._is_whole:
            # Another file, or a head was damaged or still on its way through a network file system.
            self.sessions, self._current, self._bases, self.end = {}, {}, {}, 0
        self._inode, self._size, self._is_whole = found.st_ino, found.st_size, True
        at, skipped = self.end, 0
        while at < found.st_size and skipped < MOST_SKIPPED:
            known = _read_extent(os.pread(file, HEAD_BYTES, at), at, self.path)
            if known is None:
                at, skipped, self._is_whole = at + UNIT_BYTES, skipped + 1, False
                continue
            self._add_extent(*known)
            at += known[1].size
            self.end, skipped = at, 0
        return True

    def _add_extent(self, session: Session, extent: Extent) -> None:
        name = f"{session.name} {session.rank}"
        key = self._current.get(name, name)
        known = self.sessions.setdefault(key, session)
        if known.extents:
            last = known.extents[-1]
            gone = extent.at - self._bases[key] - last.at
            if not 0 <= gone <= last.size - HEAD_BYTES:
                key = self._current[name] = f"{name} {extent.begin}"
                known = self.sessions[key] = session
        if not known.extents:
            self._bases[key] = extent.at
        base = self._bases[key]
        known.extents.append(Extent(extent.begin, extent.size, extent.at - base) if base else extent)


# ---- writing ---------------------------------------------------------------------------------------------------------


class HostStream:
    """Appends one session's bytes to a host's file; raises OSError where it cannot, as where locks do not work."""

    def __init__(self, path: Path, *, rank: int, generation: int, name: str = "", is_lines: bool = True) -> None:
        self._session = Session(os.fspath(path), rank, generation, time.time(), name or secrets.token_hex(6))
        self._is_lines = is_lines  # no line lies in two extents: whoever reads the file itself finds whole lines
        self._chain = ExtentChain(self._session.path)
        self._extent = Extent(0, HEAD_BYTES, 0)  # no room
        self._used = 0
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        try:
            self._take_extent(0)
        except BaseException:
            os.close(self._file)
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
        return done

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

    def _take_extent(self, need: int) -> None:
        """Take an extent at the end of the chain, for lines of at least `need` bytes."""
        earlier = min(len(self._session.extents), 16)
        size = max(min(UNIT_BYTES << earlier, MOST_EXTENT_BYTES), _rounded_up(HEAD_BYTES + need))
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            self._chain.refresh(self._file)
            begin, length = self._chain.end, os.fstat(self._file).st_size
            if length > begin:  # a head that cannot be read: leave its owner the room that it may have
                begin = _rounded_up(length) + MOST_EXTENT_BYTES
            extent = Extent(begin, size, self.end)
            head = _make_head(self._session, extent)
            if os.pwrite(self._file, head, begin) != len(head):
                os.ftruncate(self._file, begin)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)
        self._extent, self._used = extent, 0
        self._session.extents.append(extent)


# ---- reading ---------------------------------------------------------------------------------------------------------


class SessionBytes(io.RawIOBase):
    """The bytes of a session as if they were a file, as many as there were when it was opened."""

    def __init__(self, session: Session) -> None:
        self._file = open_regular(Path(session.path))
        self._extents = list(session.extents)
        self._starts = [one.at for one in self._extents]
        last = self._extents[-1]
        self.size = last.at + _read_used(self._file.fileno(), last)
        self._at = 0

    def read(self, size: int = -1, /) -> bytes:
        """Up to so many bytes; fewer only at the end."""
        stop = self.size if size < 0 else min(self.size, self._at + size)
        parts = []
        while self._at < stop:
            number = bisect_right(self._starts, self._at) - 1
            extent = self._extents[number]
            end = min(stop, self._starts[number + 1] if number + 1 < len(self._starts) else stop)
            begin = extent.begin + HEAD_BYTES + self._at - extent.at
            data = os.pread(self._file.fileno(), end - self._at, begin)
            if not data:  # the file became shorter
                break
            parts.append(data)
            self._at += len(data)
        return b"".join(parts)

    def readinto(self, buffer: Any, /) -> int:
        """For `io.BufferedReader`."""
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def readable(self) -> bool:
        """Always."""
        return True

    def seekable(self) -> bool:
        """Always."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        """Go to a byte."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self.size}[whence]
        self._at = max(0, base + offset)
        return self._at

    def tell(self) -> int:
        """Where the next read begins."""
        return self._at

    def close(self) -> None:
        """Close the host's file."""
        if not self.closed:
            self._file.close()
        super().close()


EventBytes = BinaryIO | SessionBytes


class HostFiles:
    """The host files of one run folder. Threads may share one."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._chains: dict[str, ExtentChain] = {}
        self._indexes: dict[str, ExtentChain] = {}
        self._ranks: dict[int, list[Session]] = {}
        self._known: frozenset[str] = frozenset()  # files whose sessions are told
        self._listed: tuple[int, int] = (-1, -1)
        self._looked_s = self._took_s = 0.0

    def sessions(self, *, now: bool = False) -> dict[int, list[Session]]:
        """By rank, oldest first; not to be changed. Looks for new ones `now`, or when it has not for a while."""
        with self._lock:
            began_s = time.monotonic()
            # Of thousands of hosts, not again before as much time has passed as looking takes.
            wait_s = SHARE * self._took_s if not now else self._took_s if self._took_s > LONG_LOOK_S else -1.0
            if not self._looked_s or began_s - self._looked_s > wait_s:
                self._look_again(now=now)
                self._looked_s = time.monotonic()
                self._took_s = self._looked_s - began_s
            return self._ranks

    def index_of(self, session: Session) -> Session | None:
        """Where the index of a session lies."""
        path = session.path.removesuffix(EVENTS) + INDEX
        with self._lock:
            chain = self._indexes.setdefault(path, ExtentChain(path))
            _refresh_chain(chain)
            return chain.sessions.get(f"{session.name} {session.rank}")

    def indexes_of(self, sessions: Iterable[Session]) -> dict[str, list[tuple[Session, Session]]]:
        """Where the indexes of sessions lie, by their file: pairs of a session and its index."""
        files: dict[str, list[Session]] = {}
        for session in sessions:
            files.setdefault(session.path.removesuffix(EVENTS) + INDEX, []).append(session)
        found: dict[str, list[tuple[Session, Session]]] = {}
        with self._lock:
            for path, some in files.items():
                chain = self._indexes.setdefault(path, ExtentChain(path))
                _refresh_chain(chain)
                pairs = [(one, chain.sessions.get(f"{one.name} {one.rank}")) for one in some]
                found[path] = [(one, index) for one, index in pairs if index is not None]
        return found

    def _look_again(self, *, now: bool) -> None:
        try:
            found = os.stat(self._folder)
            stamp = found.st_ino, found.st_mtime_ns
            # A file system may count changes by the second (events.SETTLED_NS): whoever asks for `now` must know.
            if stamp != self._listed or (now and time.time_ns() - found.st_mtime_ns < 2 * 10**9):
                names = [name for name in os.listdir(self._folder) if _HOST_FILE.fullmatch(name)]
                paths = [f"{self._folder}/{name}" for name in names]
                self._chains = {path: self._chains.get(path) or ExtentChain(path) for path in sorted(paths)}
                self._listed = stamp
        except OSError:
            self._chains = {}
        changed = [chain for chain in self._chains.values() if _refresh_chain(chain)]
        if changed or self._known != self._chains.keys():
            self._known = frozenset(self._chains)
            ranks: dict[int, list[Session]] = {}
            for chain in self._chains.values():
                for session in chain.sessions.values():
                    ranks.setdefault(session.rank, []).append(session)
            for some in ranks.values():
                some.sort(key=lambda one: one.order)
            self._ranks = dict(sorted(ranks.items()))


def _refresh_chain(chain: ExtentChain) -> bool:
    try:
        if chain.is_current(os.stat(chain.path)):  # a third of the time of opening it
            return False
        file = os.open(chain.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        return stat.S_ISREG(os.fstat(file).st_mode) and chain.refresh(file)
    except OSError:
        return False
    finally:
        os.close(file)


@lru_cache(maxsize=4)
def host_files(folder: str) -> HostFiles:
    """Those of a folder, known from one question to the next."""
    return HostFiles(folder)


def session_counts(folder: Path) -> dict[int, int]:
    """Of every rank with events in host files, how many sessions it has: now, or as of the last look."""
    return {rank: len(some) for rank, some in host_files(os.fspath(folder)).sessions(now=True).items()}


def closed_sessions(folder: Path, rank: int, *, now: bool = False) -> int:
    """How many numbered parts of a rank's events lie in host files; `now`, or as of the last look."""
    some = host_files(os.fspath(folder)).sessions(now=now).get(rank, ())
    return len(some) - (not os.path.lexists(folder / f"events-{rank:05d}.jsonl")) if some else 0


def find_session(path: Path) -> Session | None:
    """Where the bytes of a rank's events, or of their index, lie, if in a host's file.

    A rank that has a file of its own writes into that: all its sessions are numbered parts then.
    """
    match = _RANK_FILE.fullmatch(path.name)
    if match is None:
        return None
    files = host_files(os.fspath(path.parent))
    some = files.sessions().get(int(match.group(1)))
    if not some:
        return None
    if match.group(2):
        number = int(match.group(2)) - 1
        session = some[number] if 0 <= number < closed_sessions(path.parent, int(match.group(1))) else None
    else:
        session = some[-1]
    return files.index_of(session) if session is not None and match.group(3) == INDEX else session


def open_events(path: Path, *, buffering: int = 0) -> EventBytes:
    """The events of a rank, or their index, for reading; raises OSError where there are none."""
    try:
        return open_regular(path, buffering=buffering)
    except FileNotFoundError:
        if (session := find_session(path)) is None:
            raise
    found = SessionBytes(session)
    return io.BufferedReader(found, 2**18) if buffering else found


def opened_size(file: EventBytes) -> int:
    """Bytes of what `open_events` opened."""
    return file.size if isinstance(file, SessionBytes) else os.fstat(file.fileno()).st_size


@dataclass(frozen=True, slots=True)
class EventStat:
    """Size, and when the file last grew that holds it."""

    size: int
    mtime_ns: int
    is_file: bool = True


def stat_events(path: str | Path, *, follow_links: bool = True) -> EventStat | None:
    """Of the events of a rank, or of their index; None where there are none."""
    try:
        found = os.stat(path, follow_symlinks=follow_links)
        return EventStat(found.st_size, found.st_mtime_ns, stat.S_ISREG(found.st_mode))
    except FileNotFoundError:
        session = find_session(Path(path))
    except OSError:
        return None
    if session is None:
        return None
    try:
        with open_regular(Path(session.path)) as file:
            last = session.extents[-1]
            return EventStat(last.at + _read_used(file.fileno(), last), os.fstat(file.fileno()).st_mtime_ns)
    except OSError:
        return None


def has_events(path: Path) -> bool:
    """Whether there is such a file, or a session that stands for it."""
    return path.exists() or find_session(path) is not None


def has_bytes(session: Session) -> bool:
    """Whether anything was written in a session."""
    if len(session.extents) > 1:  # the first of them is full: no need to look
        return True
    try:
        with open_regular(Path(session.path)) as file:
            return _read_used(file.fileno(), session.extents[-1]) > 0
    except OSError:
        return False


def total_bytes(folder: Path) -> int:
    """Bytes of all events in the host files of a folder; each file is opened once."""
    files: dict[str, list[Session]] = {}
    for some in host_files(os.fspath(folder)).sessions(now=True).values():
        for session in some:
            files.setdefault(session.path, []).append(session)
    total = 0
    for path, some in files.items():
        with contextlib.suppress(OSError), open_regular(Path(path)) as file:
            total += sum(one.extents[-1].at + _read_used(file.fileno(), one.extents[-1]) for one in some)
    return total


def index_tails(folder: str, ranks: Iterable[int], *, head: int, size: int, most: int) -> dict[int, bytes]:
    """The last `most` records of `size` bytes of the newest index of each rank that has one in a host's file.

    Ranks that have a file of their own are left out: their newest is there. Each file of a host is opened once.
    """
    files = host_files(folder)
    sessions = files.sessions()
    if not sessions:
        return {}
    try:
        own = set(os.listdir(folder))
    except OSError:  # moved away meanwhile
        return {}
    newest = [sessions[rank][-1] for rank in ranks if rank in sessions and f"events-{rank:05d}.jsonl" not in own]
    found: dict[int, bytes] = {}
    for path, pairs in files.indexes_of(newest).items():
        with contextlib.suppress(OSError), open_regular(Path(path)) as file:
            for session, index in pairs:
                found[session.rank] = _read_last(file.fileno(), index, head=head, size=size, most=most)
    return found


def _read_last(file: int, session: Session, *, head: int, size: int, most: int) -> bytes:
    last = session.extents[-1]
    count = (last.at + _read_used(file, last) - head) // size
    first = head + max(0, count - most) * size
    stop = head + count * size
    parts = []
    for number, extent in enumerate(session.extents):
        end = session.extents[number + 1].at if number + 1 < len(session.extents) else stop
        begin, end = max(first, extent.at), min(stop, end)
        if begin < end:
            parts.append(os.pread(file, end - begin, extent.begin + HEAD_BYTES + begin - extent.at))
    return b"".join(parts)
