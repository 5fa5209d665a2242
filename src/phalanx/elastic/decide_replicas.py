"""Decisions about a lost model replica: leave it out, build it again, and let it rejoin, without stopping the others.

Only where the job allows it (`fault.on_loss`), and only within a membership: each change of the present replicas is
a numbered round of the same generation. Cases that this cannot handle are left to a new membership.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf

from phalanx.elastic.coordinator_state import CoordinatorState, RejoiningReplica
from phalanx.elastic.decision import Decision
from phalanx.elastic.failure import UNCLEAR
from phalanx.elastic.membership import HostSlot, Membership, next_membership
from phalanx.plan.model_replicas import ModelReplicas

# Between orders to end the remaining processes of a replica.
CLEAR_S = 2.0
# Without slots for a lost replica for so long, the job shrinks and the other replicas take its sequences.
SHORT_S = 10.0
# Beyond comm.init_timeout_s, for a replica to be built.
MARGIN_S = 10.0


def model_replicas(state: CoordinatorState) -> ModelReplicas | None:
    """The replicas of the present membership; None where lost ones are not left out, or there is only one."""
    if state.job.fault.on_loss != "leave-out":
        return None
    replicas = ModelReplicas.of(state.membership.layout)
    return replicas if replicas.count > 1 else None


def is_absent(state: CoordinatorState, rank: int) -> bool:
    """True when a rank belongs to a replica that is left out at present."""
    replicas = model_replicas(state) if state.saved.absent else None
    return replicas is not None and replicas.place(rank)[0] in state.saved.absent


def num_present(state: CoordinatorState) -> int:
    """Return the number of ranks that train: all but those of replicas that are left out."""
    world = state.membership.world
    replicas = model_replicas(state)
    return world - replicas.size * len(state.saved.absent) if replicas is not None else world


def only_newcomer_missing(state: CoordinatorState) -> bool:
    """True when all ranks have left their loop except a replica that rejoined at their last step.

    It waits to be connected, and no rank is left to connect to.
    """
    if state.newcomer is None:
        return False
    replicas = model_replicas(state)
    assert replicas is not None
    num_others_left = sum(replicas.place(rank)[0] != state.newcomer for rank in state.left)
    return num_others_left == num_present(state) - replicas.size


def replica_to_leave_out(state: CoordinatorState) -> int | None:
    """Return the one replica of all ranks that failed or left; None where leaving it out is not possible."""
    replicas, saved = model_replicas(state), state.saved
    if replicas is None or saved.forming or state.stop_requests:
        return None
    if any(message.get("state") for message in state.left.values()):
        # Some have finished already, and cannot be connected again.
        return None
    if any(failure.kind in UNCLEAR for failure in state.failures.values()):
        return None
    # One at a time: all ranks are restored where a second replica is lost, or ranks of another one gave up, whose
    # state is then gone.
    gone = {replicas.place(rank)[0] for rank in (*state.failures, *state.left)} | set(saved.absent)
    return gone.pop() if len(gone) == 1 else None


def leave_out(decision: Decision, replica: int) -> None:
    """Let the other replicas train on without this one; they repeat the step that they were in."""
    state, saved = decision.state, decision.state.saved
    decision.forget_failures()
    state.rejoining = state.rejoining.drop(replica)
    if replica in saved.absent:
        # It was being built: no rank waits for it.
        return
    state.newcomer = None
    decision.save(absent=(replica,), round=saved.round + 1)
    decision.record("replica", replica=replica, state="left out", round=state.saved.round, step=saved.step)
    _tell_round(decision, is_urgent=True)


def rejoin_replicas(decision: Decision) -> None:
    """Advance every replica that is left out on its way back: ended, started, connected, built, present."""
    state = decision.state
    if not state.saved.absent or state.stop_requests or state.regrow_asked:
        # No replica is left out, or the others are about to leave.
        return
    replicas = model_replicas(state)
    assert replicas is not None
    for replica in state.saved.absent:
        rejoining = state.rejoining.get(replica)
        if rejoining is None:
            _start_again(decision, replicas, replica)
        elif decision.now_s - rejoining.asked_s > state.job.comm.init_timeout_s + MARGIN_S:
            state.rejoining = state.rejoining.drop(replica)  # it starts again
        elif not rejoining.went and _are_ready(state, replicas, replica):
            _tell_go(decision, replicas, replica)
        elif rejoining.built.issuperset(replicas.ranks(replica)) and not state.unconnected:
            # Otherwise some would wait in this round, and others in the next.
            _take_in(decision, replica)


def on_built(decision: Decision, rank: int) -> None:
    """Note that a rank of a replica that was left out has built its part."""
    state, replicas = decision.state, model_replicas(decision.state)
    if replicas is None:
        return
    replica = replicas.place(rank)[0]
    rejoining = state.rejoining.get(replica)
    if rejoining is not None and rejoining.went:
        state.rejoining = state.rejoining.set(replica, replace(rejoining, built=rejoining.built | {rank}))


def on_connected(decision: Decision, rank: int, number: int) -> None:
    """Note that a replica is connected to the others of a round."""
    state, replicas = decision.state, model_replicas(decision.state)
    if replicas is not None and number == state.saved.round:
        replica = replicas.place(rank)[0]
        state.unconnected = state.unconnected - {replica}
        if replica == state.newcomer:
            # It trains with the others now, and is waited for at the end like any of them.
            state.newcomer = None


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
        pids[rank] = state.hosts[place.host].alive[place.slot]
    state.rejoining = state.rejoining.set(replica, RejoiningReplica(asked_s=decision.now_s))
    decision.save(pids=tuple(pids))
    members = [
        {"rank": rank, "host": slot_of_rank.host, "slot": slot_of_rank.slot, "pid": pids[rank]}
        for rank, slot_of_rank in places.items()
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
    """Return slots with a process and no rank for lost ranks, on as few hosts as possible; None if too few are free."""
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
    kept_hosts = {place.host for rank, place in places.items() if rank not in lost}
    order = sorted(spare, key=lambda name: (name not in kept_hosts, -len(spare[name])))
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
    """Shrink the job, where it may, after a while without slots for the replica, to learn from whole batches."""
    state, membership = decision.state, decision.state.membership
    state.short_s = decision.now_s if state.short_s is None else state.short_s
    if decision.now_s - state.short_s < SHORT_S or state.job.fault.recovery != "auto":
        return
    # Computed again only after the same time: it visits every slot.
    state.short_s = decision.now_s
    smaller = next_membership(
        generation=membership.generation,
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
    if decision.now_s - state.cleared.get(replica, -inf) < CLEAR_S:
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
    state, all_go = decision.state, decision.state.saved.go
    assert all_go is not None
    state.rejoining = state.rejoining.set(replica, replace(state.rejoining[replica], went=True))
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
    stores = [where if index == replica else store for index, store in enumerate(all_go["stores"])]
    decision.save(go={**all_go, "stores": stores})


def _take_in(decision: Decision, replica: int) -> None:
    """Let a replica that is built rejoin the others at the end of their present step."""
    state, saved = decision.state, decision.state.saved
    state.rejoining, state.newcomer = state.rejoining.drop(replica), replica
    decision.save(absent=(), round=saved.round + 1)
    decision.record("replica", replica=replica, state="rejoined", round=state.saved.round, step=saved.step)
    _tell_round(decision, is_urgent=False, newcomer=replica)


def _tell_round(decision: Decision, *, is_urgent: bool, newcomer: int | None = None) -> None:
    """Send every host the present replicas; they meet at the first of those that was already present."""
    state, saved, replicas = decision.state, decision.state.saved, model_replicas(decision.state)
    assert replicas is not None
    assert saved.go is not None
    present = [replica for replica in range(replicas.count) if replica not in saved.absent]
    first = next(replica for replica in present if replica != newcomer)
    state.unconnected = frozenset(present)
    decision.send_all(
        [name for name in state.membership.hosts if name in state.hosts],
        {
            "kind": "regroup",
            "epoch": saved.generation,
            "round": saved.round,
            "present": present,
            "store": saved.go["stores"][first],
            "urgent": is_urgent,
        },
    )
