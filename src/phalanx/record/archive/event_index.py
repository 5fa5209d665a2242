"""The index of an event file: `events-00000.index`, a head followed by records of one size, appended.

The writer appends a block's records when the block is full, so a kill costs the index one block and the events
nothing. A reader accepts only records that match the event file (its first line, its length, the record's checksum),
and reads the events where no record is valid: without its index a run looks the same, but loads more slowly.

The records are blocks (blocks.py). A reader makes blocks of the ranges that no index covers (event_file.py).
"""

from __future__ import annotations

import json
import os
import stat
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phalanx.record.archive.blocks import (
    BLOCK,
    BLOCK_TYPE,
    COLUMNS,
    LISTED,
    PLACES,
    PLACES_TYPE,
    BlockMaker,
    record_checks,
    take_blocks,
)
from phalanx.record.archive.series import SERIES
from phalanx.record.host_extents import HostStream
from phalanx.record.host_file import index_tails, open_events, opened_size, stat_events, table_blocks

SUFFIX = ".index"
VERSION = 1
HEAD_BYTES = 4 * BLOCK.itemsize
SIZE = BLOCK.itemsize
# 33 million steps; a part of a rank's events has a few thousand records.
MOST_RECORDS = 2**17
# Bytes of the first event that identify the event file.
SIGNATURE = 256


class IndexWriter:
    """Writes the index of an event file while that is written. Never raises, since a run needs no index.

    For events that go into their host's file (`stream`), the records go into the index of that file.
    """

    def __init__(self, events: Path, inode: int, *, stream: HostStream | None = None) -> None:
        self._events = events
        # The file that is written: another file may get its name.
        self._inode = inode
        self._stream = stream
        self._into: HostStream | None = None
        self._tail = b""  # the last records of the index in a host's file
        # True after a torn record there; readers decide which of the following records are valid.
        self._is_torn = False
        self._file = -1
        # Events that may not be on disk yet.
        self._lines: list[tuple[Mapping[str, Any], int]] = []
        self._maker: BlockMaker | None = None

    def add(self, event: Mapping[str, Any], length: int) -> None:
        """Add an event that the next flush will write."""
        self._lines.append((event, length))

    def flushed(self, end: int) -> None:
        """Record that all added events are in the file now, and end at `end`."""
        at = end - sum(length for _, length in self._lines)
        maker = self._maker
        # The first event, or another process wrote in between.
        if maker is None or maker.end != at:
            if maker is not None:
                maker.cut()
                self._write_records(maker)
            maker = self._maker = BlockMaker(at)
        for event, length in self._lines:
            maker.add(event["event"], event, at, length)
            at += length
        self._lines.clear()
        if maker.done:
            self._write_records(maker)

    def spoil(self) -> None:
        """Drop events whose position in the file is unknown; readers will read that range."""
        self._lines.clear()

    def close(self) -> None:
        """Write the last block, whatever its size."""
        if self._maker is not None:
            self._maker.cut()
            self._write_records(self._maker)
            self._maker = None
        if self._into is not None:
            self._into.close()
            self._into = None
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _write_records(self, maker: BlockMaker) -> None:
        data = b"".join(maker.done)
        maker.done.clear()
        try:
            if self._stream is not None:
                self._append_to_host(self._stream, data)
                return
            if self._file < 0:
                if os.stat(self._events).st_ino != self._inode:
                    return
                self._file = _open_prepared(self._events)
            size = os.fstat(self._file).st_size
            if data and os.write(self._file, data) != len(data):
                os.ftruncate(self._file, size)  # a full disk: complete records or none
        except OSError:
            pass

    def _append_to_host(self, events: HostStream, data: bytes) -> None:
        records, was_torn = data, self._is_torn
        if self._into is None:
            self._into = events.open_index()
            data = _make_head(events.first_bytes(SIGNATURE)) + data
        # If the process is killed here, the table directs readers to the index.
        events.forget_block()
        done, self._is_torn = 0, True
        # A full disk leaves a torn record: readers reject those behind it and read the events.
        while done < len(data):
            done += self._into.write(data[done:])
        self._is_torn = was_torn
        if not was_torn:
            self._tail = (self._tail + records)[-TAIL * SIZE :]
            events.note_block(newest_in_tails([self._tail]).tobytes())


