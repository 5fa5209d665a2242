"""Ctrl-C and SIGTERM for a whole command: the first signal unwinds it, so that what it started ends with it."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType

# Signals closer than this count once: a key that bounces, or `timeout`, which signals the process and then its group.
# The second must not interrupt the clean-up after the first (children ended, temporary folders removed).
SAME_S = 1.0
AGAIN_S = 0.01


class Terminated(BaseException):
    """SIGTERM as an exception, as KeyboardInterrupt is SIGINT: `finally` runs, `except Exception` does not catch it."""


class CommandSignals:
    """The handlers of SIGINT and SIGTERM while a command runs.

    A verb with its own handlers (train, web) restores these afterwards.
    """

    def __init__(self) -> None:
        self.received = False
        self.code: int | None = None  # exit code of the process, once the command is over
        # Monotonic time of the signal that unwinds the command.
        self._unwinding_s: float | None = None

    def listen(self) -> None:
        """Install the handlers, except for a signal that was ignored when the process started.

        Under nohup, or in the background of a script, a signal may be switched off.
        """
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._note_signal)
            # The first function registered runs last.
            atexit.register(self._end_process)
            sys.unraisablehook = self._raise_again
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._note_signal)

    def unwound(self) -> None:
        """Record that the command is over: a signal from here on can only interrupt the interpreter's exit."""
        self._unwinding_s = time.monotonic()

    def _end_process(self) -> None:
        """Ignore Ctrl-C and, after an interrupted command, exit with its code; runs last at exit.

        The interpreter would reset the handlers. And where the first Ctrl-C passed through an `exec` of a text, as
        when a dataclass is made, Python ends itself by SIGINT even if the exception was handled since.
        """
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if self.received and self.code is not None:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(self.code)

    def _raise_again(self, lost: sys.UnraisableHookArgs) -> None:
        """Raise an interrupt again, shortly after Python has dropped it.

        Python only prints an exception that is raised in `__del__` or in a callback, such as those of the import
        system, and continues.
        """
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
            # A second signal: the user does not want to wait for the clean-up.
            os._exit(128 + number)


def die_of_sigterm() -> None:
    """End this process by SIGTERM, so that its parent sees that signal as the reason."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTERM)
