"""A page of memory that the supervisor and its ranks share: who is at which step since when, and the wish to stop."""

from __future__ import annotations

import mmap
import struct
import time
from dataclasses import dataclass

_STOP = 0  # offset of the flag
_FIRST = 16  # offset of rank 0
_BEAT = struct.Struct("=qd")  # step, seconds of the monotonic clock (one clock for all processes of a host)
NO_STEP = -1


@dataclass(frozen=True, kw_only=True, slots=True)
class Beat:
    """The last sign of life of a rank."""

    step: int  # NO_STEP before the first one
    at_s: float  # monotonic clock


class Board:
    """Made before the ranks are forked; each rank writes only its own line, so there is nothing to lock."""

    def __init__(self, world: int) -> None:
        self._memory = mmap.mmap(-1, _FIRST + _BEAT.size * world)
        for rank in range(world):
            self.beat(rank, NO_STEP)

    def beat(self, rank: int, step: int) -> None:
        """Rank `rank` is alive and at `step`."""
        _BEAT.pack_into(self._memory, _FIRST + _BEAT.size * rank, step, time.monotonic())

    def last(self, rank: int) -> Beat:
        """The last sign of life of a rank."""
        step, at_s = _BEAT.unpack_from(self._memory, _FIRST + _BEAT.size * rank)
        return Beat(step=step, at_s=at_s)

    def ask_to_stop(self) -> None:
        """Every rank will see this at its next step; the loop agrees on it, saves and returns."""
        self._memory[_STOP] = 1

    @property
    def stopping(self) -> bool:
        """Whether the ranks are to stop."""
        return self._memory[_STOP] == 1
