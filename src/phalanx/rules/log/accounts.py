"""The accounts of a long run: ledger, failures, effective time, stragglers, cost and energy.

The ledger is that of `record.account.ledger.walk`, ten times as fast: steps that nothing comes between are taken many
at a time. Runs that it does not fit, of several witnesses or without a supervisor, are walked step by step. Of a run
that is over the stream hands on what it reads (`Passing`): nothing is read twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from phalanx.errors import PhalanxError
from phalanx.record.account.book import Floats, Stretch
from phalanx.record.account.cost import Cost, cost
from phalanx.record.account.effective import from_trail
from phalanx.record.account.formations import LATEST_S, TOLD, Clock, Formation, Lines, formations
from phalanx.record.account.incidents import Incident, incidents
from phalanx.record.account.ledger import Walk, closed, open_book, walk
from phalanx.record.account.cost import Cost, run_cost
from phalanx.record.account.incidents import Incident, incidents
from phalanx.record.account.ledger import TROUBLES, LedgerStream, LedgerWalk, walk_ledger
from phalanx.record.account.memberships import measured_mfu
from phalanx.record.account.stragglers import Scores, scores
from phalanx.record.account.time_accounts import from_trail
from phalanx.record.archive.history import RunHistory
from phalanx.record.events import Event, parts
from phalanx.record.run import Run
from phalanx.record.values import at, finite, integer, number
from phalanx.rules.facts.log import Spread
from phalanx.rules.log.files import Feed
from phalanx.rules.log.lines import STEP, Batch, uncollected
from phalanx.rules.log.lines import Lines as Parser
from phalanx.rules.log.schema import Columns
from phalanx.rules.log.sums import Histogram
from phalanx.units import HOUR_S

SMALL_BYTES = 8 * 2**20  # of the witness: below, nobody waits for the other way
MOST_SUPERVISOR_BYTES = 16 * 2**20
MOST_STARTS = 16_384  # that are remembered; a run has one for each formation
LEAST = 8  # steps that are worth it
MOST_S = 30 * 86400.0  # of what a step says it took: `values.seconds`
TROUBLES = (PhalanxError, OSError, KeyError, TypeError, ValueError, ArithmeticError, IndexError)
_TOLD = frozenset(kind.decode() for kind in TOLD)
_NUMBERS = frozenset((int, float))


def quick_walk(run: Run, history: RunHistory, *, least_bytes: int = SMALL_BYTES, passed: Passing | None = None) -> Walk:
    """As `walk`; `passed` is what the stream has handed on."""
    starts = passed.starts if passed is not None and not passed.is_lost else None
    known = formations(run, starts=starts) if run.supervisor.is_file() else []
    if passed is not None and passed.fits(known):
        return passed.close()
    if not _suits(run, known):
        return walk(run, history)
    feed = Feed(run.events(known[0].witness), "")
    if feed.left_bytes < least_bytes:
        return walk(run, history)
    going = _Going(run, history, known)
    parser = Parser()
    for piece in feed.pieces():
        with uncollected():
            going.take(parser.batch(piece))
    return going.close(known)


def _suits(run: Run, known: Sequence[Formation]) -> bool:
    """One witness of all formations, and not much told by the supervisor."""
    return len({one.witness for one in known}) == 1 and run.supervisor.stat().st_size <= MOST_SUPERVISOR_BYTES


class Passing:
    """The ledger of a run whose witness's events pass by. It goes by what the supervisor told of formations.

    A rank that finds a damaged checkpoint begins a formation elsewhere than told to: `fits` says whether any did.
    """

    def __init__(self, known: Sequence[Formation], going: _Going) -> None:
        self._known, self._going = known, going
        self._starts: list[Event] = []
        self.is_lost = False  # it does not know what it should

    @classmethod
    def of(cls, run: Run, history: RunHistory, witness: int, *, least_bytes: int = SMALL_BYTES) -> Passing | None:
        """None where it is no use."""
        try:
            if not run.supervisor.is_file() or Feed(run.events(witness), "").left_bytes < least_bytes:
                return None
            known = formations(run, starts=lambda rank: ())
            if not _suits(run, known) or known[0].witness != witness:
                return None
            history.refresh()
            return cls(known, _Going(run, history, known))
        except TROUBLES:
            return None

    def take(self, batch: Batch) -> None:
        """The next events of the witness."""
        if self.is_lost:
            return
        try:
            begun = [batch.events[place] for place, kind in batch.others if kind == "run_start"]
            self._starts += [
                {"epoch": event.get("epoch"), "step": event.get("step")} for event in begun if _is_timed(event)
            ]
            self._going.take(batch)
        except TROUBLES:  # whoever walks them again will tell
            self.is_lost = True
        self.is_lost |= len(self._starts) > MOST_STARTS

    def starts(self, rank: int) -> Sequence[Event]:
        """Of the witness, who is the only one."""
        return self._starts

    def fits(self, known: Sequence[Formation]) -> bool:
        """Whether formations are those that it went by."""
        return not self.is_lost and known == self._known

    def close(self) -> Walk:
        """The end of the record."""
        return self._going.close(self._known)


class _Going:
    """The marks of the witness, in stretches, and those of the supervisor where their time comes."""

    def __init__(self, run: Run, history: RunHistory, known: Sequence[Formation]) -> None:
        self._lines = Lines()
        self._told, self._next = list(self._lines.read(parts(run.supervisor))), 0
        self.book = open_book(run, known, history)
        self._numbers = {one.epoch: count for count, one in enumerate(known)}
        self._epoch: int | None = None
        self._clock = Clock()
        self._unreadable = 0

    def close(self, known: Sequence[Formation]) -> Walk:
        """All that was told, and the rest of the supervisor's."""
        self._supervisor(np.inf)
        unreadable, jumps = self._lines.unreadable + self._unreadable, max(self._lines.jumps, self._clock.jumps)
        return closed(self.book, known, unreadable=unreadable, jumps=jumps)

    def take(self, batch: Batch) -> None:
        """Marks, steps that follow each other together; telemetry says nothing about accounts."""
        self._unreadable += len(batch.bad)
        has_steps = len(batch.others) < len(batch.events)
        steps = batch.columns(STEP)[0] if has_steps else None
        done = 0
        for count, (place, kind) in enumerate(batch.others):
            if kind in _TOLD:
                self._row(steps, done, place - count)
                self._one(batch.events[place])
                done = place - count
        self._row(steps, done, len(batch.events) - len(batch.others))

    def _row(self, steps: Columns | None, begin: int, end: int) -> None:
        """Steps in a row. The first goes alone: what came before it is its own."""
        if steps is None or begin == end:
            return
        if end - begin >= LEAST:
            self._one(steps.event(begin))
            begin += 1
            rest = self._stretch(steps, slice(begin, end))
            if rest is not None and self.book.take_steps(self._count(), rest):
                self._clock.follow(float(rest.time_s[-1]))
                return
        for place in range(begin, end):
            self._one(steps.event(place))

    def _one(self, event: Event) -> None:
        if not _is_timed(event):
            self._unreadable += 1
            return
        time_s = self._clock.time(event)
        self._epoch = integer(event, "epoch") if "epoch" in event else self._epoch
        self._supervisor(time_s)
        if (count := self._count()) >= 0:
            self.book.take(time_s, count, event)

    def _count(self) -> int:
        return self._numbers.get(self._epoch, -1) if self._epoch is not None else -1

    def _supervisor(self, until_s: float) -> None:
        while self._next < len(self._told) and self._told[self._next][0] < until_s:
            time_s, event = self._told[self._next]
            self.book.take(time_s, -1, event)
            self._next += 1

    def _stretch(self, columns: Columns, few: slice) -> Stretch | None:
        """As columns; None where a time, a step, a formation or a duration is not as it should be."""
        epochs, times, steps, taken = (columns.get(name)[few] for name in ("epoch", "t", "step", "duration_s"))
        if self._count() < 0 or epochs.count(self._epoch) < len(epochs) or not self._clock.is_even:
            return None
        if not {*map(type, times), *map(type, taken)} <= _NUMBERS or {*map(type, steps)} != {int}:
            return None
        if not abs(steps[-1]) < 2**62:
            return None
        time_s, taken_s = columns.floats("t")[few], columns.floats("duration_s")[few]
        if self._next < len(self._told) and self._told[self._next][0] < time_s[-1]:
            return None  # the supervisor has a word in between
        if not ((taken_s >= 0.0) & (taken_s <= MOST_S)).all() or not 0.0 <= time_s[0] <= time_s[-1] <= LATEST_S:
            return None
        if time_s[0] < self._clock.last_s or (np.diff(time_s) < 0.0).any():
            return None
        return Stretch(
            time_s=time_s,
            step=np.array(steps, dtype=np.int64),
            taken_s=taken_s,
            copied_s=_seconds(columns, few, "hold_s"),
            compared_s=_seconds(columns, few, "guard_s"),
            compile_s=_seconds(columns, few, "compile_s"),
            data_s=_seconds(columns, few, "data_s"),
        )


