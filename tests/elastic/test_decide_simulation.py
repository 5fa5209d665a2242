"""`decide` under random orders of messages, losses, duplicates, delays, deaths and rejoins; every seed is one history.

The network is TCP's: in order and complete on one connection, in any order between hosts, and whatever is under way is
lost when a connection breaks. Agents behave as `elastic/host_agent.py` does. Each history holds these invariants:

- the generation only grows, and members are told to go only in the generation that the fence lets commit;
- `decide` changes nothing of the state it is given, and says the same when asked twice;
- with living hosts the run comes to its end, or ends with a reason; a request to stop always ends it.
"""

from __future__ import annotations

import heapq
import json
import os
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import pytest

from phalanx.elastic import failure as failing
from phalanx.elastic import host_agent as hosting
from phalanx.elastic.coordinator_state import (
    Action,
    AgentMessage,
    AgentMessages,
    BeginGeneration,
    CheckpointList,
    ClockTick,
    CoordinatorSettings,
    CoordinatorState,
    EndRun,
    Input,
    ListCheckpoints,
    RecordEvent,
    SavedState,
    SaveState,
    Send,
)
from phalanx.elastic.decide import decide, initial_state
from phalanx.elastic.election import LEASE_S
from phalanx.elastic.frozen_map import FrozenMap
from phalanx.elastic.heartbeat_board import Phase, fold_progress
from phalanx.elastic.host_view import HostView
from phalanx.elastic.membership import HostMembership, HostSlot
from phalanx.plan.plan import Plan
from phalanx.train.prepare import load_job, plan_for_run

JOB = Path(__file__).parents[2] / "examples" / "drill.toml"
SEEDS = int(os.environ.get("PHALANX_SIMULATIONS", "16"))
TICK_S, BEAT_S, STEP_S = 0.1, 0.25, 0.4
STEPS = 60
FAULTS_UNTIL_S, LIMIT_S = 30.0, 300.0
UNIX_S = 1.7e9
Message = dict[str, Any]


@pytest.fixture(scope="module")
def plan() -> Plan:
    return plan_for_run(load_job(str(JOB), overrides=[], cluster=None, steps=0))


@dataclass(kw_only=True)
class SimulatedRank:
    """The process of a slot."""

    pid: int
    rank: int = -1
    member_of: int = 0  # generation it is in
    ready: bool = False
    hangs: bool = False


@dataclass(kw_only=True)
class SimulatedAgent:
    """A host: its processes, and its connection. `incarnation` tells an agent from the one before a crash."""

    name: str
    ranks: dict[int, SimulatedRank] = field(default_factory=dict)
    generation: int = 0
    went: int = 0
    first_step: int = 0
    form: Message | None = None
    told_ready: bool = False
    connection: int = 0  # 0 while there is none
    alive: bool = True
    frozen_until_s: float = 0.0
    over: bool = False
    stopping: bool = False
    reforming: bool = False
    incarnation: int = 0
    unsaid: list[Message] = field(default_factory=list)
    left: dict[int, Message] = field(default_factory=dict)


