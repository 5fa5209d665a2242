"""Blocks of events: position, steps, and minimum, maximum and mean of every number, as records of one size.

A block has at most 256 steps in ascending order; a restart that goes back begins a new block. A plot of 100,000 steps
reads 400 blocks, and the events themselves only for a close look.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phalanx.record.archive.series import FREQUENT, KINDS, LATER, SERIES

# Maximum steps of a block: 150 kB of events, read and parsed in about 3 ms.
STEPS = 256
MOST_BYTES = 2**20
MOST_MONITORS = 4096
# Columns of a record, with room for series that are added later; a record is 640 bytes.
COLUMNS = 40
LISTED = 23  # rare events per record
MOST_LISTED = 4 * LISTED  # a block with more is searched instead
# A clock that goes back by less was corrected, not set.
JUMP_S = 1.0

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

_STEP_FIELDS = [(number, series.field) for number, series in enumerate(SERIES) if series.event == "step"]
_MONITOR_FIELDS = [(number, series.field) for number, series in enumerate(SERIES) if series.event == "monitor"]
_FIELDS = {"step": [name for _, name in _STEP_FIELDS], "monitor": [name for _, name in _MONITOR_FIELDS]}
_BITS = {kind: 1 << number for number, kind in enumerate(KINDS)}
UNKNOWN_BIT = 1 << 31

Blocks = NDArray[np.void]
Floats = NDArray[np.float64]


def kind_bits(kinds: tuple[str, ...]) -> int:
    """Return the mask of blocks that may contain events of these kinds."""
    mask = 0
    for kind in kinds:
        mask |= _BITS.get(kind, UNKNOWN_BIT)
        # The version that wrote the index may not have known the kind.
        mask |= UNKNOWN_BIT if kind in LATER else 0
    return mask


def kind_code(kind: str) -> int:
    """Return a kind as a number that fits in a place record."""
    return zlib.crc32(kind.encode("utf-8", errors="replace"))


def event_number(value: Any) -> float:
    """Return a number of an event; NaN if the value is not a number."""
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
    """The events of a block one by one: `step`, `t` and the series, a row each; NaN where an event has no value."""

    steps: int  # number of rows of step events, which come first; the others are of monitors
    step: NDArray[np.int64]
    t: Floats
    values: Floats  # [row, series]


class BlockMaker:
    """Takes events in the order of the file and cuts them into blocks."""

    def __init__(self, start: int, *, step: int = 0) -> None:
        # Finished records: each block is followed by its places.
        self.done: list[bytes] = []
        self._step = step  # the newest step
        self._clear_block(start)

    def _clear_block(self, start: int) -> None:
        self.start = self.end = start
        self._rows: dict[str, list[list[float]]] = {"step": [], "monitor": []}
        self._last = -1
        self._t = (math.nan, math.nan)
        self._places: list[tuple[int, int, int, int]] = []
        self._kinds = self._jumps = self._unreadable = self._unknown = 0

    def add(self, kind: str, event: Mapping[str, Any], offset: int, length: int) -> None:
        """Add an event of `length` bytes, with its newline, at `offset`; bytes after the last event are skipped."""
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
        t = event_number(event.get("t"))
        if math.isfinite(t):
            first, last = self._t
            self._jumps = min(0xFFFF, self._jumps + (t < last - JUMP_S))
            self._t = (t if math.isnan(first) else first, t)
        self._kinds |= _BITS.get(kind, UNKNOWN_BIT)
        self._unknown += kind not in _BITS
        if rows is not None:
            # Nearly all values are floats or absent: a call for each takes twice as long.
            get = event.get
            rows.append(
                [
                    self._step,
                    self._t[1],
                    *[v if type(v := get(name)) is float else event_number(v) for name in _FIELDS[kind]],
                ]
            )
        elif kind not in FREQUENT:
            self._note_place(kind, event.get("step"), offset, length)
        self.end = offset + length

    def _note_place(self, kind: str, step: Any, offset: int, length: int) -> None:
        if len(self._places) <= MOST_LISTED:
            known_step = step if type(step) is int and abs(step) < 2**62 else -1
            self._places.append((offset, length, kind_code(kind), known_step))
        if kind == "run_start" and type(step) is int and abs(step) < 2**62:
            self._step = step

    def skip(self, end: int, *, unreadable: int = 1) -> None:
        """Count lines that are not events, up to `end`."""
        if end - self.start > MOST_BYTES:
            self.cut()
        self._unreadable = min(0xFFFFFFFF, self._unreadable + unreadable)
        self.end = end

    def cut(self) -> None:
        """Finish the block; the next one begins at its end."""
        if self.end > self.start:
            self.done.append(self.snapshot())
            self._clear_block(self.end)

    def snapshot(self) -> bytes:
        """Return the block so far as records; empty if the block is empty."""
        if self.end == self.start:
            return b""
        block = np.zeros(1, BLOCK)
        self._fill_head(block)
        for kind, fields in (("step", _STEP_FIELDS), ("monitor", _MONITOR_FIELDS)):
            if self._rows[kind]:
                _reduce_columns(block, np.array(self._rows[kind])[:, 2:], [number for number, _ in fields])
        crowded = len(self._places) > MOST_LISTED
        lists = [] if crowded else [self._places[at : at + LISTED] for at in range(0, len(self._places), LISTED)]
        block["listed"] = CROWDED if crowded else len(self._places)
        return b"".join([seal_record(block), *(self._places_record(places) for places in lists)])

    def _fill_head(self, block: Blocks) -> None:
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

    def _places_record(self, places: list[tuple[int, int, int, int]]) -> bytes:
        record = np.zeros(1, PLACES)
        record["type"], record["listed"], record["start"], record["end"] = (
            PLACES_TYPE,
            len(places),
            self.start,
            self.end,
        )
        record["places"][0, : len(places)] = places
        return seal_record(record)

    def rows(self) -> Rows:
        """Return the numbers of the block so far."""
        tables = [_spread_rows(self._rows["step"], _STEP_FIELDS), _spread_rows(self._rows["monitor"], _MONITOR_FIELDS)]
        table = np.concatenate(tables)
        return Rows(steps=len(tables[0]), step=table[:, 0].astype(np.int64), t=table[:, 1], values=table[:, 2:])


def _spread_rows(rows: list[list[float]], fields: list[tuple[int, str]]) -> Floats:
    table = np.full((len(rows), 2 + len(SERIES)), np.nan)
    if rows:
        values = np.array(rows)
        table[:, :2] = values[:, :2]
        table[:, [2 + number for number, _ in fields]] = np.where(np.isfinite(values[:, 2:]), values[:, 2:], np.nan)
    return table


def _reduce_columns(block: Blocks, values: Floats, columns: list[int]) -> None:
    """Store minimum, maximum and mean of each column; values that are not finite 32-bit numbers do not count."""
    # The comparison is false for NaN too.
    values = np.where(np.abs(values) < np.finfo(np.float32).max, values, np.nan)
    count = (~np.isnan(values)).sum(axis=0)
    into = block["series"][0]
    into["low"][columns] = np.fmin.reduce(values)
    into["high"][columns] = np.fmax.reduce(values)
    into["mean"][columns] = np.nansum(values, axis=0) / np.maximum(count, 1)
    into["count"][columns] = count


def take_blocks(blocks: Blocks, which: NDArray[np.bool_] | NDArray[np.int64]) -> Blocks:
    """Return some of the blocks. They are copied as bytes: numpy copies records field by field, twenty times slower."""
    return np.ascontiguousarray(blocks).view(f"V{BLOCK.itemsize}")[which].view(blocks.dtype)


def is_crowded(block: np.void) -> bool:
    """Return True if a block has too many rare events for their places to be stored."""
    return bool(block["listed"] == CROWDED)


# ---- checksums -------------------------------------------------------------------------------------------------------

# Odd multiples of 2^64 over the golden ratio, so that swapping two words changes the sum.
_WEIGHTS = np.arange(1, BLOCK.itemsize // 8, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) | np.uint64(1)


def record_checks(records: NDArray[np.void]) -> NDArray[np.uint64]:
    """Return the checksum of each record, all at once, since a run may have half a million."""
    words = np.ascontiguousarray(records).view("<u8").reshape(len(records), -1)[:, 1:]
    return np.asarray(words @ _WEIGHTS)


def seal_record(record: NDArray[np.void]) -> bytes:
    """Return a record with its checksum as bytes."""
    record["check"] = record_checks(record)
    return record.tobytes()
