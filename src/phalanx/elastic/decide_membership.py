"""Decisions about the next generation: its members, when they go, and the state from which they continue."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import chain, islice

from phalanx.elastic.coordinator_state import (
    CoordinatorState,
    EndRun,
    ListCheckpoints,
    MarkRunning,
    Message,
    RecordEvidence,
    SavedState,
)
from phalanx.elastic.decide_replicas import model_replicas, replica_store
from phalanx.elastic.decision import FAILED, STOPPED, Decision
from phalanx.elastic.failure import Failure
from phalanx.elastic.frozen_map import FrozenMap
from phalanx.elastic.heartbeat_board import sign_every_s
from phalanx.elastic.host_view import HostView
from phalanx.elastic.membership import HostSlot, Membership, next_membership, replace_slots
from phalanx.elastic.replica_ring import ReplicaTable
from phalanx.elastic.restore_point import find_whole_step

# For an agent to start another process in a slot. Shorter is no gain: where a fork takes long (a busy machine, a
# process of many gigabytes) the run would shrink, and grow again seconds later.
REPLACE_S = 10.0
# Members in one event: a line of 1 MiB is the longest that readers accept.
MOST_LISTED = 4096
# To wait for all hosts at the start, where the hosts that came have enough spare slots for all ranks.
SPREAD_S = 30.0
# Slots that came back must stay this long before the ranks are interrupted.
REGROW_S = 1.0


def await_hosts(decision: Decision) -> None:
    """Begin the first membership as soon as there are slots for the plan, or with fewer ranks when the time is over."""
    state, patience_s = decision.state, decision.state.job.comm.init_timeout_s
    num_wanted = state.settings.most_devices
    have_all_arrived = state.num_processes >= max(state.settings.num_slots, state.settings.planned.devices)
    waited_s = decision.now_s - state.began_s
    if state.num_usable >= num_wanted and (
        # Otherwise the first host to join would run in its spare slots the ranks meant for others, and hold all
        # replicas itself.
        (have_all_arrived and state.num_here >= state.settings.num_hosts)
        or sum(not state.is_spare(place) for place in state.living_slots()) >= num_wanted
        or waited_s > min(patience_s, SPREAD_S)
    ):
        form(decision, "start")
        return
    if state.bad_hosts and have_all_arrived:
        if not form(decision, "some hosts failed their preflight"):
            end_unfit(decision)
    elif waited_s > patience_s:
        several = len(state.host_order) > 1
        if several and form(decision, "some hosts did not arrive"):
            return
        names = ", ".join(name for name in state.host_order if name in state.hosts) or "no host"
        message = (
            f"{state.settings.run_path}: {state.num_usable} of {state.settings.planned.devices} ranks "
            f"arrived within {patience_s:g} s\n  here: {names}\n  look at the logs of the agents that are missing"
        )
        end = EndRun(state="failed", exit_code=FAILED, message=message, generation=state.saved.generation)
        decision.end_run(end)


def form(decision: Decision, reason: str) -> bool:
    """Announce the next generation; False when the living slots allow no membership."""
    state = decision.state
    before = state.saved.membership
    policy = state.job.fault.recovery
    generation = max(state.saved.generation, state.settings.newest_generation) + 1
    planned = state.settings.layout_at(state.saved.step)
    membership: Membership | None = None
    if before is not None and before.layout == planned and policy != "shrink":
        membership = _replace_lost_slots(state, before, generation)
    if membership is None:
        membership = next_membership(
            generation=generation,
            planned=planned,
            sequences=state.job.batch.global_sequences,
            reproducible=state.job.numerics.reproducible,
            policy="auto" if policy == "stop" else policy,
            before=before,
            alive=state.living_slots(),
            fallen=_slots_of_ended(state, before) if before is not None else (),
            is_spare=state.is_spare,
        )
    if membership is None:
        return False
    state.before = before
    decision.forget_failures()
    # As they were informed of the membership before.
    hosts = list(state.hosts.values())
    decision.announce_membership(membership.generation)
    alive = {host.name: host.alive for host in hosts}
    pids = _process_ids(state, membership, alive)
    state.formed = (membership, alive)
    decision.save(
        generation=membership.generation,
        membership=membership,
        pids=pids,
        running=True,
        forming=True,
        go=None,
        peers={},
        absent=(),
        round=0,
    )
    state.rejoining, state.unconnected, state.newcomer, state.short_s = FrozenMap(), frozenset(), None, None
    state.asked_at, state.unfit_s = (decision.unix_s, decision.now_s), None
    decision.begin_generation(membership.generation)
    _record_membership(decision, reason)
    tell_membership(decision, hosts)
    decision.count_as_sign(sign_every_s(len(hosts)))
    return True


def _formed_with(state: CoordinatorState) -> Mapping[str, Mapping[int, int]]:
    """Return the processes by host with which this coordinator formed the membership, if no rank moved since."""
    formed = state.formed
    return formed[1] if formed is not None and formed[0] is state.saved.membership else {}


def _process_ids(
    state: CoordinatorState, membership: Membership, alive: Mapping[str, Mapping[int, int]]
) -> tuple[int, ...]:
    """Return the process of every rank; of 131,072 only those are looked up whose host has changed."""
    before, old = state.saved.membership, _formed_with(state)
    if before is None or len(state.saved.pids) != membership.world:
        return tuple(alive[name][slot] for name, slot in membership.slots)
    pids = list(state.saved.pids)
    is_same = before.has_same_ranks(membership)
    for name in membership.hosts:
        processes = alive[name]
        if old.get(name) is not processes or not (is_same or before.has_same_ranks_on(name, membership)):
            for slot, rank in membership.ranks_on(name).items():
                pids[rank] = processes[slot]
    return tuple(pids)


def _record_membership(decision: Decision, reason: str) -> None:
    """Record the rank of every slot; a large membership in ranges of slots, in as many events as needed."""
    state, membership, pids = decision.state, decision.state.membership, decision.state.saved.pids
    if membership.world <= MOST_LISTED:
        members: list[Message] = [
            {"rank": rank, "host": place.host, "slot": place.slot, "pid": pids[rank]}
            for rank, place in enumerate(membership.slots)
        ]
    else:
        members = [
            {"rank": rank, "host": host, "slot": slot, "count": count} for rank, host, slot, count in membership.runs
        ]
    decision.record(
        "epoch",
        reason=reason,
        world=membership.world,
        plan=state.settings.num_plans,
        layout=asdict(membership.layout),
        members=members[:MOST_LISTED],
    )
    for first in range(MOST_LISTED, len(members), MOST_LISTED):
        decision.record("members", members=members[first : first + MOST_LISTED])


def tell_membership(decision: Decision, hosts: Sequence[HostView]) -> None:
    """Send the present membership to hosts; a host with the same ranks as before gets only a reference to those.

    In the usual case, a process that is replaced in its slot, this is one short message that is the same for all hosts.
    """
    membership, before = decision.state.membership, decision.state.before
    summary = {"kind": "form", **membership.summary()}
    same: list[str] = []
    shares: dict[str, Message] = {}
    # Of every host.
    is_same = before is not None and before.has_same_ranks(membership)
    for host in hosts:
        name, is_announced = host.name, before is not None and host.announced_generation == before.generation
        if is_announced and before is not None and (is_same or before.has_same_ranks_on(name, membership)):
            same.append(name)
        else:
            shares[name] = membership.share_of(name)
    decision.send_all(tuple(shares), summary, shares)
    if before is not None:
        decision.send_all(same, {**summary, "same_as": [before.generation, before.digest]})


def _replace_lost_slots(state: CoordinatorState, before: Membership, generation: int) -> Membership | None:
    """Return the membership before, with other slots for ranks that have lost theirs; None where too few are free.

    The result of `next_membership` for the same layout, without visiting all 131,072 slots: only the hosts are visited.
    """
    quarantined = state.saved.quarantined
    lost = {rank for place in quarantined if (rank := before.rank_at(place)) is not None}
    free_slots: list[HostSlot] = []
    usable = {name: host for name, host in state.hosts.items() if host.is_here and not host.problems}
    formed_with = _formed_with(state)
    for name in before.hosts:
        host = usable.get(name)
        if host is None:
            lost.update(before.ranks_on(name).values())
        elif host.alive is not formed_with.get(name):
            # Otherwise every rank here has the process that it began with.
            lost.update(rank for slot, rank in before.ranks_on(name).items() if slot not in host.alive)
    if not lost:
        # Every slot has a process again: the usual case.
        return before.renumbered(generation)
    for name in state.host_order:
        host = usable.get(name)
        if host is not None and host.alive.keys() != (ranks := before.ranks_on(name)).keys():
            free = (HostSlot(name, slot) for slot in sorted(host.alive) if slot not in ranks)
            free_slots += [place for place in free if place not in quarantined]
    if len(free_slots) < len(lost):
        return None
    return before.with_moved(generation, replace_slots(before, sorted(lost), sorted(free_slots, key=state.is_spare)))


def _slots_of_ended(state: CoordinatorState, before: Membership) -> set[HostSlot]:
    """Return slots whose process ended; one that only left, or only reported for all ranks, is as good as before."""
    failed = {before.slots[rank]: state.saved.pids[rank] for rank in state.failures}
    return {place for place, pid in failed.items() if state.pid_at(place) != pid}


def await_members(decision: Decision) -> None:
    """Wait for the members of an announced membership; once all have answered, list the checkpoints and let them go."""
    state = decision.state
    if state.replacing:
        _replace_lost_members(decision)
    elif unfit := [name for name in sorted(state.bad_hosts) if state.membership.has_host(name)]:
        _form_without(decision, unfit)
    elif _are_all_ready(state):
        decision.actions.append(ListCheckpoints())


def _are_all_ready(state: CoordinatorState) -> bool:
    return state.num_ready == state.membership.num_hosts


def _replace_lost_members(decision: Decision) -> None:
    """Put new processes into the slots of members that were lost while they left the membership before.

    The generation stays: no member was let go yet, and one failure is one generation. Where no process comes, or lost
    ranks are not to be replaced, another generation is formed; that is still the same incident.
    """
    state = decision.state
    can_replace = state.job.fault.recovery != "shrink"
    for rank, (failure, since_s) in sorted(state.replacing.items()):
        place = state.membership.slots[rank]
        host = state.hosts.get(place.host)
        is_possible = can_replace and host is not None and host.is_here and state.is_usable(place)
        pid = state.pid_at(place) if is_possible else None
        if pid is not None:
            state.replacing = state.replacing.drop(rank)
            pids = state.saved.pids
            decision.save(pids=(*pids[:rank], pid, *pids[rank + 1 :]))
            _record_replacement(decision, failure, place, pid=pid)
            decision.send(place.host, {"kind": "seat", "epoch": state.saved.generation, "slot": place.slot})
        elif not can_replace or decision.now_s - since_s > REPLACE_S:
            decision.fail_replacing()
            return


def _record_replacement(decision: Decision, failure: Failure, place: HostSlot, *, pid: int) -> None:
    """Record that a process was lost while it left the membership before (the same incident), and was replaced."""
    decision.record(
        "replacement",
        rank=failure.rank,
        host=place.host,
        slot=place.slot,
        pid=pid,
        cause={"kind": failure.kind, "message": failure.message, "signal": failure.signal},
        stack=failure.stack,
    )


def _form_without(decision: Decision, unfit: Sequence[str]) -> None:
    """Form again without members on hosts that were found bad before the start: no rank failed, so no incident."""
    state, membership = decision.state, decision.state.membership
    state.unfit_s = state.unfit_s or decision.now_s
    noun = "host" if len(unfit) == 1 else "hosts"
    if form(decision, f"without {noun} {', '.join(unfit)}: failed the preflight"):
        return
    if not await_lost_slots(decision, membership, decision.now_s - state.unfit_s):
        end_unfit(decision)


def await_lost_slots(decision: Decision, membership: Membership, waited_s: float) -> bool:
    """Return True to wait for lost slots: the run cannot continue without them, and waiting interrupts no rank."""
    state = decision.state
    if state.stop_requests:
        kill_all(decision, "stopped as asked, while not enough ranks were there to go on")
        return True
    if state.job.fault.recovery == "shrink" or waited_s > state.job.comm.init_timeout_s:
        return False
    return any(
        place.host not in state.hosts or (state.is_usable(place) and not state.is_living(place))
        for place in membership.slots
    )


def start_members(decision: Decision, checkpoints: Sequence[int]) -> None:
    """Let the members go: send them each other's addresses and the state to restore."""
    state, saved = decision.state, decision.state.saved
    if saved.membership is None or not saved.forming or state.replacing or not _are_all_ready(state):
        # A member was lost while the disk was read.
        return
    membership = saved.membership
    known = dict(state.hosts.items())
    hosts = {name: known[name] for name in membership.hosts}
    answers = [host.ready for host in hosts.values() if host.ready is not None]
    held_steps = [held_step for ready in answers for held_step in ready.get("held", ())]
    trusted = [step for step in checkpoints if saved.at_most is None or step <= saved.at_most]
    on_disk = max(trusted, default=0)
    # Replicas on other hosts than the members' cannot be reached.
    point = find_whole_step(held_steps, lineage=saved.lineage, at_most=saved.at_most)
    if point is not None and on_disk > point.step:
        # Replicas that could not be renewed for long are older than the disk.
        point = None
    step = point.step if point is not None else on_disk
    went_s = saved.went_s or decision.unix_s
    first = state.hosts[membership.slots[0].host]
    assert first.ready is not None
    restore = None
    if point is not None:
        numbers = {"epoch": point.generation, "step": point.step, "world": point.world}
        restore = {**numbers, "hosts": membership.num_hosts, "writers": point.writers.to_json()}
    go = {
        "kind": "go",
        "epoch": membership.generation,
        "store": [first.address, int(first.ready["ports"][str(membership.slots[0].slot)][0])],
        "restore": restore,
        "at_most": saved.at_most,
        "case": saved.divergence,
        "went_s": went_s,
    }
    if (replicas := model_replicas(state)) is not None:
        go["stores"] = [replica_store(state, replicas, replica) for replica in range(replicas.count)]
    source = (point.generation, point.step) if point is not None else None
    state.peer_table = _peer_table(state, hosts, membership)
    state.step_s, state.stepped_s = 0.0, decision.now_s
    decision.save(
        lineage=saved.lineage.begin(membership.generation, source=source),
        forming=False,
        go=go,
        peers=state.peer_table.peers,
        step=step,
        best_step=max(step, saved.best_step),
        went_s=went_s,
    )
    collectives = _last_collectives(state, known)
    decision.actions.append(RecordEvidence(generation=membership.generation, last_collectives=collectives))
    state.last_collectives = FrozenMap()
    # Ranks report the step they really restored: replicas and checkpoints may be damaged.
    state.awaited_restore = step
    shares = {name: {"peers": peers} for name, peers in state.saved.peers.items()}
    decision.send_all(membership.hosts, go, shares)
    decision.send_all([name for name in state.hosts if not membership.has_host(name)], go)
    decision.count_as_sign(sign_every_s(len(known)))
    decision.actions.append(MarkRunning(world=membership.world))