class Simulation:
    """Agents, a network between them and `decide`, and a clock."""

    def __init__(
        self, plan: Plan, seed: int, *, hosts: int, slots: int, spares: int, faults: int, **fault: Any
    ) -> None:
        self.random, self.now_s, self._queue, self._count = random.Random(seed), 0.0, [], 0
        names = tuple(f"h{number}" for number in range(hosts))
        self.slots = {name: slots + (number >= hosts - spares) for number, name in enumerate(names)}
        job = replace(plan.job, fault=replace(plan.job.fault, **fault))
        layout = replace(plan.layout, data=hosts * slots, shard=min(plan.layout.shard, hosts * slots), accumulation=1)
        layout = replace(layout, shard=layout.data) if plan.layout.shard == plan.layout.data else layout
        self.settings = CoordinatorSettings(run_path="run", job=job, planned=layout, num_slots=sum(self.slots.values()))
        self.names, self.pid, self.connections = names, 1000, 0
        self.agents = {name: SimulatedAgent(name=name) for name in names}
        self.links: dict[int, tuple[str, float]] = {}  # connection -> host, and when its last message arrives
        self.saved, self.fence, self.checkpoints = SavedState(), 0, {0}
        self.progress: dict[int, int] = {}  # generation -> steps done by all of its members
        self.broken: set[int] = set()
        self.state: CoordinatorState | None = None
        self.end: EndRun | None = None
        self.records: Counter[str] = Counter()
        self.generations: list[int] = []
        self.stop_asked, self.paused_until_s = False, 0.0
        self._begin_coordinator()
        for name in names:
            self._start_agent(name)
        for _ in range(faults):
            self.at(self.random.uniform(0.0, FAULTS_UNTIL_S), self._fault)
        self.at(STEP_S, self._train)

    # ---- the clock and the network ---------------------------------------------------------------------------------

    def at(self, when_s: float, call: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._queue, (when_s, self._count, call))

    def after(self, most_s: float, call: Callable[[], None]) -> None:
        self.at(self.now_s + self.random.uniform(0.0, most_s), call)

    def run(self) -> None:
        while self._queue and self.end is None:
            self.now_s, _, call = heapq.heappop(self._queue)
            if self.now_s > LIMIT_S:
                return
            call()

    def _ship(self, connection: int, call: Callable[[], None]) -> None:
        """In order, after a delay, and not at all when the connection is gone by then."""
        host, last_s = self.links[connection]
        arrives_s = max(last_s, self.now_s + self.random.expovariate(1 / 0.01))
        self.links[connection] = host, arrives_s
        self.at(arrives_s, lambda: call() if connection in self.links else None)

    # ---- the coordinator -------------------------------------------------------------------------------------------

    def _begin_coordinator(self) -> None:
        self.paused_until_s = 0.0
        saved = SavedState.from_json(json.loads(json.dumps(self.saved.to_json())))
        settings = replace(self.settings, newest_generation=self.fence)
        self.state, actions = initial_state(
            settings, saved, hosts=self.names, now_s=self.now_s, unix_s=UNIX_S + self.now_s
        )
        self._perform(actions)
        self._tick(self.incarnation_of_coordinator())

    def incarnation_of_coordinator(self) -> int:
        self._coordinator = getattr(self, "_coordinator", 0) + 1
        return self._coordinator

    def _tick(self, incarnation: int) -> None:
        if self.state is None or incarnation != self._coordinator:
            return
        if self.now_s < self.paused_until_s:
            self.at(self.paused_until_s, lambda: self._tick(incarnation))
            return
        self.decide(ClockTick(now_s=self.now_s, unix_s=UNIX_S + self.now_s))
        self.at(self.now_s + TICK_S, lambda: self._tick(incarnation))

    def decide(self, message: Input) -> None:
        before, incarnation = self.state, self._coordinator
        if before is None:
            return
        if self.now_s < self.paused_until_s:  # it lies in a socket until the coordinator runs again
            until_s = self.paused_until_s
            later = replace(message, now_s=until_s, unix_s=UNIX_S + until_s)
            self.at(until_s, lambda: self.decide(later) if incarnation == self._coordinator else None)
            return
        values = [getattr(before, one.name) for one in fields(before)]
        after, actions = decide(before, message)
        assert all(getattr(before, one.name) is value for one, value in zip(fields(before), values, strict=True))
        assert after.saved.generation >= before.saved.generation
        if self.random.random() < 0.05:
            again, same = decide(before, message)
            assert (again.saved, same) == (after.saved, actions)
            assert after.num_processes == sum(len(host.alive) for host in after.hosts.values())
            assert after.num_usable == len(after.living_slots())
            assert after.num_here == sum(host.is_here for host in after.hosts.values())
            assert after.num_ready == sum(host.is_ready for host in after.hosts.values())
            assert after.bad_hosts == {name for name, host in after.hosts.items() if host.problems}
        self.state = after
        if self._perform(actions):
            steps = tuple(sorted(self.checkpoints - {0}))
            self.decide(CheckpointList(now_s=self.now_s, unix_s=UNIX_S + self.now_s, steps=steps))

    def _perform(self, actions: list[Action]) -> bool:
        for action in actions:
            if isinstance(action, SaveState):
                assert action.saved.generation >= self.saved.generation
                self.saved = action.saved
            elif isinstance(action, BeginGeneration):
                assert action.generation >= self.fence
                assert action.generation == self.saved.generation, "it is saved before anybody is told"
                self.fence = action.generation
            elif isinstance(action, Send):
                self._check_sent(action.message)
                for host in action.hosts:
                    self._send(host, action.message_for(host))
            elif isinstance(action, RecordEvent):
                self.records[action.event] += 1
            elif isinstance(action, EndRun):
                assert action.how != "plain" or action.message
                self.end = action
            elif isinstance(action, ListCheckpoints):
                return True
        return False

    def _check_sent(self, message: Message) -> None:
        if message["kind"] == "form":
            membership = self.saved.membership
            assert membership is not None
            assert message["digest"] == membership.digest
            assert membership.generation == message["epoch"] == self.fence == self.saved.generation
            assert len(set(membership.slots)) == len(set(self.saved.pids)) == membership.world
            if membership.generation not in self.generations:
                assert membership.generation > max(self.generations, default=0)
                self.generations.append(membership.generation)
        elif message["kind"] == "go":
            assert message["epoch"] == self.fence == self.saved.generation, "only they may commit"
            assert not self.saved.forming

    def _send(self, host: str, message: Message) -> None:
        agent = self.agents[host]
        if agent.connection in self.links and self.links[agent.connection][0] == host:
            copy = json.loads(json.dumps(message))
            self._ship(agent.connection, lambda: self._hear(agent, copy))

    # ---- agents ----------------------------------------------------------------------------------------------------

    def _start_agent(self, name: str) -> None:
        agent = self.agents[name]
        self.agents[name] = agent = SimulatedAgent(name=name, incarnation=agent.incarnation + 1)
        for slot in range(self.slots[name]):
            self._fork(agent, slot)
        self.after(2.0, lambda: self._connect(agent))
        self.after(BEAT_S, lambda: self._beat(agent))

    def _fork(self, agent: SimulatedAgent, slot: int) -> None:
        if agent.alive and not agent.over and slot not in agent.ranks:
            self.pid += 1
            agent.ranks[slot] = SimulatedRank(pid=self.pid)
            self._say(agent, "up", slots={slot: self.pid})

    def _connect(self, agent: SimulatedAgent) -> None:
        if not agent.alive or agent.over or agent.connection:
            return
        if self.state is None or agent.frozen_until_s > self.now_s:
            self.after(0.2, lambda: self._connect(agent))
            return
        if self.now_s < self.paused_until_s:  # nobody answers its hello
            self.at(self.paused_until_s + self.random.uniform(0.0, 0.5), lambda: self._connect(agent))
            return
        self.connections += 1
        agent.connection, agent.told_ready = self.connections, False
        self.links[agent.connection] = agent.name, self.now_s
        hello = {"address": "10.0.0.1", "time": UNIX_S + self.now_s}
        slots = {slot: one.pid for slot, one in agent.ranks.items()}
        told = {"epoch": agent.generation, "digest": agent.form["digest"] if agent.form is not None else ""}
        status = {"slots": slots, **told, "went": agent.went, "wishes": int(self.stop_asked)}
        if self.random.random() < 0.5:  # it fits into the hello
            self._say(agent, "joined", hello=hello, status=status)
        else:
            self._say(agent, "joined", hello=hello)
            self._say(agent, "status", **status)
        unsaid, agent.unsaid = agent.unsaid, []
        for message in [*unsaid, *agent.left.values()]:
            self._say(agent, **message)
        self._tell_ready(agent)

    def _disconnect(self, agent: SimulatedAgent, *, noticed: bool = True) -> None:
        connection, agent.connection = agent.connection, 0
        if connection:
            del self.links[connection]
            if noticed and self.state is not None:
                gone = AgentMessage(
                    now_s=self.now_s, unix_s=UNIX_S + self.now_s, host=agent.name, body={"kind": "gone"}
                )
                self.decide(gone)
        self.after(0.5, lambda: self._connect(agent))

    def _say(self, agent: SimulatedAgent, kind: str, **said: Any) -> None:
        message = json.loads(json.dumps({"kind": kind, **said}))
        if not agent.connection:
            if kind == "lost":
                agent.unsaid.append(message)
            return

        def deliver() -> None:
            self.decide(AgentMessage(now_s=self.now_s, unix_s=UNIX_S + self.now_s, host=agent.name, body=dict(message)))

        self._ship(agent.connection, deliver)
        if kind != "joined" and self.random.random() < 0.03:
            self._ship(agent.connection, deliver)  # twice

    def _beat(self, agent: SimulatedAgent) -> None:
        if not agent.alive or agent.over:
            return
        self.at(self.now_s + BEAT_S, lambda: self._beat(agent))
        if agent.frozen_until_s > self.now_s:
            return
        step, ranks = self.progress.get(agent.went, -1), self._members(agent)
        progress = {
            slot: (step, int(Phase.TRAINING), self._age_s(agent.went))
            if one.member_of == agent.went == agent.generation
            else None
            for slot, one in ranks.items()
        }
        self._say(agent, "beat", epoch=agent.generation, **fold_progress(progress))

    def _age_s(self, generation: int) -> float:
        return self.now_s - getattr(self, "moved_s", {}).get(generation, self.now_s)

    def _members(self, agent: SimulatedAgent) -> dict[int, SimulatedRank]:
        return {slot: one for slot, one in agent.ranks.items() if one.rank >= 0}

    def _hear(self, agent: SimulatedAgent, message: Message) -> None:
        if not agent.alive or agent.over:
            return
        if agent.frozen_until_s > self.now_s:
            self.at(agent.frozen_until_s, lambda: self._hear(agent, message))
            return
        kind = message["kind"]
        if kind == "form" and message["epoch"] > agent.generation:
            self._take_form(agent, message)
        elif kind == "go" and message["epoch"] == agent.generation > agent.went:
            agent.went = message["epoch"]
            assert agent.went == self.fence or agent.went < self.saved.generation
            restored = int((message["restore"] or {}).get("step", max(self.checkpoints)))
            self.progress.setdefault(agent.went, restored)
            self.moved_s = {**getattr(self, "moved_s", {}), agent.went: self.now_s}
        elif kind == "seat" and message["epoch"] == agent.generation > agent.went:
            one = agent.ranks.get(message["slot"])
            assert agent.form is not None
            rank = HostMembership.from_json(agent.form).ranks.get(message["slot"])
            if one is not None and one.rank < 0 and rank is not None:
                one.rank, one.member_of, agent.told_ready = rank, agent.generation, False
                self.after(0.5, lambda: self._become_ready(agent, message["slot"], agent.generation))
        elif kind == "stop":
            agent.stopping = True
        elif kind == "reform":
            agent.reforming = True
        elif kind == "where":
            told = {slot: [not one.hangs, "here"] for slot, one in self._members(agent).items()}
            self._say(agent, "where", ranks=told)
        elif kind == "kill" and message["epoch"] == agent.generation and message["slot"] in agent.ranks:
            self._lose(agent, message["slot"], kind="Silence")
        elif kind == "again":
            self._disconnect(agent)
        elif kind == "end":
            agent.over = True

    def _take_form(self, agent: SimulatedAgent, message: Message) -> None:
        if "same_as" in message:
            if agent.form is None or message["same_as"] != [agent.form["epoch"], agent.form["digest"]]:
                self._disconnect(agent)
                return
            message = {**message, "ranks": agent.form["ranks"]}
        ranks = HostMembership.from_json(message).ranks
        agent.generation, agent.form, agent.told_ready, agent.reforming = message["epoch"], message, False, False
        agent.left.clear()
        for slot, one in agent.ranks.items():
            was, one.rank, one.ready = one.member_of, ranks.get(slot, -1), False
            if was:
                self._say(agent, "left", slot=slot, epoch=was, step=self.progress.get(was, -1), why="over")
            one.member_of = agent.generation if one.rank >= 0 else 0
            if one.rank >= 0 and not one.hangs:
                self.after(1.0, lambda slot=slot: self._become_ready(agent, slot, message["epoch"]))  # type: ignore[misc]
            elif one.rank >= 0:  # its agent ends a process that does not leave in time
                self.after(2.0, lambda slot=slot, pid=one.pid: self._end_if(agent, slot, pid))  # type: ignore[misc]
        self._tell_ready(agent)

    def _end_if(self, agent: SimulatedAgent, slot: int, pid: int) -> None:
        if slot in agent.ranks and agent.ranks[slot].pid == pid:
            self._lose(agent, slot, kind="Silence", leaving=True)

    def _become_ready(self, agent: SimulatedAgent, slot: int, generation: int) -> None:
        one = agent.ranks.get(slot)
        if one is not None and generation == agent.generation and one.rank >= 0:
            one.ready = True
            self._tell_ready(agent)

    def _tell_ready(self, agent: SimulatedAgent) -> None:
        members = self._members(agent)
        if agent.alive and not agent.told_ready and agent.generation and all(one.ready for one in members.values()):
            agent.told_ready = bool(agent.connection)
            ports = {str(slot): [7000 + slot, 8000 + slot] for slot in members}
            self._say(agent, "ready", epoch=agent.generation, ports=ports, time=UNIX_S + self.now_s)

    def _lose(self, agent: SimulatedAgent, slot: int, *, kind: str = "Signal", leaving: bool = False) -> None:
        one = agent.ranks.pop(slot, None)
        if one is None or not agent.alive:
            return
        self.broken.add(one.member_of)
        agent.told_ready = False
        told = asdict(failing.by_signal(one.rank, self.progress.get(one.member_of, -1), 9)) | {"kind": kind}
        self._say(agent, "lost", slot=slot, pid=one.pid, epoch=agent.generation, failure=told, leaving=leaving)
        self.after(1.0, lambda: self._fork(agent, slot))

    # ---- the training ----------------------------------------------------------------------------------------------

    def _train(self) -> None:
        """A step of the membership that may commit, if all of its members are in it and none hangs."""
        self.at(self.now_s + STEP_S, self._train)
        generation, membership = self.fence, self.saved.membership
        if membership is None or membership.generation != generation or generation in self.broken:
            self._leave_broken(generation)
            return
        ranks = [self.agents[one.host].ranks.get(one.slot) for one in membership.slots]
        went = all(self.agents[name].went == generation for name in membership.hosts)
        if any(one is None or one.pid not in self.saved.pids for one in ranks):
            self.broken.add(generation)
        if not went or generation in self.broken or any(one is None or one.hangs for one in ranks):
            return
        self.progress[generation] += 1
        self.moved_s[generation] = self.now_s
        step = self.progress[generation]
        if step % 10 == 0:
            self.checkpoints.add(step)
        agents = [self.agents[name] for name in membership.hosts]
        is_stopped = any(one.stopping for one in agents)
        if step >= STEPS or is_stopped or any(one.reforming for one in agents):
            how = "done" if step >= STEPS else "stopped" if is_stopped else "reform"
            self.checkpoints.add(step)
            for agent in agents:
                self._all_leave(agent, generation, state=how, step=step, why="")
            self.broken.add(generation)

    def _leave_broken(self, generation: int) -> None:
        for agent in self.agents.values():
            if agent.went == generation and self.random.random() < 0.3:
                self._all_leave(agent, generation, step=self.progress.get(generation, -1), why="connection reset")

    def _all_leave(self, agent: SimulatedAgent, generation: int, **how: Any) -> None:
        if agent.frozen_until_s > self.now_s:
            return
        for slot, one in self._members(agent).items():
            if one.member_of == generation == agent.generation and not one.hangs and slot not in agent.left:
                agent.left[slot] = {"kind": "left", "slot": slot, "epoch": generation, **how}
                self._say(agent, **agent.left[slot])

    # ---- what goes wrong -------------------------------------------------------------------------------------------

    def _fault(self) -> None:
        agent = self.agents[self.random.choice(self.names)]
        slot = self.random.choice([*agent.ranks, 0])
        faults = (
            lambda: self._lose(agent, slot),
            lambda: self._lose(agent, slot),
            lambda: self._disconnect(agent) if agent.connection else None,
            lambda: self._crash_host(agent),
            lambda: self._freeze(agent),
            lambda: self._hang(agent, slot),
            self._crash_coordinator,
            self._pause_coordinator,
        )
        self.random.choice(faults)()

    def _crash_host(self, agent: SimulatedAgent) -> None:
        if agent.alive:
            self.broken.update(one.member_of for one in agent.ranks.values())
            agent.alive = False
            self._disconnect(agent, noticed=self.random.random() < 0.5)
            if self.random.random() < 0.8:
                self.after(8.0, lambda: self._start_agent(agent.name))

    def _freeze(self, agent: SimulatedAgent) -> None:
        agent.frozen_until_s = self.now_s + self.random.uniform(0.5, 8.0)

    def _hang(self, agent: SimulatedAgent, slot: int) -> None:
        if slot in agent.ranks:
            agent.ranks[slot].hangs = True

    def _pause_coordinator(self) -> None:
        self.paused_until_s = self.now_s + self.random.uniform(0.5, 20.0)

    def _crash_coordinator(self) -> None:
        if self.state is None:
            return
        self.state = None
        self._coordinator += 1
        for agent in self.agents.values():
            self._disconnect(agent)
        self.after(1.0, lambda: self._begin_coordinator() if self.state is None else None)

    def ask_to_stop(self) -> None:
        self.stop_asked = True
        for agent in self.agents.values():
            agent.stopping = True
            self._say(agent, "stop", count=1)


