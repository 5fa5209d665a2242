"""Signals from outside, counted: the first asks the ranks to stop after their step, the second ends them at once."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from types import FrameType

STOPPING = (signal.SIGTERM, signal.SIGINT)


@dataclass(slots=True)
class Wishes:
    """How often somebody asked us to stop."""

    count: int = 0
    first: int = 0  # the signal: SIGTERM is a cluster manager that will not wait for long, SIGINT a person who does

    @classmethod
    def listen(cls) -> Wishes:
        """Count SIGTERM and SIGINT from now on, and one that whoever started us held back."""
        wishes = cls()
        for number in STOPPING:
            signal.signal(number, wishes._note)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)
        return wishes

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.first = self.first or number
        self.count += 1
