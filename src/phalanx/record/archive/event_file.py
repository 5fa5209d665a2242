"""One file of events in blocks: those its valid index contains, and those made by reading the rest of the file."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from phalanx.record.archive.blocks import (
    BLOCK,
    BLOCK_TYPE,
    LISTED,
    PLACES,
    BlockMaker,
    Rows,
    is_crowded,
    kind_bits,
    kind_code,
    take_blocks,
)
from phalanx.record.archive.event_index import EMPTY, SUFFIX, Index, read_index
from phalanx.record.archive.series import FREQUENT, KINDS, SERIES
from phalanx.record.events import READ_BYTES, Event, LineSplitter, parse_event
from phalanx.record.host_file import open_events, opened_size, stat_events

# The beginning of a line as EventWriter writes it: enough to skip events of unknown kinds unparsed.
_OURS = re.compile(rb'\{"v":\d{1,9},"event":"([\w.-]{1,60})","t":(\d{1,12}(?:\.\d{1,9})?),"rank":')
_NAMES = [series.name for series in SERIES]


@dataclass(kw_only=True, slots=True)
class _Gap:
    """A range of the file that no index covers, as far as it has been read."""

    start: int
    stop: int | None  # None: to the end of the file, which may still grow
    maker: BlockMaker
    lines: LineSplitter = field(default_factory=LineSplitter)
    read_to: int = 0


class EventFile:
    """A file of events, read only where needed. Call `refresh` before the first use, and to see new events."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = 0
        self.replaced = False  # True if it once was longer than it is
        self.is_odd = False  # True if a folder, pipe or device has its name
        # Identifies the file's content; kept when the file is renamed.
        self.content = object()
        self._index = EMPTY
        self._stamp: tuple[int, int] | None = None
        self._gaps: list[_Gap] = []
        self._blocks: NDArray[np.void] | None = None
        self._places: NDArray[np.void] | None = None

    @property
    def index(self) -> Index:
        """The file's index."""
        return self._index

    def refresh(self) -> bool:
        """Look for changes; return True if there were any."""
        size = _file_size(self.path)
        self.is_odd = not size and self.path.exists() and not self.path.is_file()
        index_stat = stat_events(self.path.with_suffix(SUFFIX))
        stamp = (index_stat.size, index_stat.mtime_ns) if index_stat is not None else None
        if (size, stamp) == (self.size, self._stamp):
            return False
        if size < self.size:
            self.replaced, self.content, self._gaps = True, object(), []
        if stamp != self._stamp or size < self.size:
            self._index, self._stamp = read_index(self.path), stamp
            # The index may cover events written in between.
            size = max(size, _file_size(self.path))
        self.size, self._blocks, self._places = size, None, None
        self._fit_gaps()
        return True

    def _fit_gaps(self) -> None:
        """Compute the gaps between the blocks of the index; known gaps keep what was read."""
        blocks, known_gaps = self._index.blocks, {(gap.start, gap.stop): gap for gap in self._gaps}
        starts = np.concatenate([[0], blocks["end"].astype(np.int64)])
        stops = np.concatenate([blocks["start"].astype(np.int64), [self.size + 1]])
        steps = np.concatenate([[0], blocks["last"]])
        self._gaps = []
        for number in np.flatnonzero(starts < stops):
            start = int(starts[number])
            stop = int(stops[number]) if number < len(blocks) else None
            maker = BlockMaker(start, step=int(steps[number]))
            self._gaps.append(known_gaps.get((start, stop), _Gap(start=start, stop=stop, maker=maker, read_to=start)))

    @property
    def unread(self) -> int:
        """Bytes that `blocks` would have to read."""
        return sum((self.size if gap.stop is None else gap.stop) - gap.read_to for gap in self._gaps)

    @property
    def is_torn(self) -> bool:
        """True if the bytes read so far end in the middle of a line."""
        return any(gap.lines.held > 0 for gap in self._gaps)

    @property
    def known_blocks(self) -> NDArray[np.void]:
        """The blocks that are known without reading more."""
        return self._index.blocks if self._blocks is None else self._blocks

    @property
    def held_bytes(self) -> int:
        """Approximate memory of the index in bytes."""
        return int(self._index.blocks.nbytes + self._index.places.nbytes) + 4096

    def blocks(self) -> NDArray[np.void]:
        """Return all blocks, in the order of the file."""
        if self._blocks is None:
            for gap in self._gaps:
                self._read_gap(gap)
            records = (data for gap in self._gaps for data in (*gap.maker.done, gap.maker.snapshot()))
            gap_records = np.frombuffer(b"".join(records), BLOCK)
            self._blocks, self._places = self._indexed_blocks(), self._index.places
            if len(gap_records):
                blocks = np.concatenate([self._blocks, take_blocks(gap_records, gap_records["type"] == BLOCK_TYPE)])
                self._blocks = take_blocks(blocks, np.argsort(blocks["start"], kind="stable"))
                lists = take_blocks(gap_records, gap_records["type"] != BLOCK_TYPE).view(PLACES)
                places = np.concatenate([self._places, lists["places"][np.arange(LISTED) < lists["listed"][:, None]]])
                self._places = places[np.argsort(places["offset"], kind="stable")]
        return self._blocks

    def _indexed_blocks(self) -> NDArray[np.void]:
        """Return the blocks of the index with the columns of this version."""
        blocks, columns = self._index.blocks, self._index.columns
        if not len(blocks) or list(columns) == _NAMES:
            return blocks
        moved = blocks.copy()
        moved["series"] = np.zeros((), BLOCK["series"].base)
        for number, name in enumerate(_NAMES):
            if name in columns:
                moved["series"][:, number] = blocks["series"][:, columns[name]]
        return moved

    def _read_gap(self, gap: _Gap) -> None:
        stop = self.size if gap.stop is None else gap.stop
        if gap.read_to >= stop:
            return
        for data in self._read_chunks(gap.read_to, stop):
            begins, ends = gap.read_to - gap.lines.held, gap.read_to + data.find(b"\n") + 1
            gap.read_to += len(data)
            _take_lines(gap.maker, gap.lines.feed(data), begins, ends)
        # Blocks begin at a line start, so the rest is a torn line.
        if gap.stop is not None and gap.lines.held:
            gap.lines.finish()
            gap.maker.skip(stop)

    # ---- the events themselves -------------------------------------------------------------------------------------

    def lines(self, block: np.void) -> Iterator[bytes]:
        """Yield the lines of a block."""
        splitter = LineSplitter()
        for data in self._read_chunks(int(block["start"]), int(block["end"])):
            yield from splitter.feed(data)

    def rows(self, block: np.void) -> Rows:
        """Return the numbers of a block, event by event."""
        maker = BlockMaker(0, step=int(block["first"]))
        for line in self.lines(block):
            head = _OURS.match(line)
            if head and head.group(1) not in (b"step", b"monitor", b"run_start"):
                continue
            event = parse_event(line)
            if event is not None:
                maker.add(event["event"], event, 0, 1)
        return maker.rows()

    def search(self, block: np.void, kinds: tuple[str, ...]) -> list[Event]:
        """Return the events of some kinds in a block; without kinds, all but the frequent ones."""
        is_filtered = kinds or None
        if int(block["kinds"]) & (kind_bits(kinds) if is_filtered else ~kind_bits(FREQUENT)) == 0:
            return []
        if is_crowded(block) or any(kind in FREQUENT for kind in kinds):
            return [event for line in self.lines(block) if (event := _wanted_event(line, kinds)) is not None]
        places = self._places_in(block)
        if is_filtered:
            places = places[np.isin(places["kind"], [kind_code(kind) for kind in kinds])]
        return [event for place in places if (event := self.at(place)) is not None and _is_wanted(event, kinds)]

    def last(self, block: np.void, kind: str) -> Event | None:
        """Return the last event of a kind in a block."""
        if kind not in FREQUENT and not is_crowded(block):
            return next(reversed(self.search(block, (kind,))), None)
        lines = list(self.lines(block))
        return next((event for line in reversed(lines) if (event := _wanted_event(line, (kind,))) is not None), None)

    def at(self, place: np.void) -> Event | None:
        """Return the event at a place."""
        data = b"".join(self._read_chunks(int(place["offset"]), int(place["offset"]) + int(place["length"])))
        return parse_event(data)

    def steps_with(self, block: np.void, kind: str) -> list[int]:
        """Return the steps for which a block has a rare event of a kind.

        The events are read only if their places are not stored.
        """
        if is_crowded(block):
            steps = [event.get("step") for event in self.search(block, (kind,))]
            return [step for step in steps if type(step) is int]
        places = self._places_in(block)
        return [int(step) for step in places["step"][places["kind"] == kind_code(kind)]]

    def at_step(self, block: np.void, kind: str, step: int) -> Event | None:
        """Return the last rare event of a kind for a step in a block."""
        if is_crowded(block):
            events = [event for event in self.search(block, (kind,)) if event.get("step") == step]
            return events[-1] if events else None
        places = self._places_in(block)
        places = places[(places["kind"] == kind_code(kind)) & (places["step"] == step)]
        return self.at(places[-1]) if len(places) else None

    def _places_in(self, block: np.void) -> NDArray[np.void]:
        self.blocks()
        assert self._places is not None
        offsets = self._places["offset"]
        return np.asarray(self._places[(offsets >= block["start"]) & (offsets < block["end"])])

    def _read_chunks(self, start: int, stop: int) -> Iterator[bytes]:
        """Yield a range of the file in chunks; end early if the file does, or if a shorter one replaced it."""
        try:
            with open_events(self.path) as file:
                if opened_size(file) < self.size:
                    return
                file.seek(start)
                while start < stop and (data := file.read(min(READ_BYTES, stop - start))):
                    start += len(data)
                    yield data
        except OSError:
            return


