"""Decisions about silent hosts: when they are given up, and when the coordinator itself did not listen."""

from __future__ import annotations

from math import inf

from phalanx.elastic.coordinator_state import CoordinatorState
from phalanx.elastic.decision import Decision
from phalanx.elastic.failure import HOST_LOST

# If two turns are further apart, the coordinator itself did not listen.
PAUSE_S = 1.0
# Of a pause so much is not excused, to distinguish messages before it from messages after it.
PAUSE_COUNTS_S = 0.01
# Own pauses that excuse one host's silence: on a starved machine they follow each other for minutes.
MOST_PAUSES = 4
# An agent that disconnected may be back at once; one whose host is gone is not.
RECONNECT_S = 1.0
# For agents to find a new coordinator, as long as nothing seems to be wrong.
TAKE_OVER_S = 5.0


def excuse_own_pause(decision: Decision) -> None:
    """Excuse hosts for the time in which the coordinator itself did not run.

    A host that is silent through several pauses is not excused: between them the coordinator did listen
    (`_give_up_silent_hosts`). Called before the message is handled: a host that sends after the pause needs no excuse
    for later silence.
    """
    state, now = decision.state, decision.now_s
    paused_s, state.listened_s = now - state.listened_s, now
    if paused_s > PAUSE_S:
        state.excused_s += paused_s - PAUSE_COUNTS_S
        # The pause is not the duration of a step.
        state.stepped_s += paused_s
        # Hosts that join a new coordinator may be waiting to be accepted.
        state.began_s, state.arrived_s = state.began_s + paused_s, state.arrived_s + paused_s
        decision.heard_s = now - state.excused_s
        state.own_pauses = (*state.own_pauses, (now, decision.heard_s))
        while len(state.own_pauses) > MOST_PAUSES and now - state.own_pauses[1][0] > _unexcused_after_s(state):
            state.own_pauses = state.own_pauses[1:]
        state.check_hosts_s = -inf


def _unexcused_after_s(state: CoordinatorState) -> float:
    """Silence through `MOST_PAUSES` of the coordinator's own pauses counts once it has lasted this long."""
    return 2 * state.job.fault.dead_after_s


def give_up_hosts(decision: Decision) -> None:
    """Give up hosts that disconnected and did not return, or that are silent."""
    state, now = decision.state, decision.now_s
    if now > state.check_hosts_s:
        _give_up_silent_hosts(decision)
    if state.takes_over:
        patience_s = RECONNECT_S if state.failures or state.left else TAKE_OVER_S
        # As long as hosts join, others may be under way: thousands cannot join at once.
        is_waiting = now - max(state.began_s, state.arrived_s) < patience_s
        if is_waiting and state.num_here < state.membership.num_hosts:
            return
        missing = [
            name for name in state.membership.hosts if (host := state.hosts.get(name)) is None or not host.is_here
        ]
        if is_waiting and missing:
            return
        state.takes_over = False
        for name in missing:
            _lose_host(decision, name, "did not come back")


def _give_up_silent_hosts(decision: Decision) -> None:
    """Give up silent hosts, and compute when the next one could be due: a host that sends now is due later than that.

    A host that disconnects meanwhile is noticed separately (`_on_gone`).
    """
    state, now, dead_after_s = decision.state, decision.now_s, decision.state.job.fault.dead_after_s
    until_s, excused_s = now + dead_after_s, state.excused_s
    unexcused_s = -inf
    if len(state.own_pauses) >= MOST_PAUSES and now - state.own_pauses[0][0] > _unexcused_after_s(state):
        # A host that has not sent since was silent through all of them.
        unexcused_s = state.own_pauses[0][1]
    for name, host in state.hosts.items():
        silent = now - excused_s - host.heard_s > dead_after_s or host.heard_s < unexcused_s
        gone_s = host.gone_s
        if silent or (gone_s is not None and now - excused_s - gone_s > RECONNECT_S):
            decision.drop_host(name)
            has_hung_up = gone_s is not None
            reason = "is lost: its agent closed the connection" if has_hung_up else "stopped sending heartbeats"
            _lose_host(decision, name, reason)
            continue
        due_s = host.heard_s + excused_s + dead_after_s
        until_s = min(until_s, due_s if gone_s is None else min(due_s, gone_s + excused_s + RECONNECT_S))
    state.check_hosts_s = until_s


def _lose_host(decision: Decision, name: str, what: str) -> None:
    membership = decision.state.saved.membership
    decision.record("host", host=name, state="lost", reason=what)
    for rank in membership.ranks_on(name).values() if membership is not None else ():
        decision.fail(rank, HOST_LOST, f"host {name} {what}")
