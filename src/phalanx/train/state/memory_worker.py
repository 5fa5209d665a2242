"""A thread that does one thing after the other, and can be told to stop."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable


class Worker:
    """Jobs in the order they were given. A daemon: a process that must go does not wait for it."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._idle = threading.Condition()
        self._open = 0
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def do(self, job: Callable[[], None]) -> None:
        """Have it done soon; raises what an earlier job failed with."""
        if self._error is not None:
            raise self._error
        with self._idle:
            self._open += 1
        self._jobs.put(job)

    def wait(self) -> None:
        """Until nothing is left to do."""
        with self._idle:
            self._idle.wait_for(lambda: not self._open)

    def close(self, timeout_s: float | None = None) -> bool:
        """No further jobs; whether those given were done in time."""
        self._jobs.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                if self._error is None:
                    job()
            except BaseException as error:  # told to the thread that gives the next job
                self._error = error
            with self._idle:
                self._open -= 1
                self._idle.notify_all()
