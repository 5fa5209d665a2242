"""When the next checkpoint is due: Daly's interval, from the plan at first and from measured costs after that."""

from __future__ import annotations

from collections import deque
from statistics import median

from phalanx.job.schema import Checkpoint
from phalanx.plan.reliability import Reliability, daly_interval

RECENT = 5  # saves whose median counts: one held up by a busy disk changes nothing


class Interval:
    """The clock of rank 0. An interval that the job sets in seconds stays as it is."""

    def __init__(self, *, interval_s: float, mtbf_s: float, measured: bool, now_s: float) -> None:
        self.interval_s = interval_s
        self._mtbf_s, self._measured = mtbf_s, measured
        self._began_s = now_s
        self._blocked_s: deque[float] = deque(maxlen=RECENT)
        self._persist_s: deque[float] = deque(maxlen=RECENT)

    @staticmethod
    def of(reliability: Reliability, checkpoint: Checkpoint, *, now_s: float) -> Interval:
        """That of a plan and its job."""
        return Interval(
            interval_s=reliability.interval_s,
            mtbf_s=reliability.mtbf_s,
            measured=checkpoint.interval_s == "auto",
            now_s=now_s,
        )

    def due(self, now_s: float) -> bool:
        """Whether the interval has passed since the last save began."""
        return now_s - self._began_s >= self.interval_s

    def saved(self, *, now_s: float, blocked_s: float) -> None:
        """A save began at `now_s` and held the training up for `blocked_s`."""
        self._began_s = now_s
        self._blocked_s.append(blocked_s)
        self._update()

    def persisted(self, seconds: float) -> None:
        """The save was committed `seconds` after it began: the next may not begin sooner."""
        self._persist_s.append(seconds)
        self._update()

    def _update(self) -> None:
        if self._measured and self._blocked_s:
            best_s = daly_interval(median(self._blocked_s), self._mtbf_s)
            self.interval_s = max(best_s, median(self._persist_s) if self._persist_s else 0.0)
