"""All decisions of the coordinator: `decide(state, message) -> (state, actions)`, a pure function.

No clock, no disk, no socket: a test can play any situation, in any order of messages. A run waits for its hosts, forms
a membership (its members are asked, not all have answered), trains, or is over. Messages of agents only update the
state; actions are decided when the clock ticks, up to a hundred times a second.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from phalanx.elastic.clock_skew import MOST_SKEW_S, check_skew, clock_skew_s
from phalanx.elastic.coordinator_state import (
    Action,
    AgentMessage,
    AgentMessages,
    CheckpointList,
    ClockTick,
    CoordinatorSettings,
    CoordinatorState,
    EndRun,
    Input,
    Message,
    SavedState,
)
from phalanx.elastic.decide_membership import (
    await_hosts,
    await_members,
    go_of,
    kill_all,
    regrow,
    start_members,
    tell_membership,
)
from phalanx.elastic.decide_recovery import CAUSE_S, after_all_left, after_some_left, find_hung_rank, recover
from phalanx.elastic.decide_replicas import (
    is_absent,
    num_present,
    on_built,
    on_connected,
    only_newcomer_missing,
    rejoin_replicas,
)
from phalanx.elastic.decide_silence import RECONNECT_S, excuse_own_pause, give_up_hosts
from phalanx.elastic.decision import STOPPED, Decision
from phalanx.elastic.failure import HOST_LOST, Failure
from phalanx.elastic.frozen_map import BUCKETS
from phalanx.elastic.heartbeat_board import (
    WATCHER_SIGN_S,
    WATCHERS,
    WORD_S,
    Progress,
    first_sign_s,
    heartbeat_every_s,
    sign_every_s,
)
from phalanx.elastic.host_view import NO_EXCEPTIONS, HostView
from phalanx.elastic.membership import HostSlot

# An agent reads its clock before a connection that may take so long.
CONNECT_S = 2.0
# If Unix time and the monotonic clock differ by more over a period, this host's clock was set meanwhile.
CLOCK_SET_S = 1.0


def initial_state(
    settings: CoordinatorSettings, saved: SavedState, *, hosts: tuple[str, ...], now_s: float, unix_s: float
) -> tuple[CoordinatorState, list[Action]]:
    """Return state and actions of a coordinator that starts, perhaps in place of another one that saved `saved`."""
    sign_s = sign_every_s(len(hosts))
    state = CoordinatorState(
        settings=settings,
        saved=saved,
        began_s=now_s,
        listened_s=now_s,
        stepped_s=now_s,
        # Hosts that join get an answer, which is a sign of life with its own period: let them come first.
        sign_s=now_s + first_sign_s(len(hosts)) - sign_s + min(sign_s / 2, WORD_S),
        takes_over=saved.running,
        awaited_restore=saved.step if saved.running and not saved.forming else None,
        host_order=hosts,
        known_hosts=frozenset(hosts),
    )
    decision = Decision(state, now_s=now_s, unix_s=unix_s)
    if saved.running:
        decision.record("coordinator", state="took over")
    if saved.forming:
        # The coordinator that saved this may not have raised the fence yet.
        decision.begin_generation(saved.generation)
    return decision.state, decision.actions


def decide(state: CoordinatorState, message: Input) -> tuple[CoordinatorState, list[Action]]:
    """Return the state after a message, and the actions to carry out in this order. The given state is not changed."""
    decision = Decision(state, now_s=message.now_s, unix_s=message.unix_s)
    excuse_own_pause(decision)
    if isinstance(message, AgentMessage):
        _hear_agent(decision, message.host, message.body)
    elif isinstance(message, AgentMessages):
        for host, body in message.messages:
            _hear_agent(decision, host, body)
    elif isinstance(message, CheckpointList):
        if not state.is_over:
            start_members(decision, message.steps)
    else:
        _tick(decision, message)
    return decision.state, decision.actions


def _tick(decision: Decision, tick: ClockTick) -> None:
    state = decision.state
    _show_life(decision)
    if tick.stop_file:
        _request_stop(decision, 1)
    _act_on_stop(decision)
    if state.is_over:
        return
    give_up_hosts(decision)
    if state.saved.membership is None:
        await_hosts(decision)
    elif state.takes_over:
        return
    elif state.failures:
        recover(decision)
    elif state.left_s is not None and len(state.left) == num_present(state):
        after_all_left(decision)
    elif state.left_s is not None and decision.now_s - state.left_s > CAUSE_S:
        if only_newcomer_missing(state):
            after_all_left(decision)
        else:
            after_some_left(decision)
    elif state.saved.forming:
        await_members(decision)
    else:
        regrow(decision)
        rejoin_replicas(decision)
        find_hung_rank(decision)


def _show_life(decision: Decision) -> None:
    """Send signs of life to some of the agents at every tick: to 16,384 in a row takes a fifth of a second."""
    state = decision.state
    # Hosts that are still to join count too: they come in thousands.
    num_hosts = max(len(state.hosts), len(state.known_hosts))
    sign_s = sign_every_s(num_hosts)
    passed_buckets = (decision.now_s - state.sign_s) / sign_s * BUCKETS
    count = min(int(passed_buckets), BUCKETS)
    if count > 0:
        due = state.hosts.keys_in(range(state.sign_bucket, state.sign_bucket + count))
        state.sign_bucket = (state.sign_bucket + count) % BUCKETS
        state.sign_s = decision.now_s if passed_buckets > BUCKETS else state.sign_s + count * sign_s / BUCKETS
        every_s = heartbeat_every_s(num_hosts, state.job.fault.dead_after_s)
        decision.send_all(due, {"kind": "beat", "every_s": every_s, "sign_s": sign_s})
    if sign_s > WATCHER_SIGN_S and decision.now_s - state.watcher_sign_s >= WATCHER_SIGN_S:
        state.watcher_sign_s = decision.now_s
        watchers = [name for name in state.host_order[:WATCHERS] if name in state.hosts]
        every_s = heartbeat_every_s(num_hosts, state.job.fault.dead_after_s)
        decision.send_all(watchers, {"kind": "beat", "every_s": every_s, "sign_s": sign_s})


# ---- requests to stop ------------------------------------------------------------------------------------------------


def _request_stop(decision: Decision, count: int) -> None:
    """Note the `count`th request to stop, and pass it on to every agent."""
    state = decision.state
    if count > state.stop_requests:
        state.stop_requests, state.stop_asked_s = count, state.stop_asked_s or decision.now_s
        decision.broadcast({"kind": "stop"})


def _act_on_stop(decision: Decision) -> None:
    state, grace_s = decision.state, decision.state.job.fault.grace_s
    if state.is_over or state.stop_asked_s is None:
        return
    if state.stop_requests >= 2:
        kill_all(decision, "killed at once, as asked", at_once=True)
    elif state.saved.membership is None:
        message = "stopped before the first rank was started"
        decision.end_run(EndRun(state="stopped", exit_code=STOPPED, message=message, generation=state.saved.generation))
    elif state.hurry_s is not None and decision.now_s - state.hurry_s > grace_s:
        kill_all(decision, f"killed: not done within fault.grace_s = {grace_s:g} s after it was asked")


# ---- messages of agents
# ----------------------------------------------------------------------------------------------


def _hear_agent(decision: Decision, name: str, message: Message) -> None:
    """Update the state after a message; unknown kinds are ignored, as a newer agent may send them."""
    kind = str(message.get("kind"))
    if kind == "joined":
        _on_joined(decision, name, message["hello"], message.get("status"))
        return
    host = decision.state.hosts.get(name)
    if host is None:
        # The host was given up, and lives: it must join again.
        if kind != "gone":
            decision.send(name, {"kind": "again"})
        return
    if kind == "beat" and _is_of_training(decision, message):
        # Nearly all messages are heartbeats: the host's view is changed once.
        _on_beat(decision, host, message)
        return
    # All hosts send it at the same time, so here too the host's view is changed once.
    if kind == "ready":
        _on_ready(decision, host, message)
        return
    host = host.changed(heard_s=decision.heard_s)
    # Those handlers update the host themselves.
    if kind not in SETTING:
        decision.touch_host(host)
    if kind in HANDLERS:
        HANDLERS[kind](decision, host, message)


def _on_joined(decision: Decision, name: str, hello: Message, status: Message | None) -> None:
    """Add the agent that has connected; its status may be part of its hello."""
    state = decision.state
    is_new = name not in state.hosts
    skew_s = clock_skew_s(float(hello["time"]), CONNECT_S, now_s=decision.unix_s)
    problems = [str(text) for text in hello.get("problems", ())]
    problems += [problem.render() for problem in check_skew(skew_s, host=name)] if abs(skew_s) > MOST_SKEW_S else []
    if (reason := state.saved.history.excluded.get(name)) is not None:
        problems.append(reason)
    address = str(hello.get("address", ""))
    host = HostView(name, address, decision.heard_s, problems=tuple(problems))
    # Thousands join at once: each host's view is made once.
    if status is not None:
        host = _with_status(state, host, status)
    decision.set_host(host)
    if name not in state.known_hosts:
        state.host_order, state.known_hosts = (*state.host_order, name), state.known_hosts | {name}
    decision.record(
        "host", host=name, state="joined", problems=problems, link_bytes_per_s=hello.get("link_bytes_per_s")
    )
    if is_new and problems:
        decision.exclude_host(host, problems)
    if state.stop_requests:
        decision.send(name, {"kind": "stop"})
    if status is not None:
        _compare_status(decision, decision.state.hosts[name], status)


def _on_status(decision: Decision, host: HostView, message: Message) -> None:
    """Update the processes of an agent that has just connected, perhaps not for the first time."""
    host = _with_status(decision.state, host, message)
    decision.set_host(host)
    _compare_status(decision, host, message)


def _with_status(state: CoordinatorState, host: HostView, message: Message) -> HostView:
    saved, generation = state.saved, int(message["epoch"])
    is_announced = saved.membership is not None and (generation, message["digest"]) == (
        saved.generation,
        saved.membership.digest,
    )
    alive = {int(slot): int(pid) for slot, pid in message["slots"].items()}
    return host.with_processes(alive, generation if is_announced else 0)


def _compare_status(decision: Decision, host: HostView, message: Message) -> None:
    """Compare a host's processes with the membership: find those that ended, and repeat messages it missed."""
    state, saved, generation = decision.state, decision.state.saved, int(message["epoch"])
    state.arrived_s = decision.now_s
    # Before any membership is formed with these slots.
    _request_stop(decision, int(message["wishes"]))
    if saved.membership is None or not saved.running:
        return
    ranks = saved.membership.ranks_on(host.name)
    ended = [
        rank
        for slot, rank in ranks.items()
        if host.alive.get(slot) != saved.pids[rank] and rank not in state.replacing and not is_absent(state, rank)
    ]
    if generation < saved.generation and not saved.forming:
        ended = [rank for rank in ranks.values() if not is_absent(state, rank)]
    # An agent that knows no membership and has none of its processes is new: treat it as if the connection of the
    # agent before it had been found closed.
    is_new_agent = generation == 0 and not any(host.alive.get(slot) == saved.pids[rank] for slot, rank in ranks.items())
    for rank in ended:
        if is_new_agent:
            decision.fail(rank, HOST_LOST, f"host {host.name} is lost: its agent ended, and its ranks with it")
        else:
            decision.fail(rank, "Left", f"its process on host {host.name} ended while no coordinator ran")
    if ended:
        return
    # It never got the membership; or the run continued without it, and its ranks may still be training.
    is_uninformed = generation < saved.generation and (saved.forming if ranks else generation > 0)
    if is_uninformed:
        tell_membership(decision, [host])
        decision.touch_host(host.changed(announced_generation=saved.generation))
    elif not ranks:
        if generation == saved.generation and message["digest"] != saved.membership.digest:
            # Its ranks moved elsewhere within the generation: its remaining processes belong to no rank.
            decision.send(host.name, {"kind": "clear", "epoch": generation, "slots": sorted(host.alive)})
        return
    elif int(message["went"]) < saved.generation and saved.go is not None:
        decision.send(host.name, go_of(saved, host.name))
    elif saved.forming:
        # A process that already has a rank keeps it.
        for slot in ranks:
            decision.send(host.name, {"kind": "seat", "epoch": saved.generation, "slot": slot})


