"""Background allocation of host memory for copies: mapping and pinning gigabytes takes seconds.

A thread that is about to copy must wait for the reservation first. An allocation error is not reported here: the copy
fails in the same way, and reports it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress

import torch

from phalanx.errors import SystemFailure


class MemoryReservation:
    """A background allocation; one at a time."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None

    def begin(self, take: Callable[[], None], device: torch.device | None) -> None:
        """Call `take` in a thread; `device` is the GPU that will copy, if there is one."""
        self.wait()
        self._thread = threading.Thread(target=_take_memory, args=(take, device), name="reserve", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait until the allocation has ended."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()


def _take_memory(take: Callable[[], None], device: torch.device | None) -> None:
    if device is not None:
        # A new thread uses the first GPU, and pinning would create a CUDA context there
        torch.cuda.set_device(device)
    with suppress(SystemFailure):
        take()
