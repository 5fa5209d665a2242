"""What each rank of a host has in the host's file, in one small file beside it: `events-host-NAME.ranks`.

Whoever opens a run of 131,072 ranks wants to know which ranks have events, in how many sessions, and how fast each was
lately. The heads of all extents tell it, ten for a rank of 10,000 steps, each in another place of the disk. The rank
table has it in 768 bytes for each rank that ever wrote into the file, so one read per host is enough.

It is a copy and nobody's only source. Each entry says how many extents its rank has, and the newest extent of the file
as its rank saw it. A reader believes a table only if all check sums are right, the extents of all ranks add up, and the
file of events ends within the newest extent (`rank_table_reader.py`); else it reads the heads. So a table that is
missing, damaged, or of a file that an older version went on with costs time and changes nothing. Entries are written
only while the file of events is locked, and a writer that finds a table it would not believe makes it anew.
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

# As in archive/blocks.py: odd multiples of 2^64 over the golden ratio, so no two words can change places unseen.
CHECK_WEIGHTS = [number * 0x9E3779B97F4A7C15 % 2**64 | 1 for number in range(1, ENTRY_HEAD_BYTES // 8)]
_WORDS = struct.Struct(f"<{ENTRY_HEAD_BYTES // 8 - 1}Q")


class RankEntry(NamedTuple):
    """What one rank has in the file of its host."""

    rank: int
    sessions: int
    generation: int  # of the newest session, as the two that follow
    opened_s: float
    name: bytes
    extents: int  # of all its sessions
    has_bytes: int  # 1: something was written in one of them; 0: look
    is_block_known: int  # 1: the block is the newest of the index, or zeros where it has none; 0: look there
    file_extents: int  # of all ranks, when this one took its last
    last_begin: int  # that extent, in the file
    last_end: int
    spare: int = 0

    @property
    def order(self) -> tuple[int, float, bytes]:
        """As that of `Session`."""
        return self.generation, self.opened_s, self.name


def pack_entry(entry: RankEntry) -> bytes:
    """The head of an entry, with its check sum."""
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
    """What a table needs to know of a session that is in the file."""

    rank: int
    generation: int
    opened_s: float
    name: str
    extents: int


def table_of_sessions(sessions: Iterable[SessionSummary]) -> list[RankEntry]:
    """An entry for each rank, by what the heads of the extents tell: not whether there are bytes, nor the blocks.

    Without the newest extent of the file, so nobody believes them before an entry has it that was written behind them.
    """
    ranks: dict[int, list[SessionSummary]] = {}
    for one in sessions:
        ranks.setdefault(one.rank, []).append(one)
    total = sum(one.extents for some in ranks.values() for one in some)
    found = []
    for rank, some in ranks.items():
        newest = max(some, key=lambda one: (one.generation, one.opened_s, one.name))
        found.append(
            RankEntry(
                rank=rank,
                sessions=len(some),
                generation=newest.generation,
                opened_s=newest.opened_s,
                name=newest.name.encode(),
                extents=sum(one.extents for one in some),
                has_bytes=0,
                is_block_known=0,
                file_extents=total,
                last_begin=0,
                last_end=0,
            )
        )
    return found


class RankTableWriter:
    """Keeps a session's rank in the table of its host. Each call while the file of events is locked; none raises."""

    def __init__(self, path: str, *, rank: int, generation: int, opened_s: float, name: str) -> None:
        self._path = path
        self._mine = (generation, opened_s, name.encode())
        self._rank = rank
        self._slot = -1
        self._file = -1
        self.has_bytes = False  # as the table says

    def note_extent(
        self, known: Iterable[SessionSummary], *, is_first: bool, last_begin: int, last_end: int, extents: int
    ) -> None:
        """An extent was taken; `known` are the sessions in the file without it, `extents` all with it."""
        try:
            if self._file < 0:
                flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
                self._file = os.open(self._path, flags, 0o644)
            entries = self._read_entries()
            if entries is None or sum(one.extents for one in entries) != extents - 1:
                # Of an older version, damaged, or a process was killed before it could tell.
                entries = table_of_sessions(known)
                os.ftruncate(self._file, 0)
                self._write_at(0, b"".join(pack_entry(one) + NO_BLOCK for one in entries))
            self._slot = next((at for at, one in enumerate(entries) if one.rank == self._rank), len(entries))
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
            self.close()  # what it does not tell, readers notice

    def note_bytes(self) -> None:
        """Something was written."""
        try:
            if (entry := self._own_entry()) is not None:
                self._write_at(self._slot * ENTRY_BYTES, pack_entry(entry._replace(has_bytes=1)))
                self.has_bytes = True
        except (OSError, struct.error):
            self.close()

    def note_block(self, block: bytes) -> None:
        """The newest block of the session's index; zeros where it has none."""
        try:
            entry = self._own_entry()
            if entry is not None and entry.order == self._mine and len(block) == BLOCK_BYTES:
                head = pack_entry(entry._replace(is_block_known=1))
                self._write_at(self._slot * ENTRY_BYTES, head + block)
        except (OSError, struct.error):
            self.close()

    def forget_block(self) -> None:
        """Readers look into the index from now on."""
        try:
            entry = self._own_entry()
            if entry is not None and entry.order == self._mine:
                self._write_at(self._slot * ENTRY_BYTES, pack_entry(entry._replace(is_block_known=0)))
        except (OSError, struct.error):
            self.close()

    def close(self) -> None:
        """Nothing more is told."""
        if self._file >= 0:
            os.close(self._file)
        self._file = -1
        self.has_bytes = True  # not to be told either

    def _own_entry(self) -> RankEntry | None:
        if self._file < 0 or self._slot < 0:
            return None
        head = os.pread(self._file, ENTRY_HEAD_BYTES, self._slot * ENTRY_BYTES)
        entry = _unpack_entry(head) if len(head) == ENTRY_HEAD_BYTES else None
        return entry if entry is not None and entry.rank == self._rank else None

    def _read_entries(self) -> list[RankEntry] | None:
        """All of them; None where one is not to be believed."""
        size = os.fstat(self._file).st_size
        data = os.pread(self._file, min(size, MOST_TABLE_BYTES), 0)
        if len(data) != size or size % ENTRY_BYTES:
            return None
        heads = [data[at : at + ENTRY_HEAD_BYTES] for at in range(0, size, ENTRY_BYTES)]
        entries = [entry for entry in map(_unpack_entry, heads) if entry is not None]
        return entries if len(entries) == len(heads) == len({one.rank for one in entries}) else None

    def _write_at(self, at: int, data: bytes) -> None:
        if os.pwrite(self._file, data, at) != len(data):  # a full disk; what is torn is not believed
            raise OSError