def _on_gone(decision: Decision, host: HostView, message: Message) -> None:
    state = decision.state
    decision.set_host(host.changed(gone_s=decision.heard_s))
    state.check_hosts_s = min(state.check_hosts_s, decision.now_s + RECONNECT_S)


def _on_up(decision: Decision, host: HostView, message: Message) -> None:
    started = {int(slot): int(pid) for slot, pid in message["slots"].items()}
    decision.set_host(host.changed(alive={**host.alive, **started}))


def _on_lost(decision: Decision, host: HostView, message: Message) -> None:
    state, saved = decision.state, decision.state.saved
    slot, pid = int(message["slot"]), int(message["pid"])
    if host.alive.get(slot) == pid:
        alive = {number: process for number, process in host.alive.items() if number != slot}
        decision.set_host(host.changed(alive=alive))
    rank = saved.membership.rank_at(HostSlot(host.name, slot)) if saved.membership is not None else None
    if rank is None or not saved.running or saved.pids[rank] != pid:
        return
    failure = Failure(**{**message["failure"], "rank": rank})
    # It never left the membership before, or has not been sent this one: the same incident.
    is_leaving = message.get("leaving") or int(message["epoch"]) < saved.generation
    if saved.forming and is_leaving and not failure.is_user:
        if rank not in state.replacing:
            state.replacing = state.replacing.set(rank, (failure, decision.now_s))
        return
    state.out_of_memory = state.out_of_memory or bool(message.get("out_of_memory"))
    decision.note_step(int(message["failure"]["step"]))
    decision.add_failure(rank, failure)