def _open_prepared(events: Path) -> int:
    """Open the index for appending, with a head that matches the events and no torn record at its end."""
    file = os.open(events.with_suffix(SUFFIX), os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    size, head = os.fstat(file).st_size, _make_head(_first_bytes(events, SIGNATURE))
    if size < HEAD_BYTES or _read_head(os.pread(file, HEAD_BYTES, 0), events) != _series_names():
        os.ftruncate(file, 0)
        if os.write(file, head) != len(head):  # a full disk
            os.ftruncate(file, 0)
            os.close(file)
            raise OSError
    elif (size - HEAD_BYTES) % SIZE:
        os.ftruncate(file, size - (size - HEAD_BYTES) % SIZE)
    return file


def _series_names() -> list[str]:
    return [series.name for series in SERIES]


def _make_head(first: bytes) -> bytes:
    head = {"phalanx.index": VERSION, "length": len(first), "crc": zlib.crc32(first), "names": _series_names()}
    return json.dumps({**head, "check": _head_check(head)}).encode().ljust(HEAD_BYTES)


def _head_check(head: Mapping[str, Any]) -> int:
    """Return the checksum of the head: a series name with a changed letter would be a nonexistent series."""
    return zlib.crc32(json.dumps({name: head[name] for name in ("phalanx.index", "length", "crc", "names")}).encode())


def _read_head(data: bytes, events: Path) -> list[str] | None:
    """Return the names of the columns; None if this is not an index of these events."""
    try:
        head = json.loads(data)
        length, names = int(head["length"]), head["names"]
        fits = head["phalanx.index"] == VERSION and 0 < length <= SIGNATURE and isinstance(names, list)
        fits = fits and head.get("check", _head_check(head)) == _head_check(head)  # no `check` before 0.7
        if fits and len(names) <= COLUMNS and head["crc"] == zlib.crc32(_first_bytes(events, length)):
            return [str(name) for name in names]
    except (ValueError, KeyError, TypeError, RecursionError, OverflowError):
        pass
    return None


def _first_bytes(path: Path, length: int) -> bytes:
    try:
        with open_events(path) as file:
            return file.read(length)
    except OSError:
        return b""


@dataclass(frozen=True, kw_only=True, slots=True)
class Index:
    """The valid content of an index: blocks in the order of the file, without overlaps, and places within them."""

    blocks: NDArray[np.void]
    places: NDArray[np.void]  # offset, length, kind, step
    columns: dict[str, int]  # position of each series in the blocks
    refused: int = 0  # number of invalid records
    trouble: str = ""  # the reason why the index is unusable; empty if it is usable or absent


EMPTY = Index(blocks=np.zeros(0, BLOCK), places=np.zeros(0, PLACES["places"].base), columns={})


def read_index(events: Path) -> Index:
    """Read the index of an event file."""
    try:
        with open_events(events.with_suffix(SUFFIX)) as file:
            head = file.read(HEAD_BYTES)
            # Limited by the file size: Python would first allocate memory for the maximum.
            data = file.read(min(opened_size(file), MOST_RECORDS * SIZE))
    except FileNotFoundError:
        return EMPTY
    except OSError as error:
        return Index(blocks=EMPTY.blocks, places=EMPTY.places, columns={}, trouble=error.strerror or "unreadable")
    names = _read_head(head, events)
    # After reading the index: events are written before their index records.
    events_stat = stat_events(events)
    size = events_stat.size if events_stat is not None else 0
    if names is None:
        return Index(blocks=EMPTY.blocks, places=EMPTY.places, columns={}, trouble="it belongs to other events")
    records = np.frombuffer(data, BLOCK, count=len(data) // SIZE)
    good = record_checks(records) == records["check"] if len(records) else np.zeros(0, bool)
    good &= (records["start"] < records["end"]) & (records["end"] <= size)
    blocks = take_blocks(records, good & (records["type"] == BLOCK_TYPE))
    # Blocks that begin before the end of an earlier one are dropped and counted.
    reached = np.concatenate([[np.uint64(0)], np.maximum.accumulate(blocks["end"])])[: len(blocks)]
    fits = blocks["start"] >= reached
    blocks, twice = (blocks, 0) if fits.all() else (take_blocks(blocks, fits), int((~fits).sum()))
    lists = take_blocks(records, good & (records["type"] == PLACES_TYPE)).view(PLACES)
    columns = {name: number for number, name in enumerate(names)}
    refused = int(len(records) - good.sum()) + twice
    return Index(blocks=blocks, places=_believed_places(lists, blocks), columns=columns, refused=refused)


# At least one of the last 4 records is a block: the others are places of rare events.
TAIL = 4


def newest_blocks(folder: str, ranks: Sequence[int]) -> NDArray[np.void]:
    """Return the newest block with steps of each of these ranks; zeros (no steps) where no valid one exists.

    For ranks in host files the blocks come from the rank tables; each other rank costs one small read, less than a
    tenth of a millisecond. The columns are those of this version.
    """
    newest = np.zeros(len(ranks), BLOCK)
    is_known, blocks = table_blocks(folder, ranks)
    if len(blocks):
        newest.view(f"V{SIZE}")[is_known] = blocks
        wrong = ~_are_newest(newest)
        # All zeros mean that a rank has no block; any other invalid entry is damage, and its index is read.
        is_known &= ~(wrong & newest.view(np.uint8).reshape(len(newest), SIZE).any(axis=1))
        newest[wrong] = np.zeros(1, BLOCK)
    unknown_places = np.flatnonzero(~is_known)
    if len(unknown_places):
        newest[unknown_places] = _newest_by_indexes(folder, [ranks[at] for at in unknown_places.tolist()])
    return newest


def _newest_by_indexes(folder: str, ranks: Sequence[int]) -> NDArray[np.void]:
    shared = index_tails(folder, ranks, head=HEAD_BYTES, size=SIZE, most=TAIL)
    return newest_in_tails(
        [shared[rank] if rank in shared else _read_tail(f"{folder}/events-{rank:05d}{SUFFIX}") for rank in ranks]
    )


def _are_newest(records: NDArray[np.void]) -> NDArray[np.bool_]:
    """Return a mask of the records that are valid blocks with steps."""
    good = record_checks(records) == records["check"]
    return np.asarray(
        good & (records["type"] == BLOCK_TYPE) & (records["steps"] > 0) & (records["start"] < records["end"])
    )


def newest_in_tails(tails: Sequence[bytes]) -> NDArray[np.void]:
    """Return the newest block with steps among the last records of each index; zeros if there is none."""
    padded_tails = (tail[: len(tail) // SIZE * SIZE].rjust(TAIL * SIZE, b"\0") for tail in tails)
    records = np.frombuffer(b"".join(padded_tails), BLOCK).reshape(len(tails), TAIL)
    good = _are_newest(records.reshape(-1)).reshape(records.shape)
    blocks = np.zeros(len(tails), BLOCK)
    rows = np.flatnonzero(good.any(axis=1))
    newest = TAIL - 1 - np.argmax(good[rows, ::-1], axis=1)
    blocks[rows] = records[rows, newest]
    return blocks


def _read_tail(path: str) -> bytes:
    """Return the last records of an index."""
    try:
        # Like `open_regular`, but faster.
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return b""
    try:
        file_stat = os.fstat(file)
        count = (file_stat.st_size - HEAD_BYTES) // SIZE if stat.S_ISREG(file_stat.st_mode) else 0
        return os.pread(file, min(count, TAIL) * SIZE, HEAD_BYTES + max(0, count - TAIL) * SIZE) if count > 0 else b""
    except OSError:
        return b""
    finally:
        os.close(file)


def _believed_places(lists: NDArray[np.void], blocks: NDArray[np.void]) -> NDArray[np.void]:
    """Return the places of rare events that lie inside a valid block."""
    counts = np.minimum(lists["listed"], LISTED)
    used = np.arange(LISTED) < counts[:, None]
    places = lists["places"][used]
    if not len(blocks):
        return np.asarray(places[:0])
    ends = np.minimum(places["offset"], np.uint64(2**63)) + places["length"]
    block = np.searchsorted(blocks["start"], places["offset"], side="right") - 1
    inside = (block >= 0) & (ends <= blocks["end"][block])
    return np.asarray(places[inside])
