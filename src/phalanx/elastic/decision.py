"""A decision while it is made: the next state, and the actions that lead to it, in order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from phalanx.elastic.coordinator_state import (
    Action,
    BeginGeneration,
    CoordinatorState,
    EndRun,
    Message,
    RecordEvent,
    SaveState,
    Send,
)
from phalanx.elastic.failure import Failure
from phalanx.elastic.frozen_map import FrozenMap
from phalanx.elastic.heartbeat_board import WORD_S
from phalanx.elastic.host_view import HostView
from phalanx.elastic.membership import HostSlot

STOPPED, FAILED = 130, 3  # exit codes: 128 + SIGINT, and a system failure

# Hosts: each of them is sent the names of all.
MOST_RESCUERS = 1024


class Decision:
    """The outcome of one message. Only this class assigns to a state, and only to its own copy."""

    def __init__(self, state: CoordinatorState, *, now_s: float, unix_s: float) -> None:
        self.state, self.now_s, self.unix_s = state.copy(), now_s, unix_s
        self.heard_s = now_s - state.excused_s  # the time that is noted for a host that sends now
        self.actions: list[Action] = []
        # Draft of the hosts, as long as no other state shares it.
        self._draft: FrozenMap[str, HostView] | None = None

    # ---- actions ---------------------------------------------------------------------------------------------------

    def send(self, host: str, message: Message) -> None:
        """Send a message to one agent."""
        self.actions.append(Send(hosts=(host,), message=message))

    def send_all(self, hosts: Sequence[str], message: Message, shares: Mapping[str, Message] | None = None) -> None:
        """Send the same message to several agents, encoded once.

        `shares` are the fields that only one host gets, by host.
        """
        if hosts:
            self.actions.append(Send(hosts=tuple(hosts), message=message, shares=shares or {}))

    def broadcast(self, message: Message) -> None:
        """Send a message to every agent that is known."""
        self.actions.append(Send(hosts=tuple(self.state.hosts), message=message))

    def record(self, event: str, **fields: Any) -> None:
        """Write an event, with the generation under the name it has in event files."""
        self.actions.append(RecordEvent(event=event, fields={"epoch": self.state.saved.generation, **fields}))

    def save(self, **changes: Any) -> None:
        """Change the state that the next coordinator needs, and write it."""
        self.change_saved(**changes)
        self.actions.append(SaveState(saved=self.state.saved))

    def change_saved(self, **changes: Any) -> None:
        """Change that state without writing it; the next write contains the change."""
        self.state.saved = replace(self.state.saved, **changes)

    def begin_generation(self, generation: int) -> None:
        """Raise the fence: no rank of an older generation commits any more."""
        self.actions.append(BeginGeneration(generation=generation))

    def end_run(self, end: EndRun) -> None:
        """End the run: write how it ended, and notify every agent."""
        self.actions.append(end)
        self.state.is_over = True
        self.save(running=False)
        self.broadcast({"kind": "end", "code": end.exit_code, "rescue": self._rescue_order(end)})

    def _rescue_order(self, end: EndRun) -> Message | None:
        """Return what hosts need to write a step that only memory holds (train/state/rescue.py), or None."""
        state = self.state
        hosts = [name for name in state.host_order if name in state.hosts and state.hosts[name].is_here]
        if end.state != "failed" or not hosts or len(hosts) > MOST_RESCUERS:
            return None
        # The ranks themselves saved the step.
        if end.given_up is not None and end.given_up.cause.is_rescued:
            return None
        at_most = end.at_most if end.at_most is not None else state.saved.at_most
        lineage = state.saved.lineage.to_json()
        return {"generation": end.generation, "hosts": hosts, "lineage": lineage, "at_most": at_most}

    # ---- hosts -----------------------------------------------------------------------------------------------------

    def set_host(self, host: HostView) -> None:
        """Replace the view of a host, and update the counts that depend on it."""
        state, old = self.state, self.state.hosts.get(host.name)
        self.touch_host(host)
        if old is None or old.alive is not host.alive or old.is_here != host.is_here or old.problems != host.problems:
            self._count(host, 1)
            if old is not None:
                self._count(old, -1)
        if bool(host.problems) != (host.name in state.bad_hosts):
            state.bad_hosts = state.bad_hosts ^ {host.name}
        state.num_ready += host.is_ready - (old is not None and old.is_ready)

    def touch_host(self, host: HostView) -> None:
        """Replace the view of a host where no count changes: a heartbeat, of which there are thousands a second."""
        if self._draft is None or self._draft is not self.state.hosts:
            self._draft = self.state.hosts = self.state.hosts.draft()
        self._draft.put(host.name, host)

    def _count(self, host: HostView, sign: int) -> None:
        self.state.num_processes += sign * len(host.alive)
        self.state.num_usable += sign * host.num_usable(self.state.saved.quarantined)
        self.state.num_here += sign * host.is_here

    def drop_host(self, name: str) -> None:
        """Remove a host that is given up."""
        state, old = self.state, self.state.hosts[name]
        self._count(old, -1)
        state.num_ready -= old.is_ready
        state.bad_hosts = state.bad_hosts - {name}
        state.hosts = state.hosts.drop(name)

    def count_as_sign(self, sign_s: float) -> None:
        """Put off the next signs of life: all hosts have just been sent a message.

        By less than agents wait for a sign that is late (`QUIET_S` of host_agent.py), as sending to all takes an
        interval.
        """
        self.state.sign_s = max(self.state.sign_s, self.now_s + min(sign_s / 2, WORD_S))

    def announce_membership(self, generation: int) -> None:
        """Mark all hosts as informed of a new membership: none is ready for it or has made progress in it."""
        state = self.state
        state.hosts, state.num_ready = state.hosts.mapped(lambda host: host.announced(generation)), 0

    def exclude_host(self, host: HostView, problems: Sequence[str]) -> None:
        """Exclude a bad host until its agent is started again."""
        new = tuple(text for text in problems if text not in host.problems)
        self.set_host(host.changed(problems=(*host.problems, *new)))
        for text in problems:
            self.record("quarantine", host=host.name, reason=text)

    def exclude_for_launch(self, name: str, reason: str) -> None:
        """Exclude a host until the end of the launch, even when its agent is started again."""
        history = self.state.saved.history
        self.change_saved(history=replace(history, excluded={**history.excluded, name: reason}))
        if (host := self.state.hosts.get(name)) is not None:
            self.exclude_host(host, [reason])
        else:
            self.record("quarantine", host=name, reason=reason)

    def quarantine_slot(self, place: HostSlot, reason: str) -> None:
        """Exclude a slot from the run."""
        host, quarantined = self.state.hosts.get(place.host), self.state.saved.quarantined
        if host is not None:
            self.state.num_usable -= host.num_usable(quarantined) - host.num_usable(quarantined | {place})
        self.change_saved(quarantined=quarantined | {place})
        self.record("quarantine", host=place.host, slot=place.slot, reason=reason)

    # ---- ranks -----------------------------------------------------------------------------------------------------

    def fail(self, rank: int, kind: str, message: str, *, step: int | None = None) -> None:
        """Note that a rank has failed, as the coordinator sees it."""
        at_step = self.state.saved.step if step is None else step
        self.add_failure(rank, Failure(rank=rank, step=at_step, at_s=self.unix_s, kind=kind, message=message))

    def add_failure(self, rank: int, failure: Failure) -> None:
        """Note that a rank has failed; a failure that a process reports replaces one that is only a consequence."""
        state = self.state
        known = state.failures.get(rank)
        if known is None or known.is_consequence:
            state.failures = state.failures.set(rank, failure)
        state.noticed_s = state.noticed_s or self.now_s

    def fail_replacing(self) -> None:
        """Note the members to be replaced as failed in the same incident: another generation is needed."""
        state = self.state
        replacing, state.replacing = state.replacing, FrozenMap()
        for rank, (failure, _) in replacing.items():
            if rank not in state.failures:
                state.consequences = state.consequences | {rank}
                self.add_failure(rank, failure)

    def forget_failures(self) -> None:
        """Clear the failures; the next membership begins with none."""
        state = self.state
        state.failures, state.left, state.replacing, state.consequences = (
            FrozenMap(),
            FrozenMap(),
            FrozenMap(),
            frozenset(),
        )
        state.noticed_s = state.left_s = state.regrow_s = state.stacks_asked_s = None
        state.incident_recorded = state.regrow_asked = state.out_of_memory = False
        state.limit_reason = ""

    def note_step(self, step: int) -> None:
        """Note that the run has done so many steps, from a heartbeat or the last message of a rank.

        A heartbeat may be late.
        """
        saved = self.state.saved
        if saved.forming:
            return
        if step > saved.step:
            # The untrusted state has been left behind.
            self.change_saved(step=step, at_most=None)
        if step > saved.best_step:
            history = saved.history.after_step(step, self.unix_s)
            self.change_saved(best_step=step, failures=0, slot_failures={}, has_shrunk=False, history=history)
