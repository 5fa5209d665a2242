"""Host memory for copies, taken beside the training: gigabytes take seconds to map and pin, and no step waits for them.

Whoever is about to copy waits for the reservation first. What fails here (no memory) is not told: the copy fails in the
same way, where it can be told.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress

import torch

from phalanx.errors import SystemFailure


class MemoryReservation:
    """One at a time."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None

    def begin(self, take: Callable[[], None], device: torch.device | None) -> None:
        """Call `take` in a thread; `device` is the GPU that will copy, if there is one."""
        self.wait()
        self._thread = threading.Thread(target=_take_memory, args=(take, device), name="reserve", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Until what was begun is over."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()


def _take_memory(take: Callable[[], None], device: torch.device | None) -> None:
    if device is not None:
        torch.cuda.set_device(device)  # a thread begins with the first GPU, and pinning would open a context there
    with suppress(SystemFailure):
        take()