def describe(sim: Simulation) -> str:
    return f"generations {sim.generations}, events {dict(sim.records)}, at {sim.now_s:.1f} s: {sim.end}"


def test_without_faults_the_run_has_one_generation(plan: Plan) -> None:
    sim = Simulation(plan, 0, hosts=4, slots=2, spares=1, faults=0)
    sim.run()
    assert (sim.end is not None and sim.end.state, sim.generations) == ("done", [1]), describe(sim)


@pytest.mark.parametrize("policy", ["auto", "replace", "shrink"])
def test_every_history_comes_to_an_end(plan: Plan, policy: str) -> None:
    """With living hosts the run goes on to its last step, or says why not; the invariants are checked on the way."""
    ends = Counter[str]()
    for seed in range(SEEDS):
        sizes = random.Random(seed)
        hosts, slots = sizes.choice([(1, 4), (2, 2), (4, 1), (4, 2), (8, 1)])
        sim = Simulation(
            plan, seed, hosts=hosts, slots=slots, spares=sizes.choice([0, 0, 1]), faults=sizes.randint(1, 8),
            recovery=policy, restarts=5,
        )  # fmt: skip
        sim.run()
        assert sim.end is not None, f"seed {seed}, {hosts} hosts: {describe(sim)}"
        ends[sim.end.state] += 1
    assert ends["done"] > SEEDS / 3, ends


