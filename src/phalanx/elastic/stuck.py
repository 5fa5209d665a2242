"""Processes live and nothing moves: who is it that the others wait for?"""

from __future__ import annotations

import time
from functools import partial

from phalanx.elastic.failure import Failure
from phalanx.elastic.heartbeat_board import Phase
from phalanx.elastic.hosts import Host, culprit, is_still, seated
from phalanx.elastic.membership import Membership
from phalanx.elastic.room import Room

ANSWER_S = 2.0  # for agents to say where their ranks are, and to end one
AT = {
    Phase.BUILDING: "setting up (communicators, state, first step)",
    Phase.RESTING: "evaluating or saving",
    Phase.LOCKED: "in native code that holds the interpreter lock",
}
MARGIN_S = 10.0  # collectives give up after comm.init_timeout_s themselves, and say more about it than we can


def look_for_stuck(room: Room) -> None:
    """Processes live and nothing moves: ask where everybody is, and end the one that does not wait for others."""
    formation = room.memory.formation
    assert formation is not None
    if room.clock() - room.killed_s < ANSWER_S:
        return
    if room.asked_s is None:
        if _is_stuck(room, formation):
            _ask_where(room)
        return
    if not _has_answers(room, formation):
        return
    room.asked_s = None
    if _is_stuck(room, formation):
        _blame(room, formation)


def seeks_culprit(room: Room, formation: Membership) -> bool:
    """Ranks gave up waiting: whether one that is still in, and has not moved for long, is being dealt with."""
    now = room.clock()
    if now - room.killed_s < ANSWER_S:
        return True
    stuck = {
        (host.name, slot)
        for host, slot in seated(room.hosts, formation)
        if room.rank_of(host, slot) not in room.left and room.age_s(host, slot) > room.job.fault.dead_after_s
    }
    if not stuck:
        return False
    if room.asked_s is None:
        _ask_where(room)
        return True
    if not _has_answers(room, formation):
        return True
    room.asked_s = None
    found = culprit(room.hosts, formation, stuck)
    if found is not None:
        _kill(room, *found)
    return found is not None


def _ask_where(room: Room) -> None:
    room.asked_s = room.clock()
    for host in room.hosts.values():
        host.where = None
    room.tell_all({"kind": "where"})


def _has_answers(room: Room, formation: Membership) -> bool:
    assert room.asked_s is not None
    asked = [room.hosts[name] for name in formation.hosts if name in room.hosts]
    return all(host.where is not None for host in asked) or room.clock() - room.asked_s > ANSWER_S


def _is_stuck(room: Room, formation: Membership) -> bool:
    return is_still(room.hosts, formation, partial(_patience_s, room))


def _patience_s(room: Room, phase: int) -> float:
    """Steps are known to take as long as the last ones; nothing is known of set-up, of a rest, and of native code."""
    if phase == Phase.TRAINING:
        return room.job.fault.dead_after_s + 3 * room.step_s
    return room.job.comm.init_timeout_s + MARGIN_S


def _why_patient(room: Room, phase: int) -> str:
    """What a rank is said to have been at, where that was given more time than a step."""
    at = AT.get(Phase(phase))
    if at is None:
        return ""
    bound = f"comm.init_timeout_s + {MARGIN_S:g} s = {_patience_s(room, phase):g} s"
    return f", {at}, which may take {bound}"


def _blame(room: Room, formation: Membership) -> None:
    found = culprit(room.hosts, formation, {(host.name, slot) for host, slot in seated(room.hosts, formation)})
    if found is not None:
        host, slot, _ = found
        _kill(room, *found, patience=_why_patient(room, host.progress[slot][1]))
        return
    text = "every rank waits for another, and none moves"
    room.fail(0, Failure(rank=0, step=room.memory.step, at_s=time.time(), kind="Deadlock", message=text))


def _kill(room: Room, host: Host, slot: int, place: str, *, patience: str = "") -> None:
    room.killed_s = room.clock()
    room.send(
        host.name,
        {
            "kind": "kill",
            "epoch": room.memory.epoch,
            "slot": slot,
            "place": place,
            "silent_s": round(room.age_s(host, slot), 3),
            "patience": patience,
        },
    )
