"""The accounts of a run for the rules: ledger, failures, effective time, stragglers, money and energy.

The numbers are those of `phalanx.record.account`, converted to the fields of the facts; nothing is computed a
second time.
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
    """The accounts of a run; None where the run's files do not contain them."""

    walked: LedgerWalk | None = None
    incidents: tuple[Incident, ...] = ()
    lowest_hour: float | None = None
    scores: StragglerScores | None = None
    cost: Cost | None = None


def account_of_run(run: Run, history: RunHistory, passed: LedgerStream | None = None) -> Account:
    """Compute the accounts of a run; a damaged file costs only the numbers that depend on it.

    `passed` is the ledger made while the events were streamed; it is not used if the run has grown since.
    """
    try:
        has_grown = history.refresh()
        walked = walk_ledger(run, history, passed=None if has_grown else passed)
    except TROUBLES:
        return Account()
    try:
        incidents = tuple(read_incidents(run, walked, history.supervisor()))
    except TROUBLES:
        incidents = ()
    return Account(
        walked=walked,
        incidents=incidents,
        lowest_hour=_lowest_hour(walked),
        scores=_or_none(lambda: straggler_scores(history)),
        cost=_or_none(lambda: run_cost(run, history, walked.ledger)),
    )


def _lowest_hour(walked: LedgerWalk) -> float | None:
    """Return the lowest effective share of an hour; of the whole run, when it was shorter."""
    if not walked.ledger.steps or not walked.trail:
        return None
    curve = from_trail(walked.trail)
    if curve.window_s < HOUR_S:
        return walked.ledger.effective
    began_s = walked.trail[0][0]
    full_hours = [share for t, share in zip(curve.t, curve.last_hour, strict=True) if t - began_s >= HOUR_S]
    return min(full_hours, default=walked.ledger.effective)


def _or_none(read: Callable[[], T]) -> T | None:
    """Return what `read` returns; None where the record is too damaged for it."""
    try:
        return read()
    except TROUBLES:
        return None


def detect_s(walked: LedgerWalk | None, failures: Sequence[tuple[float, float]], step_s: float | None) -> Spread | None:
    """Return the seconds from failures until they were noticed.

    The exact moment of a failure inside the unfinished step is unknown: half a usual step after the end of the last
    step is assumed.
    """
    if walked is None:
        return None
    delays = Histogram()
    # Only the newest failures are remembered, so both lists are aligned at their ends.
    newest = walked.recoveries[-len(failures) :] if failures else []
    for recovery, (noticed_s, waited_s) in zip(newest, failures, strict=False):
        gap_s = noticed_s - waited_s - recovery.before_s
        delays.add([max(0.0, gap_s - min(gap_s, 0.5 * (step_s or 0.0)))])
    return delays.spread()


def recovery_s(fell: Sequence[Incident]) -> Spread | None:
    """Return the seconds of recovery, of the incidents after which the run went on."""
    times = Histogram()
    times.add([incident.recovery_s for incident in fell if incident.recovery_s is not None])
    return times.spread()


def mfu_of(run: Run, tokens_per_s: float | None) -> float | None:
    """Return the MFU of the whole run; None where there is no plan."""
    try:
        return measured_mfu(run.plan(), tokens_per_s)
    except PhalanxError:
        return None
