"""Decisions about ranks that failed, lost each other, hang, or came out of their loop."""

from __future__ import annotations

from collections.abc import Iterator, Set

from phalanx.elastic import failure as failing
from phalanx.elastic.coordinator_state import CoordinatorState, EndRun, GivenUp, Message, RollBack
from phalanx.elastic.decide_limits import IncidentLimit, cause_of, reached_limit
from phalanx.elastic.decide_membership import REPLACE_S, await_lost_slots, form
from phalanx.elastic.decide_replicas import is_absent, leave_out, replica_to_leave_out
from phalanx.elastic.decision import FAILED, STOPPED, Decision
from phalanx.elastic.failure import Failure
from phalanx.elastic.frozen_map import FrozenMap
from phalanx.elastic.heartbeat_board import Phase
from phalanx.elastic.host_view import HostView
from phalanx.elastic.incident_history import IncidentHistory
from phalanx.elastic.membership import HostSlot
from phalanx.units import plural

# After ranks have left without a known cause, time for the cause to show.
CAUSE_S = 0.5
BACK_OFF_S, MOST_BACK_OFF_S = 0.5, 10.0
# For agents to report the places of their ranks, and to kill one.
ANSWER_S = 2.0
# Collectives time out after comm.init_timeout_s by themselves, with better messages than the coordinator's.
MARGIN_S = 10.0
SLOW_PHASES = {
    Phase.BUILDING: "setting up (communicators, state, first step)",
    Phase.RESTING: "evaluating or saving",
    Phase.LOCKED: "in native code that holds the interpreter lock",
}


def recover(decision: Decision) -> None:
    """Recover from failed ranks or hosts: form again as soon as the slots are there, or give up."""
    state, membership = decision.state, decision.state.membership
    assert state.noticed_s is not None
    decision.fail_replacing()
    cause = failing.first(list(state.failures.values()))
    waited_s = decision.now_s - state.noticed_s
    is_end = cause.is_user or cause.is_final or state.job.fault.recovery == "stop"
    if is_end or state.saved.failures >= state.job.fault.restarts + int(not state.is_new_incident):
        is_clear = waited_s > CAUSE_S or len(state.failures.keys() | state.left.keys()) == membership.world
        why = "" if is_end else _too_often(state)
        if is_clear and (is_end or not _leave_slot_out(decision, cause, why)):
            _give_up(decision, cause, why)
        return
    if (replica := replica_to_leave_out(state)) is not None:
        if replica not in state.saved.absent:
            _record_incident(decision, cause)
        leave_out(decision, replica)
        return
    pause_s = BACK_OFF_S * 2 ** (state.saved.failures - 2) if state.saved.failures > 1 else 0.0
    if waited_s < min(pause_s, MOST_BACK_OFF_S) or _is_somebody_coming(state, waited_s):
        return
    if state.is_new_incident:
        limit = reached_limit(
            _history_with(decision, cause), restarts=state.job.fault.restarts, max_lost=state.job.fault.max_lost
        )
        if limit is not None and waited_s <= CAUSE_S:
            # The first failure may be a consequence of another one.
            return
        _record_incident(decision, cause)
        if limit is not None and not _can_go_on(decision, cause, limit):
            _give_up(decision, cause, state.limit_reason)
            return
    first_line = next(iter(cause.message.splitlines()), "")[:200]
    reason = f"rank {cause.rank} failed: {cause.kind} {first_line}".strip()
    if form(decision, reason) or await_lost_slots(decision, membership, waited_s):
        return
    _give_up(decision, cause, "\n    ".join(filter(None, (state.limit_reason, _no_slots(state)))))


def _history_with(decision: Decision, cause: Failure) -> IncidentHistory:
    """Return the history with the present incident added."""
    state, saved = decision.state, decision.state.saved
    return saved.history.after_incident(
        state.membership.slots[cause.rank],
        cause_of(cause),
        began_s=decision.unix_s - (decision.now_s - state.stepped_s),
        best_step=saved.best_step,
    )