def _peer_table(state: CoordinatorState, hosts: Mapping[str, HostView], membership: Membership) -> ReplicaTable:
    listening = {name: (host.address, (host.ready or {})["ports"]) for name, host in hosts.items()}
    return ReplicaTable.build(
        membership,
        listening,
        machines=state.settings.machines,
        rack_hosts=state.settings.rack_hosts,
        before=state.peer_table,
    )


def _last_collectives(state: CoordinatorState, known: Mapping[str, HostView]) -> dict[int, str]:
    """Return the collectives in which ranks were when they left the membership before.

    At most `MOST_LISTED` ranks, those with the rarest collectives first.
    """
    before, reported = state.before, defaultdict[str, list[tuple[str, Sequence[int]]]](list)
    # Ranks that reported by themselves.
    own_reports = defaultdict[str, list[int]](list)
    for rank, text in state.last_collectives.items():
        own_reports[text].append(rank)
    for name in before.hosts if before is not None else ():
        host = known.get(name)
        collectives = host.ready.get("collectives") if host is not None and host.ready is not None else None
        for text, slots in collectives.items() if collectives else ():
            reported[text].append((name, slots))
    counts = {
        text: len(own_reports.get(text, ())) + sum(len(slots) for _, slots in reported.get(text, ()))
        for text in {**own_reports, **reported}
    }
    listed: dict[int, str] = {}
    for text in sorted(counts, key=lambda collective: (counts[collective], collective)):
        # Only the ranks that are listed are looked up: not all 131,072.
        members = (
            ranks[slot]
            for name, slots in reported.get(text, ())
            if before is not None and (ranks := before.ranks_on(name))
            for slot in slots
            if slot in ranks
        )
        listed.update(
            dict.fromkeys(islice(chain(own_reports.get(text, ()), members), MOST_LISTED - len(listed)), str(text))
        )
    return dict(sorted(listed.items()))


