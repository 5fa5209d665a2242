"""The index beside a file of events: `events-00000.index`, a head and then records of one size, appended.

The writer adds a block's records when the block is full, so a kill costs the index one block and the events nothing.
A reader believes no record that does not fit the events beside it (their first line, their length, its check sum),
and reads the events themselves where none does: without its index a run looks the same, only later.

The records are blocks (blocks.py). A reader makes blocks of what no index covers (event_file.py).
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
MOST_RECORDS = 2**17  # 33 million steps; a part of a rank's events has a few thousand
SIGNATURE = 256  # bytes of the first event that tell one file from another


class IndexWriter:
    """Writes the index of one file of events while that is written. Never raises: a run needs no index.

    Of events that go into their host's file (`stream`), it goes into the index beside that.
    """

    def __init__(self, events: Path, inode: int, *, stream: HostStream | None = None) -> None:
        self._events = events
        self._inode = inode  # of the file that is written: another may get its name
        self._stream = stream
        self._into: HostStream | None = None
        self._tail = b""  # the last records of a host's index
        self._is_torn = False  # a record in that is not whole: which of those behind it are read, readers find out
        self._file = -1
        self._lines: list[tuple[Mapping[str, Any], int]] = []  # not yet known to be on the disk
        self._maker: BlockMaker | None = None

    def add(self, event: Mapping[str, Any], length: int) -> None:
        """An event that will be written with the next flush."""
        self._lines.append((event, length))

    def flushed(self, end: int) -> None:
        """All that was added is in the file now, and ends at `end`."""
        at = end - sum(length for _, length in self._lines)
        maker = self._maker
        if maker is None or maker.end != at:  # the first, or somebody else wrote in between
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
        """Where the lines landed is not known: readers will have to look."""
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
                os.ftruncate(self._file, size)  # a full disk: whole records or none
        except OSError:
            pass

    def _append_to_host(self, events: HostStream, data: bytes) -> None:
        records, was_torn = data, self._is_torn
        if self._into is None:
            self._into = events.open_index()
            data = _make_head(events.first_bytes(SIGNATURE)) + data
        events.forget_block()  # a process that is killed here leaves a table that says: look into the index
        done, self._is_torn = 0, True
        while done < len(data):  # a full disk leaves a torn record: those behind it are refused, and the events read
            done += self._into.write(data[done:])
        self._is_torn = was_torn
        if not was_torn:
            self._tail = (self._tail + records)[-TAIL * SIZE :]
            events.note_block(newest_in_tails([self._tail]).tobytes())


def _open_prepared(events: Path) -> int:
    """The index opened for appending, with a head that fits the events and no torn record at its end."""
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
    """Of the head itself: a name with a changed letter would be a series that is not there."""
    return zlib.crc32(json.dumps({name: head[name] for name in ("phalanx.index", "length", "crc", "names")}).encode())


def _read_head(data: bytes, events: Path) -> list[str] | None:
    """The names of the columns; None when this is no index of these events."""
    try:
        head = json.loads(data)
        length, names = int(head["length"]), head["names"]
        fits = head["phalanx.index"] == VERSION and 0 < length <= SIGNATURE and isinstance(names, list)
        fits = fits and head.get("check", _head_check(head)) == _head_check(head)  # none before 0.7
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
    """What is believed of an index: blocks in the order of the file, no two overlapping, and places in them."""

    blocks: NDArray[np.void]
    places: NDArray[np.void]  # offset, length, kind, step
    columns: dict[str, int]  # where each series stands in the blocks
    refused: int = 0  # records that were not believed
    trouble: str = ""  # why there is no index at all; empty when there is, or when nobody wrote one


EMPTY = Index(blocks=np.zeros(0, BLOCK), places=np.zeros(0, PLACES["places"].base), columns={})


def read_index(events: Path) -> Index:
    """The index of a file of events."""
    try:
        with open_events(events.with_suffix(SUFFIX)) as file:
            head = file.read(HEAD_BYTES)
            # Not simply "at most so many": Python would first ask for the memory of them all.
            data = file.read(min(opened_size(file), MOST_RECORDS * SIZE))
    except FileNotFoundError:
        return EMPTY
    except OSError as error:
        return Index(blocks=EMPTY.blocks, places=EMPTY.places, columns={}, trouble=error.strerror or "unreadable")
    names = _read_head(head, events)
    found = stat_events(events)  # asked now: events are written before what is told of them
    size = found.size if found is not None else 0
    if names is None:
        return Index(blocks=EMPTY.blocks, places=EMPTY.places, columns={}, trouble="it belongs to other events")
    records = np.frombuffer(data, BLOCK, count=len(data) // SIZE)
    good = record_checks(records) == records["check"] if len(records) else np.zeros(0, bool)
    good &= (records["start"] < records["end"]) & (records["end"] <= size)
    blocks = take_blocks(records, good & (records["type"] == BLOCK_TYPE))
    # Blocks that begin before an earlier one ends are left out, and counted.
    reached = np.concatenate([[np.uint64(0)], np.maximum.accumulate(blocks["end"])])[: len(blocks)]
    fits = blocks["start"] >= reached
    blocks, twice = (blocks, 0) if fits.all() else (take_blocks(blocks, fits), int((~fits).sum()))
    lists = take_blocks(records, good & (records["type"] == PLACES_TYPE)).view(PLACES)
    columns = {name: number for number, name in enumerate(names)}
    refused = int(len(records) - good.sum()) + twice
    return Index(blocks=blocks, places=_believed_places(lists, blocks), columns=columns, refused=refused)


TAIL = 4  # records at the end of an index of which one is a block: the others are places of rare events


def newest_blocks(folder: str, ranks: Sequence[int]) -> NDArray[np.void]:
    """The newest block with steps in the index of each of these ranks; zeros (no steps) where none is believed.

    Of ranks that share files, by the tables of their hosts; of the others one small read each, less than a tenth of a
    millisecond. The columns are those of this version.
    """
    found = np.zeros(len(ranks), BLOCK)
    known, blocks = table_blocks(folder, ranks)
    if len(blocks):
        found.view(f"V{SIZE}")[known] = blocks
        wrong = ~_are_newest(found)
        # Zeros say that a rank has no block; anything else that is none is damage, and its index is read.
        known &= ~(wrong & found.view(np.uint8).reshape(len(found), SIZE).any(axis=1))
        found[wrong] = np.zeros(1, BLOCK)
    rest = np.flatnonzero(~known)
    if len(rest):
        found[rest] = _newest_by_indexes(folder, [ranks[at] for at in rest.tolist()])
    return found


def _newest_by_indexes(folder: str, ranks: Sequence[int]) -> NDArray[np.void]:
    shared = index_tails(folder, ranks, head=HEAD_BYTES, size=SIZE, most=TAIL)
    return newest_in_tails(
        [shared[rank] if rank in shared else _read_tail(f"{folder}/events-{rank:05d}{SUFFIX}") for rank in ranks]
    )


def _are_newest(records: NDArray[np.void]) -> NDArray[np.bool_]:
    """Which of them are blocks with steps."""
    good = record_checks(records) == records["check"]
    return np.asarray(
        good & (records["type"] == BLOCK_TYPE) & (records["steps"] > 0) & (records["start"] < records["end"])
    )


def newest_in_tails(tails: Sequence[bytes]) -> NDArray[np.void]:
    """The newest block with steps among the last records of each index; zeros where there is none."""
    whole = (tail[: len(tail) // SIZE * SIZE].rjust(TAIL * SIZE, b"\0") for tail in tails)
    records = np.frombuffer(b"".join(whole), BLOCK).reshape(len(tails), TAIL)
    good = _are_newest(records.reshape(-1)).reshape(records.shape)
    found = np.zeros(len(tails), BLOCK)
    rows = np.flatnonzero(good.any(axis=1))
    newest = TAIL - 1 - np.argmax(good[rows, ::-1], axis=1)
    found[rows] = records[rows, newest]
    return found


def _read_tail(path: str) -> bytes:
    """The last records of an index; fewer where it has fewer."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)  # as `open_regular`, quicker
    except OSError:
        return b""
    try:
        found = os.fstat(file)
        count = (found.st_size - HEAD_BYTES) // SIZE if stat.S_ISREG(found.st_mode) else 0
        return os.pread(file, min(count, TAIL) * SIZE, HEAD_BYTES + max(0, count - TAIL) * SIZE) if count > 0 else b""
    except OSError:
        return b""
    finally:
        os.close(file)


def _believed_places(lists: NDArray[np.void], blocks: NDArray[np.void]) -> NDArray[np.void]:
    """The places of rare events, each inside a block that was believed."""
    counts = np.minimum(lists["listed"], LISTED)
    taken = np.arange(LISTED) < counts[:, None]
    found = lists["places"][taken]
    if not len(blocks):
        return np.asarray(found[:0])
    ends = np.minimum(found["offset"], np.uint64(2**63)) + found["length"]
    block = np.searchsorted(blocks["start"], found["offset"], side="right") - 1
    inside = (block >= 0) & (ends <= blocks["end"][block])
    return np.asarray(found[inside])