def _can_go_on(decision: Decision, cause: Failure, limit: IncidentLimit) -> bool:
    """Apply a limit; True when the run continues, without the slot or host that reached it where there is another."""
    state, place = decision.state, decision.state.membership.slots[cause.rank]
    may_shrink = limit.is_exceeded and state.job.fault.recovery in ("auto", "shrink")
    num_needed = 1 if may_shrink else state.membership.world
    host = state.hosts.get(place.host)
    state.limit_reason = limit.reason
    if limit.measure == "move" and (may_shrink or state.num_usable > num_needed):
        if place not in state.saved.quarantined:
            decision.quarantine_slot(place, limit.reason)
        return True
    num_elsewhere = state.num_usable - (host.num_usable(state.saved.quarantined) if host is not None else 0)
    if limit.measure == "exclude" and num_elsewhere >= num_needed:
        decision.exclude_for_launch(place.host, limit.reason)
        return True
    no_other = {"move": "; no other slot is free", "exclude": "; no other host is there", "end": ""}
    is_over = limit.measure == "end" or limit.is_exceeded
    state.limit_reason = limit.reason + no_other[limit.measure] if is_over else ""
    return not is_over


def _leave_slot_out(decision: Decision, cause: Failure, why: str) -> bool:
    """Continue without the one slot that failed repeatedly, on fewer ranks; False where that is not possible.

    Once, until a new furthest step is done: a failure that follows the rank to any slot is not the slot's fault.
    """
    state, place = decision.state, decision.state.membership.slots[cause.rank]
    saved = state.saved
    other_failures = (state.failures.keys() - state.consequences) - {cause.rank}
    is_alone = not other_failures and all(failed_place == place for failed_place in saved.slot_failures)
    if state.job.fault.recovery not in ("auto", "shrink") or saved.has_shrunk or not is_alone:
        return False
    _record_incident(decision, cause)
    if place not in state.saved.quarantined:
        decision.quarantine_slot(place, why)
    decision.change_saved(failures=0, slot_failures={}, has_shrunk=True)
    return form(decision, f"without slot {place.slot} of {place.host}: {why}")


def _no_slots(state: CoordinatorState) -> str:
    refusals = state.refusals()
    bad = ["; a host failed its preflight:", *(f"    {line}" for text in refusals for line in text.splitlines())]
    return "there are not enough slots left for any layout of this job" + ("\n".join(bad) if refusals else "")


def _too_often(state: CoordinatorState) -> str:
    count, most = state.saved.failures + int(state.is_new_incident), state.job.fault.restarts
    return f"{plural(count, 'failure')} in a row, without a new step between (fault.restarts = {most})"


def _is_somebody_coming(state: CoordinatorState, waited_s: float) -> bool:
    """True when it will soon be clear which processes are there: a host disconnected or joins, or a process starts."""
    if state.num_here < len(state.hosts):
        return True
    if state.job.fault.recovery == "shrink" or waited_s > REPLACE_S:
        return False
    missing = [state.membership.slots[rank] for rank in state.failures]
    is_coming = any(state.is_usable(place) and not state.is_living(place) for place in missing)
    return is_coming and state.num_usable < state.membership.world


def _record_incident(decision: Decision, cause: Failure) -> None:
    """Record the incident, once; a slot that fails repeatedly is quarantined when there is another."""
    state, membership = decision.state, decision.state.membership
    assert state.noticed_s is not None
    if not state.is_new_incident:
        return
    history = _history_with(decision, cause)
    state.incident_recorded = True
    decision.change_saved(failures=state.saved.failures + 1, history=history)
    for rank in sorted(state.failures.keys() - state.consequences):
        place = membership.slots[rank]
        count = state.saved.slot_failures.get(place, 0) + 1
        decision.change_saved(slot_failures={**state.saved.slot_failures, place: count})
        if count >= state.job.fault.restarts and state.num_usable > membership.world:
            decision.quarantine_slot(place, f"failed {plural(count, 'time')} in a row")
    place = membership.slots[cause.rank]
    decision.record(
        "incident",
        rank=cause.rank,
        host=place.host,
        slot=place.slot,
        step=max(cause.step, state.saved.step),
        cause={"kind": cause.kind, "message": cause.message, "signal": cause.signal},
        stack=cause.stack,
        others=[rank for rank in sorted(state.failures) if rank != cause.rank],
        in_a_row=state.saved.failures,
        waited_s=round(decision.now_s - state.noticed_s, 3),
    )


def _give_up(decision: Decision, cause: Failure, why: str = "", *, rollback: RollBack | None = None) -> None:
    """End the run as failed, with one message that includes the other failures."""
    state, membership = decision.state, decision.state.membership
    _record_incident(decision, cause)
    left_failures = [
        Failure(
            rank=rank, step=int(message["step"]), at_s=decision.unix_s, kind="Left", message=str(message.get("why"))
        )
        for rank, message in sorted(state.left.items())
        if rank not in state.failures and not message.get("state") and not message.get("fault")
    ]
    given_up = GivenUp(
        cause=cause,
        others=(*(failure for failure in state.failures.values() if failure is not cause), *left_failures),
        why=why,
        world=membership.world,
        host=membership.slots[cause.rank].host if len(state.host_order) > 1 else "",
        out_of_memory=state.out_of_memory,
    )
    decision.end_run(
        EndRun(
            state="failed",
            exit_code=cause.exit_code if cause.is_user else FAILED,
            message="",
            generation=state.saved.generation,
            how="given up",
            at_most=state.saved.at_most,
            given_up=given_up,
            rollback=rollback,
        )
    )


