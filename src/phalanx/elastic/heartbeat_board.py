"""A page of memory that an agent and its ranks share: heartbeats, the step of each rank, and requests to the ranks.

Two clocks per slot: `answered_s` is updated by a thread of the rank several times a second, whatever the rank waits
for; `progress_s` by the training itself. The thread needs the interpreter lock, which native code may hold for minutes
during set-up (a communicator, a CUDA module): so the agent checks from outside whether the process runs at all. An old
answer of a process that runs only shows that the lock is held.
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
# Bytes; every value is one word, written at once, so that a reader never sees half of it.
_WORD = 8
_FIRST = 2  # the word of slot 0
# Words of a slot; all clocks are the host's monotonic clock.
_ANSWERED, _MUTED, _GENERATION, _STEP, _PHASE, _PROGRESS = range(6)
_LINE = 6
NO_STEP = -1


class Phase(IntEnum):
    """The activity of a rank, which determines how long it may take."""

    IDLE = 0  # waits for a place in a membership
    # Joins, builds, restores; compiles in its first step.
    BUILDING = 1
    TRAINING = 2
    # Evaluates, saves, samples: no step for a while.
    RESTING = 3
    # Native code holds the interpreter lock, as the agent sees; never written by the rank itself.
    LOCKED = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Heartbeat:
    """The last signs of life of a slot; times of the monotonic clock."""

    generation: int
    step: int  # NO_STEP before the first one
    phase: Phase
    progress_s: float
    answered_s: float
    # A drill hides all signs of life of this rank.
    is_muted: bool = False


class HeartbeatBoard:
    """The shared page, made before the ranks are forked; each rank writes only its own line, so no lock is needed."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self._memory = mmap.mmap(-1, _WORD * (_FIRST + _LINE * slots))
        self._clocks, self._counts = memoryview(self._memory).cast("d"), memoryview(self._memory).cast("q")
        for slot in range(slots):
            self.reset(slot)

    def reset(self, slot: int) -> None:
        """Reset the line of a slot for a new process."""
        self.progress(slot, generation=0, step=NO_STEP, phase=Phase.IDLE)
        self.answer(slot)

    def answer(self, slot: int) -> None:
        """Note that the process of a slot runs, and that its interpreter lock was free."""
        self._counts[_FIRST + _LINE * slot + _MUTED] = 0
        self._clocks[_FIRST + _LINE * slot + _ANSWERED] = time.monotonic()

    def mute(self, slot: int) -> None:
        """Make the process of a slot count as one without signs of life, until it answers again."""
        self._counts[_FIRST + _LINE * slot + _MUTED] = 1

    def progress(self, slot: int, *, generation: int, step: int, phase: Phase) -> None:
        """Note the step and phase of a slot's training."""
        first = _FIRST + _LINE * slot
        for word, value in ((_GENERATION, generation), (_STEP, step), (_PHASE, int(phase))):
            self._counts[first + word] = value
        self._clocks[first + _PROGRESS] = time.monotonic()

    def last(self, slot: int) -> Heartbeat:
        """Return the last signs of life of a slot."""
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
        """Ask every rank to stop at its next step; the loop agrees on the step, saves and returns."""
        self._memory[_STOP] = 1

    @property
    def stopping(self) -> bool:
        """True when the ranks are asked to stop."""
        return self._memory[_STOP] == 1

    def ask_to_reform(self, wanted: bool) -> None:
        """Ask every rank to leave the membership after its step, so that another one can form without losing a step."""
        self._memory[_REFORM] = int(wanted)

    @property
    def reforming(self) -> bool:
        """True when the ranks are asked to leave the membership."""
        return self._memory[_REFORM] == 1


# ---- in messages to the coordinator ----------------------------------------------------------------------------------

# Step, phase, and seconds since the rank made progress.
Progress = tuple[int, int, float]
# Ranks of a host whose ages differ by less are reported together.
ALIKE_S = 1.0
# Heartbeats that the coordinator takes in a second, before they come as rarely as they may.
HOSTS_PER_S = 512
LEAST_BEAT_S, MOST_BEAT_S = 0.25, 4.0
# Seconds between signs of life of the coordinator to one agent.
LEAST_SIGN_S, MOST_SIGN_S = 0.5, 4.0
# Hosts whose turn to start a coordinator comes first: they must notice its silence soon.
WATCHERS = 4
# Seconds between signs of life to one of them, at most.
WATCHER_SIGN_S = 1.0
# A message to all agents puts signs of life off by so much: less than agents wait for one that is late.
WORD_S = 1.4
# The first sign of life after a hello may be so much later than others, where thousands join.
FIRST_MORE_S = 2.0
# Signs of life to all agents in a second, before they come as rarely as they may.
SIGNS_PER_S = 512


def heartbeat_every_s(num_hosts: int, dead_after_s: float = math.inf) -> float:
    """Seconds between two heartbeats of an agent: the more hosts, the fewer heartbeats, and four within `dead_after_s`.

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
    """Seconds within which an agent that joins gets a sign of life after the answer to its hello, which was the first.

    With many hosts it comes later than the period between two signs. The first frame of a connection costs as much as
    half a handshake, since its key is derived with it: connections that are still in their handshake come first.

    >>> [first_sign_s(hosts) for hosts in (2, 1024, 16384)]
    [0.5, 4.0, 6.0]
    """
    sign_s = sign_every_s(num_hosts)
    return sign_s + FIRST_MORE_S if sign_s > WATCHER_SIGN_S else sign_s


def fold_progress(progress: Mapping[int, Progress | None]) -> dict[str, Any]:
    """Return a host's report on its ranks by slot (None: not reported): the common progress, and exceptions.

    >>> fold_progress({0: (7, 2, 0.5), 1: (7, 2, 0.25), 2: (6, 2, 9.0), 3: None})
    {'progress': (7, 2, 0.25), 'exceptions': {2: (6, 2, 9.0), 3: None}}
    """
    known = [rank_progress for rank_progress in progress.values() if rank_progress is not None]
    if not known:
        return {"progress": None}
    (step, phase), _ = Counter(rank_progress[:2] for rank_progress in known).most_common(1)[0]
    age_s = min(rank_progress[2] for rank_progress in known if rank_progress[:2] == (step, phase))
    alike = (step, phase, age_s)
    exceptions = {
        slot: rank_progress
        for slot, rank_progress in progress.items()
        if rank_progress is None or rank_progress[:2] != alike[:2] or rank_progress[2] > age_s + ALIKE_S
    }
    return {"progress": alike, "exceptions": exceptions} if exceptions else {"progress": alike}
