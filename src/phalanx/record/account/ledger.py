"""The ledger of a run: every second between launch and end in exactly one account, from its records alone.

One timeline is walked once, from mark to mark: the supervisor's events and those of one witness per formation, the
lowest rank that did not fall in it. Whether a step stayed is known beforehand from where later formations went on, so
nothing has to be remembered of the steps: a run of a million of them needs as much memory as one of ten.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from phalanx.record.account.book import Accounts, Book, Point, Recovery
from phalanx.record.account.formations import Formation, Lines, formations, timeline
from phalanx.record.run import Run
from phalanx.units import format_seconds, plural

if TYPE_CHECKING:
    from phalanx.record.account.waiting import Waited
    from phalanx.record.archive.history import RunHistory

TOLERANCE = 0.01  # of the wall clock
# What the record may leave unexplained: a share of the wall clock, or so much for each step, whichever is more. Ten
# real runs of 10 to 150 steps on two busy cores had 0.6 to 4.8 % (3 to 24 ms per step: events, orders); one from
# before `guard_s` was recorded had 10 %, 45 ms per step, and does not close.
UNEXPLAINED = 0.05
UNEXPLAINED_STEP_S = 0.03


@dataclass(frozen=True, kw_only=True, slots=True)
class Ledger:
    """Where the time went. `overlap_s` are seconds that two marks both claim: clocks that jumped, or a wrong record."""

    wall_s: float
    accounts: Accounts
    overlap_s: float
    steps: int  # that stayed
    steps_lost: int
    incidents: int
    formations: int
    unreadable_lines: int
    clock_jumps: int = 0  # of a second or more; the times after them were moved to follow those before

    @property
    def effective(self) -> float:
        """Effective training time: the share of the wall clock spent on steps that stayed, without compiling."""
        return self.accounts.stepping / self.wall_s if self.wall_s else 0.0

    @property
    def closes(self) -> bool:
        """Whether the accounts add up to the wall clock within 1 %, nothing counts twice and little is unexplained."""
        return not self.gap

    @property
    def gap(self) -> str:
        """Why it does not close; empty when it does."""
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
        """What is to be said of the clock; empty when it only went forward."""
        if not self.clock_jumps:
            return ""
        often = "once" if self.clock_jumps == 1 else plural(self.clock_jumps, "time")
        return f"the clock jumped {often}, and what is told of that time is a guess"

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self) | {"effective": self.effective, "closes": self.closes, "gap": self.gap}

    def __str__(self) -> str:
        spent = sorted(asdict(self.accounts).items(), key=lambda one: -one[1])
        parts = [f"{name.replace('_', ' ')} {format_seconds(took_s)}" for name, took_s in spent if took_s >= 0.0005]
        closes = f"; does not close, {self.gap}" if self.gap else ""
        jumped = f"; {self.jumped}" if self.jumped else ""
        return f"{format_seconds(self.wall_s)} ({self.effective:.1%} effective): {', '.join(parts)}{closes}{jumped}"


def ledger(run: Run, history: RunHistory | None = None) -> Ledger:
    """Account for the whole of a run; for one that still goes on, until its last event."""
    return walk(run, history).ledger


@dataclass(frozen=True, kw_only=True, slots=True)
class Walk:
    """What one reading of the records gives."""

    ledger: Ledger
    trail: list[Point]
    recoveries: list[Recovery]  # of each incident, in order


def walk(run: Run, history: RunHistory | None = None) -> Walk:
    """The ledger, how it grew, and how long each failure took; `history` spares opening the run again."""
    known, lines = formations(run), Lines()
    book = open_book(run, known, history)
    for time_s, formation, event in timeline(run, known, lines):
        book.take(time_s, formation, event)
    return closed(book, known, unreadable=lines.unreadable, jumps=lines.jumps)


def open_book(run: Run, known: Sequence[Formation], history: RunHistory | None) -> Book:
    """An empty book for a run."""
    supervised = run.supervisor.is_file()
    return Book(launches=run.launches(), formations=known, supervised=supervised, waited=_waited(run, history))


def closed(book: Book, known: Sequence[Formation], *, unreadable: int, jumps: int) -> Walk:
    """What a book that took all marks comes to."""
    accounts = book.close()
    made = Ledger(
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
    return Walk(ledger=made, trail=book.trail.close(), recoveries=book.recoveries)


def _waited(run: Run, history: RunHistory | None) -> Waited:
    from phalanx.record.account.waiting import waited  # reads the other ranks

    return waited(run, history)
