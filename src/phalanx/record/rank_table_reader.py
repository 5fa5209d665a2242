"""Read the rank tables of many hosts at once, and decide which of them are valid (rank_table.py).

Separate from the writer because this needs numpy, half of the start-up time of a coordinator.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from phalanx.record.rank_table import (
    BLOCK_BYTES,
    CHECK_WEIGHTS,
    ENTRY_BYTES,
    ENTRY_HEAD_BYTES,
    MAGIC,
    MOST_TABLE_BYTES,
    SessionSummary,
    pack_entry,
    table_of_sessions,
)

# The table of 16 ranks; requesting more bytes takes as long as reading them.
READ_BYTES = 12 * 2**10
# Sessions of a rank in one file; a table with more is rejected, and the heads are read.
MOST_SESSIONS = 2**20
MOST_RANK = 10**7

HEAD = np.dtype(
    [
        ("check", "<u8"), ("magic", "<u8"), ("rank", "<u8"), ("sessions", "<u8"), ("generation", "<i8"),
        ("opened_s", "<f8"), ("name", "S16"), ("extents", "<u8"), ("has_bytes", "<u8"), ("is_block_known", "<u8"),
        ("file_extents", "<u8"), ("last_begin", "<u8"), ("last_end", "<u8"), ("spare", "<u8", (2,)),
    ]
)  # fmt: skip
ENTRY = np.dtype([("head", HEAD), ("block", f"V{BLOCK_BYTES}")])
_WEIGHTS = np.array(CHECK_WEIGHTS, dtype=np.uint64)

Heads = NDArray[np.void]
Integers = NDArray[np.int64]


def read_table(path: str) -> bytes:
    """Return a table as it lies on disk; empty if it is missing or its length is not a multiple of an entry."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return b""
    try:
        data = os.read(file, READ_BYTES)
        if len(data) == READ_BYTES:
            while len(data) < MOST_TABLE_BYTES and (more := os.read(file, 32 * READ_BYTES)):
                data += more
    except OSError:
        return b""
    finally:
        os.close(file)
    return data if len(data) % ENTRY_BYTES == 0 else b""


def _heads_of(data: bytes) -> Heads:
    """Return the heads of the entries without their blocks: a sixth of the bytes."""
    rows = np.frombuffer(data, np.uint8).reshape(-1, ENTRY_BYTES)[:, :ENTRY_HEAD_BYTES]
    return np.ascontiguousarray(rows).view(HEAD)[:, 0]


