"""One event file for all ranks of a host: `events-host-NAME.jsonl`, with its index `events-host-NAME.index`.

One event file and one index for each of 131,072 ranks are too many files for a shared file system. From 1,024 ranks on
(`telemetry.host_files_from`) the ranks of a host share one file of each. Every rank appends to its own extents, so
lines of different ranks never mix, and a killed rank leaves at most its own last line torn. Only taking an extent
needs a lock, once in some hundred steps.

Readers do not see the difference. A session is presented like a file that was closed for its size: a numbered part of
the rank's events. `open_events`, `stat_events`, `has_events` and `session_counts` accept `events-00005.jsonl`,
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

# Importing numpy takes half of the start-up time of a coordinator, which reads no host files.
if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from phalanx.record.rank_table_reader import RankRows

# Scanning for new extents takes at most 1/20 of a reader's time.
SHARE = 20
# The same share for callers that pass `now`: a scan of some milliseconds returns a state of that age anyway.
SHARE_NOW = 8
# Below this a scan takes less than a millisecond, and a busy machine would make it look expensive.
MANY_FILES = 64
# Hosts whose rank tables are in memory at the same time: 6 MB.
HOSTS_AT_ONCE = 1024

HOST_FILE = re.compile(r"events-host-[A-Za-z0-9][A-Za-z0-9._-]{0,99}\.jsonl")
_RANK_FILE = re.compile(r"events-(\d{5}|[1-9]\d{5,6})(?:-(\d{4,9}))?(\.jsonl|\.index)")


class SessionBytes(io.RawIOBase):
    """A read-only file over the bytes of a session, as many as it had when opened."""

    def __init__(self, session: Session) -> None:
        self._file = open_regular(Path(session.path))
        self._extents = list(session.extents)
        self._starts = [extent.at for extent in self._extents]
        last = self._extents[-1]
        self.size = last.at + read_used(self._file.fileno(), last)
        self._at = 0

    def read(self, size: int = -1, /) -> bytes:
        """Read up to `size` bytes; fewer only at the end."""
        stop = self.size if size < 0 else min(self.size, self._at + size)
        parts = []
        while self._at < stop:
            number = bisect_right(self._starts, self._at) - 1
            extent = self._extents[number]
            end = min(stop, self._starts[number + 1] if number + 1 < len(self._starts) else stop)
            begin = extent.begin + HEAD_BYTES + self._at - extent.at
            data = os.pread(self._file.fileno(), end - self._at, begin)
            if not data:  # the file was truncated
                break
            parts.append(data)
            self._at += len(data)
        return b"".join(parts)

    def readinto(self, buffer: Any, /) -> int:
        """Fill a buffer, for `io.BufferedReader`."""
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        """Set the position."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self.size}[whence]
        self._at = max(0, base + offset)
        return self._at

    def tell(self) -> int:
        """Return the position of the next read."""
        return self._at

    def close(self) -> None:
        """Close the host's file."""
        if not self.closed:
            self._file.close()
        super().close()


EventBytes = BinaryIO | SessionBytes


@dataclass(frozen=True, eq=False, slots=True)
class SessionCounts:
    """The number of sessions of each rank. Immutable: an unchanged object means unchanged sessions."""

    by_rank: dict[int, int]


@dataclass(slots=True, eq=False)
class HostFile:
    """The known contents of one host's file, from its rank table or, if that is invalid, from the extent heads."""

    path: str
    chain: ExtentChain
    heads: bytes = b""  # entries of the rank table
    inode: int = -1  # inode of the file whose table was valid; -1 if none was
    last_begin: int = 0  # its newest extent according to the table
    last_end: int = 0
    walked: int = 0  # number of the scan that last followed the extent heads

    def is_current(self, found: os.stat_result) -> bool:
        """Return True if a file with this stat has no unknown extents: a new extent makes it longer."""
        if self.inode >= 0:
            is_inside = self.last_begin + HEAD_BYTES <= found.st_size <= self.last_end
            return is_inside and found.st_ino == self.inode
        return self.chain.is_current(found)


