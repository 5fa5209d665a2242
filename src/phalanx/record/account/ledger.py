"""The ledger of a run: every second between launch and end in exactly one account, computed from its records.

One timeline is walked once, from event to event: the coordinator's events and those of one observer rank per
membership, the lowest rank that did not fail in it (`RecordedMembership.witness`). Whether a step stayed is known
beforehand from the step at which later memberships began, so the steps need not be remembered: a run of a million
steps needs as much memory as one of ten. In long runs, steps with no other event between them are processed together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from phalanx.errors import PhalanxError
from phalanx.io.values import integer
from phalanx.record.account.memberships import (
    LATEST_S,
    REPORTED,
    Clock,
    MarkReader,
    RecordedMembership,
    is_timed,
    merged_marks,
    read_memberships,
)
from phalanx.record.account.time_accounts import (
    ACCOUNT_LABELS,
    Accounts,
    Floats,
    LedgerBuilder,
    Point,
    Recovery,
    StepStretch,
)
from phalanx.record.event_batches import STEP, EventBatch, EventFeed, EventParser, gc_paused
from phalanx.record.event_schema import EventColumns
from phalanx.record.events import Event, event_files_of
from phalanx.record.run import Run
from phalanx.units import format_seconds, plural

if TYPE_CHECKING:
    from phalanx.record.archive.history import RunHistory


TOLERANCE = 0.01  # share of the wall time
# Limit of unexplained time: a share of the wall time or seconds per step, whichever is more. Ten real runs of 10 to
# 150 steps on two busy cores had 0.6 to 4.8 % (3 to 24 ms per step: events, orders). A run from before `guard_s` was
# recorded had 10 %, 45 ms per step, and does not close.
UNEXPLAINED = 0.05
UNEXPLAINED_STEP_S = 0.03
# Smaller runs take a tenth of a second either way.
SMALL_BYTES = 2**20
MOST_SUPERVISOR_BYTES = 16 * 2**20
# Start events kept in memory; a run has one per membership.
MOST_STARTS = 16_384
# Shorter stretches of steps are not worth batching.
LEAST = 8
# The longest credible duration in a step event, as in `values.seconds`.
MOST_S = 30 * 86400.0
TROUBLES = (PhalanxError, OSError, KeyError, TypeError, ValueError, ArithmeticError, IndexError)
_ACCOUNTED_KINDS = frozenset(kind.decode() for kind in REPORTED)
_NUMBERS = frozenset((int, float))


@dataclass(frozen=True, kw_only=True, slots=True)
class Ledger:
    """The wall time of a run by account.

    `overlap_s` are seconds that two events claim, because of clock jumps or a wrong record.
    """

    wall_s: float
    accounts: Accounts
    overlap_s: float
    steps: int  # that stayed
    steps_lost: int
    incidents: int
    formations: int
    unreadable_lines: int
    clock_jumps: int = 0  # of a second or more; later times were shifted to follow the earlier ones

    @property
    def effective(self) -> float:
        """Effective training time: the share of the wall time spent on steps that stayed, without compiling."""
        return self.accounts.stepping / self.wall_s if self.wall_s else 0.0

    @property
    def closes(self) -> bool:
        """True if accounts and wall time differ by at most 1 %, overlaps too, and little time is unexplained."""
        return not self.gap

    @property
    def gap(self) -> str:
        """The reason why the ledger does not close; empty if it closes."""
        missing_s = abs(float(sum(asdict(self.accounts).values())) - self.wall_s)
        if missing_s > TOLERANCE * self.wall_s:
            return f"{format_seconds(missing_s)} are in no account"
        if self.overlap_s > TOLERANCE * self.wall_s:
            return f"{format_seconds(self.overlap_s)} are claimed twice"
        steps = self.steps + self.steps_lost
        if self.accounts.other > max(UNEXPLAINED * self.wall_s, UNEXPLAINED_STEP_S * steps):
            return f"no event explains {format_seconds(self.accounts.other)}"
        return ""

    @property
    def jumped(self) -> str:
        """A warning about clock jumps; empty if the clock only went forward."""
        if not self.clock_jumps:
            return ""
        often = "once" if self.clock_jumps == 1 else plural(self.clock_jumps, "time")
        return f"the clock jumped {often}, and what is told of that time is a guess"

    def to_json(self) -> dict[str, Any]:
        """Return the ledger as JSON values."""
        return asdict(self) | {"effective": self.effective, "closes": self.closes, "gap": self.gap}

    def __str__(self) -> str:
        accounts = sorted(asdict(self.accounts).items(), key=lambda account: -account[1])
        parts = [f"{ACCOUNT_LABELS[name]} {format_seconds(took_s)}" for name, took_s in accounts if took_s >= 0.0005]
        closes = f"; does not close, {self.gap}" if self.gap else ""
        jumped = f"; {self.jumped}" if self.jumped else ""
        total = f"{format_seconds(self.wall_s)} (effective training time {self.effective:.1%})"
        return f"{total}: {', '.join(parts)}{closes}{jumped}"


def read_ledger(run: Run, history: RunHistory | None = None) -> Ledger:
    """Account for all time of a run; for a run that is still going, until its last event."""
    return walk_ledger(run, history).ledger


@dataclass(frozen=True, kw_only=True, slots=True)
class LedgerWalk:
    """The results of one walk over the records of a run."""

    ledger: Ledger
    trail: list[Point]
    recoveries: list[Recovery]  # of each incident, in order


def walk_ledger(
    run: Run, history: RunHistory | None = None, *, passed: LedgerStream | None = None, least_bytes: int = SMALL_BYTES
) -> LedgerWalk:
    """Walk the records of a run: the ledger, how it grew, and how long each recovery took.

    `history` saves opening the run again. In a long run with one observer rank, steps with no other event between them
    are processed together, with the same result and ten times as fast. `passed` is a stream that has just read the
    run; if it fits, nothing is read twice.
    """
    supervised = run.supervisor.is_file()
    memberships = read_memberships(run, starts=passed.starts if passed is not None and not passed.is_lost else None)
    if passed is not None and supervised and passed.fits(memberships):
        return passed.close()
    if supervised and _has_one_witness(run, memberships):
        feed = EventFeed(run.events(memberships[0].witness), "")
        if feed.left_bytes >= least_bytes:
            merger, parser = _MarkMerger(run, history, memberships), EventParser()
            for block in feed.pieces():
                with gc_paused():
                    merger.take(parser.batch(block))
            return merger.close(memberships)
    lines = MarkReader()
    book = open_book(run, memberships, history)
    for time_s, generation, event in merged_marks(run, memberships, lines):
        book.take(time_s, generation, event)
    return closed_ledger(book, memberships, unreadable=lines.unreadable, jumps=lines.jumps)


def open_book(run: Run, known: Sequence[RecordedMembership], history: RunHistory | None) -> LedgerBuilder:
    """Create an empty ledger builder for a run."""
    # Imported here because it reads the events of the other ranks.
    from phalanx.record.account.straggler_cost import straggler_time

    supervised = run.supervisor.is_file()
    return LedgerBuilder(
        launches=run.launches(), memberships=known, supervised=supervised, waited=straggler_time(run, history)
    )


def closed_ledger(
    book: LedgerBuilder, known: Sequence[RecordedMembership], *, unreadable: int, jumps: int
) -> LedgerWalk:
    """Return the result of a builder that has taken all marks."""
    accounts = book.close()
    ledger = Ledger(
        wall_s=round(book.wall_s, 6),
        accounts=accounts,
        overlap_s=round(book.overlap_s, 6),
        steps=book.steps,
        steps_lost=book.lost,
        incidents=book.incidents,
        formations=len(known),
        unreadable_lines=unreadable,
        clock_jumps=book.jumps + jumps,
    )
    return LedgerWalk(ledger=ledger, trail=book.trail.close(), recoveries=book.recoveries)


def _has_one_witness(run: Run, known: Sequence[RecordedMembership]) -> bool:
    """Return True if all memberships share one observer rank and the coordinator's file is small enough to hold."""
    return (
        len({membership.witness for membership in known}) == 1
        and run.supervisor.stat().st_size <= MOST_SUPERVISOR_BYTES
    )


