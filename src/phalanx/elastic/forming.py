"""The next epoch: who is asked to take part, when all of them go, and from which state."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from phalanx.elastic.ending import end_unfit, kill_all
from phalanx.elastic.fence import begin_generation, current_generation
from phalanx.elastic.incident import write_replacement
from phalanx.elastic.membership import HostSlot, Membership, next_membership
from phalanx.elastic.memory import Message
from phalanx.elastic.restore_point import ReplicaInfo, RestorePoint, find_restore_points
from phalanx.elastic.room import Room
from phalanx.record.account.incidents import find_culprit, read_flights, recorded_epochs

MOST_FLIGHTS = 2048  # ranks whose recorders are read while others wait; of more, reports read them later
REPLACE_S = 2.0  # for an agent to start another process in a slot
GROW_S = 1.0  # seats that came back are to stay this long before the ranks are disturbed


def form(room: Room, reason: str, *, first: bool = True) -> bool:
    """Begin the next epoch; False when there is no formation for the seats that live.

    The very first is as planned, unless `first` says that enough was waited for that.
    """
    before = room.memory.formation
    policy = room.job.fault.recovery if before is not None or not first else "replace"
    formation = next_membership(
        epoch=max(room.memory.epoch, current_generation(room.run)) + 1,
        planned=room.layout_at(room.memory.step),
        sequences=room.job.batch.global_sequences,
        reproducible=room.job.numerics.reproducible,
        policy="auto" if policy == "stop" else policy,
        before=before,
        alive=room.alive(),
        fallen=_fallen(room, before) if before is not None else (),
    )
    if formation is None:
        return False
    memory, room.before = room.memory, before
    memory.epoch, memory.formation, memory.running = formation.epoch, formation, True
    memory.forming, memory.go = True, None
    memory.pids = [room.hosts[seat.host].alive[seat.slot] for seat in formation.seats]
    room.forget_failures()
    for host in room.hosts.values():
        host.ready, host.progress = None, {}
    room.save(memory)
    room.asked_at, room.unfit_s = (time.time(), room.clock()), None
    begin_generation(room.run, formation.epoch)
    room.events.write(
        "epoch",
        epoch=formation.epoch,
        reason=reason,
        world=formation.world,
        plan=room.run.plan_count(),
        layout=asdict(formation.layout),
        members=[
            {"rank": rank, "host": seat.host, "slot": seat.slot, "pid": memory.pids[rank]}
            for rank, seat in enumerate(formation.seats)
        ],
    )
    room.tell_all({"kind": "form", **formation.to_json()})
    return True


def _fallen(room: Room, before: Membership) -> list[HostSlot]:
    """Seats whose process ended: one that only left, or only spoke for all, is as good as before."""
    seats = [(before.seats[rank], room.memory.pids[rank]) for rank in room.failures]
    return [seat for seat, pid in seats if room.pid(seat) != pid]


def gather(room: Room) -> None:
    """Go as soon as every member has answered."""
    formation = room.memory.formation
    assert formation is not None
    if room.replacing:
        _replace(room, formation)
        return
    hosts = [room.hosts.get(name) for name in formation.hosts]
    if unfit := [host.name for host in hosts if host is not None and host.problems]:
        _form_without(room, unfit)
        return
    ready = {host.name: host.ready for host in hosts if host is not None and host.ready is not None}
    if all(seat.host in ready and str(seat.slot) in ready[seat.host]["ports"] for seat in formation.seats):
        _go(room, formation, ready)


def _replace(room: Room, formation: Membership) -> None:
    """Put new processes into the places of members that were lost while they left the formation before.

    The epoch stays: nobody was told to go yet, and one fault is one epoch. Where no process comes, or lost ranks are
    not to be replaced, another is formed; that is still the same incident.
    """
    can_replace = room.job.fault.recovery != "shrink"
    for rank, (failure, since_s) in list(room.replacing.items()):
        seat = formation.seats[rank]
        pid = room.pid(seat) if can_replace and room.is_here(seat.host) and room.is_usable(seat) else None
        if pid is not None:
            del room.replacing[rank]
            room.memory.pids[rank] = pid
            room.save(room.memory)
            write_replacement(room, failure, pid=pid)
            room.send(seat.host, {"kind": "seat", "epoch": formation.epoch, "slot": seat.slot})
        elif not can_replace or room.clock() - since_s > REPLACE_S:
            room.fail_replacing()
            return


def _form_without(room: Room, unfit: Sequence[str]) -> None:
    """Members turned out to be on bad hosts before anybody was told to go: no rank fell, so it is no incident."""
    formation = room.memory.formation
    assert formation is not None
    room.unfit_s = room.unfit_s or room.clock()
    noun = "host" if len(unfit) == 1 else "hosts"
    if form(room, f"without {noun} {', '.join(unfit)}: failed the preflight"):
        return
    if not may_return(room, formation, room.clock() - room.unfit_s):
        end_unfit(room)


def may_return(room: Room, formation: Membership, waited_s: float) -> bool:
    """Whether to wait for lost places: nothing can go on without them, and nobody is disturbed by waiting."""
    if room.wishes:
        kill_all(room, "stopped as asked, while not enough ranks were there to go on")
        return True
    if room.job.fault.recovery == "shrink" or waited_s > room.job.comm.init_timeout_s:
        return False
    alive = set(room.alive())
    return any(seat not in alive and (seat.host not in room.hosts or room.is_usable(seat)) for seat in formation.seats)


def _go(room: Room, formation: Membership, ready: Mapping[str, Message]) -> None:
    """Tell the members where everybody is and which state to take up."""
    choice = _choice(room, ready)
    vaults = {
        str(rank): [room.hosts[seat.host].address, int(ready[seat.host]["ports"][str(seat.slot)][1])]
        for rank, seat in enumerate(formation.seats)
    }
    first, at_most = formation.seats[0], room.memory.at_most
    saved = [step for step in room.run.saved_steps() if at_most is None or step <= at_most]
    if choice is not None and max(saved, default=0) > choice.step:
        choice = None  # copies that could not be renewed for long are older than the disk
    step = choice.step if choice is not None else max(saved, default=0)
    room.memory.went_s = room.memory.went_s or time.time()
    go = {
        "kind": "go",
        "epoch": formation.epoch,
        "store": [room.hosts[first.host].address, int(ready[first.host]["ports"][str(first.slot)][0])],
        "vaults": vaults,
        "peers": {seat.host: vaults[str(rank)] for rank, seat in reversed(list(enumerate(formation.seats)))},
        "restore": choice.to_json() if choice is not None else None,
        "at_most": at_most,
        "case": room.memory.case,
        "went_s": room.memory.went_s,
    }
    source = (choice.epoch, choice.step) if choice is not None else None
    room.memory.lineage = room.memory.lineage.begin(formation.epoch, source=source)
    room.memory.forming, room.memory.go = False, go
    room.memory.step, room.memory.best_step = step, max(step, room.memory.best_step)
    room.step_s, room.stepped_s = 0.0, room.clock()
    room.save(room.memory)
    _tell_evidence(room, formation)
    where = "memory" if choice is not None else "disk" if step else "start"
    room.events.write("restore", epoch=formation.epoch, step=step, source=where)
    room.tell_all(go)
    if room.run.status().get("state") != "running":
        room.run.set_status("running", world=formation.world, started=round(time.time(), 3))


def _tell_evidence(room: Room, formation: Membership) -> None:
    """The survivors have left what fell, and could say where they were.

    The last formation that trained need not be the one before this: some may have failed before they began.
    """
    new = [epoch for epoch in recorded_epochs(room.run) if room.told_flights < epoch < formation.epoch]
    room.told_flights = max(new, default=room.told_flights)
    found = find_culprit(read_flights(room.run, new[0], most=MOST_FLIGHTS)) if new else None
    if room.words or found is not None:
        told = {"finding": found.sentence, "culprits": list(found.culprits)} if found is not None else {}
        epoch = new[0] if new else formation.epoch - 1
        room.events.write("evidence", epoch=epoch, last_collectives=room.words, **told)
        room.words = {}


def _choice(room: Room, ready: Mapping[str, Message]) -> RestorePoint | None:
    """The newest step that the members' hosts hold in full; what others hold cannot be reached."""
    held = {name: [ReplicaInfo.from_json(one) for one in message.get("held", ())] for name, message in ready.items()}
    found = find_restore_points(held, lineage=room.memory.lineage, at_most=room.memory.at_most)
    return found[0] if found else None


def grow(room: Room) -> None:
    """A job that shrank takes its planned layout up again, at the end of a step, when the seats are there."""
    formation = room.memory.formation
    assert formation is not None
    wanted = room.layout_at(room.memory.step)
    if room.told_reform or room.job.fault.recovery != "auto" or formation.world >= wanted.devices or room.wishes:
        return
    better = next_membership(
        epoch=room.memory.epoch + 1,
        planned=wanted,
        sequences=room.job.batch.global_sequences,
        reproducible=room.job.numerics.reproducible,
        policy="auto",
        before=formation,
        alive=room.alive(),
    )
    if better is None or better.world <= formation.world:
        room.grow_s = None
        return
    room.grow_s = room.grow_s or room.clock()
    if room.clock() - room.grow_s > GROW_S:
        room.told_reform = True
        room.tell_all({"kind": "reform"})