def test_a_pause_of_the_coordinator_loses_nobody(plan: Plan) -> None:
    """Its host swaps, or it was stopped for a moment; connections that broke meanwhile are at its door."""
    for seed in range(SEEDS):
        sim = Simulation(plan, seed, hosts=4, slots=1, spares=0, faults=0, restarts=5)

        def pause(sim: Simulation = sim) -> None:
            sim._pause_coordinator()
            agent = sim.agents[sim.random.choice(sim.names)]
            for when_s in (sim.now_s, sim.paused_until_s - 0.1):
                sim.at(when_s, lambda: sim._disconnect(agent) if agent.connection else None)

        for _ in range(2):
            sim.at(sim.random.uniform(5.0, 30.0), pause)
        if sim.random.random() < 0.5:
            sim.at(sim.random.uniform(5.0, 25.0), sim._crash_coordinator)
        sim.run()
        assert sim.end is not None and sim.end.state == "done", f"seed {seed}: {describe(sim)}"  # noqa: PT018
        assert (sim.generations, sim.records["incident"]) == ([1], 0), f"seed {seed}: {describe(sim)}"


def test_a_request_to_stop_always_ends_the_run(plan: Plan) -> None:
    for seed in range(SEEDS):
        sim = Simulation(plan, seed, hosts=4, slots=1, spares=0, faults=4, restarts=5)
        sim.at(sim.random.uniform(0.0, 15.0), sim.ask_to_stop)
        sim.run()
        assert sim.end is not None, f"seed {seed}: {describe(sim)}"
        assert sim.end.state in ("stopped", "failed", "done")


