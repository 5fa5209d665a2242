"""Ctrl-C and SIGTERM for a whole command: the first one unwinds it, so that what it started ends with it."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType

# Signals closer than this are one: a key that bounces, or `timeout`, which signals the process and then its group. The
# clean-up behind the first (children ended, temporary folders removed) must not be cut in half by the second.
SAME_S = 1.0
AGAIN_S = 0.01


class Terminated(BaseException):
    """SIGTERM, as KeyboardInterrupt is SIGINT: `finally` runs, and nobody takes it for an error."""


class CommandSignals:
    """Counts the signals that end a command; a verb that takes them itself (train, web) puts these back afterwards."""

    def __init__(self) -> None:
        self.received = False
        self.code: int | None = None  # of the process, once the command is over
        self._unwinding_s: float | None = None  # since when

    def listen(self) -> None:
        """Take what nobody ignores: under nohup, or in the background of a script, a signal may be switched off."""
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._note_signal)
            atexit.register(self._end_process)  # what is registered first runs last
            sys.unraisablehook = self._raise_again
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._note_signal)

    def unwound(self) -> None:
        """The command is over: from here on there is nothing to interrupt but the interpreter's own end."""
        self._unwinding_s = time.monotonic()

    def _end_process(self) -> None:
        """The last thing that runs: from here on Ctrl-C changes nothing.

        The interpreter would reset handlers; and where the first one passed through an `exec` of a text, as when a
        dataclass is made, Python ends itself by SIGINT after all, whatever was made of it since.
        """
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if self.received and self.code is not None:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(self.code)

    def _raise_again(self, lost: sys.UnraisableHookArgs) -> None:
        """Python drops what a callback or `__del__` raises, as the import system's own: a moment later it counts."""
        if not issubclass(lost.exc_type, KeyboardInterrupt | Terminated):
            sys.__unraisablehook__(lost)
            return
        number = signal.SIGINT if issubclass(lost.exc_type, KeyboardInterrupt) else signal.SIGTERM
        self._unwinding_s = None
        signal.signal(signal.SIGALRM, lambda _, frame: self._note_signal(number, frame))
        signal.setitimer(signal.ITIMER_REAL, AGAIN_S)

    def _note_signal(self, number: int, frame: FrameType | None) -> None:
        now_s = time.monotonic()
        self.received = True
        if self._unwinding_s is None:
            self._unwinding_s = now_s
            raise KeyboardInterrupt if number == signal.SIGINT else Terminated
        if now_s - self._unwinding_s > SAME_S:
            os._exit(128 + number)  # somebody does not want to wait for the clean-up


def die_of_sigterm() -> None:
    """End as SIGTERM ends a process, for whoever asks how we ended."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTERM)
