"""Verdicts on a run in progress: job and plan are read once, events incrementally within a byte budget."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import date

from phalanx.record.run import Run
from phalanx.rules.evidence import Evidence
from phalanx.rules.gather import with_log
from phalanx.rules.log.stream import LogStream
from phalanx.rules.run_rules import CheckReport
from phalanx.rules.specification import base_of, check_evidence, this_day

# Bytes read between two judgements: under a second at the 100 MB/s that the reader is built for.
BUDGET_BYTES = 64 * 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdicts:
    """The check report of a run at one moment."""

    report: CheckReport
    bytes_left: int  # written to the event files and not read yet
    is_over: bool

    @property
    def is_settled(self) -> bool:
        """True if all events written so far are judged."""
        return self.bytes_left <= 0

    @property
    def is_last(self) -> bool:
        """True if the run is over and all its events are judged."""
        return self.is_over and self.is_settled


class LiveCheck:
    """Checks one run repeatedly. Not thread-safe."""

    def __init__(self, run: Run, *, today: Callable[[], date] = this_day) -> None:
        self._run, self._today = run, today
        self._stream = LogStream(run)
        self._base: Evidence | None = None

    def look(self, budget_bytes: int = BUDGET_BYTES) -> Verdicts:
        """Read up to `budget_bytes` more of the events and judge all that was read so far."""
        self._stream.refresh(budget_bytes)
        facts = self._stream.facts()
        report = check_evidence(with_log(self._known_evidence(), facts))
        return Verdicts(report=report, bytes_left=facts.bytes_left, is_over=facts.is_over)

    def _known_evidence(self) -> Evidence:
        """Return the evidence from job and plan.

        It is read again while the job or the plan is missing, and when the date changes, because waivers may have
        expired.
        """
        base, today = self._base, self._today()
        if base is None or base.job is None or base.plan is None or base.today != today:
            base = self._base = base_of(self._run, today=today)
        return base
