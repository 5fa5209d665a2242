"""Start times of connections: at a time, or when other connections have finished."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from phalanx.errors import mistake
from phalanx.sim.fabric_links import Floats, Ints

NONE = -1


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """Starts of connections; those with a trigger wait for it and have no start time.

    A trigger fires, once, when `needed` of its connections have had their last packet acknowledged: 1 is htsim's
    oneshot, more is its barrier.
    """

    start_s: Floats  # [connection]
    waits_for: Ints  # [connection] trigger that starts it, -1 is none
    fires: Ints  # [connection] trigger that its end fires, -1 is none
    needed: Ints  # [trigger] ends until it fires

    def ordered(self, order: Ints) -> Schedule:
        """Return the schedule with the connections in another order."""
        return Schedule(
            start_s=self.start_s[order], waits_for=self.waits_for[order], fires=self.fires[order], needed=self.needed
        )


def at_once(connections: int) -> Schedule:
    """Return a schedule in which all connections start together."""
    no_trigger = np.full(connections, NONE, dtype=np.int64)
    return Schedule(
        start_s=np.zeros(connections), waits_for=no_trigger, fires=no_trigger, needed=np.zeros(0, dtype=np.int64)
    )


def check_schedule(schedule: Schedule, connections: int) -> None:
    """Raise UserError for a malformed schedule, or one in which a connection would never start."""
    columns = {"start_s": schedule.start_s, "waits_for": schedule.waits_for, "fires": schedule.fires}
    for name, column in columns.items():
        if len(column) != connections:
            raise mistake("schedule", f"{len(column)} entries of {name} for {connections:,} connections")
    if not (np.isfinite(schedule.start_s).all() and (schedule.start_s >= 0).all()):
        raise mistake("schedule", f"a start at {float(np.min(schedule.start_s)):g} s", fix="starts are 0 s or later")
    triggers = len(schedule.needed)
    for name, trigger_numbers in (("waits for", schedule.waits_for), ("fires", schedule.fires)):
        if ((trigger_numbers < NONE) | (trigger_numbers >= triggers)).any():
            unknown_trigger = int(trigger_numbers[(trigger_numbers < NONE) | (trigger_numbers >= triggers)][0])
            raise mistake(
                "schedule", f"a connection {name} trigger {unknown_trigger}", fix=f"there are {triggers}, from 0"
            )
    if triggers and int(schedule.needed.min()) < 1:
        raise mistake("schedule", f"a trigger needs {int(schedule.needed.min())} ends", fix="use 1 (oneshot) or more")
    stuck = np.flatnonzero(~_reached_connections(schedule))
    if len(stuck):
        trigger = int(schedule.waits_for[stuck[0]])
        raise mistake(
            "schedule",
            f"{len(stuck):,} connections wait for ever: trigger {trigger} hears of fewer than the "
            f"{int(schedule.needed[trigger])} ends it needs",
            why="they wait for each other, or for connections that do not name the trigger",
            fix="lower its number of ends, or let more connections fire it",
        )


def _reached_connections(schedule: Schedule) -> NDArray[np.bool_]:
    """Return the connections that start, assuming that each connection that starts also ends."""
    started = schedule.waits_for < 0
    while True:
        fired = schedule.fires[started & (schedule.fires >= 0)]
        ready = np.bincount(fired, minlength=len(schedule.needed)) >= schedule.needed
        reached = started | ((schedule.waits_for >= 0) & np.append(ready, False)[schedule.waits_for])
        if (reached == started).all():
            return started
        started = reached
