"""Follow a run: periodic looks while it grows, with verdicts computed in a background thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from phalanx.api.results import PublicResult
from phalanx.io.codec import json_values
from phalanx.record.report.live import View, Watcher
from phalanx.record.run import Run

if TYPE_CHECKING:
    from phalanx.rules.live_check import Verdicts
    from phalanx.rules.run_rules import Finding

LEAST_S = 2.0  # seconds between two checks
# Pause in durations of the last check: checks take at most a tenth of a core.
REST = 10.0
PATIENCE_S = 20.0  # for the final verdicts on a run that is over
MOST_LISTED = 20  # findings in the JSON of a look


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownVerdicts:
    """The newest verdicts, or the reason why there are none."""

    verdicts: Verdicts | None = None
    trouble: str = ""
    is_last: bool = False  # True if no newer verdicts will follow

    def line(self) -> str:
        """Return the counts of verdicts; empty before the first check."""
        if self.verdicts is None:
            return self.trouble
        from phalanx.rules.formats.text import summary_of

        return summary_of(self.verdicts.report) + ("" if self.is_last else "; so far")

    def problems(self) -> tuple[Finding, ...]:
        """Return the findings of severity error or warning, worst first."""
        if self.verdicts is None:
            return ()
        return tuple(finding for finding in self.verdicts.report.problems if finding.severity != "info")

    def as_json(self) -> dict[str, object] | None:
        """Return the verdicts for `--json`; None before the first check."""
        if self.verdicts is None:
            return {"trouble": self.trouble} if self.trouble else None
        from phalanx.rules.formats.text import counts_of, fix_of

        report = self.verdicts.report
        return {
            "edition": report.edition,
            "counts": counts_of(report),
            "errors": report.errors,
            "so_far": not self.is_last,
            "findings": [
                {
                    "rule": finding.rule.id,
                    "severity": finding.severity,
                    "what": finding.outcome.what,
                    "fix": fix_of(finding.outcome),
                }
                for finding in self.problems()[:MOST_LISTED]
            ],
        }


class BackgroundCheck:
    """Checks a run in the background; `known` never waits."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._known = KnownVerdicts()
        self._changed = threading.Condition()
        self._over = False
        # A daemon thread: Ctrl-C does not wait for a verdict that will not be read.
        threading.Thread(target=self._judge_on, daemon=True, name="phalanx-check").start()

    @property
    def known(self) -> KnownVerdicts:
        """The newest verdicts."""
        return self._known

    def last(self, wait_s: float = PATIENCE_S) -> KnownVerdicts:
        """Return the final verdicts on a run that is over; those known so far if they take longer than `wait_s`."""
        until_s = time.monotonic() + wait_s
        with self._changed:
            self._over = True
            self._changed.notify_all()
            while not self._known.is_last and (left_s := until_s - time.monotonic()) > 0:
                self._changed.wait(left_s)
        return self._known

    def _judge_on(self) -> None:
        try:
            self._judge_run()
        except Exception as error:  # an internal error must not end the watching
            self._publish_verdicts(
                KnownVerdicts(trouble=f"could not be worked out ({type(error).__name__})", is_last=True)
            )

    def _judge_run(self) -> None:
        from phalanx.rules.live_check import LiveCheck

        check = LiveCheck(self._run)
        while not self._known.is_last:
            # Read before the check: events written later do not belong to a run that was over at this time.
            over, began_s = self._over, time.monotonic()
            verdicts = check.look()
            last = verdicts.is_last or (over and verdicts.is_settled)
            self._publish_verdicts(KnownVerdicts(verdicts=verdicts, is_last=last))
            with self._changed:
                if not self._over:
                    self._changed.wait(max(LEAST_S, REST * (time.monotonic() - began_s)))

    def _publish_verdicts(self, known: KnownVerdicts) -> None:
        with self._changed:
            self._known = known
            self._changed.notify_all()


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class RunLook(PublicResult):
    """A run at one moment: its state and numbers, the remarks since the last look, and the findings so far."""

    view: View
    remarks: tuple[str, ...]
    check: KnownVerdicts

    def __str__(self) -> str:
        return self.view.progress.line() if self.view.progress is not None else "no step yet"

    @property
    def is_last(self) -> bool:
        """True if the run has ended."""
        return self.view.is_finished

    def to_dict(self) -> dict[str, Any]:
        """Return what `phalanx watch --json` prints on a line."""
        s, p = self.view.summary, self.view.progress
        cost = s.cost.so_far if s.cost is not None else None
        values = {
            "state": self.view.state,
            "step": p.step if p is not None else 0,
            "steps": p.steps if p is not None else None,
            "loss": p.loss if p is not None else None,
            "tokens_per_s": p.tokens_per_s if p is not None else None,
            "mean_tokens_per_s": s.tokens_per_s.measured,
            "left_s": p.left_s if p is not None else None,
            "mfu": s.mfu.measured,
            "memory_bytes": s.memory_bytes.measured,
            "noise_scale": s.noise_scale,
            "effective": s.effective_time.measured,
            "accounts": s.ledger.accounts if s.ledger is not None else None,
            "so_far": cost,
            "incidents": len(s.incidents),
            "stragglers": self.view.scores.named,
            "saved_step": self.view.saved_step,
            "damage": s.damage,
            "check": self.check.as_json(),
        }
        return dict(json_values(values))


def run_looks(run: Run, *, every_s: float) -> Iterator[RunLook]:
    """Yield a look every `every_s` seconds until the run is over; the last one waits for the final verdicts."""
    watcher, checker = Watcher(run), BackgroundCheck(run)
    while True:
        view = watcher.look()
        remarks = tuple(watcher.remarks())
        if view.is_finished:
            yield RunLook(view=view, remarks=remarks, check=checker.known)
            yield RunLook(view=view, remarks=(), check=checker.last())
            return
        yield RunLook(view=view, remarks=remarks, check=checker.known)
        time.sleep(every_s)
