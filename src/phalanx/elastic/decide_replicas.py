"""A lost model replica is left out, built anew beside the others, and taken in again; nobody else is interrupted.

Only where the job allows it (`fault.on_loss`), and only within a membership: each change of who is present is a
numbered round of the same generation. Whatever this cannot deal with is for a new membership to rebuild.
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

CLEAR_S = 2.0  # between orders to end what is left of a replica
SHORT_S = 10.0  # without slots for a lost replica, after which the job shrinks and the others take its sequences
MARGIN_S = 10.0  # beyond comm.init_timeout_s, for a replica to be built


def model_replicas(state: CoordinatorState) -> ModelReplicas | None:
    """The replicas of the present membership, where lost ones are left out; None where everything is rebuilt."""
    if state.job.fault.on_loss != "leave-out":
        return None
    found = ModelReplicas.of(state.membership.layout)
    return found if found.count > 1 else None


def is_absent(state: CoordinatorState, rank: int) -> bool:
    """Whether a rank belongs to a replica that is left out at present."""
    found = model_replicas(state) if state.saved.absent else None
    return found is not None and found.place(rank)[0] in state.saved.absent


def num_present(state: CoordinatorState) -> int:
    """Ranks that train: all but those of replicas that are left out."""
    world = state.membership.world
    found = model_replicas(state)
    return world - found.size * len(state.saved.absent) if found is not None else world


def only_newcomer_missing(state: CoordinatorState) -> bool:
    """Whether all came out of their loop but a replica that was taken in when they were at their last step.

    It waits to be connected, and nobody is left to connect to.
    """
    if state.newcomer is None:
        return False
    found = model_replicas(state)
    assert found is not None
    num_others_left = sum(found.place(rank)[0] != state.newcomer for rank in state.left)
    return num_others_left == num_present(state) - found.size


def replica_to_leave_out(state: CoordinatorState) -> int | None:
    """The replica of all ranks that failed; None where leaving it out is no way on."""
    found, saved = model_replicas(state), state.saved
    if found is None or saved.forming or state.stop_requests:
        return None
    if any(one.get("state") for one in state.left.values()):
        return None  # some are at their end already, and cannot be connected anew
    if any(one.kind in UNCLEAR for one in state.failures.values()):
        return None
    # One at a time: with a second one lost, or ranks of others that gave up and kept nothing, everything is rebuilt.
    gone = {found.place(rank)[0] for rank in (*state.failures, *state.left)} | set(saved.absent)
    return gone.pop() if len(gone) == 1 else None


def leave_out(decision: Decision, replica: int) -> None:
    """The others go on without this replica, and repeat the step that they were in."""
    state, saved = decision.state, decision.state.saved
    decision.forget_failures()
    state.rejoining = state.rejoining.drop(replica)
    if replica in saved.absent:
        return  # it was being built: nobody waits for it
    state.newcomer = None
    decision.save(absent=(replica,), round=saved.round + 1)
    decision.record("replica", replica=replica, state="left out", round=state.saved.round, step=saved.step)
    _tell_round(decision, is_urgent=True)


def rejoin_replicas(decision: Decision) -> None:
    """Take every replica that is left out a step further on its way back: ended, started, connected, built, present."""
    state = decision.state
    if not state.saved.absent or state.stop_requests or state.regrow_asked:
        return  # none is, or the others are about to leave
    found = model_replicas(state)
    assert found is not None
    for replica in state.saved.absent:
        coming = state.rejoining.get(replica)
        if coming is None:
            _start_again(decision, found, replica)
        elif decision.now_s - coming.asked_s > state.job.comm.init_timeout_s + MARGIN_S:
            state.rejoining = state.rejoining.drop(replica)  # it starts again
        elif not coming.went and _are_ready(state, found, replica):
            _tell_go(decision, found, replica)
        elif coming.built.issuperset(found.ranks(replica)) and not state.unconnected:
            _take_in(decision, replica)  # else some would wait in this round, and others in the next


def on_built(decision: Decision, rank: int) -> None:
    """A rank of a replica that was left out has built its part."""
    state, found = decision.state, model_replicas(decision.state)
    if found is None:
        return
    replica = found.place(rank)[0]
    coming = state.rejoining.get(replica)
    if coming is not None and coming.went:
        state.rejoining = state.rejoining.set(replica, replace(coming, built=coming.built | {rank}))


def on_connected(decision: Decision, rank: int, number: int) -> None:
    """A replica is connected to the others of a round."""
    state, found = decision.state, model_replicas(decision.state)
    if found is not None and number == state.saved.round:
        replica = found.place(rank)[0]
        state.unconnected = state.unconnected - {replica}
        if replica == state.newcomer:
            state.newcomer = None  # it trains with the others now, and is waited for at the end like any of them


def _start_again(decision: Decision, found: ModelReplicas, replica: int) -> None:
    """New processes take the replica's ranks, as soon as there is one in each of its slots, or in spare ones."""
    state = decision.state
    places = {rank: state.membership.slots[rank] for rank in found.ranks(replica)}
    if any(state.pid_at(place) == state.saved.pids[rank] for rank, place in places.items()):
        _end_processes(decision, found, replica)  # they wait for the lost one, and hold nothing that is needed
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
    members = [{"rank": rank, "host": one.host, "slot": one.slot, "pid": pids[rank]} for rank, one in places.items()]
    decision.record("members", members=members)
    for name, slots in _slots_by_host(state, found.ranks(replica)).items():
        generation, membership, host = state.saved.generation, state.membership, state.hosts[name]
        share = membership.share_of(name)
        # It joined after this generation began; one that knows it takes no notice.
        if host.announced_generation < generation:
            decision.send(name, {"kind": "form", **membership.summary(), **share})
        decision.set_host(host.changed(ready=None, is_ready=False))
        changed = {"digest": membership.digest, **share} if lost else {}
        decision.send(name, {"kind": "rejoin", "epoch": generation, "slots": slots, **changed})


