"""Decisions about a lost model replica: leave it out, build it again, and let it rejoin, without stopping the others.

Only where the job allows it (`fault.on_loss`), and only within a membership: each change of the present replicas is
a numbered round of the same generation. Cases that this cannot handle are left to a new membership.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from phalanx.elastic.coordinator_state import CoordinatorState, Message, RejoiningReplica
from phalanx.elastic.decision import Decision
from phalanx.elastic.failure import UNCLEAR
from phalanx.elastic.frozen_map import FrozenMap
from phalanx.elastic.membership import HostSlot, Membership, next_membership
from phalanx.plan.model_replicas import ModelReplicas

# Between orders to end the remaining processes of a replica.
CLEAR_S = 2.0
# Without slots for a lost replica for so long, the job shrinks and the others take its sequences.
SHORT_S = 10.0
# Beyond comm.init_timeout_s, for a replica to be built.
MARGIN_S = 10.0


def model_replicas(state: CoordinatorState) -> ModelReplicas | None:
    """Return the replicas of the present membership, where lost ones are left out; None where all ranks
    are restored."""
    if state.job.fault.on_loss != "leave-out" or state.saved.membership is None:
        return None
    replicas = ModelReplicas.of(state.saved.membership.layout)
    return replicas if replicas.count > 1 else None


def is_absent(state: CoordinatorState, rank: int) -> bool:
    """True when a rank belongs to a replica that is left out at present."""
    if not state.saved.absent:
        return False
    replicas = model_replicas(state)
    return replicas is not None and replicas.place(rank)[0] in state.saved.absent


def num_present(state: CoordinatorState) -> int:
    """Return the number of ranks that train: all but those of replicas that are left out."""
    world = state.membership.world
    replicas = model_replicas(state) if state.saved.absent else None
    return world - replicas.size * len(state.saved.absent) if replicas is not None else world


def only_newcomer_missing(state: CoordinatorState) -> bool:
    """True when all ranks have left their loop except a replica that rejoined at their last step.

    It waits to be connected, and no rank is left to connect to.
    """
    replicas, newcomer = model_replicas(state), state.newcomer
    if replicas is None or newcomer is None or len(state.left) < num_present(state) - replicas.size:
        return False
    missing = (rank for rank in range(state.membership.world) if rank not in state.left and not is_absent(state, rank))
    return all(replicas.place(rank)[0] == newcomer for rank in missing)


def replicas_to_leave_out(state: CoordinatorState) -> set[int] | None:
    """Return the replicas of all ranks that failed; None where leaving them out is not possible."""
    replicas, saved = model_replicas(state), state.saved
    if replicas is None or saved.forming or saved.go is None or state.stop_requests:
        return None
    if any(message.get("state") for message in state.left.values()):
        # Some have finished already, and cannot be connected again.
        return None
    if any(failure.is_user or failure.kind in UNCLEAR for failure in state.failures.values()):
        return None
    lost = {replicas.place(rank)[0] for rank in state.failures}
    gone = lost | set(saved.absent)
    # One at a time: with a second one lost, all ranks are restored.
    if len(gone) > 1 or len(gone) == replicas.count:
        return None
    came_out = {replicas.place(rank)[0] for rank, message in state.left.items() if not message.get("state")}
    # Otherwise a rank of another replica gave up, and its state is gone.
    return lost if came_out <= gone else None


def leave_out(decision: Decision, lost: Iterable[int]) -> None:
    """Let the others train on without these replicas; they repeat the step that they were in."""
    state, saved, replicas = decision.state, decision.state.saved, model_replicas(decision.state)
    assert replicas is not None
    lost = set(lost)
    left_messages = {rank: message for rank, message in state.left.items() if replicas.place(rank)[0] not in lost}
    decision.forget_failures()
    state.left = FrozenMap[int, Message]().update(left_messages)
    state.left_s = decision.now_s if left_messages else None
    for replica in lost:
        state.rejoining = state.rejoining.drop(replica)
    new = sorted(lost - set(saved.absent))
    if not new:
        # A replica that was being built: no other waits for it.
        return
    state.newcomer = None
    decision.save(absent=tuple(sorted({*saved.absent, *new})), round=saved.round + 1)
    for replica in new:
        decision.record("replica", replica=replica, state="left out", round=state.saved.round, step=saved.step)
    _tell_round(decision, is_urgent=True)


def rejoin_replicas(decision: Decision) -> None:
    """Advance every replica that is left out on its way back: ended, started, connected, built, present."""
    state, replicas = decision.state, model_replicas(decision.state)
    if replicas is None or state.stop_requests or state.regrow_asked:
        # The others are about to leave.
        return
    for replica in state.saved.absent:
        rejoining = state.rejoining.get(replica)
        if rejoining is None:
            _start_again(decision, replicas, replica)
        elif decision.now_s - rejoining.asked_s > state.job.comm.init_timeout_s + MARGIN_S:
            state.rejoining = state.rejoining.drop(replica)
            _end_processes(decision, replicas, replica)
        elif not rejoining.went and _are_ready(state, replicas, replica):
            _tell_go(decision, replicas, replica)
        elif rejoining.went and rejoining.built.issuperset(replicas.ranks(replica)) and not state.unconnected:
            # Otherwise some would wait in this round, and others in the next.
            _take_in(decision, replica)


def on_built(decision: Decision, rank: int) -> None:
    """Note that a rank of a replica that was left out has built its part."""
    state, replicas = decision.state, model_replicas(decision.state)
    rejoining = state.rejoining.get(replicas.place(rank)[0]) if replicas is not None else None
    if replicas is not None and rejoining is not None and rejoining.went:
        updated = RejoiningReplica(asked_s=rejoining.asked_s, went=True, built=rejoining.built | {rank})
        state.rejoining = state.rejoining.set(replicas.place(rank)[0], updated)


def on_connected(decision: Decision, rank: int, number: int) -> None:
    """Note that a replica is connected to the others of a round."""
    state, replicas = decision.state, model_replicas(decision.state)
    if replicas is not None and number == state.saved.round:
        state.unconnected = state.unconnected - {replicas.place(rank)[0]}


def _start_again(decision: Decision, found: ModelReplicas, replica: int) -> None:
    """Assign new processes to the replica's ranks, as soon as there is one in each of its slots, or in spare ones."""
    state = decision.state
    places = {rank: state.membership.slots[rank] for rank in found.ranks(replica)}
    if any(state.pid_at(place) == state.saved.pids[rank] for rank, place in places.items()):
        # They wait for the lost rank, and hold nothing that is needed.
        _end_processes(decision, found, replica)
        return
    lost = [rank for rank, place in places.items() if not state.is_usable(place)]
    if lost:
        moved = _spare_slots(state, places, lost)
        if moved is None:
            _shrink_instead(decision)
            return
        places |= moved
    state.short_s = None
    if not all(state.is_living(place) for place in places.values()):
        return
    if lost:
        _move_ranks(decision, places)
    pids = list(state.saved.pids)
    for rank, place in places.items():
        pids[rank] = state.pid_at(place) or 0
    state.rejoining = state.rejoining.set(replica, RejoiningReplica(asked_s=decision.now_s))
    decision.save(pids=tuple(pids))
    members = [
        {"rank": rank, "host": place.host, "slot": place.slot, "pid": pids[rank]}
        for rank, place in sorted(places.items())
    ]
    decision.record("members", members=members)
    for name, slots in _slots_by_host(state, found.ranks(replica)).items():
        generation, membership, host = state.saved.generation, state.membership, state.hosts[name]
        share = membership.share_of(name)
        # A host that joined after this generation began gets the membership; one that knows it ignores the message.
        if host.announced_generation < generation:
            decision.send(name, {"kind": "form", **membership.summary(), **share})
        decision.set_host(host.changed(ready=None, is_ready=False))
        changed = {"digest": membership.digest, **share} if lost else {}
        decision.send(name, {"kind": "rejoin", "epoch": generation, "slots": slots, **changed})


