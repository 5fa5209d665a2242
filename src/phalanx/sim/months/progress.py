"""Training time that counts, and how much of it survives: checkpoints on disk and copies in memory."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Saving:
    """How state is kept. Seconds; `copy_every_s` is training time between copies in memory, infinite for none."""

    interval_s: float  # training time between checkpoints
    blocking_s: float  # training stands still for one
    lag_s: float  # from then until it is safe on disk
    copy_every_s: float = math.inf
    copy_share: float = 0.0  # time of a copy over the training time between two

    @property
    def cycle_s(self) -> float:
        """From one checkpoint to the next."""
        return self.interval_s + self.blocking_s


class Progress:
    """Seconds of training done at the planned pace. Checkpoints are computed, not simulated one by one.

    >>> progress = Progress(Saving(interval_s=100.0, blocking_s=10.0, lag_s=5.0))
    >>> progress.advance(0.0, 224.0, speed=1.0)  # two checkpoints, done at 110 s and at 220 s
    204.0
    >>> progress.restore(224.0), progress.done_s  # the second was not on disk yet
    (104.0, 100.0)
    """

    def __init__(self, saving: Saving) -> None:
        self.done_s = 0.0
        self._saving = saving
        self._cycle_s = 0.0  # since the last checkpoint, or since the start
        self._base_s = 0.0  # what was done when the job started last
        # (when, what was done then); the first is the state before training. One more than may be under way at once.
        writing = math.ceil(saving.lag_s / saving.cycle_s) if math.isfinite(saving.cycle_s) else 0
        self._taken = deque([(-math.inf, 0.0)], maxlen=writing + 2)

    @property
    def newest_s(self) -> float:
        """What was done when the newest checkpoint was taken."""
        return self._taken[-1][1]

    def advance(self, start_s: float, seconds: float, *, speed: float) -> float:
        """Run for `seconds` of wall-clock time from `start_s`; returns those not spent on checkpoints.

        `speed` is the training time done in a second of that.
        """
        s = self._saving
        if not math.isfinite(s.interval_s):
            self.done_s += seconds * speed
            return seconds
        before_s = min(self._cycle_s, s.interval_s)
        count, left_s = divmod(self._cycle_s + seconds, s.cycle_s)
        first_s, first_done_s = start_s + s.cycle_s - self._cycle_s, self.done_s + (s.interval_s - before_s) * speed
        for index in range(max(0, int(count) - (self._taken.maxlen or 1)), int(count)):
            self._taken.append((first_s + index * s.cycle_s, first_done_s + index * s.interval_s * speed))
        worked_s = max(0.0, count * s.interval_s + min(left_s, s.interval_s) - before_s)
        self._cycle_s = left_s
        self.done_s += worked_s * speed
        return worked_s

    def restore(self, now_s: float) -> float:
        """Go back to the newest state that is left after a failure; returns the training time lost."""
        s = self._saving
        while self._taken[-1][0] + s.lag_s > now_s:
            self._taken.pop()
        copied_s = -math.inf
        if math.isfinite(s.copy_every_s):
            copied_s = self.done_s - math.fmod(self.done_s - self._base_s, s.copy_every_s)
        return self._back_to(max(copied_s, self.newest_s))

    def roll_back(self, done_s: float) -> float:
        """Go back to a checkpoint of that time and forget the later ones; returns the training time lost."""
        while self._taken and self._taken[-1][1] > done_s:
            self._taken.pop()
        if not self._taken or self.newest_s < done_s:
            self._taken.append((-math.inf, done_s))
        return self._back_to(min(done_s, self.done_s))

    def save(self) -> None:
        """A checkpoint that was waited for, until it was on disk."""
        self._taken.append((-math.inf, self.done_s))
        self._back_to(self.done_s)

    def _back_to(self, done_s: float) -> float:
        lost_s = self.done_s - done_s
        self.done_s = self._base_s = done_s
        self._cycle_s = 0.0
        return lost_s