def test_a_lost_rack_with_the_first_hosts_and_the_coordinator_does_not_end_the_run(plan: Plan) -> None:
    """120 hosts at once, the first in the order of those that may coordinate; the first of the others takes over."""
    lost = 120
    plan = replace(plan, job=replace(plan.job, batch=replace(plan.job.batch, global_sequences=160)))
    sim = Simulation(plan, 0, hosts=160, slots=1, spares=0, faults=0, recovery="auto")
    silent_s = hosting.SIGN_S + hosting.QUIET_S + hosting.turn_s(lost) + LEASE_S
    assert silent_s < hosting.LOST_S / 2, "no agent gives up before that"

    def fail() -> None:
        for name in sim.names[:lost]:
            sim.agents[name].alive = False
        sim.state = None
        sim._coordinator += 1
        for agent in sim.agents.values():
            sim._disconnect(agent)
        sim.broken.add(sim.fence)
        sim.at(sim.now_s + silent_s, sim._begin_coordinator)

    sim.at(10.0, fail)
    sim.run()
    assert sim.end is not None and sim.end.state == "done", describe(sim)  # noqa: PT018
    assert sim.saved.membership is not None
    assert sim.saved.membership.world == 160 - lost, describe(sim)
    assert set(sim.saved.membership.hosts) == set(sim.names[lost:])


