"""Runs that are being judged: how far the log of each is read, a bounded turn at a time."""

from __future__ import annotations

import threading
from collections import OrderedDict

from phalanx.record.run import Run
from phalanx.rules.live import LiveCheck, Verdicts

MOST_CHECKS = 8  # runs whose logs are read on; one that makes room is read again from its start


class Checks:
    """Runs that are being judged: where the reading of each log stands."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # of the table
        self._open: OrderedDict[tuple[str, int], Turns] = OrderedDict()

    def turns(self, run: Run) -> Turns:
        """Of one run; another run of the same name, in a new folder, begins afresh."""
        key = (run.name, run.path.stat().st_ino)
        with self._lock:
            found = self._open.get(key)
            if found is None:
                found = self._open[key] = Turns(run)
            self._open.move_to_end(key)
            while len(self._open) > MOST_CHECKS:
                self._open.popitem(last=False)
        return found


class Turns:
    """Reads a log a turn at a time; `number` changes while there is more to read, so that the next question goes on."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._check: LiveCheck | None = None
        self._lock = threading.Lock()
        self.number = 0

    def take(self) -> Verdicts:
        """One turn: some of the log, or all that is new."""
        with self._lock:
            if self._check is None:  # opens files: not before somebody waits for it
                self._check = LiveCheck(self._run)
            found = self._check.look()
            if not found.is_settled:
                self.number += 1
            return found
