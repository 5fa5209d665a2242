"""A coordinator that is only `decide`, and agents that answer at once: no file, no process, a clock moved by hand."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from phalanx.elastic.coordinator_state import (
    Action,
    AgentMessage,
    BeginGeneration,
    CheckpointList,
    ClockTick,
    CoordinatorSettings,
    EndRun,
    Input,
    ListCheckpoints,
    RecordEvent,
    RecordEvidence,
    RollBack,
    SavedState,
    Send,
)
from phalanx.elastic.decide import decide, initial_state
from phalanx.elastic.failure import by_signal
from phalanx.job.schema import Job
from phalanx.plan.layout import Layout
from phalanx.plan.plan import Plan

DEAD_S, TIMEOUT_S = 5.0, 60.0  # of the job: fault.dead_after_s and comm.init_timeout_s
UNIX_S = 1.7e9  # Unix time at 0 s of the clock


@cache
def _job() -> Job:
    return Plan.from_json((Path(__file__).parent / "synthetic_plan.json").read_text()).job


def data_layout(world: int) -> Layout:
    """A layout of so many ranks that share one model replica."""
    return Layout(
        data=world, shard=world, tensor=1, context=1, pipeline=1, virtual_pipeline=1, expert=1, zero=2,
        sequence_parallel=False, micro_batch=1, accumulation=12 // world, recompute="none", precision="fp32",
        schedule="1f1b", offload="none", compression="none",
    )  # fmt: skip


class PureRun:
    """A run of four ranks; `hosts` says how many slots each host has, with a process in every one."""

    def __init__(
        self,
        hosts: Mapping[str, int],
        *,
        settings: Mapping[str, Any] | None = None,
        timeout_s: float = TIMEOUT_S,
        planned: Layout | None = None,
        **fault: Any,
    ) -> None:
        job = replace(
            _job(),
            fault=replace(_job().fault, **{"dead_after_s": DEAD_S, "recovery": "auto", **fault}),
            comm=replace(_job().comm, init_timeout_s=timeout_s),
            batch=replace(_job().batch, global_sequences=12),
        )
        fields = {"num_slots": sum(hosts.values()), "num_hosts": len(hosts), **(settings or {})}
        self.settings = CoordinatorSettings(run_path="run", job=job, planned=planned or data_layout(4), **fields)
        self.now_s, self.checkpoints, self.asked_for_checkpoints = 100.0, (0,), 0
        self.does_disk_answer = True
        self.pids = {
            host: {slot: 1000 * (at + 1) + slot for slot in range(hosts[host])} for at, host in enumerate(hosts)
        }
        self.here = set[str]()  # hosts whose agents send heartbeats
        self.held = dict[str, list[Any]]()  # the replicas in each host's memory
        self.collectives = dict[str, dict[str, list[int]]]()  # those that its ranks were in
        self.sent, self.events = list[tuple[str, dict[str, Any]]](), list[dict[str, Any]]()
        self.evidence = list[Mapping[int, str]]()
        self.rollbacks = list[RollBack]()
        self.progress = dict[str, list[float]]()  # step, phase and age of each host's ranks, in its heartbeats
        self.end: EndRun | None = None
        self.fenced = list[int]()  # generations that were begun
        self.begin(SavedState())

    def begin(self, saved: SavedState) -> None:
        """A coordinator starts; the agents have yet to find it."""
        self.here.clear()
        self.state, actions = initial_state(
            self.settings, saved, hosts=tuple(self.pids), now_s=self.now_s, unix_s=UNIX_S + self.now_s
        )
        self._perform(actions)

    def take_over(self) -> None:
        """The coordinator is lost, and another reads what it wrote down."""
        self.begin(SavedState.from_json(json.loads(json.dumps(self.state.saved.to_json()))))

    def _perform(self, actions: Collection[Action]) -> None:
        for action in actions:
            if isinstance(action, Send):
                self.sent += [(host, json.loads(json.dumps(action.message_for(host)))) for host in action.hosts]
            elif isinstance(action, RecordEvent):
                self.events.append({"event": action.event, **action.fields})
            elif isinstance(action, RecordEvidence):
                self.evidence.append(action.last_collectives)
            elif isinstance(action, BeginGeneration):
                self.fenced.append(action.generation)
            elif isinstance(action, RollBack):
                self.rollbacks.append(action)
            elif isinstance(action, EndRun):
                self.end = action
            elif isinstance(action, ListCheckpoints):
                self.asked_for_checkpoints += 1
                if self.does_disk_answer:
                    self.list_checkpoints()

    def list_checkpoints(self) -> None:
        """The disk answers."""
        self._decide(CheckpointList(now_s=self.now_s, unix_s=UNIX_S + self.now_s, steps=self.checkpoints))

    def _decide(self, message: Input) -> None:
        self.state, actions = decide(self.state, message)
        self._perform(actions)

    def hear(self, host: str, kind: str, **fields: Any) -> None:
        """An agent says something."""
        body = json.loads(json.dumps({"kind": kind, **fields}))
        self._decide(AgentMessage(now_s=self.now_s, unix_s=UNIX_S + self.now_s, host=host, body=body))

    def connect(self, host: str, **hello: Any) -> None:
        """An agent connects, and has not yet said which processes it has."""
        self.here.add(host)
        self.hear(host, "joined", hello={"host": host, "address": f"at-{host}", "time": UNIX_S + self.now_s, **hello})

    def join(self, *hosts: str, knows: bool = True, **hello: Any) -> None:
        """Agents connect; with `knows`, they know the present membership and were told to go."""
        for host in hosts:
            self.connect(host, **hello)
            saved = self.state.saved
            membership = saved.membership if knows else None
            epoch, digest = (membership.generation, membership.digest) if membership is not None else (0, "")
            went = epoch if saved.go is not None and saved.go["epoch"] == epoch else 0
            self.hear(host, "status", slots=self.pids[host], epoch=epoch, digest=digest, went=went, wishes=0)

    def beat(self, *hosts: str) -> None:
        """Agents say that they live."""
        for host in hosts:
            self.hear(host, "beat", epoch=self.state.saved.generation, progress=self.progress.get(host))

    def tick(self, seconds: float = 0.0) -> None:
        """Time passes at once: more than a second is a pause of the coordinator."""
        self.now_s += seconds
        self._decide(ClockTick(now_s=self.now_s, unix_s=UNIX_S + self.now_s))

    def pass_time(self, seconds: float, *, silent: Collection[str] = (), by_s: float = 0.25) -> None:
        """Ticks, and heartbeats of all connected agents but those in `silent`."""
        until_s = self.now_s + seconds
        while self.now_s < until_s and self.end is None:
            self.now_s += by_s
            self.beat(*sorted(self.here - set(silent)))
            self.tick()

    def ready(self, *hosts: str) -> None:
        """Agents answer that their ranks are ready; all that are connected where none is named."""
        for host in hosts or sorted(self.here):
            ports = {slot: [7000 + slot, 8000 + slot] for slot in self.state.membership.ranks_on(host)}
            more = {"collectives": self.collectives[host]} if host in self.collectives else {}
            held = self.held.get(host, [])
            self.hear(host, "ready", epoch=self.state.saved.generation, ports=ports, held=held, **more)
        self.tick()

    def start(self, *hosts: str, step: int = 7) -> None:
        """All hosts join, their ranks are told to go, and do `step` steps."""
        self.join(*(hosts or tuple(self.pids)))
        self.tick()
        self.ready()
        self.advance(step)

    def advance(self, step: int) -> None:
        """All ranks come to this step."""
        for host in sorted(self.here):
            if self.state.membership.has_host(host):
                self.hear(host, "beat", epoch=self.state.saved.generation, progress=[step, 2, 0.0])
        self.tick()

    def lose(self, host: str, slot: int, *, is_replaced: bool = True, leaving: bool = False, **failure: Any) -> None:
        """A process ends; another takes its slot."""
        pid = self.pids[host].pop(slot)
        told = by_signal(0, 7, 9)
        fields = {name: getattr(told, name) for name in told.__dataclass_fields__} | failure
        self.hear(host, "lost", slot=slot, pid=pid, epoch=self.state.saved.generation, failure=fields, leaving=leaving)
        if is_replaced:
            self.fill(host, slot, pid + 100)

    def fill(self, host: str, slot: int, pid: int) -> None:
        """A process starts in a slot."""
        self.pids[host][slot] = pid
        self.hear(host, "up", slots={slot: pid})

    def hang_up(self, host: str) -> None:
        """An agent's connection closes."""
        self.here.discard(host)
        self.hear(host, "gone")

    def kinds(self, host: str) -> list[str]:
        """The kinds of all messages to a host but signs of life."""
        return [message["kind"] for name, message in self.sent if name == host and message["kind"] != "beat"]

    def last(self, host: str, kind: str) -> dict[str, Any]:
        """The last message of a kind to a host."""
        return [message for name, message in self.sent if name == host and message["kind"] == kind][-1]

    def events_of(self, kind: str) -> list[dict[str, Any]]:
        """All events of a kind."""
        return [one for one in self.events if one["event"] == kind]

    @property
    def lost(self) -> list[tuple[str, str]]:
        """Hosts that were given up, with the reason."""
        return [(one["host"], one["reason"]) for one in self.events_of("host") if one["state"] == "lost"]

    @property
    def places(self) -> str:
        """The slot of every rank, as in "a0 a1 b0 b1"; empty without a membership."""
        membership = self.state.saved.membership
        return " ".join(f"{host}{slot}" for host, slot in membership.slots) if membership is not None else ""

    @property
    def generation(self) -> int:
        """Of the present membership."""
        return self.state.saved.generation
