"""The index beside a file of events: `events-00000.index`, a head and then records of one size, appended.

The writer adds a block's records when the block is full, so a kill costs the index one block and the events nothing.
A reader believes no record that does not fit the events beside it (their first line, their length, its check sum),
and reads the events themselves where none does: without its index a run looks the same, only later.

Of each block it holds place, steps, and least, largest and mean of every number. A block has at most 256 steps, in
ascending order: where a restart goes back, a new one begins. Whoever draws 100,000 steps reads 400 blocks, and the
events themselves only where somebody looks closely. A reader makes blocks of what no index covers (event_file.py).
"""

from __future__ import annotations

import json
import math
import os
import stat
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phalanx.record.archive.series import FREQUENT, KINDS, LATER, SERIES
from phalanx.record.host_file import HostStream, index_tails, open_events, opened_size, stat_events

# ---- blocks ----------------------------------------------------------------------------------------------------------

STEPS = 256  # of a block: 150 kB of events, read and parsed in about 3 ms
MOST_BYTES = 2**20
MOST_MONITORS = 4096
COLUMNS = 40  # room for series that are not there yet; a record is 640 bytes
LISTED = 23  # rare events in one record
MOST_LISTED = 4 * LISTED  # a block with more is searched instead
JUMP_S = 1.0  # a clock that goes back by less was corrected, not set

_HEAD = [
    ("check", "<u8"), ("type", "<u2"), ("listed", "<u2"), ("unreadable", "<u4"), ("start", "<u8"), ("end", "<u8"),
    ("first", "<i8"), ("last", "<i8"), ("t_first", "<f8"), ("t_last", "<f8"), ("steps", "<u2"), ("jumps", "<u2"),
    ("kinds", "<u4"), ("unknown", "<u4"), ("spare", "<u4"),
]  # fmt: skip
_COLUMN = np.dtype([("low", "<f4"), ("high", "<f4"), ("mean", "<f4"), ("count", "<u2")])
_PLACE = np.dtype([("offset", "<u8"), ("length", "<u4"), ("kind", "<u4"), ("step", "<i8")])
BLOCK = np.dtype([*_HEAD, ("series", _COLUMN, (COLUMNS,))])
PLACES = np.dtype([*_HEAD, ("places", _PLACE, (LISTED,)), ("pad", "V8")])
BLOCK_TYPE, PLACES_TYPE = 1, 2
CROWDED = 0xFFFF  # in `listed`: too many rare events to list

_STEP_FIELDS = [(number, one.field) for number, one in enumerate(SERIES) if one.event == "step"]
_MONITOR_FIELDS = [(number, one.field) for number, one in enumerate(SERIES) if one.event == "monitor"]
_FIELDS = {"step": [name for _, name in _STEP_FIELDS], "monitor": [name for _, name in _MONITOR_FIELDS]}
_BITS = {kind: 1 << number for number, kind in enumerate(KINDS)}
UNKNOWN_BIT = 1 << 31

Blocks = NDArray[np.void]
Floats = NDArray[np.float64]


def bits_of(kinds: tuple[str, ...]) -> int:
    """The mask of blocks in which events of these kinds may be."""
    mask = 0
    for kind in kinds:
        mask |= _BITS.get(kind, UNKNOWN_BIT)
        mask |= UNKNOWN_BIT if kind in LATER else 0  # whoever wrote the index may not have known it yet
    return mask


def code_of(kind: str) -> int:
    """A kind as a number that fits in a place."""
    return zlib.crc32(kind.encode("utf-8", errors="replace"))


def number_of(value: Any) -> float:
    """A number of an event; NaN when it is none."""
    if type(value) is float:
        return value
    if type(value) is int:
        try:
            return float(value)
        except OverflowError:
            return math.nan
    return math.nan


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """The events of a block one by one: `step`, `t` and the series, a row each; NaN where an event has none."""

    steps: int  # rows of step events, which come first; the others are of monitors
    step: NDArray[np.int64]
    t: Floats
    values: Floats  # [row, series]


