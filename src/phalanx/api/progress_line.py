"""The progress of a run: a line redrawn in place on a terminal, or printed from time to time without one."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING

from phalanx.api.results import Tell, tell_stderr
from phalanx.io.visible import visible
from phalanx.record.report.live import Follower
from phalanx.record.run import Run
from phalanx.units import plural

if TYPE_CHECKING:
    from rich.live import Live
    from rich.text import Text

PLAIN_S = 5.0  # seconds between lines without a terminal
REDRAW_S = 0.2


class ProgressLine:
    """A context manager in which `tick` keeps the progress line up to date."""

    def __init__(
        self, run: Run, *, steps: int, world: int, since_s: float, tell: Tell = tell_stderr, terminal: bool = True
    ) -> None:
        self._follower = Follower(run, steps=steps, since_s=since_s)
        self._waiting = f"starting {plural(world, 'rank')} …"
        self._shown = ""
        self._at_s = 0.0
        self._tell = tell
        self._display = _terminal_line() if terminal and tell is tell_stderr and sys.stderr.isatty() else None

    def __enter__(self) -> ProgressLine:
        if self._display is not None:
            self._display.start()
        else:
            self._tell(self._waiting)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for remark in self._follower.read():
            self.note(remark)
        if self._display is not None:
            self._display.stop()
        line = self._progress_text()
        if line not in (self._shown, self._waiting) or (self._display is not None and line != self._waiting):
            self._tell(line)

    def tick(self) -> None:
        """Read new events; cheap enough to call ten times a second."""
        now = time.monotonic()
        if now - self._at_s < (REDRAW_S if self._display is not None else PLAIN_S) and self._at_s:
            return
        self._at_s = now
        for remark in self._follower.read():
            self.note(remark)
        line = self._progress_text()
        if line == self._shown:
            return
        self._shown = line
        if self._display is not None:
            self._display.update(terminal_text(line), refresh=True)
        elif line != self._waiting:
            self._tell(line)

    def note(self, text: str) -> None:
        """Print a permanent line above the progress line."""
        if self._display is not None:
            self._display.console.print(terminal_text(text))
        else:
            self._tell(text)

    def _progress_text(self) -> str:
        progress = self._follower.progress
        return self._waiting if progress is None else progress.line()


def _terminal_line() -> Live:
    from rich.console import Console

    # Imported only on a terminal: it takes 60 ms.
    from rich.live import Live

    return Live(console=Console(stderr=True, highlight=False), auto_refresh=False, transient=True)


def terminal_text(line: str) -> Text:
    """Return one line for rich: control characters escaped, cut at the edge of the terminal."""
    from rich.text import Text

    return Text(visible(line), overflow="ellipsis", no_wrap=True)
