"""The decisions of the coordinator: who forms the next epoch, from which state, and when the run is over.

Messages in, messages out; no sockets and no torch, so that every situation can be played through in a test. A run is
waiting (for hosts), forming (asked its members, not all have answered), running, or over.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from phalanx.elastic import hearing
from phalanx.elastic.ending import STOPPED, end, kill_all
from phalanx.elastic.forming import gather, grow
from phalanx.elastic.memory import Memory, Message
from phalanx.elastic.recovering import CAUSE_S, all_left, nobody_fell, recover
from phalanx.elastic.room import Room
from phalanx.elastic.stuck import look_for_stuck
from phalanx.elastic.waiting import miss_hosts, wait_for_hosts
from phalanx.plan.plan import Plan
from phalanx.record.events import EventWriter
from phalanx.record.run import Run

LOOK_S = 0.5  # between looks for the stop file
BEAT_S = 0.5  # between signs of life to the agents
PAUSE_S = 1.0  # between two of our own turns, after which it was us who did not listen


class Council:
    """Hears agents and decides. `hear` only takes note; `tick`, called often, acts."""

    def __init__(
        self,
        run: Run,
        plan: Plan,
        send: Callable[[str, Message], None],
        events: EventWriter,
        *,
        memory: Memory,
        save: Callable[[Memory], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.room = Room(run, plan, send, events, memory=memory, save=save, clock=clock)

    @property
    def memory(self) -> Memory:
        """What whoever takes over must know."""
        return self.room.memory

    @property
    def is_over(self) -> bool:
        """Whether the run has ended."""
        return self.room.is_over

    def hear(self, host: str, message: Message) -> None:
        """Take note of what an agent said."""
        hearing.hear(self.room, host, message)

    def tick(self) -> None:
        """Act on what is known."""
        room = self.room
        self._mind_the_clock()
        self._look_for_stop()
        if room.is_over:
            return
        miss_hosts(room)
        formation = room.memory.formation
        if formation is None:
            wait_for_hosts(room)
        elif room.takes_over:
            return
        elif room.failures:
            recover(room)
        elif room.left_s is not None and len(room.left) == formation.world:
            all_left(room)
        elif room.left_s is not None and room.clock() - room.left_s > CAUSE_S:
            nobody_fell(room)
        elif room.memory.forming:
            gather(room)
        else:
            grow(room)
            look_for_stuck(room)

    def _mind_the_clock(self) -> None:
        """If it was us who did not run for a while, the others are not to blame; and they are to know that we do."""
        room = self.room
        now = room.clock()
        paused_s, room.ticked_s = now - room.ticked_s, now
        if paused_s > PAUSE_S:
            for host in room.hosts.values():
                host.heard_s += paused_s
        if now - room.beat_s >= BEAT_S:
            room.beat_s = now
            room.tell_all({"kind": "beat"})

    def _look_for_stop(self) -> None:
        room = self.room
        now = room.clock()
        if now - room.looked_s >= LOOK_S:
            room.looked_s = now
            if room.run.stop_file.exists():
                hearing.wish(room, 1)
        if room.wished_s is None:
            return
        if room.wishes >= 2:
            kill_all(room, "killed at once, as asked")
        elif room.memory.formation is None:
            end(room, "stopped", STOPPED, "stopped before the first rank was started")
        elif room.hurry_s is not None and now - room.hurry_s > room.job.fault.grace_s:
            kill_all(room, f"killed: not done within fault.grace_s = {room.job.fault.grace_s:g} s after it was asked")