class HostFiles:
    """The host files of one run folder. Threads may share one object."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._lock = threading.RLock()
        self._hosts: list[HostFile] = []
        self._indexes: dict[str, ExtentChain] = {}
        self._rows: RankRows | None = None  # None: the folder has no host files
        # Cache of the ranks requested since the last change.
        self._sessions: dict[int, list[Session]] = {}
        self.counts = SessionCounts({})  # as of the last scan
        # Names of the files that belong to a single rank.
        self._own: frozenset[str] = frozenset()
        self._listed: tuple[int, int] = (-1, -1)
        self._looked_s = self._took_s = 0.0
        self._looks = 0

    def look(self, *, now: bool = False) -> None:
        """Scan for new sessions: always with `now`, otherwise only if the last scan is old enough."""
        with self._lock:
            began_s = time.monotonic()
            # With thousands of hosts, wait some times as long as a scan takes before the next one.
            wait_s = (SHARE_NOW if now else SHARE) * self._took_s if len(self._hosts) > MANY_FILES else -1.0
            if not self._looked_s or began_s - self._looked_s > wait_s:
                self._look_again(now=now)
                self._looked_s = time.monotonic()
                self._took_s = self._looked_s - began_s

    def sessions_of(self, rank: int, *, now: bool = False) -> list[Session]:
        """Return the sessions of a rank, oldest first, from its hosts' extent heads; not to be modified."""
        with self._lock:
            self.look(now=now)
            if self._rows is None:
                return []
            if rank not in self._sessions:
                hosts = [self._hosts[number] for number in self._rows.files_of(rank)]
                walked = [self._walk_chain(host) for host in hosts]
                if any(walked):
                    self._tell_rows()
                sessions = [
                    session for host in hosts for session in host.chain.sessions.values() if session.rank == rank
                ]
                self._sessions[rank] = sorted(sessions, key=lambda session: session.order)
            return self._sessions[rank]

    def ranks_with_bytes(self) -> frozenset[int]:
        """Return the ranks that have written bytes according to the tables; for other ranks, read the extent heads."""
        with self._lock:
            return self._rows.with_bytes if self._rows is not None else frozenset()

    def index_of(self, session: Session) -> Session | None:
        """Return the session in the index file that holds the index of `session`; None if there is none."""
        path = session.path.removesuffix(EVENTS) + INDEX
        with self._lock:
            chain = self._indexes.setdefault(path, ExtentChain(path))
            _refresh_chain(chain)
            return chain.sessions.get(f"{session.name} {session.rank}")

    def indexes_of(self, sessions: Iterable[Session]) -> dict[str, list[tuple[Session, Session]]]:
        """Return pairs of a session and its index session, grouped by index file."""
        files: dict[str, list[Session]] = {}
        for session in sessions:
            files.setdefault(session.path.removesuffix(EVENTS) + INDEX, []).append(session)
        pairs_by_file: dict[str, list[tuple[Session, Session]]] = {}
        with self._lock:
            for path, file_sessions in files.items():
                chain = self._indexes.setdefault(path, ExtentChain(path))
                _refresh_chain(chain)
                pairs = [(session, chain.sessions.get(f"{session.name} {session.rank}")) for session in file_sessions]
                pairs_by_file[path] = [(session, index) for session, index in pairs if index is not None]
        return pairs_by_file

    def has_own_file(self, rank: int) -> bool:
        """Return True if a rank had its own event file at the last scan."""
        return f"events-{rank:05d}{EVENTS}" in self._own

    def newest_blocks(self, ranks: Sequence[int]) -> tuple[NDArray[np.bool_], NDArray[np.void]]:
        """Return a mask of the ranks whose newest index block is in a rank table, and those blocks."""
        import numpy as np

        from phalanx.record.rank_table_reader import read_blocks

        has_block = np.zeros(len(ranks), bool)
        with self._lock:
            self.look()
            if self._rows is None:
                return has_block, np.zeros(0, f"V{BLOCK_BYTES}")
            places, files = self._rows.with_blocks(ranks)
            if self._own:
                shared = np.array([not self.has_own_file(ranks[place]) for place in places.tolist()], bool)
                places, files = places[shared], files[shared]
            needed = np.unique(files).tolist()
            paths = {number: self._hosts[number].path.removesuffix(EVENTS) + TABLE for number in needed}
        is_there, blocks = read_blocks(paths, files, np.asarray(ranks, np.int64)[places])
        has_block[places[is_there]] = True
        return has_block, blocks

    def _look_again(self, *, now: bool) -> None:
        self._looks += 1
        is_listed_anew = False
        try:
            folder_stat = os.stat(self._folder)
            stamp = folder_stat.st_ino, folder_stat.st_mtime_ns
            # Some file systems round change times to seconds (events.SETTLED_NS), so `now` lists a recently changed
            # folder again.
            if stamp != self._listed or (now and time.time_ns() - folder_stat.st_mtime_ns < 2 * 10**9):
                is_listed_anew = self._list_hosts()
                self._listed = stamp
        except OSError:
            is_listed_anew, self._hosts = bool(self._hosts), []
        if self._refresh_hosts() or is_listed_anew:
            self._tell_rows()

    def _list_hosts(self) -> bool:
        """List the host files; return True if they differ from the previous list."""
        names = [name for name in os.listdir(self._folder) if name.endswith(EVENTS) and name.startswith("events-")]
        shared = sorted(name for name in names if name.startswith("events-host-") and HOST_FILE.fullmatch(name))
        self._own = frozenset(names).difference(shared)
        before = {host.path: host for host in self._hosts}
        paths = [f"{self._folder}/{name}" for name in shared]
        self._hosts = [before.get(path) or HostFile(path, ExtentChain(path)) for path in paths]
        return paths != list(before)

    def _refresh_hosts(self) -> bool:
        """Read the files that have new extents; return True if there are any."""
        changed: list[tuple[HostFile, os.stat_result]] = []
        for host in self._hosts:
            with contextlib.suppress(OSError):
                file_stat = os.stat(host.path, follow_symlinks=False)
                if not host.is_current(file_stat):
                    changed.append((host, file_stat))
        if not changed:
            return False
        from phalanx.record.rank_table_reader import believe_tables, heads_of_sessions, read_table

        is_new = False
        for begin in range(0, len(changed), HOSTS_AT_ONCE):
            batch = changed[begin : begin + HOSTS_AT_ONCE]
            is_file = [stat.S_ISREG(file_stat.st_mode) for _, file_stat in batch]
            tables = [
                read_table(host.path.removesuffix(EVENTS) + TABLE) if is_regular else b""
                for (host, _), is_regular in zip(batch, is_file, strict=True)
            ]
            believed = believe_tables(tables, [file_stat.st_size for _, file_stat in batch], head_bytes=HEAD_BYTES)
            for (host, file_stat), table in zip(batch, believed, strict=True):
                if table is not None:
                    host.heads, host.inode = table.heads, file_stat.st_ino
                    host.last_begin, host.last_end = table.last_begin, table.last_end
                    is_new = True
                elif _refresh_chain(host.chain) or host.inode >= 0:
                    host.heads = heads_of_sessions(session.summary for session in host.chain.sessions.values())
                    host.inode, host.walked = -1, self._looks
                    is_new = True
        return is_new

    def _walk_chain(self, host: HostFile) -> bool:
        """Follow the extent heads of a file, at most once per scan; return True if its table had other sessions."""
        if host.walked == self._looks:
            return False
        host.walked = self._looks
        _refresh_chain(host.chain)
        if host.inode < 0:
            return False
        from phalanx.record.rank_table_reader import heads_of_sessions, tells_of

        sessions = [session.summary for session in host.chain.sessions.values()]
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
        # Takes a third of the time of opening the file.
        if chain.is_current(os.stat(chain.path)):
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
    """Return the host files of a folder; the object is cached between calls."""
    return HostFiles(folder)


