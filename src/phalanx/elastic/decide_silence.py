"""Hosts that say nothing, or hung up: when they are given up, and when it was us who did not listen."""

from __future__ import annotations

from math import inf

from phalanx.elastic.coordinator_state import CoordinatorState
from phalanx.elastic.decision import Decision
from phalanx.elastic.failure import HOST_LOST

PAUSE_S = 1.0  # between two of our own turns, after which it was us who did not listen
PAUSE_COUNTS_S = 0.01  # of a pause is not excused: who spoke before it is told from who spoke after it
MOST_PAUSES = 4  # of our own that excuse one host's silence: on a starved machine they follow each other for minutes
RECONNECT_S = 1.0  # an agent that hung up may be back at once; one whose host is gone is not
TAKE_OVER_S = 5.0  # for agents to find a new coordinator, as long as nothing seems to be wrong


def excuse_own_pause(decision: Decision) -> None:
    """If it was us who did not run for a while, the others are not to blame.

    But one that says nothing through several pauses is: between them we did listen (`_give_up_silent_hosts`). Before
    the message is taken note of: whoever speaks after our pause needs no excuse for what comes after it.
    """
    state, now = decision.state, decision.now_s
    paused_s, state.listened_s = now - state.listened_s, now
    if paused_s > PAUSE_S:
        state.excused_s += paused_s - PAUSE_COUNTS_S
        state.stepped_s += paused_s  # no step has taken so long
        # Hosts that come to a new coordinator may be at the door.
        state.began_s, state.arrived_s = state.began_s + paused_s, state.arrived_s + paused_s
        decision.heard_s = now - state.excused_s
        state.own_pauses = (*state.own_pauses, (now, decision.heard_s))
        while len(state.own_pauses) > MOST_PAUSES and now - state.own_pauses[1][0] > _unexcused_after_s(state):
            state.own_pauses = state.own_pauses[1:]
        state.check_hosts_s = -inf


def _unexcused_after_s(state: CoordinatorState) -> float:
    """Silence through `MOST_PAUSES` of our own pauses counts once it has lasted so long."""
    return 2 * state.job.fault.dead_after_s


def give_up_hosts(decision: Decision) -> None:
    """Hosts that hung up and did not come back, or say nothing any more."""
    state, now = decision.state, decision.now_s
    if now > state.check_hosts_s:
        _give_up_silent_hosts(decision)
    if state.takes_over:
        patience_s = RECONNECT_S if state.failures or state.left else TAKE_OVER_S
        # As long as hosts come, others may be under way: thousands cannot come at once.
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
    """Goes through all hosts, and not again before another could be due: who speaks from now on is due later than now.

    One that hangs up meanwhile says so itself (`_on_gone`).
    """
    state, now, dead_after_s = decision.state, decision.now_s, decision.state.job.fault.dead_after_s
    until_s, excused_s = now + dead_after_s, state.excused_s
    unexcused_s = -inf
    if len(state.own_pauses) >= MOST_PAUSES and now - state.own_pauses[0][0] > _unexcused_after_s(state):
        unexcused_s = state.own_pauses[0][1]  # who has not spoken since was silent through all of them
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
