"""A decision in the making: the next state, and the actions that lead to it, in their order."""

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

STOPPED, FAILED = 130, 3  # exit codes

MOST_RESCUERS = 1024  # hosts: each of them is told the names of all


class Decision:
    """What one message leads to. Only here is anything assigned to a state, and only to our own copy of it."""

    def __init__(self, state: CoordinatorState, *, now_s: float, unix_s: float) -> None:
        self.state, self.now_s, self.unix_s = state.copy(), now_s, unix_s
        self.heard_s = now_s - state.excused_s  # what is noted of a host that speaks now
        self.actions: list[Action] = []
        self._draft: FrozenMap[str, HostView] | None = None  # of the hosts, as long as only we know it

    # ---- actions ---------------------------------------------------------------------------------------------------

    def send(self, host: str, message: Message) -> None:
        """Say something to one agent."""
        self.actions.append(Send(hosts=(host,), message=message))

    def send_all(self, hosts: Sequence[str], message: Message, shares: Mapping[str, Message] | None = None) -> None:
        """Say the same to several agents, encoded once; `shares` is what only one of them is told besides, by host."""
        if hosts:
            self.actions.append(Send(hosts=tuple(hosts), message=message, shares=shares or {}))

    def broadcast(self, message: Message) -> None:
        """Say something to every agent that is known."""
        self.actions.append(Send(hosts=tuple(self.state.hosts), message=message))

    def record(self, event: str, **fields: Any) -> None:
        """Write an event, with the generation under the name it has in event files."""
        self.actions.append(RecordEvent(event=event, fields={"epoch": self.state.saved.generation, **fields}))

    def save(self, **changes: Any) -> None:
        """Change what the next coordinator must know, and write it down."""
        self.change_saved(**changes)
        self.actions.append(SaveState(saved=self.state.saved))

    def change_saved(self, **changes: Any) -> None:
        """Change it; to be written down together with what follows, or with the next note of progress."""
        self.state.saved = replace(self.state.saved, **changes)

    def begin_generation(self, generation: int) -> None:
        """Nobody of an older generation commits any more."""
        self.actions.append(BeginGeneration(generation=generation))

    def end_run(self, end: EndRun) -> None:
        """The run is over: write it down and tell everybody."""
        self.actions.append(end)
        self.state.is_over = True
        self.save(running=False)
        self.broadcast({"kind": "end", "code": end.exit_code, "rescue": self._rescue_order(end)})

    def _rescue_order(self, end: EndRun) -> Message | None:
        """What hosts must know to write down a step that only memory holds (train/state/rescue.py)."""
        state = self.state
        hosts = [name for name in state.host_order if name in state.hosts and state.hosts[name].is_here]
        if end.state != "failed" or not hosts or len(hosts) > MOST_RESCUERS:
            return None
        if end.given_up is not None and end.given_up.cause.is_rescued:  # by the ranks themselves
            return None
        at_most = end.at_most if end.at_most is not None else state.saved.at_most
        lineage = state.saved.lineage.to_json()
        return {"generation": end.generation, "hosts": hosts, "lineage": lineage, "at_most": at_most}

    # ---- hosts -----------------------------------------------------------------------------------------------------

    def set_host(self, host: HostView) -> None:
        """A host is as described now."""
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
        """`set_host` where nothing that is counted has changed: a heartbeat, of which there are thousands a second."""
        if self._draft is None or self._draft is not self.state.hosts:
            self._draft = self.state.hosts = self.state.hosts.draft()
        self._draft.put(host.name, host)

    def _count(self, host: HostView, sign: int) -> None:
        self.state.num_processes += sign * len(host.alive)
        self.state.num_usable += sign * host.num_usable(self.state.saved.quarantined)
        self.state.num_here += sign * host.is_here

    def drop_host(self, name: str) -> None:
        """A host is given up."""
        state, old = self.state, self.state.hosts[name]
        self._count(old, -1)
        state.num_ready -= old.is_ready
        state.bad_hosts = state.bad_hosts - {name}
        state.hosts = state.hosts.drop(name)

    def count_as_sign(self, sign_s: float) -> None:
        """All hosts have just been told something: the next round of signs of life begins later.

        By less than agents wait for a sign that is late (`QUIET_S` of host_agent.py), as the round takes an interval.
        """
        self.state.sign_s = max(self.state.sign_s, self.now_s + min(sign_s / 2, WORD_S))

    def announce_membership(self, generation: int) -> None:
        """All hosts are told of a membership that begins: nobody is ready for it, or has got anywhere in it."""
        state = self.state
        state.hosts, state.num_ready = state.hosts.mapped(lambda host: host.announced(generation)), 0

    def exclude_host(self, host: HostView, problems: Sequence[str]) -> None:
        """A bad host takes no part until its agent is started again."""
        new = tuple(text for text in problems if text not in host.problems)
        self.set_host(host.changed(problems=(*host.problems, *new)))
        for text in problems:
            self.record("quarantine", host=host.name, reason=text)

    def exclude_for_launch(self, name: str, reason: str) -> None:
        """A host takes no part until the end of the launch, also where its agent is started again."""
        history = self.state.saved.history
        self.change_saved(history=replace(history, excluded={**history.excluded, name: reason}))
        if (host := self.state.hosts.get(name)) is not None:
            self.exclude_host(host, [reason])
        else:
            self.record("quarantine", host=name, reason=reason)

    def quarantine_slot(self, place: HostSlot, reason: str) -> None:
        """A slot that is not used any more."""
        host, quarantined = self.state.hosts.get(place.host), self.state.saved.quarantined
        if host is not None:
            self.state.num_usable -= host.num_usable(quarantined) - host.num_usable(quarantined | {place})
        self.change_saved(quarantined=quarantined | {place})
        self.record("quarantine", host=place.host, slot=place.slot, reason=reason)

    # ---- ranks -----------------------------------------------------------------------------------------------------

    def fail(self, rank: int, kind: str, message: str, *, step: int | None = None) -> None:
        """A rank has failed, as we see it."""
        at_step = self.state.saved.step if step is None else step
        self.add_failure(rank, Failure(rank=rank, step=at_step, at_s=self.unix_s, kind=kind, message=message))

    def add_failure(self, rank: int, failure: Failure) -> None:
        """A rank has failed. What a process says of its end counts more than that it is gone."""
        state = self.state
        known = state.failures.get(rank)
        if known is None or known.is_consequence:
            state.failures = state.failures.set(rank, failure)
        state.noticed_s = state.noticed_s or self.now_s

    def fail_replacing(self) -> None:
        """Another generation is needed: who was to be replaced in this one has failed, as part of the same incident."""
        state = self.state
        replacing, state.replacing = state.replacing, FrozenMap()
        for rank, (failure, _) in replacing.items():
            if rank not in state.failures:
                state.consequences = state.consequences | {rank}
                self.add_failure(rank, failure)

    def forget_failures(self) -> None:
        """The next membership begins with none."""
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
        """The run has done so many steps, as a heartbeat says or the last word of a rank: a heartbeat may be late."""
        saved = self.state.saved
        if saved.forming:
            return
        if step > saved.step:
            self.change_saved(step=step, at_most=None)  # what could not be trusted was left behind
        if step > saved.best_step:
            history = saved.history.after_step(step, self.unix_s)
            self.change_saved(best_step=step, failures=0, slot_failures={}, has_shrunk=False, history=history)