def _seconds(columns: Columns, few: slice, name: str) -> Floats:
    """What can be a duration; 0 for the rest."""
    values = columns.floats(name)[few]
    found: Floats = np.where((values >= 0.0) & (values <= MOST_S), values, 0.0)
    return found


def _is_timed(event: Event) -> bool:
    time_s = finite(event.get("t"))
    return time_s is not None and 0.0 <= time_s <= LATEST_S


# What the record's own accounts say of a run: ledger, failures, effective time, stragglers, money and energy.
#
# Nothing is computed twice: this is `phalanx.record.account`, asked once and put into the words of the facts.


@dataclass(frozen=True, kw_only=True, slots=True)
class Account:
    """What is known; None where the run's files do not give it."""

    walked: LedgerWalk | None = None
    incidents: tuple[Incident, ...] = ()
    lowest_hour: float | None = None
    scores: Scores | None = None
    cost: Cost | None = None


def account_of_run(run: Run, history: RunHistory, passed: LedgerStream | None = None) -> Account:
    """Read what the stream has not kept; a damaged file costs what it would have told, nothing else.

    `passed` is no use when the run has grown since it began.
    """
    try:
        has_grown = history.refresh()
        walked = walk_ledger(run, history, passed=None if has_grown else passed)
    except TROUBLES:
        return Account()
    try:
        fell = tuple(incidents(run, walked, history.supervisor()))
    except TROUBLES:
        fell = ()
    return Account(
        walked=walked,
        incidents=fell,
        lowest_hour=_lowest(walked),
        scores=_scores(history),
        cost=_cost(run, history, walked),
    )