class LedgerStream:
    """The ledger of a run, built while the events of its observer rank are read for another purpose.

    It relies on the coordinator's record of the memberships. A rank that finds a damaged checkpoint begins a
    membership at another step than recorded there; `fits` detects that.
    """

    def __init__(self, known: Sequence[RecordedMembership], merger: _MarkMerger) -> None:
        self._known, self._merger = known, merger
        self._starts: list[Event] = []
        self.is_lost = False  # True after an error: the result is unusable

    @classmethod
    def of(cls, run: Run, history: RunHistory, witness: int, *, least_bytes: int = SMALL_BYTES) -> LedgerStream | None:
        """Create a stream; return None if the run is too short, has several observers, or cannot be read."""
        try:
            if not run.supervisor.is_file() or EventFeed(run.events(witness), "").left_bytes < least_bytes:
                return None
            memberships = read_memberships(run, starts=lambda rank: ())
            if not _has_one_witness(run, memberships) or memberships[0].witness != witness:
                return None
            history.refresh()
            return cls(memberships, _MarkMerger(run, history, memberships))
        except TROUBLES:
            return None

    def take(self, batch: EventBatch) -> None:
        """Take the next events of the observer rank."""
        if self.is_lost:
            return
        try:
            starts = [batch.events[place] for place, kind in batch.others if kind == "run_start"]
            self._starts += [
                {"epoch": event.get("epoch"), "step": event.get("step")} for event in starts if is_timed(event)
            ]
            self._merger.take(batch)
        # A second walk over the records reports the error.
        except TROUBLES:
            self.is_lost = True
        self.is_lost |= len(self._starts) > MOST_STARTS

    def starts(self, rank: int) -> Sequence[Event]:
        """Return the `run_start` events of the observer rank, the only rank whose starts are known."""
        return self._starts

    def fits(self, known: Sequence[RecordedMembership]) -> bool:
        """Return True if these are the memberships that this stream assumed."""
        return not self.is_lost and known == self._known

    def close(self) -> LedgerWalk:
        """Finish the ledger."""
        return self._merger.close(self._known)


