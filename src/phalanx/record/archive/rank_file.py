"""The events of one rank over all its files: the blocks whose steps stayed, and their numbers event by event."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from phalanx.io.values import integer
from phalanx.record.archive.blocks import Rows, kind_bits, take_blocks
from phalanx.record.archive.event_file import EventFile
from phalanx.record.events import Event, part_path
from phalanx.record.host_file import has_events

# Returned at once; a run has a few hundred rare ones per rank.
MOST_EVENTS = 20_000
MOST_CACHED = 256  # blocks whose rows are in memory: 16 MB
FOREVER = 2**62

Start = tuple[int, int]  # generation, and the step at which it began


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptBlocks:
    """The blocks whose steps stayed, in order of their steps, and for each the step below which its steps stayed."""

    blocks: NDArray[np.void]
    segment: NDArray[np.int64]  # number of the file that contains each block
    below: NDArray[np.int64]

    @property
    def is_cut(self) -> NDArray[np.bool_]:
        """Blocks whose last steps were repeated later."""
        return np.asarray(self.blocks["last"] >= self.below)


class RowCache:
    """The rows of the blocks used last, of all ranks together."""

    def __init__(self) -> None:
        # Not by path, because after a rotation the next file has it. Of a growing block only the newest state is
        # stored: otherwise watching a run would fill the cache with its former states, 16 MB in some minutes.
        self._rows: OrderedDict[tuple[object, int], tuple[int, Rows]] = OrderedDict()

    def get(self, segment: EventFile, block: np.void) -> Rows:
        """Return the numbers of a block, event by event; do not cache them if steps are missing in the file."""
        key, end = (segment.content, int(block["start"])), int(block["end"])
        known_end, rows = self._rows.pop(key, (-1, None))
        if rows is None or known_end != end:
            rows = segment.rows(block)
        if rows.steps < block["steps"]:
            return rows
        self._rows[key] = end, rows
        while len(self._rows) > MOST_CACHED:
            self._rows.popitem(last=False)
        return rows


class RankFile:
    """Reads one rank. Call `refresh` first, and whenever the run may have grown.

    `closed` are the numbers of its closed parts.
    """

    def __init__(self, path: Path, closed: Sequence[int], cache: RowCache) -> None:
        self._path = path
        self._cache = cache
        self._numbers = list(closed)
        self._next = (0, path)  # number and path of the next part
        self._parts = [EventFile(part_path(path, number)) for number in self._numbers]
        self._live = EventFile(path)
        self._starts: tuple[Start, ...] = ()
        self._kept: KeptBlocks | None = None
        self.changed = False  # True if the last refresh found anything

    @property
    def segments(self) -> list[EventFile]:
        """The rank's files, oldest first."""
        return [*self._parts, self._live]

    def refresh(self) -> bool:
        """Look for new data; return True if there was any."""
        self._follow_rotation()
        changed = [segment.refresh() for segment in self.segments]
        # Closed during the refresh: the data just read may be of the next file.
        while has_events(self._next_part()):
            self._live = EventFile(self._path)
            self._follow_rotation()
            changed += [segment.refresh() for segment in self.segments]
        self.changed = any(changed)
        if self.changed:
            self._kept = None
        return self.changed

    def _next_part(self) -> Path:
        number = self._numbers[-1] + 1 if self._numbers else 1
        if self._next[0] != number:  # called for every row of a mesh
            self._next = number, part_path(self._path, number)
        return self._next[1]

    def _follow_rotation(self) -> None:
        """Rename the growing file here if it was closed under another name; what was read of it stays read.

        This may happen between two refreshes: the file that begins anew has no blocks before it is refreshed, and the
        numbers of the others stay.
        """
        while has_events(closed := self._next_part()):
            self._live.path = closed
            self._parts.append(self._live)
            self._numbers.append(self._numbers[-1] + 1 if self._numbers else 1)
            self._live = EventFile(self._path)

    def know_starts(self, starts: tuple[Start, ...]) -> None:
        """Set the starts of the run's memberships, as recorded by a rank that is in all of them."""
        if starts != self._starts:
            self._starts, self._kept = starts, None

    @property
    def unread(self) -> int:
        """Bytes to read before `kept` can answer."""
        return sum(segment.unread for segment in self.segments)

    @property
    def held_bytes(self) -> int:
        """Approximate memory in bytes, without cached rows."""
        return sum(segment.held_bytes for segment in self.segments)

    def kept(self) -> KeptBlocks:
        """Return the blocks that count: a restart that goes back undoes the later steps of the start before.

        This includes restarts that a rank did not take part in, as far as `know_starts` knows them. Of a rank that
        left and came back, steps that were undone meanwhile stay if its own restart lies above them.
        """
        if self._kept is None:
            self._follow_rotation()
            segment_blocks = [segment.blocks() for segment in self.segments]
            # A copy takes as long as everything else.
            blocks = np.concatenate(segment_blocks) if len(segment_blocks) > 1 else segment_blocks[0]
            number = np.repeat(
                np.arange(len(segment_blocks)), [len(blocks_of_segment) for blocks_of_segment in segment_blocks]
            )
            # A block without steps undoes nothing.
            first = np.where(blocks["steps"] > 0, blocks["first"], FOREVER)
            below = np.append(np.minimum.accumulate(first[::-1])[::-1], FOREVER)[1:]
            below = np.minimum(below, self._undone_from())
            stay = blocks["first"] < below
            if not stay.all():
                blocks, number, below = take_blocks(blocks, stay), number[stay], below[stay]
            self._kept = KeptBlocks(blocks=blocks, segment=number, below=below)
        return self._kept

    def _undone_from(self) -> int:
        """Return the lowest step at which a membership after this rank's last one began."""
        if len(self._starts) < 2 or (start := self.latest("run_start")) is None:
            return FOREVER
        generation = integer(start, "epoch")
        return min(
            (step for later, step in self._starts if generation is not None and later > generation), default=FOREVER
        )

    def rows(self, number: int) -> Rows:
        """Return the numbers of one of the kept blocks, without the steps that were undone."""
        kept_blocks = self.kept()
        place, block = int(kept_blocks.segment[number]), kept_blocks.blocks[number]
        if place == len(self._parts):
            # The file may have been closed since the last refresh, and another file may have its name.
            self._follow_rotation()
        rows = self._cache.get(self.segments[place], block)
        stay = rows.step < kept_blocks.below[number]
        if stay.all():
            return rows
        steps = int(stay[: rows.steps].sum())
        return Rows(steps=steps, step=rows.step[stay], t=rows.t[stay], values=rows.values[stay])

    def steps(self, first: int, last: int) -> Iterator[Event]:
        """Return the step events of a range that stayed."""
        self._follow_rotation()
        kept_blocks = self.kept()
        blocks = kept_blocks.blocks
        inside = (blocks["steps"] > 0) & (blocks["last"] >= first) & (blocks["first"] <= last)
        for number in np.flatnonzero(inside):
            segment = self.segments[int(kept_blocks.segment[number])]
            for event in segment.search(blocks[number], ("step",)):
                step = event.get("step")
                if type(step) is int and first <= step <= last and step < kept_blocks.below[number]:
                    yield event

    def events(self, kinds: tuple[str, ...]) -> list[Event]:
        """Return the newest events of some kinds, oldest first; without kinds, all but the frequent ones."""
        events_by_block: list[list[Event]] = []
        count = 0
        for segment, block in self._newest_first(kinds):
            events_by_block.append(segment.search(block, kinds))
            count += len(events_by_block[-1])
            if count >= MOST_EVENTS:
                break
        return [event for block_events in reversed(events_by_block) for event in block_events][-MOST_EVENTS:]

    def latest(self, kind: str) -> Event | None:
        """Return the last event of a kind."""
        for segment, block in self._newest_first((kind,)):
            if (event := segment.last(block, kind)) is not None:
                return event
        return None

    def _newest_first(self, kinds: tuple[str, ...]) -> Iterator[tuple[EventFile, np.void]]:
        self._follow_rotation()
        mask = kind_bits(kinds) if kinds else 0xFFFFFFFF
        for segment in reversed(self.segments):
            blocks = segment.blocks()
            for number in np.flatnonzero(blocks["kinds"] & mask)[::-1]:
                yield segment, blocks[number]

    def steps_with(self, kind: str) -> set[int]:
        """Return the steps for which there is an event of a rare kind."""
        return {step for segment, block in self._newest_first((kind,)) for step in segment.steps_with(block, kind)}

    def at_step(self, kind: str, step: int) -> Event | None:
        """Return the newest event of a rare kind for a step."""
        for segment, block in self._newest_first((kind,)):
            if (event := segment.at_step(block, kind, step)) is not None:
                return event
        return None

    @property
    def torn(self) -> int:
        """Number of incomplete lines at its end, as far as it was read."""
        return int(self._live.is_torn)

    @property
    def end(self) -> tuple[int, float]:
        """Its last step that stayed, and the time of its last event."""
        kept_blocks = self.kept()
        stay = kept_blocks.blocks["steps"] > 0
        last = np.minimum(kept_blocks.blocks["last"], kept_blocks.below - 1)[stay]
        times = kept_blocks.blocks["t_last"][np.isfinite(kept_blocks.blocks["t_last"])]
        return (int(last[-1]) if len(last) else -1), (float(times.max()) if len(times) else 0.0)

    def troubles(self) -> Counter[str]:
        """Return what could not be read or was invalid in its files, as far as they were read."""
        troubles: Counter[str] = Counter()
        for segment in self.segments:
            blocks = segment.known_blocks
            troubles["lines that are no events"] += int(blocks["unreadable"].sum())
            troubles["events of kinds this version does not know"] += int(blocks["unknown"].sum())
            troubles["times at which the clock went back"] += int(blocks["jumps"].sum())
            troubles["index records that do not fit the events"] += segment.index.refused
            if segment.index.trouble:
                troubles[f"index not used: {segment.index.trouble}"] += 1
            # No process will complete a line in a closed part, such as the rest of a killed process in its host's
            # file.
            troubles["lines that are no events"] += segment.is_torn and segment is not self._live
            troubles["the file became shorter"] += segment.replaced
            troubles["something that is no file in its place"] += segment.is_odd
        return +troubles