def _on_left(decision: Decision, host: HostView, message: Message) -> None:
    """Note that a rank left its membership, or several ranks of a host at once."""
    for rank_message in message.get("ranks", ()):
        _on_left(decision, host, rank_message)
    if "ranks" in message:
        return
    state = decision.state
    generation, place = int(message["epoch"]), HostSlot(host.name, int(message["slot"]))
    known = (state.saved.membership, state.before)
    membership = next(
        (candidate for candidate in known if candidate is not None and candidate.generation == generation), None
    )
    rank = membership.rank_at(place) if membership is not None else None
    if rank is None:
        return
    if message.get("last_collective"):
        state.last_collectives = state.last_collectives.set(rank, str(message["last_collective"]))
    if generation == state.saved.generation and not is_absent(state, rank):
        decision.note_step(int(message["step"]))
        state.left, state.left_s = state.left.set(rank, message), state.left_s or decision.now_s


def _on_ready(decision: Decision, host: HostView, message: Message) -> None:
    state = decision.state
    if int(message["epoch"]) != state.saved.generation:
        decision.touch_host(host.changed(heard_s=decision.heard_s))
        return
    ranks = state.saved.membership.ranks_on(host.name) if state.saved.membership is not None else {}
    is_ready = bool(ranks) and message["ports"].keys() >= _slot_names(tuple(ranks))
    state.num_ready += is_ready - host.is_ready
    decision.touch_host(host.answered(decision.heard_s, message, is_ready))
    if state.asked_at is not None and "time" in message:
        asked_s, took_s = state.asked_at[0], decision.now_s - state.asked_at[1]
        # Otherwise this host's own clock was set.
        if abs(decision.unix_s - asked_s - took_s) < CLOCK_SET_S:
            # The other host's clock was read after this request.
            skew_s = clock_skew_s(float(message["time"]), took_s, now_s=decision.unix_s)
            if abs(skew_s) > MOST_SKEW_S:
                texts = [problem.render() for problem in check_skew(skew_s, host=host.name)]
                decision.exclude_host(state.hosts[host.name], texts)