def _spare_slots(
    state: CoordinatorState, places: dict[int, HostSlot], lost: Sequence[int]
) -> dict[int, HostSlot] | None:
    """Return slots for lost ranks: with a process and no rank, on as few hosts as possible; None where too few are
    free."""
    membership = state.membership
    # Checked first, so that not every slot is visited at every tick.
    if state.num_usable < membership.world:
        return None
    spare: dict[str, list[HostSlot]] = {}
    for place in state.living_slots():
        if membership.rank_at(place) is None:
            spare.setdefault(place.host, []).append(place)
    if sum(len(slots) for slots in spare.values()) < len(lost):
        return None
    near = {place.host for rank, place in places.items() if rank not in lost}
    order = sorted(spare, key=lambda name: (name not in near, -len(spare[name])))
    return dict(zip(lost, (place for name in order for place in spare[name]), strict=False))


def _move_ranks(decision: Decision, places: dict[int, HostSlot]) -> None:
    """Move ranks of a replica that is left out to other slots; no other host is notified before the next generation."""
    state, before = decision.state, decision.state.membership
    slots = tuple(places.get(rank, place) for rank, place in enumerate(before.slots))
    membership = Membership(generation=before.generation, layout=before.layout, slots=slots)
    decision.save(membership=membership)
    # Hosts know the membership as it was: the next one is sent to each in full.
    state.hosts = state.hosts.mapped(lambda host: host.changed(announced_generation=0))


