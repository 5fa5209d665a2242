"""The rank table of a host's event file: what each rank has in it, in one small file `events-host-NAME.ranks`.

A reader that opens a run of 131,072 ranks needs to know which ranks have events, in how many sessions, and how fast
each rank was lately. The extent heads hold this, ten per rank of 10,000 steps, each at another place of the disk. The
rank table holds it in 768 bytes for each rank that ever wrote into the file, so one read per host is enough.

The table is a copy, never the only source. Each entry holds the number of extents of its rank, and the newest extent
of the file at the time the rank took its last one. A reader accepts a table only if all checksums are right, the
extents of all ranks add up, and the event file ends within the newest extent (`rank_table_reader.py`); otherwise it
reads the heads. A table that is missing, damaged, or outdated because an older version appended to the file costs time
and changes no result. Entries are written only while the event file is locked, and a writer that finds an invalid
table rebuilds it.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable
from typing import NamedTuple

TABLE = ".ranks"
MAGIC = int.from_bytes(b"PhxRank1", "little")
ENTRY_HEAD = struct.Struct("<QQQQqd16sQQQQQQQQ")  # check, magic and the fields of RankEntry
ENTRY_HEAD_BYTES = ENTRY_HEAD.size  # 128
BLOCK_BYTES = 640  # a record of the index (archive/blocks.py)
ENTRY_BYTES = ENTRY_HEAD_BYTES + BLOCK_BYTES
MOST_TABLE_BYTES = 4 * 2**20  # 5,000 ranks that were on one host
NO_BLOCK = bytes(BLOCK_BYTES)

# As in archive/blocks.py: odd multiples of 2^64 over the golden ratio, so swapping two words changes the sum.
CHECK_WEIGHTS = [number * 0x9E3779B97F4A7C15 % 2**64 | 1 for number in range(1, ENTRY_HEAD_BYTES // 8)]
_WORDS = struct.Struct(f"<{ENTRY_HEAD_BYTES // 8 - 1}Q")


class RankEntry(NamedTuple):
    """The table entry of one rank."""

    rank: int
    sessions: int
    generation: int  # of the newest session, as are the next two fields
    opened_s: float
    name: bytes
    extents: int  # of all its sessions
    has_bytes: int  # 1: bytes were written in one of its sessions; 0: unknown, read the heads
    # 1: the block is the newest of the index, or zeros if the index has none; 0: unknown, read the index.
    is_block_known: int
    file_extents: int  # of all ranks, when this rank took its last extent
    last_begin: int  # offset of that extent in the file
    last_end: int
    spare: int = 0

    @property
    def order(self) -> tuple[int, float, bytes]:
        """Sort key of sessions, as in `Session`."""
        return self.generation, self.opened_s, self.name


def pack_entry(entry: RankEntry) -> bytes:
    """Return the head of an entry as bytes, with its checksum."""
    values = ENTRY_HEAD.pack(0, MAGIC, *entry, 0)
    return _check_sum(values).to_bytes(8, "little") + values[8:]


def _check_sum(head: bytes) -> int:
    words: tuple[int, ...] = _WORDS.unpack_from(head, 8)
    return sum(word * weight for word, weight in zip(words, CHECK_WEIGHTS, strict=True)) % 2**64


def _unpack_entry(head: bytes) -> RankEntry | None:
    check, magic, *values, _ = ENTRY_HEAD.unpack(head)
    if magic != MAGIC or check != _check_sum(head):
        return None
    values[4] = values[4].rstrip(b"\0")
    return RankEntry(*values)


class SessionSummary(NamedTuple):
    """The facts about a session in the file that the table needs."""

    rank: int
    generation: int
    opened_s: float
    name: str
    extents: int


def table_of_sessions(sessions: Iterable[SessionSummary]) -> list[RankEntry]:
    """Build an entry for each rank from the sessions in the extent heads; `has_bytes` and the blocks are unknown.

    The newest extent of the file is left at 0, so readers reject the table until an entry with it has been written.
    """
    ranks: dict[int, list[SessionSummary]] = {}
    for session in sessions:
        ranks.setdefault(session.rank, []).append(session)
    total = sum(session.extents for rank_sessions in ranks.values() for session in rank_sessions)
    entries = []
    for rank, rank_sessions in ranks.items():
        newest = max(rank_sessions, key=lambda session: (session.generation, session.opened_s, session.name))
        entries.append(
            RankEntry(
                rank=rank,
                sessions=len(rank_sessions),
                generation=newest.generation,
                opened_s=newest.opened_s,
                name=newest.name.encode(),
                extents=sum(session.extents for session in rank_sessions),
                has_bytes=0,
                is_block_known=0,
                file_extents=total,
                last_begin=0,
                last_end=0,
            )
        )
    return entries


class RankTableWriter:
    """Updates one rank's entry in the table of its host. Call every method with the event file locked; none raises."""

    def __init__(self, path: str, *, rank: int, generation: int, opened_s: float, name: str) -> None:
        self._path = path
        self._mine = (generation, opened_s, name.encode())
        self._rank = rank
        self._slot = -1
        self._file = -1
        self.has_bytes = False  # according to the table

    def note_extent(
        self, known: Iterable[SessionSummary], *, is_first: bool, last_begin: int, last_end: int, extents: int
    ) -> None:
        """Record a new extent. `known` are the sessions in the file without it; `extents` counts all, with it."""
        try:
            if self._file < 0:
                flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
                self._file = os.open(self._path, flags, 0o644)
            entries = self._read_entries()
            if entries is None or sum(entry.extents for entry in entries) != extents - 1:
                # Written by an older version, damaged, or a process was killed before it could update the table.
                entries = table_of_sessions(known)
                os.ftruncate(self._file, 0)
                self._write_at(0, b"".join(pack_entry(entry) + NO_BLOCK for entry in entries))
            self._slot = next((at for at, entry in enumerate(entries) if entry.rank == self._rank), len(entries))
            before = entries[self._slot] if self._slot < len(entries) else None
            newest = before.order if before is not None else self._mine
            is_newest = self._mine >= newest
            entry = RankEntry(
                self._rank,
                (before.sessions if before is not None else 0) + is_first,
                *(self._mine if is_newest else newest),
                extents=(before.extents if before is not None else 0) + 1,
                has_bytes=before.has_bytes if before is not None else 0,
                is_block_known=1 if is_first and is_newest else before.is_block_known if before is not None else 0,
                file_extents=extents,
                last_begin=last_begin,
                last_end=last_end,
            )
            self.has_bytes = bool(entry.has_bytes)
            begins = is_first and is_newest
            self._write_at(self._slot * ENTRY_BYTES, pack_entry(entry) + (NO_BLOCK if begins else b""))
        except (OSError, struct.error):
            self.close()  # readers notice what is missing from the table

    def note_bytes(self) -> None:
        """Record that the rank has written bytes."""
        try:
            if (entry := self._own_entry()) is not None:
                self._write_at(self._slot * ENTRY_BYTES, pack_entry(entry._replace(has_bytes=1)))
                self.has_bytes = True
        except (OSError, struct.error):
            self.close()

    def note_block(self, block: bytes) -> None:
        """Store the newest block of the session's index; zeros if it has none."""
        try:
            entry = self._own_entry()
            if entry is not None and entry.order == self._mine and len(block) == BLOCK_BYTES:
                head = pack_entry(entry._replace(is_block_known=1))
                self._write_at(self._slot * ENTRY_BYTES, head + block)
        except (OSError, struct.error):
            self.close()

    def forget_block(self) -> None:
        """Mark the newest block as unknown, so that readers look into the index."""
        try:
            entry = self._own_entry()
            if entry is not None and entry.order == self._mine:
                self._write_at(self._slot * ENTRY_BYTES, pack_entry(entry._replace(is_block_known=0)))
        except (OSError, struct.error):
            self.close()

    def close(self) -> None:
        """Close the table; later calls record nothing."""
        if self._file >= 0:
            os.close(self._file)
        self._file = -1
        self.has_bytes = True  # so that no caller tries to record it

    def _own_entry(self) -> RankEntry | None:
        if self._file < 0 or self._slot < 0:
            return None
        head = os.pread(self._file, ENTRY_HEAD_BYTES, self._slot * ENTRY_BYTES)
        entry = _unpack_entry(head) if len(head) == ENTRY_HEAD_BYTES else None
        return entry if entry is not None and entry.rank == self._rank else None

    def _read_entries(self) -> list[RankEntry] | None:
        """Return all entries; None if one of them is not valid."""
        size = os.fstat(self._file).st_size
        data = os.pread(self._file, min(size, MOST_TABLE_BYTES), 0)
        if len(data) != size or size % ENTRY_BYTES:
            return None
        heads = [data[at : at + ENTRY_HEAD_BYTES] for at in range(0, size, ENTRY_BYTES)]
        entries = [entry for entry in map(_unpack_entry, heads) if entry is not None]
        return entries if len(entries) == len(heads) == len({entry.rank for entry in entries}) else None

    def _write_at(self, at: int, data: bytes) -> None:
        # A full disk; readers reject the torn entry.
        if os.pwrite(self._file, data, at) != len(data):
            raise OSError
