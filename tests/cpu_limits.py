"""A limit on the processor time of a block: a reader that does not end fails its test instead of stopping the suite."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


class CpuLimitExceededError(BaseException):
    """The block took more processor time than it may; no `except Exception` of the code under test catches it."""


@contextmanager
def cpu_limit(seconds: float) -> Iterator[None]:
    """Raise CpuLimitExceededError in the main thread after so much processor time of this process."""

    def interrupt(*_: object) -> None:
        raise CpuLimitExceededError(f"more than {seconds:g} s of processor time")

    before = signal.signal(signal.SIGPROF, interrupt)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
