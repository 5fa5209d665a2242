"""One file of events for all ranks of a host: `events-host-NAME.jsonl`, and `events-host-NAME.index` beside it.

131,072 ranks with a file of events and an index each are more files than a shared file system likes. From 1,024 ranks
on (`telemetry.host_files_from`) the ranks of a host share one file of each. Every rank appends to extents of its own,
so no rank's lines mix with another's, and a killed rank leaves at most its own last line torn. Only taking an extent
needs a lock, once in some hundred steps.

Readers see none of this. A session is what a file that was closed for its size is otherwise: a numbered part of the
rank's events. `open_events`, `stat_events`, `has_events` and `session_counts` answer for `events-00005.jsonl`,
`events-00005-0001.jsonl` and their indexes, wherever the bytes lie.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import stat
import threading
import time
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from phalanx.io.files import open_regular
from phalanx.record.host_extents import EVENTS, HEAD_BYTES, INDEX, ExtentChain, Session, read_used
from phalanx.record.rank_table import BLOCK_BYTES, TABLE

if TYPE_CHECKING:  # numpy takes half of the time in which a coordinator starts, and that reads no files of hosts
    import numpy as np
    from numpy.typing import NDArray

    from phalanx.record.rank_table_reader import RankRows

SHARE = 20  # looking for new extents takes at most one part in so many of a reader's time
SHARE_NOW = 8  # the same for who must know now: what a look of some milliseconds tells is as old as that anyway
MANY_FILES = 64  # of fewer, a look costs less than a millisecond, and a busy machine only makes it seem long
HOSTS_AT_ONCE = 1024  # whose rank tables are held in memory: 6 MB

HOST_FILE = re.compile(r"events-host-[A-Za-z0-9][A-Za-z0-9._-]{0,99}\.jsonl")
_RANK_FILE = re.compile(r"events-(\d{5}|[1-9]\d{5,6})(?:-(\d{4,9}))?(\.jsonl|\.index)")


class SessionBytes(io.RawIOBase):
    """The bytes of a session as if they were a file, as many as there were when it was opened."""

    def __init__(self, session: Session) -> None:
        self._file = open_regular(Path(session.path))
        self._extents = list(session.extents)
        self._starts = [one.at for one in self._extents]
        last = self._extents[-1]
        self.size = last.at + read_used(self._file.fileno(), last)
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


@dataclass(frozen=True, eq=False, slots=True)
class SessionCounts:
    """How many sessions each rank has. Never changed: as long as it is the same one, so are the sessions."""

    by_rank: dict[int, int]


@dataclass(slots=True, eq=False)
class HostFile:
    """What is known of one host's file: by its rank table, or by the heads of its extents where nobody believes it."""

    path: str
    chain: ExtentChain
    heads: bytes = b""  # entries of a rank table
    inode: int = -1  # of a file whose table was believed
    last_begin: int = 0  # its newest extent by the table
    last_end: int = 0
    walked: int = 0  # the look at which the heads were followed last

    def is_current(self, found: os.stat_result) -> bool:
        """Whether a file like this has no extents that are not known: a new one makes it longer."""
        if self.inode >= 0:
            is_inside = self.last_begin + HEAD_BYTES <= found.st_size <= self.last_end
            return is_inside and found.st_ino == self.inode
        return self.chain.is_current(found)