def _spare_slots(
    state: CoordinatorState, places: dict[int, HostSlot], lost: Sequence[int]
) -> dict[int, HostSlot] | None:
    """Where lost ranks can go: slots with a process and no rank, on as few hosts as can be; None without enough."""
    membership = state.membership
    if state.num_usable < membership.world:  # without looking at every slot at every tick
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
    """Ranks of a replica that is left out get other slots; nobody else is concerned before the next generation."""
    state, before = decision.state, decision.state.membership
    slots = tuple(places.get(rank, place) for rank, place in enumerate(before.slots))
    membership = Membership(generation=before.generation, layout=before.layout, slots=slots)
    decision.save(membership=membership)
    # Hosts know the membership as it was: the next one is told to each in full.
    state.hosts = state.hosts.mapped(lambda host: host.changed(announced_generation=0))


def _shrink_instead(decision: Decision) -> None:
    """There are no slots for the replica: after a while the job shrinks, where it may, to learn from whole batches."""
    state, membership = decision.state, decision.state.membership
    state.short_s = decision.now_s if state.short_s is None else state.short_s
    if decision.now_s - state.short_s < SHORT_S or state.job.fault.recovery != "auto":
        return
    state.short_s = decision.now_s  # asked again only after as long: the answer takes a look at every slot
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
    found: dict[str, list[int]] = {}
    for rank in ranks:
        place = state.membership.slots[rank]
        if place.host in state.hosts:
            found.setdefault(place.host, []).append(place.slot)
    return found


def _are_ready(state: CoordinatorState, found: ModelReplicas, replica: int) -> bool:
    hosts = _slots_by_host(state, found.ranks(replica))
    return all(
        (told := state.hosts[name].ready) is not None and all(str(slot) in told["ports"] for slot in slots)
        for name, slots in hosts.items()
    )


def replica_store(state: CoordinatorState, found: ModelReplicas, replica: int) -> list[object]:
    """Where the ranks of a replica meet: its first rank listens there."""
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
        "stores": [where if one == replica else None for one in range(found.count)],
        "went_s": state.saved.went_s,
    }
    for name, slots in _slots_by_host(state, found.ranks(replica)).items():
        decision.send(name, {**go, "slots": slots})
    # Its store is where rounds may meet from now on.
    stores = [where if one == replica else store for one, store in enumerate(all_go["stores"])]
    decision.save(go={**all_go, "stores": stores})


def _take_in(decision: Decision, replica: int) -> None:
    """The replica is built: from the end of the step that the others are in it is one of them."""
    state, saved = decision.state, decision.state.saved
    state.rejoining, state.newcomer = state.rejoining.drop(replica), replica
    decision.save(absent=(), round=saved.round + 1)
    decision.record("replica", replica=replica, state="rejoined", round=state.saved.round, step=saved.step)
    _tell_round(decision, is_urgent=False, newcomer=replica)


def _tell_round(decision: Decision, *, is_urgent: bool, newcomer: int | None = None) -> None:
    """Tell every host who is present; they meet where the first of those is that was there before."""
    state, saved, found = decision.state, decision.state.saved, model_replicas(decision.state)
    assert found is not None
    assert saved.go is not None
    present = [replica for replica in range(found.count) if replica not in saved.absent]
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