def go_of(saved: SavedState, host: str) -> Message:
    """Return the "go" message for one host."""
    assert saved.go is not None
    peers = saved.peers.get(host)
    return {**saved.go, "peers": peers} if peers else saved.go


def regrow(decision: Decision) -> None:
    """Let a job that shrank return to its planned layout at the end of a step, when the slots are there."""
    state, membership = decision.state, decision.state.membership
    wanted = state.settings.layout_at(state.saved.step)
    is_complete = membership.world >= wanted.devices
    if state.regrow_asked or state.job.fault.recovery != "auto" or is_complete or state.stop_requests:
        return
    better = None
    if state.num_usable > membership.world:
        better = next_membership(
            generation=membership.generation,
            planned=wanted,
            sequences=state.job.batch.global_sequences,
            reproducible=state.job.numerics.reproducible,
            policy="auto",
            before=membership,
            alive=state.living_slots(),
        )
    if better is None or better.world <= membership.world:
        state.regrow_s = None
        return
    state.regrow_s = state.regrow_s or decision.now_s
    if decision.now_s - state.regrow_s > REGROW_S:
        state.regrow_asked = True
        decision.broadcast({"kind": "reform"})


def end_unfit(decision: Decision) -> None:
    """End the run: without the hosts that failed their preflight there is no membership."""
    state = decision.state
    lines = [line for text in state.refusals() for line in text.splitlines()]
    decision.end_run(
        EndRun(
            state="failed",
            exit_code=FAILED,
            message="\n".join(["a host failed its preflight", *(f"  {line}" for line in lines)]),
            generation=state.saved.generation,
            how="unfit",
            at_most=state.saved.at_most,
        )
    )


def kill_all(decision: Decision, why: str, *, at_once: bool = False) -> None:
    """End the run now, whatever the ranks are doing; `at_once` where the user asked for that."""
    saved = decision.state.saved
    decision.end_run(
        EndRun(
            state="stopped",
            exit_code=STOPPED,
            message=why,
            generation=saved.generation,
            how="killed at once" if at_once else "killed",
            at_most=saved.at_most,
        )
    )
