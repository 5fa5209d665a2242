"""A page of memory that an agent and its ranks share: who is alive, at which step since when, and what is asked for.

Two clocks per slot: `answered_s` is touched by a thread of the rank several times a second, whatever the rank waits
for; `progress_s` by the training itself. The thread needs the interpreter lock, which native code may hold for minutes
while it sets up (a communicator, a CUDA module): whether the process runs at all is therefore for its agent to see,
from outside. An old answer of a process that runs only says that the lock is held.
"""

from __future__ import annotations

import math
import mmap
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

_STOP, _REFORM = 0, 1  # bytes of the flags
_WORD = 8  # bytes; every value is one word, written at once: a reader never sees half of it
_FIRST = 2  # word of slot 0
# Words of a slot; clocks are monotonic, one for all of a host.
_ANSWERED, _MUTED, _GENERATION, _STEP, _PHASE, _PROGRESS = range(6)
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

    generation: int
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
        self.progress(slot, generation=0, step=NO_STEP, phase=Phase.IDLE)
        self.answer(slot)

    def answer(self, slot: int) -> None:
        """The process of a slot runs, and its interpreter lock was free."""
        self._counts[_FIRST + _LINE * slot + _MUTED] = 0
        self._clocks[_FIRST + _LINE * slot + _ANSWERED] = time.monotonic()

    def mute(self, slot: int) -> None:
        """From now on the process of a slot counts as one that shows no sign of life, until it answers again."""
        self._counts[_FIRST + _LINE * slot + _MUTED] = 1

    def progress(self, slot: int, *, generation: int, step: int, phase: Phase) -> None:
        """The training of a slot got somewhere."""
        first = _FIRST + _LINE * slot
        for word, value in ((_GENERATION, generation), (_STEP, step), (_PHASE, int(phase))):
            self._counts[first + word] = value
        self._clocks[first + _PROGRESS] = time.monotonic()

    def last(self, slot: int) -> Heartbeat:
        """The last signs of life of a slot."""
        first = _FIRST + _LINE * slot
        generation, step, phase = (self._counts[first + word] for word in (_GENERATION, _STEP, _PHASE))
        return Heartbeat(
            generation=generation,
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


# ---- in messages to the coordinator ----------------------------------------------------------------------------------

Progress = tuple[int, int, float]  # step, phase, seconds since the rank got anywhere
ALIKE_S = 1.0  # ranks of a host whose ages differ by less are told of as one
HOSTS_PER_S = 512  # whose heartbeats the coordinator takes in a second, before they come as rarely as they may
LEAST_BEAT_S, MOST_BEAT_S = 0.25, 4.0
LEAST_SIGN_S, MOST_SIGN_S = 0.5, 4.0  # between signs of life of the coordinator to one agent
WATCHERS = 4  # hosts whose turn to start a coordinator comes first: they are to know soon that it is silent
WATCHER_SIGN_S = 1.0  # between signs of life to one of them, at the most
WORD_S = 1.4  # by which a word to everybody puts off signs of life: less than agents wait for one that is late
FIRST_MORE_S = 2.0  # by which the first sign of life after a hello may be later than others, where thousands join
SIGNS_PER_S = 512  # signs of life to all of them, before they come as rarely as they may


def heartbeat_every_s(num_hosts: int, dead_after_s: float = math.inf) -> float:
    """Seconds between two heartbeats of an agent: the more hosts, the fewer, and four within `dead_after_s`.

    >>> [heartbeat_every_s(hosts, 30.0) for hosts in (2, 512, 1024, 16384)], heartbeat_every_s(16384, 5.0)
    ([0.25, 1.0, 2.0, 4.0], 1.25)
    """
    most_s = max(LEAST_BEAT_S, min(MOST_BEAT_S, dead_after_s / 4))
    return min(max(LEAST_BEAT_S, num_hosts / HOSTS_PER_S), most_s)


def sign_every_s(num_hosts: int) -> float:
    """Seconds between two signs of life to one agent.

    >>> [sign_every_s(hosts) for hosts in (2, 1024, 16384)]
    [0.5, 2.0, 4.0]
    """
    return min(max(LEAST_SIGN_S, num_hosts / SIGNS_PER_S), MOST_SIGN_S)


def first_sign_s(num_hosts: int) -> float:
    """Seconds within which an agent that joins is shown a sign of life: the answer to its hello was the first.

    Of many hosts it comes later than one does after another. The first frame of a connection costs as much as half a
    handshake, since its key is made with it: those who are still at the door come first.

    >>> [first_sign_s(hosts) for hosts in (2, 1024, 16384)]
    [0.5, 4.0, 6.0]
    """
    sign_s = sign_every_s(num_hosts)
    return sign_s + FIRST_MORE_S if sign_s > WATCHER_SIGN_S else sign_s


def fold_progress(progress: Mapping[int, Progress | None]) -> dict[str, Any]:
    """What a host tells of its ranks (by slot; None where one has not told): what most do, and who differs.

    >>> fold_progress({0: (7, 2, 0.5), 1: (7, 2, 0.25), 2: (6, 2, 9.0), 3: None})
    {'progress': (7, 2, 0.25), 'exceptions': {2: (6, 2, 9.0), 3: None}}
    """
    told = [one for one in progress.values() if one is not None]
    if not told:
        return {"progress": None}
    (step, phase), _ = Counter(one[:2] for one in told).most_common(1)[0]
    age_s = min(one[2] for one in told if one[:2] == (step, phase))
    alike = (step, phase, age_s)
    exceptions = {
        slot: one for slot, one in progress.items() if one is None or one[:2] != alike[:2] or one[2] > age_s + ALIKE_S
    }
    return {"progress": alike, "exceptions": exceptions} if exceptions else {"progress": alike}