def session_counts(folder: Path) -> SessionCounts:
    """Return the number of sessions of every rank with events in host files, after a new scan."""
    files = host_files(os.fspath(folder))
    files.look(now=True)
    return files.counts


def closed_sessions(folder: Path, rank: int, *, now: bool = False) -> int:
    """Return the number of numbered parts of a rank's events in host files, with a new scan if `now`."""
    sessions = host_files(os.fspath(folder)).sessions_of(rank, now=now)
    return len(sessions) - (not os.path.lexists(folder / f"events-{rank:05d}.jsonl")) if sessions else 0


def find_session(path: Path) -> Session | None:
    """Return the session that holds the events of a rank, or their index, if they are in a host's file.

    If a rank has its own file, it writes there, and all of its sessions are numbered parts.
    """
    # String operations: this runs ten thousand times for a page, and a Path is slow.
    folder, _, name = os.fspath(path).rpartition("/")
    match = _RANK_FILE.fullmatch(name)
    if match is None:
        return None
    files = host_files(folder or ".")
    rank, number, ending = match.groups()
    sessions = files.sessions_of(int(rank))
    if not sessions:
        return None
    if number:
        has_own = os.path.lexists(f"{folder or '.'}/events-{int(rank):05d}{EVENTS}")
        session = sessions[int(number) - 1] if 0 < int(number) <= len(sessions) - (not has_own) else None
    else:
        session = sessions[-1]
    return files.index_of(session) if session is not None and ending == INDEX else session


