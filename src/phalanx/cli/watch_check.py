"""The verdicts beside a run that is watched, worked out in a thread of their own so that the screen never waits."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

TYPE_CHECKING = False
if TYPE_CHECKING:
    from phalanx.record.run import Run
    from phalanx.rules.judge import Finding
    from phalanx.rules.live import Verdicts

LEAST_S = 2.0  # between two judgements
REST = 10.0  # and ten times what the last one took: at most a tenth of a core
PATIENCE_S = 20.0  # for the last word on a run that is over
MOST_TOLD = 3  # findings on the screen
MOST_LISTED = 20  # findings in an object


@dataclass(frozen=True, kw_only=True, slots=True)
class Known:
    """The newest verdicts, or why there are none."""

    verdicts: Verdicts | None = None
    trouble: str = ""
    is_last: bool = False  # nothing better is to come

    def line(self) -> str:
        """The counts; empty before the first judgement."""
        if self.verdicts is None:
            return self.trouble
        from phalanx.rules.formats.text import summary_of

        return summary_of(self.verdicts.report) + ("" if self.is_last else "; so far")

    def problems(self) -> tuple[Finding, ...]:
        """What speaks against the run, worst first; remarks left out."""
        if self.verdicts is None:
            return ()
        return tuple(one for one in self.verdicts.report.problems if one.severity != "info")

    def as_json(self) -> dict[str, object] | None:
        """For `--json`; None before the first judgement."""
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
                {"rule": one.rule.id, "severity": one.severity, "what": one.outcome.what, "fix": fix_of(one.outcome)}
                for one in self.problems()[:MOST_LISTED]
            ],
        }


class Checker:
    """Judges a run in the background; `known` is always there at once."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._known = Known()
        self._changed = threading.Condition()
        self._over = False
        # A daemon: Ctrl-C does not wait for a verdict nobody is going to read.
        threading.Thread(target=self._work, daemon=True, name="phalanx-check").start()

    @property
    def known(self) -> Known:
        """The newest verdicts."""
        return self._known

    def last(self, wait_s: float = PATIENCE_S) -> Known:
        """The verdicts on a run that is over; what is known by then where that takes longer than `wait_s`."""
        until_s = time.monotonic() + wait_s
        with self._changed:
            self._over = True
            self._changed.notify_all()
            while not self._known.is_last and (left_s := until_s - time.monotonic()) > 0:
                self._changed.wait(left_s)
        return self._known

    def _work(self) -> None:
        try:
            self._judge()
        except Exception as error:  # a fault of ours must not end the watching
            self._tell(Known(trouble=f"could not be worked out ({type(error).__name__})", is_last=True))

    def _judge(self) -> None:
        from phalanx.rules.live import LiveCheck

        check = LiveCheck(self._run)
        while not self._known.is_last:
            # Asked before the look: what is written later does not belong to a run that was over then.
            over, began_s = self._over, time.monotonic()
            verdicts = check.look()
            last = verdicts.is_last or (over and verdicts.is_settled)
            self._tell(Known(verdicts=verdicts, is_last=last))
            with self._changed:
                if not self._over:
                    self._changed.wait(max(LEAST_S, REST * (time.monotonic() - began_s)))

    def _tell(self, known: Known) -> None:
        with self._changed:
            self._known = known
            self._changed.notify_all()