class BlockMaker:
    """Takes events in the order of the file and cuts them into blocks."""

    def __init__(self, start: int, *, step: int = 0) -> None:
        self.done: list[bytes] = []  # finished records, blocks with their places behind
        self._step = step  # the one that goes on
        self._clear(start)

    def _clear(self, start: int) -> None:
        self.start = self.end = start
        self._rows: dict[str, list[list[float]]] = {"step": [], "monitor": []}
        self._last = -1
        self._t = (math.nan, math.nan)
        self._places: list[tuple[int, int, int, int]] = []
        self._kinds = self._jumps = self._unreadable = self._unknown = 0

    def add(self, kind: str, event: Mapping[str, Any], offset: int, length: int) -> None:
        """An event of `length` bytes, its newline included, at `offset`; bytes between it and the last are skipped."""
        rows = self._rows.get(kind)
        if kind == "step":
            step = event.get("step")
            if type(step) is not int or not -(2**62) < step < 2**62:
                self.skip(offset + length)
                return
            if step <= self._last or len(self._rows["step"]) >= STEPS:
                self.cut()
            self._step = self._last = step
            rows = self._rows["step"]
        if offset + length - self.start > MOST_BYTES or len(self._rows["monitor"]) >= MOST_MONITORS:
            self.cut()
            self._last, rows = self._step if kind == "step" else -1, self._rows.get(kind)
        self._time(number_of(event.get("t")))
        self._kinds |= _BITS.get(kind, UNKNOWN_BIT)
        self._unknown += kind not in _BITS
        if rows is not None:
            rows.append([self._step, self._t[1], *[number_of(event.get(name)) for name in _FIELDS[kind]]])
        elif kind not in FREQUENT:
            self._note(kind, event.get("step"), offset, length)
        self.end = offset + length

    def _note(self, kind: str, step: Any, offset: int, length: int) -> None:
        if len(self._places) <= MOST_LISTED:
            known = step if type(step) is int and abs(step) < 2**62 else -1
            self._places.append((offset, length, code_of(kind), known))
        if kind == "run_start" and type(step) is int and abs(step) < 2**62:
            self._step = step

    def _time(self, t: float) -> None:
        if math.isfinite(t):
            first, last = self._t
            self._jumps = min(0xFFFF, self._jumps + (t < last - JUMP_S))
            self._t = (t if math.isnan(first) else first, t)

    def skip(self, end: int, *, unreadable: int = 1) -> None:
        """Lines that are no events, up to `end`."""
        if end - self.start > MOST_BYTES:
            self.cut()
        self._unreadable = min(0xFFFFFFFF, self._unreadable + unreadable)
        self.end = end

    def cut(self) -> None:
        """Finish the block; the next begins where it ends."""
        if self.end > self.start:
            self.done.append(self.snapshot())
            self._clear(self.end)

    def snapshot(self) -> bytes:
        """The block so far, as records; nothing when it is empty."""
        if self.end == self.start:
            return b""
        block = np.zeros(1, BLOCK)
        self._head(block)
        for kind, fields in (("step", _STEP_FIELDS), ("monitor", _MONITOR_FIELDS)):
            if self._rows[kind]:
                _reduce(block, np.array(self._rows[kind])[:, 2:], [number for number, _ in fields])
        crowded = len(self._places) > MOST_LISTED
        lists = [] if crowded else [self._places[at : at + LISTED] for at in range(0, len(self._places), LISTED)]
        block["listed"] = CROWDED if crowded else len(self._places)
        return b"".join([seal(block), *(self._listed(one) for one in lists)])

    def _head(self, block: Blocks) -> None:
        steps = self._rows["step"]
        first = int(steps[0][0]) if steps else self._step
        values = {
            "type": BLOCK_TYPE, "unreadable": self._unreadable, "start": self.start, "end": self.end, "first": first,
            "last": int(steps[-1][0]) if steps else self._step, "t_first": self._t[0], "t_last": self._t[1],
            "steps": len(steps), "jumps": self._jumps, "kinds": self._kinds,
            "unknown": self._unknown,
        }  # fmt: skip
        for name, value in values.items():
            block[name] = value

    def _listed(self, places: list[tuple[int, int, int, int]]) -> bytes:
        record = np.zeros(1, PLACES)
        record["type"], record["listed"], record["start"], record["end"] = (
            PLACES_TYPE,
            len(places),
            self.start,
            self.end,
        )
        record["places"][0, : len(places)] = places
        return seal(record)

    def rows(self) -> Rows:
        """The numbers of the block so far."""
        made = [_spread(self._rows["step"], _STEP_FIELDS), _spread(self._rows["monitor"], _MONITOR_FIELDS)]
        table = np.concatenate(made)
        return Rows(steps=len(made[0]), step=table[:, 0].astype(np.int64), t=table[:, 1], values=table[:, 2:])