def _are_whole(heads: Heads) -> NDArray[np.bool_]:
    words = heads.view("<u8").reshape(len(heads), ENTRY_HEAD_BYTES // 8)
    return np.asarray((words[:, 1:] @ _WEIGHTS == words[:, 0]) & (heads["magic"] == MAGIC))


@dataclass(frozen=True, slots=True)
class BelievedTable:
    """A table that matches its event file: the heads of its entries, and the newest extent of the file."""

    heads: bytes
    last_begin: int
    last_end: int


def believe_tables(tables: Sequence[bytes], sizes: Sequence[int], *, head_bytes: int) -> list[BelievedTable | None]:
    """Validate tables against the sizes of their event files; return None for each table that does not match."""
    valid_tables: list[BelievedTable | None] = [None] * len(tables)
    numbers_read = [number for number, data in enumerate(tables) if data]
    if not numbers_read:
        return valid_tables
    heads = _heads_of(b"".join([tables[number] for number in numbers_read]))
    lengths = np.array([len(tables[number]) // ENTRY_BYTES for number in numbers_read])
    stops = np.cumsum(lengths)
    starts = stops - lengths
    good = _are_whole(heads) & (heads["rank"] < MOST_RANK) & (heads["sessions"] <= MOST_SESSIONS)
    good &= (heads["sessions"] > 0) & (heads["extents"] >= heads["sessions"]) & (heads["extents"] < 2**40)
    # Each rank may occur once.
    keys = np.repeat(np.arange(len(numbers_read)), lengths) * MOST_RANK + np.minimum(heads["rank"], MOST_RANK).astype(
        np.int64
    )
    order = np.argsort(keys, kind="stable")
    good[order[1:][keys[order[1:]] == keys[order[:-1]]]] = False
    fits = np.logical_and.reduceat(good, starts)
    newest_begin = np.maximum.reduceat(heads["last_begin"], starts)
    newest_end = np.maximum.reduceat(heads["last_end"], starts)
    fits &= np.add.reduceat(heads["extents"], starts) == np.maximum.reduceat(heads["file_extents"], starts)
    size = np.array([sizes[number] for number in numbers_read], np.uint64)
    # A newer extent would begin where the newest one ends, and make the file longer.
    fits &= (newest_begin + np.uint64(head_bytes) <= size) & (size <= newest_end)
    data = heads.tobytes()
    for at in np.flatnonzero(fits).tolist():
        own = data[int(starts[at]) * ENTRY_HEAD_BYTES : int(stops[at]) * ENTRY_HEAD_BYTES]
        valid_tables[numbers_read[at]] = BelievedTable(own, int(newest_begin[at]), int(newest_end[at]))
    return valid_tables


def heads_of_sessions(sessions: Iterable[SessionSummary]) -> bytes:
    """Return the table heads that the extent heads of a file amount to."""
    return b"".join(map(pack_entry, table_of_sessions(sessions)))


def tells_of(heads: bytes, sessions: Iterable[SessionSummary]) -> bool:
    """Return True if the table heads list these sessions: the same number for each rank."""
    entries = np.frombuffer(heads, HEAD)
    return dict(zip(entries["rank"].tolist(), entries["sessions"].tolist(), strict=True)) == Counter(
        session.rank for session in sessions
    )


class RankRows:
    """The ranks with sessions, and the host files that contain them, over all hosts of a run."""

    def __init__(self, heads_of_files: Sequence[bytes]) -> None:
        heads = np.frombuffer(b"".join(heads_of_files), HEAD)
        lengths = [len(data) // ENTRY_HEAD_BYTES for data in heads_of_files]
        files = np.repeat(np.arange(len(lengths)), lengths)
        rank = heads["rank"].astype(np.int64)
        order = np.argsort(rank, kind="stable")
        is_last = np.append(np.diff(rank[order]) > 0, True) if len(rank) else np.zeros(0, bool)
        # Ranks that moved to another host: sort the newest session last.
        if not is_last.all():
            order = np.lexsort((heads["name"], heads["opened_s"], heads["generation"], rank))
        heads = heads[order]
        self._rank, self._file = rank[order], files[order]
        self._is_known = heads["is_block_known"] == 1
        self._newest = np.flatnonzero(is_last)  # rows of the newest session of each rank
        self._unique = self._rank[self._newest]
        starts = np.append(0, self._newest[:-1] + 1) if len(self._newest) else self._newest
        sessions = np.add.reduceat(heads["sessions"], starts) if len(starts) else heads["sessions"]
        self.counts: dict[int, int] = dict(zip(self._unique.tolist(), sessions.tolist(), strict=True))
        # For other ranks, read the extent heads.
        self.with_bytes = frozenset(self._rank[heads["has_bytes"] == 1].tolist())

    def files_of(self, rank: int) -> list[int]:
        """Return the numbers of the files with sessions of a rank."""
        first, stop = np.searchsorted(self._rank, (rank, rank + 1))
        files: list[int] = self._file[first:stop].tolist()
        return files

    def with_blocks(self, ranks: Sequence[int]) -> tuple[Integers, Integers]:
        """Return the places of those ranks whose newest block is in a table, and the files of those tables."""
        requested = np.asarray(ranks, np.int64)
        if not len(self._unique) or not len(requested):
            return np.zeros(0, np.int64), np.zeros(0, np.int64)
        at = np.minimum(np.searchsorted(self._unique, requested), len(self._unique) - 1)
        row = self._newest[at]
        places = np.flatnonzero((self._unique[at] == requested) & self._is_known[row])
        return places, self._file[row[places]]


def read_blocks(
    paths: Mapping[int, str], files: Integers, ranks: Integers
) -> tuple[NDArray[np.bool_], NDArray[np.void]]:
    """Return a mask of the ranks whose table entry still has a block, and those blocks."""
    if not len(files):
        return np.zeros(0, bool), np.zeros(0, f"V{BLOCK_BYTES}")
    numbers = np.unique(files)
    tables = [read_table(paths[number]) for number in numbers.tolist()]
    entries = np.frombuffer(b"".join(tables), np.uint8).reshape(-1, ENTRY_BYTES)
    heads = np.ascontiguousarray(entries[:, :ENTRY_HEAD_BYTES]).view(HEAD)[:, 0]
    good = _are_whole(heads) & (heads["is_block_known"] == 1) & (heads["rank"] < MOST_RANK)
    lengths = [len(data) // ENTRY_BYTES for data in tables]
    rows = np.flatnonzero(good)
    keys = np.repeat(numbers, lengths)[rows] * MOST_RANK + heads["rank"][rows].astype(np.int64)
    rows, keys = rows[np.argsort(keys)], np.sort(keys)
    requested_keys = files * MOST_RANK + ranks
    at = np.minimum(np.searchsorted(keys, requested_keys), max(0, len(keys) - 1))
    is_there = keys[at] == requested_keys if len(keys) else np.zeros(len(requested_keys), bool)
    blocks = (
        entries[:, ENTRY_HEAD_BYTES:][rows[at[is_there]]] if is_there.any() else np.zeros((0, BLOCK_BYTES), np.uint8)
    )
    return is_there, np.ascontiguousarray(blocks).view(f"V{BLOCK_BYTES}")[:, 0]
