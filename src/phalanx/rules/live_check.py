"""Verdicts on a run that grows: job and plan are read once, events are read on, a bounded piece at a time."""

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

# Read between two judgements: under a second at the 100 MB/s that the reader is built for.
BUDGET_BYTES = 64 * 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdicts:
    """What the specification says of a run at one look."""

    report: CheckReport
    bytes_left: int  # written and not read yet
    is_over: bool

    @property
    def is_settled(self) -> bool:
        """Whether everything that was written is judged."""
        return self.bytes_left <= 0

    @property
    def is_last(self) -> bool:
        """Whether nothing more can come."""
        return self.is_over and self.is_settled


class LiveCheck:
    """Judges one run again and again. Not for two threads at once."""

    def __init__(self, run: Run, *, today: Callable[[], date] = this_day) -> None:
        self._run, self._today = run, today
        self._stream = LogStream(run)
        self._base: Evidence | None = None

    def look(self, budget_bytes: int = BUDGET_BYTES) -> Verdicts:
        """Read on, and judge what is known by now."""
        self._stream.refresh(budget_bytes)
        facts = self._stream.facts()
        report = check_evidence(with_log(self._known_evidence(), facts))
        return Verdicts(report=report, bytes_left=facts.bytes_left, is_over=facts.is_over)

    def _known_evidence(self) -> Evidence:
        """Job and plan: read again while one of them is missing, and on another day, when waivers may have ended."""
        base, today = self._base, self._today()
        if base is None or base.job is None or base.plan is None or base.today != today:
            base = self._base = base_of(self._run, today=today)
        return base