# Nearly all hosts have the same slots.
@lru_cache(maxsize=1024)
def _slot_names(slots: tuple[int, ...]) -> frozenset[str]:
    return frozenset(map(str, slots))


def _present_rank(state: CoordinatorState, host: HostView, message: Message) -> int | None:
    """Return the rank that a message is about, if it is of the present generation."""
    membership = state.saved.membership
    if membership is None or int(message["epoch"]) != membership.generation:
        return None
    return membership.ranks_on(host.name).get(int(message["slot"]))


def _on_built(decision: Decision, host: HostView, message: Message) -> None:
    if (rank := _present_rank(decision.state, host, message)) is not None:
        on_built(decision, rank)


def _on_connected(decision: Decision, host: HostView, message: Message) -> None:
    if (rank := _present_rank(decision.state, host, message)) is not None:
        on_connected(decision, rank, int(message["round"]))


def _on_restored(decision: Decision, host: HostView, message: Message) -> None:
    """Note the state from which the ranks continue, which need not be the one they were asked to restore."""
    state = decision.state
    awaited_step, step, source = state.awaited_restore, int(message["step"]), str(message["source"])
    if awaited_step is None or state.saved.forming or int(message["epoch"]) != state.saved.generation:
        return
    state.awaited_restore = None
    if step < awaited_step:
        decision.change_saved(step=step)
    asked_restore = (state.saved.go or {}).get("restore")
    # In-memory checkpoints of an earlier generation are no ancestors of this state.
    if asked_restore is not None and source != "memory":
        decision.change_saved(lineage=state.saved.lineage.begin(state.saved.generation, source=None))
    decision.record("restore", step=step, source=source)