def open_events(path: Path, *, buffering: int = 0) -> EventBytes:
    """Open the events of a rank, or their index, for reading; raise OSError if there are none."""
    try:
        return open_regular(path, buffering=buffering)
    except FileNotFoundError:
        if (session := find_session(path)) is None:
            raise
    session_file = SessionBytes(session)
    return io.BufferedReader(session_file, 2**18) if buffering else session_file


def opened_size(file: EventBytes) -> int:
    """Return the size in bytes of a file from `open_events`."""
    return file.size if isinstance(file, SessionBytes) else os.fstat(file.fileno()).st_size


@dataclass(frozen=True, slots=True)
class EventStat:
    """Size of the events, and the time at which the file that contains them last grew."""

    size: int
    mtime_ns: int
    is_file: bool = True


def stat_events(path: str | Path, *, follow_links: bool = True) -> EventStat | None:
    """Return the stat of a rank's events, or of their index; None if there are none."""
    try:
        file_stat = os.stat(path, follow_symlinks=follow_links)
        return EventStat(file_stat.st_size, file_stat.st_mtime_ns, stat.S_ISREG(file_stat.st_mode))
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
    """Return True if there is such a file, or a session in a host file that replaces it."""
    return os.path.exists(path) or find_session(path) is not None


def has_bytes(session: Session) -> bool:
    """Return True if anything was written in a session."""
    if len(session.extents) > 1:  # the first extent is full: no need to read it
        return True
    try:
        with open_regular(Path(session.path)) as file:
            return read_used(file.fileno(), session.extents[-1]) > 0
    except OSError:
        return False


def total_bytes(folder: Path) -> int:
    """Return the bytes of all events in the host files of a folder; each file is opened once."""
    host_files_of_folder = host_files(os.fspath(folder))
    host_files_of_folder.look(now=True)
    files: dict[str, list[Session]] = {}
    for rank in host_files_of_folder.counts.by_rank:
        for session in host_files_of_folder.sessions_of(rank):
            files.setdefault(session.path, []).append(session)
    total = 0
    for path, sessions in files.items():
        with contextlib.suppress(OSError), open_regular(Path(path)) as file:
            total += sum(session.extents[-1].at + read_used(file.fileno(), session.extents[-1]) for session in sessions)
    return total


def table_blocks(folder: str, ranks: Sequence[int]) -> tuple[NDArray[np.bool_], NDArray[np.void]]:
    """Return a mask of the ranks whose newest index block is in a rank table, and those blocks."""
    return host_files(folder).newest_blocks(ranks)


def index_tails(folder: str, ranks: Iterable[int], *, head: int, size: int, most: int) -> dict[int, bytes]:
    """Return the last `most` records of `size` bytes of the newest index of each rank that has one in a host file.

    Ranks with their own event file are left out: their newest index is there. Each host file is opened once.
    """
    files = host_files(folder)
    files.look()
    shared = [rank for rank in ranks if rank in files.counts.by_rank and not files.has_own_file(rank)]
    newest = [sessions[-1] for rank in shared if (sessions := files.sessions_of(rank))]
    tails: dict[int, bytes] = {}
    for path, pairs in files.indexes_of(newest).items():
        with contextlib.suppress(OSError), open_regular(Path(path)) as file:
            for session, index in pairs:
                tails[session.rank] = _read_last(file.fileno(), index, head=head, size=size, most=most)
    return tails


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