def _file_size(path: Path) -> int:
    """Return the size in bytes; 0 if it is not a file."""
    events = stat_events(path)
    return events.size if events is not None and events.is_file else 0


def _take_lines(maker: BlockMaker, lines: list[bytes], at: int, first_end: int) -> None:
    """Pass complete lines to the block maker; the first begins `at`. A line that was too long comes empty."""
    for number, line in enumerate(lines):
        end = at + len(line) + 1 if number else first_end
        head = _OURS.match(line)
        kind = head.group(1).decode() if head else ""
        event = (
            parse_event(line)
            if kind in KINDS or not head
            else {"t": float(head.group(2))}
            if line[-1:] == b"}"
            else None
        )
        if event is not None:
            maker.add(kind or str(event["event"]), event, at, end - at)
        elif line.strip() or end - at > len(line) + 1:
            maker.skip(end)
        at = end


def _wanted_event(line: bytes, kinds: tuple[str, ...]) -> Event | None:
    head = _OURS.match(line)
    if head and not _of_kind(head.group(1).decode(), kinds):
        return None
    event = parse_event(line)
    return event if event is not None and _is_wanted(event, kinds) else None


def _is_wanted(event: Event, kinds: tuple[str, ...]) -> bool:
    return _of_kind(event["event"], kinds)


def _of_kind(kind: str, kinds: tuple[str, ...]) -> bool:
    return kind in kinds if kinds else kind not in FREQUENT