class HostFiles:
    """The host files of one run folder. Threads may share one."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._lock = threading.RLock()
        self._hosts: list[HostFile] = []
        self._indexes: dict[str, ExtentChain] = {}
        self._rows: RankRows | None = None  # None: there are no host files
        self._sessions: dict[int, list[Session]] = {}  # of ranks that were asked for since the last change
        self.counts = SessionCounts({})  # as of the last look
        self._own: frozenset[str] = frozenset()  # names of files that ranks have for themselves
        self._listed: tuple[int, int] = (-1, -1)
        self._looked_s = self._took_s = 0.0
        self._looks = 0

    def look(self, *, now: bool = False) -> None:
        """Look for new sessions `now`, or when nobody has for a while."""
        with self._lock:
            began_s = time.monotonic()
            # Of thousands of hosts, not again before some times as much time has passed as looking takes.
            wait_s = (SHARE_NOW if now else SHARE) * self._took_s if len(self._hosts) > MANY_FILES else -1.0
            if not self._looked_s or began_s - self._looked_s > wait_s:
                self._look_again(now=now)
                self._looked_s = time.monotonic()
                self._took_s = self._looked_s - began_s

    def sessions_of(self, rank: int, *, now: bool = False) -> list[Session]:
        """The sessions of a rank, oldest first; not to be changed. By the heads of the extents, of its hosts alone."""
        with self._lock:
            self.look(now=now)
            if self._rows is None:
                return []
            if rank not in self._sessions:
                hosts = [self._hosts[number] for number in self._rows.files_of(rank)]
                walked = [self._walk_chain(host) for host in hosts]
                if any(walked):
                    self._tell_rows()
                some = [one for host in hosts for one in host.chain.sessions.values() if one.rank == rank]
                self._sessions[rank] = sorted(some, key=lambda one: one.order)
            return self._sessions[rank]

    def ranks_with_bytes(self) -> frozenset[int]:
        """Ranks of which the tables say that something was written; of the others, look."""
        with self._lock:
            return self._rows.with_bytes if self._rows is not None else frozenset()

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

    def has_own_file(self, rank: int) -> bool:
        """Whether a rank had a file of its own at the last look."""
        return f"events-{rank:05d}{EVENTS}" in self._own

    def newest_blocks(self, ranks: Sequence[int]) -> tuple[NDArray[np.bool_], NDArray[np.void]]:
        """Of which ranks the tables have the newest block of the index, and those blocks; none of the others."""
        import numpy as np

        from phalanx.record.rank_table_reader import read_blocks

        known = np.zeros(len(ranks), bool)
        with self._lock:
            self.look()
            if self._rows is None:
                return known, np.zeros(0, f"V{BLOCK_BYTES}")
            places, files = self._rows.with_blocks(ranks)
            if self._own:
                shared = np.array([not self.has_own_file(ranks[place]) for place in places.tolist()], bool)
                places, files = places[shared], files[shared]
            needed = np.unique(files).tolist()
            paths = {number: self._hosts[number].path.removesuffix(EVENTS) + TABLE for number in needed}
        is_there, blocks = read_blocks(paths, files, np.asarray(ranks, np.int64)[places])
        known[places[is_there]] = True
        return known, blocks

    def _look_again(self, *, now: bool) -> None:
        self._looks += 1
        is_listed_anew = False
        try:
            found = os.stat(self._folder)
            stamp = found.st_ino, found.st_mtime_ns
            # A file system may count changes by the second (events.SETTLED_NS): whoever asks for `now` must know.
            if stamp != self._listed or (now and time.time_ns() - found.st_mtime_ns < 2 * 10**9):
                is_listed_anew = self._list_hosts()
                self._listed = stamp
        except OSError:
            is_listed_anew, self._hosts = bool(self._hosts), []
        if self._refresh_hosts() or is_listed_anew:
            self._tell_rows()

    def _list_hosts(self) -> bool:
        """Which files there are; whether they are others than before."""
        names = [name for name in os.listdir(self._folder) if name.endswith(EVENTS) and name.startswith("events-")]
        shared = sorted(name for name in names if name.startswith("events-host-") and HOST_FILE.fullmatch(name))
        self._own = frozenset(names).difference(shared)
        before = {host.path: host for host in self._hosts}
        paths = [f"{self._folder}/{name}" for name in shared]
        self._hosts = [before.get(path) or HostFile(path, ExtentChain(path)) for path in paths]
        return paths != list(before)

    def _refresh_hosts(self) -> bool:
        """Look at the files that have new extents; whether there are any."""
        changed: list[tuple[HostFile, os.stat_result]] = []
        for host in self._hosts:
            with contextlib.suppress(OSError):
                found = os.stat(host.path, follow_symlinks=False)
                if not host.is_current(found):
                    changed.append((host, found))
        if not changed:
            return False
        from phalanx.record.rank_table_reader import believe_tables, heads_of_sessions, read_table

        is_new = False
        for begin in range(0, len(changed), HOSTS_AT_ONCE):
            some = changed[begin : begin + HOSTS_AT_ONCE]
            is_file = [stat.S_ISREG(found.st_mode) for _, found in some]
            tables = [
                read_table(host.path.removesuffix(EVENTS) + TABLE) if is_one else b""
                for (host, _), is_one in zip(some, is_file, strict=True)
            ]
            believed = believe_tables(tables, [found.st_size for _, found in some], head_bytes=HEAD_BYTES)
            for (host, found), table in zip(some, believed, strict=True):
                if table is not None:
                    host.heads, host.inode = table.heads, found.st_ino
                    host.last_begin, host.last_end = table.last_begin, table.last_end
                    is_new = True
                elif _refresh_chain(host.chain) or host.inode >= 0:
                    host.heads = heads_of_sessions(one.summary for one in host.chain.sessions.values())
                    host.inode, host.walked = -1, self._looks
                    is_new = True
        return is_new

    def _walk_chain(self, host: HostFile) -> bool:
        """Follow the heads of a file, once between two looks; whether they tell of other sessions than its table."""
        if host.walked == self._looks:
            return False
        host.walked = self._looks
        _refresh_chain(host.chain)
        if host.inode < 0:
            return False
        from phalanx.record.rank_table_reader import heads_of_sessions, tells_of

        sessions = [one.summary for one in host.chain.sessions.values()]
        if tells_of(host.heads, sessions):
            return False
        host.heads, host.inode = heads_of_sessions(sessions), -1
        return True

    def _tell_rows(self) -> None:
        from phalanx.record.rank_table_reader import RankRows

        self._rows = RankRows([host.heads for host in self._hosts]) if self._hosts else None
        self._sessions = {}
        self.counts = SessionCounts(self._rows.counts if self._rows is not None else {})


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


def session_counts(folder: Path) -> SessionCounts:
    """Of every rank with events in host files, how many sessions it has: now, or as of the last look."""
    files = host_files(os.fspath(folder))
    files.look(now=True)
    return files.counts


def closed_sessions(folder: Path, rank: int, *, now: bool = False) -> int:
    """How many numbered parts of a rank's events lie in host files; `now`, or as of the last look."""
    some = host_files(os.fspath(folder)).sessions_of(rank, now=now)
    return len(some) - (not os.path.lexists(folder / f"events-{rank:05d}.jsonl")) if some else 0


