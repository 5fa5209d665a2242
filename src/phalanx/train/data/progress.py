"""How far a long job is: share done, rate and time left, on one line that is rewritten on a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TextIO

from phalanx.units import format_bytes, format_count, format_seconds

TERMINAL_S = 0.5
LOG_S = 10.0


class BuildProgress:
    """Counts bytes read and tokens made; `total_bytes` may be low where files are packed, and 100 % is never passed."""

    def __init__(self, stream: TextIO, total_bytes: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream, self._total, self._clock = stream, max(1, total_bytes), clock
        self._terminal = stream.isatty()
        self._every = TERMINAL_S if self._terminal else LOG_S
        self._start = self._last = clock()
        self._label = ""
        self._bytes = self._skipped = self._tokens = 0

    def begin(self, label: str, *, skipped_bytes: int = 0) -> None:
        """A new pass over the data; bytes done by an earlier call do not count towards the rate."""
        self._label, self._bytes, self._skipped, self._tokens = label, skipped_bytes, skipped_bytes, 0
        self._start = self._last = self._clock()

    def advance(self, read_bytes: int, tokens: int = 0, *, skipped: bool = False) -> None:
        """Some more was read; prints now and then."""
        self._bytes += read_bytes
        self._skipped += read_bytes if skipped else 0
        self._tokens += tokens
        now = self._clock()
        if now - self._last >= self._every:
            self._last = now
            text = self.line(now - self._start)
            self._stream.write(f"\r\x1b[K{text}" if self._terminal else f"{text}\n")
            self._stream.flush()

    def line(self, elapsed_s: float) -> str:
        """The text of the line."""
        done = min(1.0, self._bytes / self._total)
        rate = (self._bytes - self._skipped) / max(elapsed_s, 1e-9)
        ahead = self._total - self._bytes
        left = f", {format_seconds(ahead / rate)} left" if rate > 0 and ahead > 0 else ""
        tokens = f", {format_count(self._tokens)} tokens" if self._tokens else ""
        return f"{self._label}: {done:.0%} of {format_bytes(self._total)}{tokens}, {format_bytes(rate)}/s{left}"

    def note(self, text: str) -> None:
        """A line that stays."""
        self._stream.write(f"\r\x1b[K{text}\n" if self._terminal else f"{text}\n")
        self._stream.flush()

    def end(self) -> None:
        """Leave the terminal on an empty line."""
        if self._terminal:
            self._stream.write("\r\x1b[K")
            self._stream.flush()


def on_stderr(total_bytes: int) -> BuildProgress:
    """The usual progress of a command."""
    return BuildProgress(sys.stderr, total_bytes)