def _shrink_instead(decision: Decision) -> None:
    """Shrink the job after a while without slots for the replica, where it may, so that it learns from
    whole batches."""
    state, membership = decision.state, decision.state.membership
    state.short_s = decision.now_s if state.short_s is None else state.short_s
    if decision.now_s - state.short_s < SHORT_S or state.job.fault.recovery != "auto":
        return
    # Computed again only after the same time: it visits every slot.
    state.short_s = decision.now_s
    smaller = next_membership(
        generation=state.saved.generation + 1,
        planned=state.settings.layout_at(state.saved.step),
        sequences=state.job.batch.global_sequences,
        reproducible=state.job.numerics.reproducible,
        policy="auto",
        before=membership,
        alive=state.living_slots(),
    )
    if smaller is not None:
        state.regrow_asked = True
        decision.broadcast({"kind": "reform"})


def _end_processes(decision: Decision, found: ModelReplicas, replica: int) -> None:
    state = decision.state
    if decision.now_s - state.cleared.get(replica, -CLEAR_S) < CLEAR_S:
        return
    state.cleared = state.cleared.set(replica, decision.now_s)
    for name, slots in _slots_by_host(state, found.ranks(replica)).items():
        old = [slot for slot in slots if _is_old(state, name, slot)]
        decision.send(name, {"kind": "clear", "epoch": state.saved.generation, "slots": old})


def _is_old(state: CoordinatorState, host: str, slot: int) -> bool:
    rank = state.membership.ranks_on(host)[slot]
    return state.pid_at(state.membership.slots[rank]) == state.saved.pids[rank]


def _slots_by_host(state: CoordinatorState, ranks: Sequence[int]) -> dict[str, list[int]]:
    slots_of: dict[str, list[int]] = {}
    for rank in ranks:
        place = state.membership.slots[rank]
        if place.host in state.hosts:
            slots_of.setdefault(place.host, []).append(place.slot)
    return slots_of


def _are_ready(state: CoordinatorState, found: ModelReplicas, replica: int) -> bool:
    hosts = _slots_by_host(state, found.ranks(replica))
    return all(
        (ready := state.hosts[name].ready) is not None and all(str(slot) in ready["ports"] for slot in slots)
        for name, slots in hosts.items()
    )


def replica_store(state: CoordinatorState, found: ModelReplicas, replica: int) -> list[object]:
    """Return address and port where the ranks of a replica meet: its first rank listens there."""
    place = state.membership.slots[found.rank(replica, 0)]
    host = state.hosts[place.host]
    assert host.ready is not None
    return [host.address, int(host.ready["ports"][str(place.slot)][0])]


def _tell_go(decision: Decision, found: ModelReplicas, replica: int) -> None:
    state = decision.state
    rejoining = state.rejoining[replica]
    updated = RejoiningReplica(asked_s=rejoining.asked_s, went=True)
    state.rejoining = state.rejoining.set(replica, updated)
    where = replica_store(state, found, replica)
    go = {
        "kind": "go",
        "epoch": state.saved.generation,
        "late": True,
        "store": where,
        "stores": [where if index == replica else None for index in range(found.count)],
        "went_s": state.saved.went_s,
    }
    for name, slots in _slots_by_host(state, found.ranks(replica)).items():
        decision.send(name, {**go, "slots": slots})
    # From now on rounds may meet at its store.
    stores = [*(state.saved.go or {}).get("stores", ())]
    stores[replica] = where
    decision.save(go={**(state.saved.go or {}), "stores": stores})


def _take_in(decision: Decision, replica: int) -> None:
    """Let a replica that is built rejoin the others at the end of their present step."""
    state, saved = decision.state, decision.state.saved
    state.rejoining, state.newcomer = state.rejoining.drop(replica), replica
    absent = tuple(absent_replica for absent_replica in saved.absent if absent_replica != replica)
    decision.save(absent=absent, round=saved.round + 1)
    decision.record("replica", replica=replica, state="rejoined", round=state.saved.round, step=saved.step)
    _tell_round(decision, is_urgent=False, newcomer=replica)


def _tell_round(decision: Decision, *, is_urgent: bool, newcomer: int = -1) -> None:
    """Send every host the present replicas; they meet at the first of those that was already present."""
    state, saved, replicas = decision.state, decision.state.saved, model_replicas(decision.state)
    assert replicas is not None
    present = [replica for replica in range(replicas.count) if replica not in saved.absent]
    first = next(replica for replica in present if replica != newcomer)
    state.unconnected = frozenset(present)
    stores = (saved.go or {})["stores"]
    decision.send_all(
        [name for name in state.membership.hosts if name in state.hosts],
        {
            "kind": "regroup",
            "epoch": saved.generation,
            "round": saved.round,
            "present": present,
            "store": stores[first],
            "urgent": is_urgent,
        },
    )
