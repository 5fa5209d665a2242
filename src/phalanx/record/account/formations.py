"""Who took part in a run, and what they saw: formations, their witnesses, and one timeline of all marks.

A witness is the lowest rank with a record that did not fall in a formation; its events speak for all.
"""

from __future__ import annotations

import functools
import heapq
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from phalanx.io.files import open_regular
from phalanx.io.values import integer, number, seconds
from phalanx.record.events import MOST_LINE_BYTES, Event, event_files_of, parse_event
from phalanx.record.run import Run

NEVER_UNDONE = 2**63
LATEST_S = 1e11  # a later time is none: the year 5138
JUMP_S = 30 * 86400.0  # between two events of one formation: a clock that was set, not a run that waited
UNEVEN_S = 1e-3  # two threads of a rank may write out of order by this much

# Lines of other kinds are passed over unparsed: a timeline may have 100 kB, and telemetry says nothing about accounts.
TOLD = frozenset(
    b"ready run_start compile_check step evaluate checkpoint sample stop run_end".split()
    + b"host epoch restore incident end".split()
)
_KIND = re.compile(rb'"event"\s*:\s*"([^"\\]*)"')


@dataclass(kw_only=True, slots=True)
class Formation:
    """One epoch, as far as its members' steps depend on others."""

    epoch: int
    world: int
    from_step: int | None = None
    fallen: set[int] = field(default_factory=set)
    recorded: tuple[int, ...] = ()  # ranks that have a record
    floor: int = NEVER_UNDONE  # steps from here on were undone by a later one

    @property
    def witness(self) -> int:
        """The rank whose events are read."""
        here = [rank for rank in self.recorded if rank < self.world]
        return next((rank for rank in here or range(self.world) if rank not in self.fallen), here[0] if here else 0)


def formations(run: Run, *, starts: Callable[[int], Iterable[Event]] | None = None) -> list[Formation]:
    """All of them, in order; of a run without a supervisor, its starts.

    `starts` gives the `run_start` events of a rank, where the caller knows them: the events are not read then.
    """
    known = starts or functools.partial(_starts, run)
    found = _supervised(run, known) if run.supervisor.is_file() else list(_started(run))
    floor = NEVER_UNDONE
    for one in reversed(found):
        one.floor = floor
        floor = floor if one.from_step is None else min(floor, one.from_step)
    return found


def _supervised(run: Run, starts: Callable[[int], Iterable[Event]]) -> list[Formation]:
    found: dict[int, Formation] = {}
    recorded = tuple(run.recorded())
    for _, event in MarkReader().read(event_files_of(run.supervisor)):
        kind, epoch = event["event"], integer(event, "epoch")
        if kind == "epoch" and epoch is not None:
            world = max(1, integer(event, "world") or 1)
            found[epoch] = Formation(epoch=epoch, world=world, recorded=recorded)
        elif kind == "restore" and epoch in found:
            found[epoch].from_step = integer(event, "step")
        elif kind == "incident" and epoch in found:
            others = event.get("others")
            ranks = [event.get("rank"), *(others if isinstance(others, list) else ())]
            found[epoch].fallen.update(rank for rank in ranks if isinstance(rank, int))
    for rank in sorted({one.witness for one in found.values()}):
        for event in starts(rank):
            epoch = integer(event, "epoch")
            if epoch in found and found[epoch].witness == rank:
                found[epoch].from_step = integer(event, "step")  # where a damaged checkpoint made it fall back to
    return list(found.values())


def _started(run: Run) -> Iterator[Formation]:
    for count, event in enumerate(_starts(run, next(run.recorded(), 0))):
        world = max(1, integer(event, "world") or 1)
        yield Formation(epoch=count, world=world, from_step=integer(event, "step"))


def _starts(run: Run, rank: int) -> Iterator[Event]:
    found = MarkReader().read(files_of(run, rank), only=b"run_start")
    return (event for _, event in found if event["event"] == "run_start")


def files_of(run: Run, rank: int) -> list[Path]:
    """The event files of a rank, oldest first: those that were closed for their size, then the one that grows."""
    return event_files_of(run.events(rank))


# ---- what they saw ---------------------------------------------------------------------------------------------------

Mark = tuple[float, int, Event]  # time, number of the formation (-1: the supervisor), event