def _on_unfit(decision: Decision, host: HostView, message: Message) -> None:
    """Exclude a host whose agent found a problem before the next membership."""
    if int(message["epoch"]) == decision.state.saved.generation:
        texts = [str(text) for text in message["problems"]]
        decision.exclude_host(host, [text for text in texts if text not in host.problems])


def _is_of_training(decision: Decision, message: Message) -> bool:
    saved = decision.state.saved
    return int(message["epoch"]) == saved.generation and not saved.forming


def _on_beat(decision: Decision, host: HostView, message: Message) -> None:
    state, saved = decision.state, decision.state.saved
    progress, reported = _progress(message["progress"]), message.get("exceptions")
    exceptions = {int(slot): _progress(values) for slot, values in reported.items()} if reported else NO_EXCEPTIONS
    decision.touch_host(host.moved(decision.heard_s, progress, exceptions))
    if saved.membership is None or not saved.membership.has_host(host.name):
        return
    step = progress[0] if progress is not None else saved.step
    if exceptions:
        step = max(step, *(exception[0] if exception is not None else step for exception in exceptions.values()))
    if step > saved.step:
        state.step_s = max(0.9 * state.step_s, decision.now_s - state.stepped_s)
        state.stepped_s = decision.now_s
        decision.note_step(step)


def _progress(reported: Sequence[Any] | None) -> Progress | None:
    return (int(reported[0]), int(reported[1]), float(reported[2])) if reported is not None else None


def _on_where(decision: Decision, host: HostView, message: Message) -> None:
    stacks = {int(slot): (bool(waits), str(place)) for slot, (waits, place) in message["ranks"].items()}
    decision.set_host(host.changed(stacks=stacks))


def _on_stop(decision: Decision, host: HostView, message: Message) -> None:
    _request_stop(decision, int(message["count"]))
    if message.get("hurry"):
        decision.state.hurry_s = decision.state.hurry_s or decision.now_s


HANDLERS: dict[str, Callable[[Decision, HostView, Message], None]] = {
    "status": _on_status,
    "gone": _on_gone,
    "up": _on_up,
    "lost": _on_lost,
    "left": _on_left,
    "built": _on_built,
    "connected": _on_connected,
    "restored": _on_restored,
    "unfit": _on_unfit,
    "where": _on_where,
    "stop": _on_stop,
}
SETTING = frozenset({"status", "gone", "up"})