def _spread(rows: list[list[float]], fields: list[tuple[int, str]]) -> Floats:
    table = np.full((len(rows), 2 + len(SERIES)), np.nan)
    if rows:
        known = np.array(rows)
        table[:, :2] = known[:, :2]
        table[:, [2 + number for number, _ in fields]] = np.where(np.isfinite(known[:, 2:]), known[:, 2:], np.nan)
    return table


def _reduce(block: Blocks, values: Floats, columns: list[int]) -> None:
    """Least, largest and mean of each column; what is not finite, or not as a 32-bit number, does not count."""
    values = np.where(np.abs(values) < np.finfo(np.float32).max, values, np.nan)  # false for NaN too
    count = (~np.isnan(values)).sum(axis=0)
    into = block["series"][0]
    into["low"][columns] = np.fmin.reduce(values)
    into["high"][columns] = np.fmax.reduce(values)
    into["mean"][columns] = np.nansum(values, axis=0) / np.maximum(count, 1)
    into["count"][columns] = count


def take(blocks: Blocks, which: NDArray[np.bool_] | NDArray[np.int64]) -> Blocks:
    """Some of the blocks. As plain bytes, since numpy copies records field by field, twenty times slower."""
    return np.ascontiguousarray(blocks).view(f"V{BLOCK.itemsize}")[which].view(blocks.dtype)


# ---- against damage --------------------------------------------------------------------------------------------------

