"""What the record's own accounts say of a run: ledger, failures, effective time, stragglers, money and energy.

Nothing is computed twice: this is `phalanx.record.account`, asked once and put into the words of the facts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from phalanx.errors import PhalanxError
from phalanx.record.account.cost import Cost, run_cost
from phalanx.record.account.incidents import Incident, read_incidents
from phalanx.record.account.ledger import TROUBLES, LedgerStream, LedgerWalk, walk_ledger
from phalanx.record.account.memberships import measured_mfu
from phalanx.record.account.stragglers import StragglerScores, straggler_scores
from phalanx.record.account.time_accounts import from_trail
from phalanx.record.archive.history import RunHistory
from phalanx.record.run import Run
from phalanx.rules.facts.log_facts import Spread
from phalanx.rules.log.sums import Histogram
from phalanx.units import HOUR_S

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Account:
    """What is known; None where the run's files do not give it."""

    walked: LedgerWalk | None = None
    incidents: tuple[Incident, ...] = ()
    lowest_hour: float | None = None
    scores: StragglerScores | None = None
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
        fell = tuple(read_incidents(run, walked, history.supervisor()))
    except TROUBLES:
        fell = ()
    return Account(
        walked=walked,
        incidents=fell,
        lowest_hour=_lowest_hour(walked),
        scores=_or_none(lambda: straggler_scores(history)),
        cost=_or_none(lambda: run_cost(run, history, walked.ledger)),
    )


def _lowest_hour(walked: LedgerWalk) -> float | None:
    """The lowest share of an hour that was effective; of the whole, when it was shorter."""
    if not walked.ledger.steps or not walked.trail:
        return None
    curve = from_trail(walked.trail)
    if curve.window_s < HOUR_S:
        return walked.ledger.effective
    began_s = walked.trail[0][0]
    whole = [share for t, share in zip(curve.t, curve.last_hour, strict=True) if t - began_s >= HOUR_S]
    return min(whole, default=walked.ledger.effective)


def _or_none(read: Callable[[], T]) -> T | None:
    """What is read; None where the record is too damaged for it."""
    try:
        return read()
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