class _MarkMerger:
    """Merges the observer's events, in stretches of steps, with the coordinator's events in the order of time."""

    def __init__(self, run: Run, history: RunHistory | None, known: Sequence[RecordedMembership]) -> None:
        self._lines = MarkReader()
        self._reported, self._next = list(self._lines.read(event_files_of(run.supervisor))), 0
        self.book = open_book(run, known, history)
        self._numbers = {membership.generation: count for count, membership in enumerate(known)}
        self._generation: int | None = None
        self._clock = Clock()
        self._unreadable = 0

    def close(self, known: Sequence[RecordedMembership]) -> LedgerWalk:
        """Take the remaining events of the coordinator, and return the result."""
        self._take_supervisor(np.inf)
        unreadable, jumps = self._lines.unreadable + self._unreadable, max(self._lines.jumps, self._clock.jumps)
        return closed_ledger(self.book, known, unreadable=unreadable, jumps=jumps)

    def take(self, batch: EventBatch) -> None:
        """Take a batch of events: consecutive steps together, others singly, kinds without an account never."""
        self._unreadable += len(batch.bad)
        has_steps = len(batch.others) < len(batch.events)
        steps = batch.columns(STEP)[0] if has_steps else None
        done = 0
        for count, (place, kind) in enumerate(batch.others):
            if kind in _ACCOUNTED_KINDS:
                self._take_rows(steps, done, place - count)
                self._take_event(batch.events[place])
                done = place - count
        self._take_rows(steps, done, len(batch.events) - len(batch.others))

    def _take_rows(self, steps: EventColumns | None, begin: int, end: int) -> None:
        """Take consecutive steps. The first is taken singly, because the time before it belongs to other accounts."""
        if steps is None or begin == end:
            return
        if end - begin >= LEAST:
            self._take_event(steps.event(begin))
            begin += 1
            rest = self._step_stretch(steps, slice(begin, end))
            if rest is not None and self.book.take_steps(self._membership_number(), rest):
                self._clock.follow(float(rest.time_s[-1]))
                return
        for place in range(begin, end):
            self._take_event(steps.event(place))

    def _take_event(self, event: Event) -> None:
        if not is_timed(event):
            self._unreadable += 1
            return
        time_s = self._clock.time(event)
        self._generation = integer(event, "epoch") if "epoch" in event else self._generation
        self._take_supervisor(time_s)
        if (count := self._membership_number()) >= 0:
            self.book.take(time_s, count, event)

    def _membership_number(self) -> int:
        return self._numbers.get(self._generation, -1) if self._generation is not None else -1

    def _take_supervisor(self, until_s: float) -> None:
        while self._next < len(self._reported) and self._reported[self._next][0] < until_s:
            time_s, event = self._reported[self._next]
            self.book.take(time_s, -1, event)
            self._next += 1

    def _step_stretch(self, columns: EventColumns, few: slice) -> StepStretch | None:
        """Return steps as columns; None if a time, step, generation or duration is not as expected."""
        generations, times, steps, durations = (columns.get(name)[few] for name in ("epoch", "t", "step", "duration_s"))
        if (
            self._membership_number() < 0
            or generations.count(self._generation) < len(generations)
            or not self._clock.is_even
        ):
            return None
        if not {*map(type, times), *map(type, durations)} <= _NUMBERS or {*map(type, steps)} != {int}:
            return None
        if not abs(steps[-1]) < 2**62:
            return None
        time_s, taken_s = columns.floats("t")[few], columns.floats("duration_s")[few]
        if self._next < len(self._reported) and self._reported[self._next][0] < time_s[-1]:
            # An event of the coordinator lies between these steps.
            return None
        if not ((taken_s >= 0.0) & (taken_s <= MOST_S)).all() or not 0.0 <= time_s[0] <= time_s[-1] <= LATEST_S:
            return None
        if time_s[0] < self._clock.last_s or (np.diff(time_s) < 0.0).any():
            return None
        return StepStretch(
            time_s=time_s,
            step=np.array(steps, dtype=np.int64),
            taken_s=taken_s,
            copied_s=_column_seconds(columns, few, "hold_s"),
            compared_s=_column_seconds(columns, few, "guard_s"),
            compile_s=_column_seconds(columns, few, "compile_s"),
            data_s=_column_seconds(columns, few, "data_s"),
        )


def _column_seconds(columns: EventColumns, few: slice, name: str) -> Floats:
    """Return a column of durations in seconds, with 0 for values that cannot be durations."""
    values = columns.floats(name)[few]
    durations: Floats = np.where((values >= 0.0) & (values <= MOST_S), values, 0.0)
    return durations