# Odd multiples of 2^64 over the golden ratio: no two words can change places unseen.
_WEIGHTS = np.arange(1, BLOCK.itemsize // 8, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) | np.uint64(1)


def checks(records: NDArray[np.void]) -> NDArray[np.uint64]:
    """A check sum of each record: of all at once, since a run may have half a million."""
    words = np.ascontiguousarray(records).view("<u8").reshape(len(records), -1)[:, 1:]
    return np.asarray(words @ _WEIGHTS)


def seal(record: NDArray[np.void]) -> bytes:
    """A record with its check sum, as bytes."""
    record["check"] = checks(record)
    return record.tobytes()


# ---- the index file --------------------------------------------------------------------------------------------------

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
                self._write(maker)
            maker = self._maker = BlockMaker(at)
        for event, length in self._lines:
            maker.add(event["event"], event, at, length)
            at += length
        self._lines.clear()
        if maker.done:
            self._write(maker)

    def spoil(self) -> None:
        """Where the lines landed is not known: readers will have to look."""
        self._lines.clear()

    def close(self) -> None:
        """Write the last block, whatever its size."""
        if self._maker is not None:
            self._maker.cut()
            self._write(self._maker)
            self._maker = None
        if self._into is not None:
            self._into.close()
            self._into = None
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _write(self, maker: BlockMaker) -> None:
        data = b"".join(maker.done)
        maker.done.clear()
        try:
            if self._stream is not None:
                self._append(self._stream, data)
                return
            if self._file < 0:
                if os.stat(self._events).st_ino != self._inode:
                    return
                self._file = _prepared(self._events)
            size = os.fstat(self._file).st_size
            if data and os.write(self._file, data) != len(data):
                os.ftruncate(self._file, size)  # a full disk: whole records or none
        except OSError:
            pass

    def _append(self, events: HostStream, data: bytes) -> None:
        if self._into is None:
            self._into = events.open_index()
            data = _make_head(events.first_bytes(SIGNATURE)) + data
        done = 0
        while done < len(data):  # a full disk leaves a torn record: those behind it are refused, and the events read
            done += self._into.write(data[done:])


def _prepared(events: Path) -> int:
    """The index opened for appending, with a head that fits the events and no torn record at its end."""
    file = os.open(events.with_suffix(SUFFIX), os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    size, head = os.fstat(file).st_size, _head(events)
    if size < HEAD_BYTES or _read_head(os.pread(file, HEAD_BYTES, 0), events) != _names():
        os.ftruncate(file, 0)
        if os.write(file, head) != len(head):  # a full disk
            os.ftruncate(file, 0)
            os.close(file)
            raise OSError
    elif (size - HEAD_BYTES) % SIZE:
        os.ftruncate(file, size - (size - HEAD_BYTES) % SIZE)
    return file


def _names() -> list[str]:
    return [series.name for series in SERIES]


def _head(events: Path) -> bytes:
    return _make_head(_first_bytes(events, SIGNATURE))


def _make_head(first: bytes) -> bytes:
    head = {"phalanx.index": VERSION, "length": len(first), "crc": zlib.crc32(first), "names": _names()}
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


def _size(path: Path) -> int:
    found = stat_events(path)
    return found.size if found is not None else 0


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
    names, size = _read_head(head, events), _size(events)  # asked now: events are written before what is told of them
    if names is None:
        return Index(blocks=EMPTY.blocks, places=EMPTY.places, columns={}, trouble="it belongs to other events")
    records = np.frombuffer(data, BLOCK, count=len(data) // SIZE)
    good = checks(records) == records["check"] if len(records) else np.zeros(0, bool)
    good &= (records["start"] < records["end"]) & (records["end"] <= size)
    blocks = take(records, good & (records["type"] == BLOCK_TYPE))
    blocks, twice = _in_order(blocks)
    lists = take(records, good & (records["type"] == PLACES_TYPE)).view(PLACES)
    columns = {name: number for number, name in enumerate(names)}
    refused = int(len(records) - good.sum()) + twice
    return Index(blocks=blocks, places=_places(lists, blocks), columns=columns, refused=refused)


TAIL = 4  # records at the end of an index of which one is a block: the others are places of rare events


def newest_blocks(folder: str, ranks: Sequence[int]) -> NDArray[np.void]:
    """The newest block with steps in the index of each of these ranks; zeros (no steps) where none is believed.

    Of many: one small read each, less than a tenth of a millisecond. The columns are those of this version.
    """
    shared = index_tails(folder, ranks, head=HEAD_BYTES, size=SIZE, most=TAIL)
    tails = [shared[rank] if rank in shared else _read_tail(f"{folder}/events-{rank:05d}{SUFFIX}") for rank in ranks]
    whole = (tail[: len(tail) // SIZE * SIZE].rjust(TAIL * SIZE, b"\0") for tail in tails)
    records = np.frombuffer(b"".join(whole), BLOCK).reshape(len(ranks), TAIL)
    good = (checks(records.reshape(-1)) == records.reshape(-1)["check"]).reshape(records.shape)
    good &= (records["type"] == BLOCK_TYPE) & (records["steps"] > 0) & (records["start"] < records["end"])
    found = np.zeros(len(ranks), BLOCK)
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


def _in_order(blocks: NDArray[np.void]) -> tuple[NDArray[np.void], int]:
    """Without blocks that begin before an earlier one ends, and how many those were."""
    reached = np.concatenate([[np.uint64(0)], np.maximum.accumulate(blocks["end"])])[: len(blocks)]
    fits = blocks["start"] >= reached
    return (blocks, 0) if fits.all() else (take(blocks, fits), int((~fits).sum()))


def _places(lists: NDArray[np.void], blocks: NDArray[np.void]) -> NDArray[np.void]:
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


def is_crowded(block: np.void) -> bool:
    """Whether a block has too many rare events for their places to be kept."""
    return bool(block["listed"] == CROWDED)
