"""What is written down when a rank fell, and when a place or a host is not to be used any more."""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.elastic.failure import Failure
from phalanx.elastic.hosts import Host
from phalanx.elastic.membership import HostSlot
from phalanx.elastic.room import Room
from phalanx.units import plural


def write_incident(room: Room, cause: Failure) -> None:
    """Record it, once."""
    formation = room.memory.formation
    assert formation is not None
    if not room.is_new_incident:
        return
    room.told_incident = True
    room.memory.failures += 1
    for rank in sorted(room.failures.keys() - room.consequences):
        seat = formation.seats[rank]
        room.memory.seat_failures[seat] = room.memory.seat_failures.get(seat, 0) + 1
        if room.memory.seat_failures[seat] >= room.job.fault.restarts and len(room.alive()) > formation.world:
            quarantine(room, seat, f"failed {plural(room.memory.seat_failures[seat], 'time')} in a row")
    seat = formation.seats[cause.rank]
    room.events.write(
        "incident",
        epoch=formation.epoch,
        rank=cause.rank,
        host=seat.host,
        slot=seat.slot,
        step=max(cause.step, room.memory.step),
        cause={"kind": cause.kind, "message": cause.message, "signal": cause.signal},
        stack=cause.stack,
        others=[rank for rank in room.failures if rank != cause.rank],
        in_a_row=room.memory.failures,
        waited_s=round(room.clock() - room.noticed_s, 3) if room.noticed_s is not None else 0.0,
    )


def write_replacement(room: Room, failure: Failure, *, pid: int) -> None:
    """Record a process that was lost while it left the epoch before, and the one that takes its place.

    It counts to the incident that ended that epoch.
    """
    formation = room.memory.formation
    assert formation is not None
    seat = formation.seats[failure.rank]
    room.events.write(
        "replacement",
        epoch=formation.epoch,
        rank=failure.rank,
        host=seat.host,
        slot=seat.slot,
        pid=pid,
        cause={"kind": failure.kind, "message": failure.message, "signal": failure.signal},
        stack=failure.stack,
    )


def quarantine(room: Room, seat: HostSlot, reason: str) -> None:
    """A place that is not used any more."""
    room.memory.quarantined.add(seat)
    room.events.write("quarantine", epoch=room.memory.epoch, host=seat.host, slot=seat.slot, reason=reason)


def shut_out(room: Room, host: Host, problems: Sequence[str]) -> None:
    """A bad host takes no part until its agent is started again."""
    host.problems = (*host.problems, *(text for text in problems if text not in host.problems))
    for text in problems:
        room.events.write("quarantine", epoch=room.memory.epoch, host=host.name, reason=text)
