"""Hosts that are waited for: at the start, after a coordinator took over, and those that say nothing any more."""

from __future__ import annotations

import time

from phalanx.elastic.ending import FAILED, end, end_unfit
from phalanx.elastic.failure import Failure
from phalanx.elastic.forming import form
from phalanx.elastic.room import Room

RECONNECT_S = 1.0  # an agent that hung up may be back at once; one whose host is gone is not
TAKE_OVER_S = 5.0  # for agents to find a new coordinator, as long as nothing seems to be wrong


def wait_for_hosts(room: Room) -> None:
    patience_s = room.job.comm.init_timeout_s
    late = room.clock() - room.began_s > patience_s
    refused = room.refused()
    if len(room.alive()) >= room.layout_at(0).devices:
        form(room, "start")
    elif refused and _all_arrived(room) and not form(room, "some hosts failed their preflight", first=False):
        end_unfit(room)
    elif late and (len(room.order) < 2 or not form(room, "some hosts did not arrive", first=False)):
        here = ", ".join(room.hosts) or "nobody"
        message = (
            f"{room.run.path}: {len(room.alive())} of {room.planned.devices} ranks arrived within "
            f"{patience_s:g} s\n  here: {here}\n  look at the logs of the agents that are missing"
        )
        end(room, "failed", FAILED, message)


def _all_arrived(room: Room) -> bool:
    return sum(len(host.alive) for host in room.hosts.values()) >= max(room.slots, room.planned.devices)


def miss_hosts(room: Room) -> None:
    """Hosts that hung up and did not come back, or say nothing any more."""
    now = room.clock()
    for name, host in list(room.hosts.items()):
        silent = now - host.heard_s > room.job.fault.dead_after_s
        if (host.gone_s is not None and now - host.gone_s > RECONNECT_S) or silent:
            del room.hosts[name]
            _lose_host(room, name, "says nothing any more" if silent else "is gone: its agent hung up")
    if room.takes_over and room.memory.formation is not None:
        missing = [name for name in room.memory.formation.hosts if not room.is_here(name)]
        patience_s = RECONNECT_S if room.failures or room.left else TAKE_OVER_S
        if missing and now - room.began_s < patience_s:
            return
        room.takes_over = False
        for name in missing:
            _lose_host(room, name, "did not come back")


def _lose_host(room: Room, name: str, what: str) -> None:
    room.events.write("host", host=name, state="lost", epoch=room.memory.epoch, reason=what)
    formation = room.memory.formation
    for rank in formation.of_host(name).values() if formation is not None else ():
        text = f"host {name} {what}"
        room.fail(rank, Failure(rank=rank, step=room.memory.step, at_s=time.time(), kind="HostLost", message=text))
