"""The end of a run: as asked, or given up with the reason, and what of it is left to go on from."""

from __future__ import annotations

import time
from typing import Any

from phalanx.elastic import failure as failing
from phalanx.elastic.aside import set_aside
from phalanx.elastic.failure import Failure
from phalanx.elastic.fence import begin_epoch
from phalanx.elastic.incident import write_incident
from phalanx.elastic.room import Room

STOPPED, FAILED = 130, 3


def end(room: Room, state: str, code: int, message: str, **fields: Any) -> None:
    """Write it down and tell everybody; `fields` go into the status."""
    room.run.set_status(state, exit_code=code, message=message, **fields)
    room.events.write("end", epoch=room.memory.epoch, state=state, message=message)
    room.is_over, room.memory.running = True, False
    room.save(room.memory)
    room.tell_all({"kind": "end", "code": code})


def end_unfit(room: Room) -> None:
    """Without the hosts that failed their preflight there is no formation."""
    lines = [line for text in room.refused() for line in text.splitlines()]
    aside = _set_aside(room)
    saved = failing.last_checkpoint(room.run, at_most=room.memory.at_most)
    if saved is not None:
        lines.append(f"last good checkpoint: step {saved:,}; go on with: phalanx train --resume {room.run.path}")
    lines += [aside] if aside else []
    end(room, "failed", FAILED, "\n".join(["a host failed its preflight", *(f"  {line}" for line in lines)]))


def kill_all(room: Room, why: str) -> None:
    """End it now, whatever the ranks are doing."""
    aside = _set_aside(room)
    saved = failing.last_checkpoint(room.run, at_most=room.memory.at_most)
    kept = f"the last checkpoint is step {saved:,}" if saved is not None else "no checkpoint was written"
    end(room, "stopped", STOPPED, f"{why}; {kept}" + (f"\n  {aside}" if aside else ""), step=saved)


def _set_aside(room: Room) -> str:
    """What was saved of a state that went astray is no state to go on from; what to tell about it."""
    if room.memory.at_most is None:
        return ""
    begin_epoch(room.run, room.memory.epoch + 1)  # nobody commits any more
    return set_aside(room.run, after=room.memory.at_most)


def give_up(room: Room, cause: Failure, why: str = "") -> None:
    """The run has failed: the one message, with what others did and what is left."""
    formation = room.memory.formation
    assert formation is not None
    write_incident(room, cause)
    left = [
        Failure(rank=rank, step=int(one["step"]), at_s=time.time(), kind="Left", message=str(one.get("why")))
        for rank, one in room.left.items()
        if rank not in room.failures and not one.get("state") and not one.get("fault")
    ]
    others = [one for one in room.failures.values() if one is not cause]
    aside = _set_aside(room)
    message = failing.tell(
        room.run,
        cause,
        others=[*others, *left],
        world=formation.world,
        out_of_memory=room.out_of_memory,
        host=formation.seats[cause.rank].host if len(room.order) > 1 else "",
        at_most=room.memory.at_most,
    )
    if aside:
        message = f"{message}\n  {aside}"
    if why:
        message = f"{message}\n  given up: {why}"
    code = cause.exit_code if cause.is_user else FAILED
    end(room, "failed", code, message, rank=cause.rank, step=cause.step)
