"""The events of one rank over all its files: which blocks stayed, and their numbers event by event."""

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

MOST_EVENTS = 20_000  # told at once; a run has a few hundred rare ones per rank
MOST_CACHED = 256  # blocks whose rows are kept: 16 MB
FOREVER = 2**62

Start = tuple[int, int]  # generation, and the step it went on from


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptBlocks:
    """The blocks whose steps stayed, in order of their steps, and below which step each of them did."""

    blocks: NDArray[np.void]
    segment: NDArray[np.int64]  # number of the file each block is in
    below: NDArray[np.int64]

    @property
    def is_cut(self) -> NDArray[np.bool_]:
        """Blocks of which the last steps were done again later."""
        return np.asarray(self.blocks["last"] >= self.below)


class RowCache:
    """The rows of the blocks that were looked at last, of all ranks together."""

    def __init__(self) -> None:
        # Not by path: after a rotation the next file has it. Of a block that grows, only the newest is kept: whoever
        # watches a run would fill the cache with its former states, 16 MB in some minutes.
        self._rows: OrderedDict[tuple[object, int], tuple[int, Rows]] = OrderedDict()

    def get(self, segment: EventFile, block: np.void) -> Rows:
        """The numbers of a block, event by event; fewer steps than it has where the file has gone, then not kept."""
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
    """Reads one rank; `refresh` first, and whenever the run may have gone on. `closed`: numbers of its closed parts."""

    def __init__(self, path: Path, closed: Sequence[int], cache: RowCache) -> None:
        self._path = path
        self._cache = cache
        self._numbers = list(closed)
        self._next = (0, path)  # number and path of the part that comes next
        self._parts = [EventFile(part_path(path, number)) for number in self._numbers]
        self._live = EventFile(path)
        self._starts: tuple[Start, ...] = ()
        self._kept: KeptBlocks | None = None
        self.changed = False  # whether the last refresh found anything

    @property
    def segments(self) -> list[EventFile]:
        """Its files, oldest first."""
        return [*self._parts, self._live]

    def refresh(self) -> bool:
        """Look what is new; whether there was anything."""
        self._follow_rotation()
        changed = [segment.refresh() for segment in self.segments]
        while has_events(self._next_part()):  # closed while we looked: what was just seen may be of the next file
            self._live = EventFile(self._path)
            self._follow_rotation()
            changed += [segment.refresh() for segment in self.segments]
        self.changed = any(changed)
        if self.changed:
            self._kept = None
        return self.changed

    def _next_part(self) -> Path:
        number = self._numbers[-1] + 1 if self._numbers else 1
        if self._next[0] != number:  # asked for with every row of a mesh
            self._next = number, part_path(self._path, number)
        return self._next[1]

    def _follow_rotation(self) -> None:
        """What grew until now may have been closed under another name: what was read of it stays read.

        Between two refreshes too: the file that begins anew has no blocks before it is refreshed, and the numbers of
        the others stay.
        """
        while has_events(closed := self._next_part()):
            self._live.path = closed
            self._parts.append(self._live)
            self._numbers.append(self._numbers[-1] + 1 if self._numbers else 1)
            self._live = EventFile(self._path)

    def know_starts(self, starts: tuple[Start, ...]) -> None:
        """Where the memberships of the run began, as a rank tells that is in all of them."""
        if starts != self._starts:
            self._starts, self._kept = starts, None

    @property
    def unread(self) -> int:
        """Bytes to be read before `kept` can answer."""
        return sum(segment.unread for segment in self.segments)

    @property
    def held_bytes(self) -> int:
        """Memory this takes, about; rows that were looked at not counted."""
        return sum(segment.held_bytes for segment in self.segments)

    def kept(self) -> KeptBlocks:
        """The blocks that count: a restart that goes back undoes the later steps of the start before.

        Also of a rank that was in no membership since, as far as `know_starts` tells. Of one that left and came back,
        steps that were undone meanwhile stay where its own restart lies above them.
        """
        if self._kept is None:
            self._follow_rotation()
            parts = [segment.blocks() for segment in self.segments]
            blocks = np.concatenate(parts) if len(parts) > 1 else parts[0]  # a copy takes as long as all the rest
            number = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
            first = np.where(blocks["steps"] > 0, blocks["first"], FOREVER)  # a block of other events undoes nothing
            below = np.append(np.minimum.accumulate(first[::-1])[::-1], FOREVER)[1:]
            below = np.minimum(below, self._undone_from())
            stay = blocks["first"] < below
            if not stay.all():
                blocks, number, below = take_blocks(blocks, stay), number[stay], below[stay]
            self._kept = KeptBlocks(blocks=blocks, segment=number, below=below)
        return self._kept

    def _undone_from(self) -> int:
        """The lowest step that a membership after this rank's last one went on from."""
        if len(self._starts) < 2 or (start := self.latest("run_start")) is None:
            return FOREVER
        generation = integer(start, "epoch")
        return min(
            (step for later, step in self._starts if generation is not None and later > generation), default=FOREVER
        )

    def rows(self, number: int) -> Rows:
        """The numbers of one of the kept blocks, without the steps that were undone."""
        kept = self.kept()
        place, block = int(kept.segment[number]), kept.blocks[number]
        if place == len(self._parts):
            self._follow_rotation()  # it may have been closed since the last refresh, and another have its name
        rows = self._cache.get(self.segments[place], block)
        stay = rows.step < kept.below[number]
        if stay.all():
            return rows
        steps = int(stay[: rows.steps].sum())
        return Rows(steps=steps, step=rows.step[stay], t=rows.t[stay], values=rows.values[stay])

    def steps(self, first: int, last: int) -> Iterator[Event]:
        """The step events of a range, those that stayed."""
        self._follow_rotation()
        kept = self.kept()
        blocks = kept.blocks
        inside = (blocks["steps"] > 0) & (blocks["last"] >= first) & (blocks["first"] <= last)
        for number in np.flatnonzero(inside):
            segment = self.segments[int(kept.segment[number])]
            for event in segment.search(blocks[number], ("step",)):
                step = event.get("step")
                if type(step) is int and first <= step <= last and step < kept.below[number]:
                    yield event

    def events(self, kinds: tuple[str, ...]) -> list[Event]:
        """The newest events of some kinds, oldest first; without kinds, all but the frequent ones."""
        found: list[list[Event]] = []
        count = 0
        for segment, block in self._newest_first(kinds):
            found.append(segment.search(block, kinds))
            count += len(found[-1])
            if count >= MOST_EVENTS:
                break
        return [event for part in reversed(found) for event in part][-MOST_EVENTS:]

    def latest(self, kind: str) -> Event | None:
        """The last event of a kind."""
        for segment, block in self._newest_first((kind,)):
            if (found := segment.last(block, kind)) is not None:
                return found
        return None

    def _newest_first(self, kinds: tuple[str, ...]) -> Iterator[tuple[EventFile, np.void]]:
        self._follow_rotation()
        mask = kind_bits(kinds) if kinds else 0xFFFFFFFF
        for segment in reversed(self.segments):
            blocks = segment.blocks()
            for number in np.flatnonzero(blocks["kinds"] & mask)[::-1]:
                yield segment, blocks[number]

    def steps_with(self, kind: str) -> set[int]:
        """The steps for which there is an event of a rare kind."""
        return {step for segment, block in self._newest_first((kind,)) for step in segment.steps_with(block, kind)}

    def at_step(self, kind: str, step: int) -> Event | None:
        """The newest event of a rare kind for a step."""
        for segment, block in self._newest_first((kind,)):
            if (found := segment.at_step(block, kind, step)) is not None:
                return found
        return None

    @property
    def torn(self) -> int:
        """Lines at its end, as far as read, that are not complete."""
        return int(self._live.is_torn)

    @property
    def end(self) -> tuple[int, float]:
        """Its last step that stayed, and the time of its last event."""
        kept = self.kept()
        stay = kept.blocks["steps"] > 0
        last = np.minimum(kept.blocks["last"], kept.below - 1)[stay]
        times = kept.blocks["t_last"][np.isfinite(kept.blocks["t_last"])]
        return (int(last[-1]) if len(last) else -1), (float(times.max()) if len(times) else 0.0)

    def troubles(self) -> Counter[str]:
        """What of its files could not be read or believed, as far as they were looked at."""
        found: Counter[str] = Counter()
        for segment in self.segments:
            blocks = segment.known_blocks
            found["lines that are no events"] += int(blocks["unreadable"].sum())
            found["events of kinds this version does not know"] += int(blocks["unknown"].sum())
            found["times at which the clock went back"] += int(blocks["jumps"].sum())
            found["index records that do not fit the events"] += segment.index.refused
            if segment.index.trouble:
                found[f"index not used: {segment.index.trouble}"] += 1
            # Nobody is going to complete a line in a closed part: what a killed process left in its host's file.
            found["lines that are no events"] += segment.is_torn and segment is not self._live
            found["the file became shorter"] += segment.replaced
            found["something that is no file in its place"] += segment.is_odd
        return +found