def find_session(path: Path) -> Session | None:
    """Where the bytes of a rank's events, or of their index, lie, if in a host's file.

    A rank that has a file of its own writes into that: all its sessions are numbered parts then.
    """
    folder, _, name = os.fspath(path).rpartition("/")  # asked ten thousand times for a page: a Path takes long
    match = _RANK_FILE.fullmatch(name)
    if match is None:
        return None
    files = host_files(folder or ".")
    rank, number, ending = match.groups()
    some = files.sessions_of(int(rank))
    if not some:
        return None
    if number:
        has_own = os.path.lexists(f"{folder or '.'}/events-{int(rank):05d}{EVENTS}")
        session = some[int(number) - 1] if 0 < int(number) <= len(some) - (not has_own) else None
    else:
        session = some[-1]
    return files.index_of(session) if session is not None and ending == INDEX else session


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
            return EventStat(last.at + read_used(file.fileno(), last), os.fstat(file.fileno()).st_mtime_ns)
    except OSError:
        return None


def has_events(path: Path) -> bool:
    """Whether there is such a file, or a session that stands for it."""
    return os.path.exists(path) or find_session(path) is not None


def has_bytes(session: Session) -> bool:
    """Whether anything was written in a session."""
    if len(session.extents) > 1:  # the first of them is full: no need to look
        return True
    try:
        with open_regular(Path(session.path)) as file:
            return read_used(file.fileno(), session.extents[-1]) > 0
    except OSError:
        return False


def total_bytes(folder: Path) -> int:
    """Bytes of all events in the host files of a folder; each file is opened once."""
    known = host_files(os.fspath(folder))
    known.look(now=True)
    files: dict[str, list[Session]] = {}
    for rank in known.counts.by_rank:
        for session in known.sessions_of(rank):
            files.setdefault(session.path, []).append(session)
    total = 0
    for path, some in files.items():
        with contextlib.suppress(OSError), open_regular(Path(path)) as file:
            total += sum(one.extents[-1].at + read_used(file.fileno(), one.extents[-1]) for one in some)
    return total


def table_blocks(folder: str, ranks: Sequence[int]) -> tuple[NDArray[np.bool_], NDArray[np.void]]:
    """Of which ranks a rank table has the newest block of the newest index, and those blocks as they lie there."""
    return host_files(folder).newest_blocks(ranks)


def index_tails(folder: str, ranks: Iterable[int], *, head: int, size: int, most: int) -> dict[int, bytes]:
    """The last `most` records of `size` bytes of the newest index of each rank that has one in a host's file.

    Ranks that have a file of their own are left out: their newest is there. Each file of a host is opened once.
    """
    files = host_files(folder)
    files.look()
    shared = [rank for rank in ranks if rank in files.counts.by_rank and not files.has_own_file(rank)]
    newest = [some[-1] for rank in shared if (some := files.sessions_of(rank))]
    found: dict[int, bytes] = {}
    for path, pairs in files.indexes_of(newest).items():
        with contextlib.suppress(OSError), open_regular(Path(path)) as file:
            for session, index in pairs:
                found[session.rank] = _read_last(file.fileno(), index, head=head, size=size, most=most)
    return found


def _read_last(file: int, session: Session, *, head: int, size: int, most: int) -> bytes:
    last = session.extents[-1]
    count = (last.at + read_used(file, last) - head) // size
    first = head + max(0, count - most) * size
    stop = head + count * size
    parts = []
    for number, extent in enumerate(session.extents):
        end = session.extents[number + 1].at if number + 1 < len(session.extents) else stop
        begin, end = max(first, extent.at), min(stop, end)
        if begin < end:
            parts.append(os.pread(file, end - begin, extent.begin + HEAD_BYTES + begin - extent.at))
    return b"".join(parts)
