"""A page of memory that an agent and its ranks share: who is alive, at which step since when, and what is wished.

Two clocks per slot: `answered_s` is touched by a thread of the rank several times a second, whatever the rank waits
for; `progress_s` by the training itself. The thread needs the interpreter lock, which native code may hold for minutes
while it sets up (a communicator, a CUDA module): whether the process runs at all is therefore for its agent to see,
from outside. An old answer of a process that runs only says that the lock is held.
"""

from __future__ import annotations

import mmap
import time
from dataclasses import dataclass
from enum import IntEnum

_STOP, _REFORM = 0, 1  # bytes of the flags
_WORD = 8  # bytes; every value is one word, written at once: a reader never sees half of it
_FIRST = 2  # word of slot 0
# Words of a slot; clocks are monotonic, one for all of a host.
_ANSWERED, _MUTED, _EPOCH, _STEP, _PHASE, _PROGRESS = range(6)
_LINE = 6
NO_STEP = -1


class Phase(IntEnum):
    """What a rank is doing, as far as its patience is concerned."""

    IDLE = 0  # waits for a place in a membership
    BUILDING = 1  # joins, builds, restores; compiles in its first step
    TRAINING = 2
    RESTING = 3  # evaluates, saves, samples: no step for a while
    LOCKED = 4  # native code holds the interpreter lock, as its agent sees; never written by the rank itself


@dataclass(frozen=True, kw_only=True, slots=True)
class Heartbeat:
    """The last signs of life of a slot; times of the monotonic clock."""

    epoch: int
    step: int  # NO_STEP before the first one
    phase: Phase
    progress_s: float
    answered_s: float
    is_muted: bool = False  # a drill says that no sign of life of this rank is to be seen


class HeartbeatBoard:
    """Made before the ranks are forked; each rank writes only its own line, so there is nothing to lock."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self._memory = mmap.mmap(-1, _WORD * (_FIRST + _LINE * slots))
        self._clocks, self._counts = memoryview(self._memory).cast("d"), memoryview(self._memory).cast("q")
        for slot in range(slots):
            self.reset(slot)

    def reset(self, slot: int) -> None:
        """A new process takes the slot."""
        self.progress(slot, epoch=0, step=NO_STEP, phase=Phase.IDLE)
        self.answer(slot)

    def answer(self, slot: int) -> None:
        """The process of a slot runs, and its interpreter lock was free."""
        self._counts[_FIRST + _LINE * slot + _MUTED] = 0
        self._clocks[_FIRST + _LINE * slot + _ANSWERED] = time.monotonic()

    def mute(self, slot: int) -> None:
        """From now on the process of a slot counts as one that shows no sign of life, until it answers again."""
        self._counts[_FIRST + _LINE * slot + _MUTED] = 1

    def progress(self, slot: int, *, epoch: int, step: int, phase: Phase) -> None:
        """The training of a slot got somewhere."""
        first = _FIRST + _LINE * slot
        for word, value in ((_EPOCH, epoch), (_STEP, step), (_PHASE, int(phase))):
            self._counts[first + word] = value
        self._clocks[first + _PROGRESS] = time.monotonic()

    def last(self, slot: int) -> Heartbeat:
        """The last signs of life of a slot."""
        first = _FIRST + _LINE * slot
        epoch, step, phase = (self._counts[first + word] for word in (_EPOCH, _STEP, _PHASE))
        return Heartbeat(
            epoch=epoch,
            step=step,
            phase=Phase(phase),
            progress_s=self._clocks[first + _PROGRESS],
            answered_s=self._clocks[first + _ANSWERED],
            is_muted=self._counts[first + _MUTED] != 0,
        )

    def ask_to_stop(self) -> None:
        """Every rank will see this at its next step; the loop agrees on it, saves and returns."""
        self._memory[_STOP] = 1

    @property
    def stopping(self) -> bool:
        """Whether the ranks are to stop."""
        return self._memory[_STOP] == 1

    def ask_to_reform(self, wanted: bool) -> None:
        """Every rank is to leave the membership after its step, so that another can be made without losing one."""
        self._memory[_REFORM] = int(wanted)

    @property
    def reforming(self) -> bool:
        """Whether the ranks are to leave the membership."""
        return self._memory[_REFORM] == 1
