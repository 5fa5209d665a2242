"""Ranks fell, lost each other, or came out of their loop: what that means, and what is done about it."""

from __future__ import annotations

import time

from phalanx.elastic import failure as failing
from phalanx.elastic.ending import FAILED, STOPPED, end, give_up
from phalanx.elastic.failure import Failure
from phalanx.elastic.forming import REPLACE_S, form, may_return
from phalanx.elastic.incident import quarantine, write_incident
from phalanx.elastic.membership import Membership
from phalanx.elastic.memory import Message
from phalanx.elastic.room import Room
from phalanx.elastic.stuck import seeks_culprit
from phalanx.units import plural

CAUSE_S = 0.5  # after ranks have left without a known cause, time for it to show
BACK_OFF_S, MOST_BACK_OFF_S = 0.5, 10.0


def recover(room: Room) -> None:
    """A rank or a host fell: form again as soon as the seats for it are there, or give up."""
    formation = room.memory.formation
    assert formation is not None
    assert room.noticed_s is not None
    room.fail_replacing()
    cause = failing.first(list(room.failures.values()))
    waited_s = room.clock() - room.noticed_s
    ends = cause.is_user or room.job.fault.recovery == "stop"
    if ends or room.memory.failures >= room.job.fault.restarts + int(not room.is_new_incident):
        if waited_s > CAUSE_S or len(room.failures.keys() | room.left.keys()) == formation.world:
            give_up(room, cause, "" if ends else _too_often(room))
        return
    pause_s = BACK_OFF_S * 2 ** (room.memory.failures - 2) if room.memory.failures > 1 else 0.0
    if waited_s < min(pause_s, MOST_BACK_OFF_S) or _somebody_comes(room, formation, waited_s):
        return
    write_incident(room, cause)
    if form(room, _because(cause)) or may_return(room, formation, waited_s):
        return
    give_up(room, cause, _no_places(room))


def _no_places(room: Room) -> str:
    refused = room.refused()
    bad = ["; a host failed its preflight:", *(f"    {line}" for text in refused for line in text.splitlines())]
    return "there are not enough places left for any layout of this job" + ("\n".join(bad) if refused else "")


def _too_often(room: Room) -> str:
    count = room.memory.failures + int(room.is_new_incident)
    return f"{plural(count, 'failure')} in a row, without a step between (fault.restarts = {room.job.fault.restarts})"


def _somebody_comes(room: Room, formation: Membership, waited_s: float) -> bool:
    """Whether it will soon be clear who is there: a host that hung up, one that joins, a process being started."""
    if any(host.gone_s is not None or not host.told for host in room.hosts.values()):
        return True
    if room.job.fault.recovery == "shrink" or waited_s > REPLACE_S:
        return False
    alive = set(room.alive())
    missing = [formation.seats[rank] for rank in room.failures]
    coming = [seat for seat in missing if seat not in alive and room.is_usable(seat)]
    return bool(coming) and len(alive) < formation.world


def nobody_fell(room: Room) -> None:
    """Ranks lost each other, or their numbers, and every process lives."""
    formation = room.memory.formation
    assert formation is not None
    astray = [message for message in room.left.values() if message.get("fault")]
    if astray:
        _astray(room, astray[0])
        return
    rank, message = min(room.left.items(), key=lambda one: (bool(one[1].get("state")), one[0]))
    if message.get("state"):
        room.left_s = None  # some are done, the others are still at it
    elif not seeks_culprit(room, formation):
        text = str(message.get("why") or "left its formation")
        room.fail(rank, Failure(rank=rank, step=int(message["step"]), at_s=time.time(), kind="Left", message=text))


def _astray(room: Room, message: Message) -> None:
    """All ranks agree that the state is not to be trusted: go on from before it, without those to blame."""
    assert room.memory.formation is not None
    sound, step, why = int(message["sound"]), int(message["step"]), str(message["why"])
    again = step in room.memory.rolled_back
    suspects = [int(rank) for rank in message.get("suspects", ())]
    cause = Failure(rank=suspects[0] if suspects else 0, step=step, at_s=time.time(), kind="Astray", message=why)
    room.memory.case = None if suspects else message.get("evidence")
    room.failures, room.noticed_s = {cause.rank: cause}, room.noticed_s or room.clock()
    room.memory.at_most = sound
    if room.job.fault.recovery == "stop":
        give_up(room, cause)
        return
    if again and not suspects:
        give_up(room, cause, "it happened again at the same step after going back")
        return
    if room.memory.failures >= room.job.fault.restarts:
        give_up(room, cause, _too_often(room))
        return
    room.memory.rolled_back.append(step)
    write_incident(room, cause)
    if len(suspects) == 1:
        quarantine(room, room.memory.formation.seats[suspects[0]], why)
    if not form(room, f"roll back to step {sound}: {why}"):
        give_up(room, cause, _no_places(room))


def all_left(room: Room) -> None:
    """Every rank came out of its loop."""
    states = {str(one.get("state") or "") for one in room.left.values()}
    if states == {"reform"}:
        room.memory.step = max(int(one["step"]) for one in room.left.values())
        if not form(room, "as planned"):
            end(room, "failed", FAILED, f"{room.run.path}: no formation is left for step {room.memory.step}")
    elif states == {"done"}:
        end(room, "done", 0, "", step=failing.last_checkpoint(room.run))
    elif states == {"stopped"}:
        saved = failing.last_checkpoint(room.run)
        kept = f"saved step {saved:,}" if saved is not None else "nothing was saved"
        message = f"stopped as asked: {kept}; go on with: phalanx train --resume {room.run.path}"
        end(room, "stopped", STOPPED, message, step=saved)
    elif "" in states:
        nobody_fell(room)
    else:
        text = f"ranks left in different states: {', '.join(sorted(states))}"
        room.fail(0, Failure(rank=0, step=room.memory.step, at_s=time.time(), kind="Left", message=text))


def _because(cause: Failure) -> str:
    said = next(iter(cause.message.splitlines()), "")[:200]
    return f"rank {cause.rank} fell: {cause.kind} {said}".strip()