# ---- ranks that came out of their loop -------------------------------------------------------------------------------


def after_all_left(decision: Decision) -> None:
    """Decide what follows when every rank came out of its loop."""
    state = decision.state
    generation = state.saved.generation
    ends = {str(message.get("state") or "") for message in state.left.values()}
    if ends == {"reform"}:
        decision.change_saved(step=max(int(message["step"]) for message in state.left.values()))
        if not form(decision, "as planned"):
            message = f"{state.settings.run_path}: no membership is left for step {state.saved.step}"
            decision.end_run(EndRun(state="failed", exit_code=FAILED, message=message, generation=generation))
    elif ends == {"done"}:
        decision.end_run(EndRun(state="done", exit_code=0, message="", generation=generation, how="finished"))
    elif ends == {"stopped"}:
        decision.end_run(EndRun(state="stopped", exit_code=STOPPED, message="", generation=generation, how="stopped"))
    elif "" in ends:
        after_some_left(decision)
    else:
        decision.fail(0, "Left", f"ranks left in different states: {', '.join(sorted(ends))}")


def after_some_left(decision: Decision) -> None:
    """Decide what follows when ranks lost each other, or found wrong numbers, while every process lives."""
    state = decision.state
    faulty = [message for _, message in sorted(state.left.items()) if message.get("fault")]
    if faulty:
        _roll_back(decision, faulty[0])
        return
    rank, message = min(state.left.items(), key=lambda entry: (bool(entry[1].get("state")), entry[0]))
    if message.get("state"):
        # Some are done, the others still train.
        state.left_s = None
    elif not _is_culprit_dealt_with(decision):
        decision.fail(rank, "Left", str(message.get("why") or "left its membership"), step=int(message["step"]))


def _roll_back(decision: Decision, message: Message) -> None:
    """Go back to a step before the state that all ranks agree not to trust, without the ranks to blame."""
    state, membership = decision.state, decision.state.membership
    sound, step, why = int(message["sound"]), int(message["step"]), str(message["why"])
    is_again = step in state.saved.rolled_back
    suspects = [int(rank) for rank in message.get("suspects", ())]
    cause = Failure(rank=suspects[0] if suspects else 0, step=step, at_s=decision.unix_s, kind="Astray", message=why)
    state.failures, state.noticed_s = (
        FrozenMap[int, Failure]().set(cause.rank, cause),
        state.noticed_s or decision.now_s,
    )
    decision.change_saved(divergence=None if suspects else message.get("evidence"), at_most=sound)
    rollback = RollBack(generation=state.saved.generation, step=step, target=sound, reason=why)
    if state.job.fault.recovery == "stop":
        _give_up(decision, cause, rollback=rollback)
        return
    if is_again and not suspects:
        _give_up(decision, cause, "it happened again at the same step after going back", rollback=rollback)
        return
    if state.saved.failures >= state.job.fault.restarts:
        _give_up(decision, cause, _too_often(state), rollback=rollback)
        return
    decision.change_saved(rolled_back=(*state.saved.rolled_back, step))
    limit = reached_limit(
        _history_with(decision, cause), restarts=state.job.fault.restarts, max_lost=state.job.fault.max_lost
    )
    # Otherwise the suspects are quarantined below.
    if limit is not None and limit.measure == "end":
        _give_up(decision, cause, limit.reason, rollback=rollback)
        return
    _record_incident(decision, cause)
    for suspect in suspects:
        decision.quarantine_slot(membership.slots[suspect], why)
    if form(decision, f"roll back to step {sound}: {why}"):
        # After the fence was raised: the old membership commits nothing more.
        decision.actions.append(rollback)
    else:
        _give_up(decision, cause, _no_slots(state), rollback=rollback)


# ---- processes live and nothing moves --------------------------------------------------------------------------------