def timeline(run: Run, known: Sequence[Formation], lines: MarkReader) -> Iterator[Mark]:
    """The marks of supervisor and witnesses in the order of time."""
    if not run.supervisor.is_file():
        return _unsupervised(run, lines)
    numbers = {one.epoch: count for count, one in enumerate(known)}
    files = [_marks(run, rank, known, numbers, lines) for rank in sorted({one.witness for one in known})]
    supervisor = ((time_s, -1, event) for time_s, event in lines.read(event_files_of(run.supervisor)))
    return heapq.merge(*files, supervisor, key=lambda mark: mark[0])  # at the same time, ranks before its end


def _marks(
    run: Run, rank: int, known: Sequence[Formation], numbers: Mapping[int, int], lines: MarkReader
) -> Iterator[Mark]:
    """Events of a rank in the formations it is the witness of."""
    mine = {epoch: count for epoch, count in numbers.items() if known[count].witness == rank}
    epoch: int | None = None
    for time_s, event in lines.read(files_of(run, rank)):
        epoch = integer(event, "epoch") if "epoch" in event else epoch
        count = mine.get(epoch, -1) if epoch is not None else -1
        if count >= 0:
            yield time_s, count, event


def _unsupervised(run: Run, lines: MarkReader) -> Iterator[Mark]:
    """Rank 0 alone, or the lowest with a record; a formation ends where the next start is made ready."""
    count, started = 0, False
    for time_s, event in lines.read(files_of(run, next(run.recorded(), 0))):
        if event["event"] == "ready" and started:
            count, started = count + 1, False
        elif event["event"] == "run_start":
            count, started = count + started, True
        yield time_s, count, event


class MarkReader:
    """Reads events line by line; what is no event with a time is counted and left out.

    Times come out in order: a clock that was set back, or that leapt within a formation, is counted and levelled out.
    """

    def __init__(self, kinds: frozenset[bytes] = TOLD) -> None:
        self._kinds = kinds
        self.unreadable = 0
        self.jumps = 0

    def read(self, paths: Iterable[Path], *, only: bytes = b"") -> Iterator[tuple[float, Event]]:
        """Time and event of every line that tells of accounts; lines without `only` are not looked at."""
        clock = Clock()
        for path in paths:
            for line in raw_lines(path):
                event = self._event(line) if only in line else None
                if event is not None:
                    yield clock.time(event), event
        self.jumps = max(self.jumps, clock.jumps)  # files of one machine tell of the same jump

    def _event(self, line: bytes) -> Event | None:
        kind = _KIND.search(line[:200])
        if kind is not None and kind.group(1) not in self._kinds:
            return None
        event = parse_event(line, strict=True)
        if event is None or not is_timed(event):
            self.unreadable += bool(line.strip())
            return None
        return event


class Clock:
    """The time of one file's events, made to go forward only."""

    def __init__(self) -> None:
        self._shift_s = 0.0
        self._last_s: float | None = None
        self.jumps = 0

    def time(self, event: Event) -> float:
        """When an event happened, on the clock that the file began with."""
        now_s = float(event["t"]) + self._shift_s
        if self._last_s is not None:
            gap_s = now_s - self._last_s
            leapt = gap_s > JUMP_S and event["event"] in ("step", "evaluate", "checkpoint")
            if leapt or gap_s < -UNEVEN_S:
                self.jumps += abs(gap_s) > 1.0
                now_s = self._last_s + (seconds(event, "duration_s") or 0.0)
                self._shift_s = now_s - float(event["t"])
        self._last_s = now_s if self._last_s is None else max(now_s, self._last_s)
        return self._last_s

    @property
    def last_s(self) -> float:
        """The newest time."""
        return 0.0 if self._last_s is None else self._last_s

    @property
    def is_even(self) -> bool:
        """Whether its times are those of the events: nobody has set it."""
        return self._shift_s == 0.0

    def follow(self, time_s: float) -> None:
        """Events up to this time went by in order."""
        self._last_s = time_s


def raw_lines(path: Path) -> Iterator[bytes]:
    """The lines of a file, if there is one; an overlong one comes in pieces."""
    try:
        file = open_regular(path, buffering=-1)
    except OSError:
        return
    with file:
        try:
            while line := file.readline(MOST_LINE_BYTES):
                yield line
        except OSError:  # a disk that fails, or a folder of that name
            return


def is_timed(event: Event) -> bool:
    """Whether an event says when it happened, and that can be."""
    time_s = number(event, "t")
    return time_s is not None and 0.0 <= time_s <= LATEST_S