def test_messages_heard_together_are_messages_heard_one_by_one(plan: Plan) -> None:
    settings = CoordinatorSettings(run_path="run", job=plan.job, planned=plan.layout, num_slots=plan.layout.devices)
    names = tuple(f"h{number}" for number in range(plan.layout.devices))
    first, _ = initial_state(settings, SavedState(), hosts=names, now_s=0.0, unix_s=UNIX_S)
    said: list[tuple[str, Message]] = []
    for number, name in enumerate(names):
        said.append((name, {"kind": "joined", "hello": {"address": "10.0.0.1", "time": UNIX_S}}))
        told = {"epoch": 0, "digest": "", "went": 0, "wishes": 0}
        said.append((name, {"kind": "status", "slots": {"0": 1000 + number}, **told}))
    together, actions = decide(first, AgentMessages(now_s=1.0, unix_s=UNIX_S, messages=said))
    one_by_one, each = first, list[Action]()
    for name, body in said:
        one_by_one, more = decide(one_by_one, AgentMessage(now_s=1.0, unix_s=UNIX_S, host=name, body=body))
        each += more
    assert dict(first.hosts) == {}, "the state before is left as it was"
    assert dict(together.hosts) == dict(one_by_one.hosts)
    assert (together.num_usable, actions) == (one_by_one.num_usable, each)


def test_a_message_costs_the_same_on_any_number_of_hosts() -> None:
    """A change of one host of many shares all other hosts with the state before."""
    hosts: FrozenMap[str, HostView] = FrozenMap()
    for number in range(4096):
        hosts = hosts.set(f"h{number}", HostView(name=f"h{number}", address="", heard_s=0.0))
    other = hosts.set("h7", hosts["h7"].changed(heard_s=1.0))
    shared = sum(one is two for one, two in zip(hosts._buckets, other._buckets, strict=True))
    assert (len(other), other["h7"].heard_s, hosts["h7"].heard_s) == (4096, 1.0, 0.0)
    assert shared == len(hosts._buckets) - 1
    assert "h7" not in other.drop("h7")
    assert len(other.drop("h7")) == 4095
    assert HostSlot("h1", 0) < HostSlot("h1", 1)
