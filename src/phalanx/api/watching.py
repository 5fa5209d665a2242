"""Follow a run: looks at it while it grows, with verdicts worked out in a thread so that nobody waits for them."""

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

LEAST_S = 2.0  # between two judgements
REST = 10.0  # and ten times what the last one took: at most a tenth of a core
PATIENCE_S = 20.0  # for the last word on a run that is over
MOST_LISTED = 20  # findings in an object


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownVerdicts:
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


class BackgroundCheck:
    """Judges a run in the background; `known` is always there at once."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._known = KnownVerdicts()
        self._changed = threading.Condition()
        self._over = False
        # A daemon: Ctrl-C does not wait for a verdict nobody is going to read.
        threading.Thread(target=self._judge_on, daemon=True, name="phalanx-check").start()

    @property
    def known(self) -> KnownVerdicts:
        """The newest verdicts."""
        return self._known

    def last(self, wait_s: float = PATIENCE_S) -> KnownVerdicts:
        """The verdicts on a run that is over; what is known by then where that takes longer than `wait_s`."""
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
        except Exception as error:  # a fault of ours must not end the watching
            self._publish_verdicts(
                KnownVerdicts(trouble=f"could not be worked out ({type(error).__name__})", is_last=True)
            )

    def _judge_run(self) -> None:
        from phalanx.rules.live_check import LiveCheck

        check = LiveCheck(self._run)
        while not self._known.is_last:
            # Asked before the look: what is written later does not belong to a run that was over then.
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
    """A run at one moment: its state and numbers, what is new since the look before, and the findings so far."""

    view: View
    remarks: tuple[str, ...]
    check: KnownVerdicts

    def __str__(self) -> str:
        return self.view.progress.line() if self.view.progress is not None else "no step yet"

    @property
    def is_last(self) -> bool:
        """Whether nothing more is to come from the run."""
        return self.view.is_finished

    def to_dict(self) -> dict[str, Any]:
        """What `phalanx watch --json` prints on a line."""
        s, p = self.view.summary, self.view.progress
        cost = s.cost.so_far if s.cost is not None else None
        found = {
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
        return dict(json_values(found))


def run_looks(run: Run, *, every_s: float) -> Iterator[RunLook]:
    """A look every `every_s` seconds until the run is over; the last one waits for the verdicts on the whole."""
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