def find_hung_rank(decision: Decision) -> None:
    """Ask all ranks for their stacks when none makes progress, and kill the one that does not wait for others."""
    state = decision.state
    if decision.now_s - state.killed_s < ANSWER_S:
        return
    if state.stacks_asked_s is None:
        if _is_nothing_moving(state):
            _ask_for_stacks(decision)
        return
    if not _have_all_answered(decision):
        return
    state.stacks_asked_s = None
    if not _is_nothing_moving(state):
        return
    # `_members` leaves out absent ranks.
    culprit = _culprit(state, set(state.membership.slots))
    if culprit is None:
        decision.fail(0, "Deadlock", "every rank waits for another, and none moves")
        return
    host, slot, place = culprit
    progress = host.progress_of(slot)
    assert progress is not None
    phase = progress[1]
    activity, bound = SLOW_PHASES.get(Phase(phase)), f"{_patience_s(state, phase):g} s"
    text = (
        f", {activity}, which may take comm.init_timeout_s + {MARGIN_S:g} s = {bound}" if activity is not None else ""
    )
    _kill_rank(decision, host, slot, place, patience=text)


def _is_culprit_dealt_with(decision: Decision) -> bool:
    """True when a rank that is still in the membership, and has not moved for long, is being handled.

    Called when other ranks gave up waiting.
    """
    state = decision.state
    if decision.now_s - state.killed_s < ANSWER_S:
        return True
    hung = {
        membership_slot
        for host, slot in _members(state)
        if (membership_slot := HostSlot(host.name, slot))
        and state.membership.rank_at(membership_slot) not in state.left
        and host.age_s(slot) > state.job.fault.dead_after_s
    }
    if not hung:
        return False
    if state.stacks_asked_s is None:
        _ask_for_stacks(decision)
        return True
    if not _have_all_answered(decision):
        return True
    state.stacks_asked_s = None
    culprit = _culprit(state, hung)
    if culprit is not None:
        _kill_rank(decision, *culprit)
    return culprit is not None


def _members(state: CoordinatorState) -> Iterator[tuple[HostView, int]]:
    """Yield host and slot of every rank that trains and whose host is there."""
    for rank, place in enumerate(state.membership.slots):
        host = state.hosts.get(place.host)
        if host is not None and not is_absent(state, rank):
            yield host, place.slot


def _is_nothing_moving(state: CoordinatorState) -> bool:
    """True when every rank has reported, and none has made progress for longer than its phase may take.

    The first rank that moves decides: in a healthy run that is the first one checked.
    """
    for rank, place in enumerate(state.membership.slots):
        if is_absent(state, rank):
            continue
        host = state.hosts.get(place.host)
        progress = host.progress_of(place.slot) if host is not None else None
        if progress is None or progress[2] <= _patience_s(state, progress[1]):
            return False
    return True


def _patience_s(state: CoordinatorState, phase: int) -> float:
    """Return how long a phase may take: steps like the last ones; set-up, pauses and native code up to a timeout."""
    if phase == Phase.TRAINING:
        return state.job.fault.dead_after_s + 3 * state.step_s
    return state.job.comm.init_timeout_s + MARGIN_S


def _ask_for_stacks(decision: Decision) -> None:
    decision.state.stacks_asked_s = decision.now_s
    state = decision.state
    state.hosts = state.hosts.mapped(lambda host: host.changed(stacks=None))
    decision.broadcast({"kind": "where"})


def _have_all_answered(decision: Decision) -> bool:
    state = decision.state
    assert state.stacks_asked_s is not None
    asked = [host for name in state.membership.hosts if (host := state.hosts.get(name)) is not None]
    return all(host.stacks is not None for host in asked) or decision.now_s - state.stacks_asked_s > ANSWER_S


def _culprit(state: CoordinatorState, among: Set[HostSlot]) -> tuple[HostView, int, str] | None:
    """Return host, slot and place in the code of the rank that waits for no other and is furthest behind."""
    candidates = [
        (progress[0], state.membership.rank_at(HostSlot(host.name, slot)) or 0, host, slot)
        for host, slot in _members(state)
        if HostSlot(host.name, slot) in among and host.stacks and slot in host.stacks
        if not host.stacks[slot][0] and (progress := host.progress_of(slot)) is not None
    ]
    if not candidates:
        return None
    _, _, host, slot = min(candidates, key=lambda candidate: candidate[:2])
    assert host.stacks is not None
    return host, slot, host.stacks[slot][1]


def _kill_rank(decision: Decision, host: HostView, slot: int, place: str, *, patience: str = "") -> None:
    decision.state.killed_s = decision.now_s
    decision.send(
        host.name,
        {
            "kind": "kill",
            "epoch": decision.state.saved.generation,
            "slot": slot,
            "place": place,
            "silent_s": round(host.age_s(slot), 3),
            "patience": patience,
        },
    )
