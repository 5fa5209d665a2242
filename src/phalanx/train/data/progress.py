"""Progress of a data build: share done, rate and time left, on one line that is rewritten on a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TextIO

from phalanx.units import format_bytes, format_count, format_seconds

TERMINAL_S = 0.5
LOG_S = 10.0


class BuildProgress:
    """Counts bytes read and tokens made.

    `total_bytes` may be too low for packed files, and the display stops at 100 %.
    """

    def __init__(self, stream: TextIO, total_bytes: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream, self._total, self._clock = stream, max(1, total_bytes), clock
        self._terminal = stream.isatty()
        self._every = TERMINAL_S if self._terminal else LOG_S
        self._start = self._last = clock()
        self._label = ""
        self._bytes = self._skipped = self._tokens = 0

    def begin(self, label: str, *, skipped_bytes: int = 0) -> None:
        """Start a new pass over the data; bytes done by an earlier call do not count towards the rate."""
        self._label, self._bytes, self._skipped, self._tokens = label, skipped_bytes, skipped_bytes, 0
        self._start = self._last = self._clock()

    def advance(self, read_bytes: int, tokens: int = 0, *, skipped: bool = False) -> None:
        """Add to the counts, and print at intervals."""
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
        """Return the text of the progress line."""
        share_done = min(1.0, self._bytes / self._total)
        rate = (self._bytes - self._skipped) / max(elapsed_s, 1e-9)
        remaining_bytes = self._total - self._bytes
        time_left = f", {format_seconds(remaining_bytes / rate)} left" if rate > 0 and remaining_bytes > 0 else ""
        tokens = f", {format_count(self._tokens)} tokens" if self._tokens else ""
        return (
            f"{self._label}: {share_done:.0%} of {format_bytes(self._total)}{tokens}, {format_bytes(rate)}/s{time_left}"
        )

    def note(self, text: str) -> None:
        """Print a line that stays."""
        self._stream.write(f"\r\x1b[K{text}\n" if self._terminal else f"{text}\n")
        self._stream.flush()

    def end(self) -> None:
        """Clear the progress line on a terminal."""
        if self._terminal:
            self._stream.write("\r\x1b[K")
            self._stream.flush()


def on_stderr(total_bytes: int) -> BuildProgress:
    """Return the progress display on standard error."""
    return BuildProgress(sys.stderr, total_bytes)
