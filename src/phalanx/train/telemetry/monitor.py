"""The monitor: a thread beside the training of a rank that looks at its device now and then and writes it down.

It never holds up a step: the training neither waits for it nor hears of what goes wrong in it.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from phalanx.record.events import EventWriter
from phalanx.train.telemetry.sensors import Reading, Sensors
from phalanx.train.telemetry.sharing import Sharers

LEAVE_S = 0.5  # that the end of a formation waits for the last sample; a driver that hangs is left behind


class Monitor:
    """Of one rank in one formation. `sensors` is called in the thread: a driver may be slow to answer."""

    def __init__(
        self,
        events: EventWriter,
        sensors: Callable[[], Sensors],
        *,
        sharers: Sharers,
        interval_s: float,
        epoch: int = 0,
    ) -> None:
        self._events, self._sensors, self._sharers = events, sensors, sharers
        self._interval_s, self._epoch = interval_s, epoch
        self._energy_j: float | None = None  # of this formation, with the time before it in which nobody looked
        self._closing, self._abandoned = threading.Event(), False
        self.trouble = ""  # the first thing that went wrong
        self._thread = threading.Thread(target=self._run, name="monitor", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def close(self) -> None:
        """Take a last sample and end, soon; calling it twice is fine."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join(LEAVE_S)
        self._abandoned = True

    def _run(self) -> None:
        found = self._tried(self._sensors)
        while found is not None:
            ended = self._closing.wait(min(self._interval_s, threading.TIMEOUT_MAX))
            self._tried(lambda: self._sample(found))
            if ended:
                return

    def _sample(self, sensors: Sensors) -> None:
        fields = self._fields(sensors.read(self._sharers))
        if not self._abandoned:
            self._events.write("monitor", epoch=self._epoch, **fields)

    def _fields(self, reading: Reading) -> dict[str, Any]:
        if reading.energy_j is not None:
            self._energy_j = (self._energy_j or 0.0) + reading.energy_j
        return {**asdict(reading), "energy_j": self._energy_j}

    def _tried(self, act: Callable[[], Any]) -> Any:
        """Do it; whatever goes wrong is told once in the rank's log, and the training goes on."""
        try:
            return act()
        except Exception as error:
            if not self.trouble:
                self.trouble = f"{type(error).__name__}: {error}"
                print(f"monitor: a sample could not be taken ({self.trouble}); training goes on", file=sys.stderr)
            return None