def _lowest(walked: LedgerWalk) -> float | None:
    """The lowest share of an hour that was effective; of the whole, when it was shorter."""
    if not walked.ledger.steps or not walked.trail:
        return None
    curve = from_trail(walked.trail)
    if curve.window_s < HOUR_S:
        return walked.ledger.effective
    began_s = walked.trail[0][0]
    whole = [share for t, share in zip(curve.t, curve.last_hour, strict=True) if t - began_s >= HOUR_S]
    return min(whole, default=walked.ledger.effective)


def _scores(history: RunHistory) -> Scores | None:
    try:
        return scores(history)
    except TROUBLES:
        return None


def _cost(run: Run, history: RunHistory, walked: LedgerWalk) -> Cost | None:
    try:
        return run_cost(run, history, walked.ledger)
    except TROUBLES:
        return None


def detect_s(walked: LedgerWalk | None, failures: Sequence[tuple[float, float]], step_s: float | None) -> Spread | None:
    """From failures to their notice.

    A failure falls somewhere into the step that did not end: half a usual step after the last one's end is taken.
    """
    if walked is None:
        return None
    found = Histogram()
    newest = walked.recoveries[-len(failures) :] if failures else []
    for recovery, (noticed_s, waited_s) in zip(newest, failures, strict=False):
        gap_s = noticed_s - waited_s - recovery.before_s
        found.add([max(0.0, gap_s - min(gap_s, 0.5 * (step_s or 0.0)))])
    return found.spread()


def recovery_s(fell: Sequence[Incident]) -> Spread | None:
    """Of those that were got over."""
    found = Histogram()
    found.add([one.recovery_s for one in fell if one.recovery_s is not None])
    return found.spread()


def mfu_of(run: Run, tokens_per_s: float | None) -> float | None:
    """Of the whole run; None where there is no plan."""
    try:
        return measured_mfu(run.plan(), tokens_per_s)
    except PhalanxError:
        return None
