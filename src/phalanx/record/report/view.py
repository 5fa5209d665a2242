"""A run as somebody who watches it wants to see it: what is cheap at every look, what is dear now and then."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from phalanx.errors import PhalanxError
from phalanx.io.values import at, integer, number, seconds
from phalanx.record.account.effective import Effective, from_trail
from phalanx.record.account.ledger import walk
from phalanx.record.account.stragglers import Scores, scores
from phalanx.record.account.summary import Summary, summarize
from phalanx.record.archive.history import RunHistory
from phalanx.record.events import Event, EventReader
from phalanx.record.over import ENDED, is_over, written
from phalanx.record.report.follow import REMARKED, Progress, remark_of_rank, remark_of_supervisor
from phalanx.record.run import Run

RECENT = 20  # steps behind the rate and the time that is left
# The whole record is read again at most this often, and never for more than a twentieth of the time.
LEAST_S = 2.0
SHARE = 0.05
OVER = (*ENDED, "gone")


@dataclass(frozen=True, kw_only=True, slots=True)
class View:
    """A run at one look."""

    state: str
    progress: Progress | None
    loss: tuple[float | None, ...]  # over the whole run
    tokens_per_s: tuple[float | None, ...]
    summary: Summary
    effective: Effective
    scores: Scores
    saved_step: int | None  # newest checkpoint
    saved_age_s: float | None

    @property
    def over(self) -> bool:
        """Whether nothing more is to come."""
        return self.state in OVER


@dataclass(frozen=True, kw_only=True, slots=True)
class _Dear:
    """What takes a look at the whole record."""

    summary: Summary
    effective: Effective
    scores: Scores
    loss: tuple[float | None, ...]
    tokens_per_s: tuple[float | None, ...]


class Watcher:
    """Looks at a run again and again."""

    def __init__(self, run: Run, *, points: int = 120, clock: Callable[[], float] = time.time) -> None:
        self.run, self._points, self._clock = run, points, clock
        self._history = RunHistory.open(run)
        # Read on from where they stopped: a long run has more of them than can be looked through twice a second.
        self._rank, self._supervisor = EventReader(run.events(0)), EventReader(run.supervisor)
        self._changed_s = written(run)
        self._next_s = 0.0
        self._dear: _Dear | None = None

    def look(self) -> View:
        """What there is now."""
        if self._history.refresh():
            self._changed_s = self._clock()
        state = self._state()
        dear = self._read(force=state in OVER)
        saved = [event for event in self._history.events("checkpoint") if event.get("path") and not event.get("error")]
        saved_s = number(saved[-1], "t") if saved else None
        return View(
            state=state,
            progress=self._progress(),
            loss=dear.loss,
            tokens_per_s=dear.tokens_per_s,
            summary=dear.summary,
            effective=dear.effective,
            scores=dear.scores,
            saved_step=integer(saved[-1], "step") if saved else None,
            saved_age_s=max(0.0, self._clock() - saved_s) if saved_s is not None else None,
        )

    def remarks(self) -> list[str]:
        """What happened since the last time this was asked, a line each."""
        new = [(event, remark_of_rank) for event in self._rank.stream(only=REMARKED)]
        new += [(event, remark_of_supervisor) for event in self._supervisor.stream()]
        new.sort(key=lambda one: number(one[0], "t") or 0.0)
        return [line for event, remark in new for line in remark(event)]

    def _read(self, *, force: bool) -> _Dear:
        """The ledger, the curves and all else that needs the whole record."""
        if self._dear is not None and not force and time.monotonic() < self._next_s:
            return self._dear
        began_s = time.monotonic()
        walked = walk(self.run, self._history)
        self._dear = _Dear(
            summary=summarize(self.run, self._history, walked),
            effective=from_trail(walked.trail),
            scores=scores(self._history),
            loss=self._history.curve("loss", points=self._points).mean,
            tokens_per_s=self._history.curve("tokens_per_s", points=self._points).mean,
        )
        took_s = time.monotonic() - began_s
        self._next_s = time.monotonic() + max(LEAST_S, took_s / SHARE)
        return self._dear

    def _state(self) -> str:
        state = str(self.run.status().get("state", "unknown"))
        is_gone = state not in ENDED and is_over(self.run, heard_s=self._changed_s, now_s=self._clock())
        return "gone" if is_gone else state

    def _progress(self) -> Progress | None:
        last = self._history.last_step
        if last is None:
            return None
        recent: list[Event] = list(self._history.steps(self._history.witness, max(0, last - RECENT + 1), last))
        timed = [(number(one, "tokens") or 0.0, took) for one in recent if (took := seconds(one, "duration_s"))]
        spent_s, newest = sum(took for _, took in timed), recent[-1] if recent else {}
        steps = self._steps()
        return Progress(
            step=last + 1,
            steps=steps,
            loss=number(newest, "loss"),
            tokens_per_s=sum(tokens for tokens, _ in timed) / spent_s if spent_s else None,
            left_s=max(0, steps - last - 1) * spent_s / len(timed) if timed and steps else None,
            memory_bytes=number(newest, "memory_bytes"),
            lr=number(newest, "lr"),
        )

    def _steps(self) -> int:
        begun = self._history.events("run_start")
        told = integer(begun[-1], "steps") if begun else None
        try:
            return told or integer(at(self.run.plan(), "duration"), "steps") or 0
        except PhalanxError:
            return told or 0
