"""Every situation of a run played through: messages of agents in, orders out, with a clock that is moved by hand."""

from __future__ import annotations

import errno
import json
import re
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from phalanx.elastic import decide_membership
from phalanx.elastic import failure as failing
from phalanx.elastic.coordinator_actions import Coordinator
from phalanx.elastic.coordinator_plan import CoordinatorPlan
from phalanx.elastic.coordinator_state import SavedState, Send
from phalanx.elastic.decide_membership import REPLACE_S, SPREAD_S
from phalanx.elastic.fence import current_generation
from phalanx.elastic.heartbeat_board import Phase, fold_progress
from phalanx.elastic.restore_point import ReplicaInfo, fold_held
from phalanx.errors import Problem
from phalanx.plan.plan import Plan
from phalanx.record import run_files
from phalanx.record.account.rank_places import rank_places
from phalanx.record.events import EventWriter, read_events
from phalanx.record.run import Run, create_run
from phalanx.train.prepare import load_job, plan_for_run

JOB = Path(__file__).parents[2] / "examples" / "drill.toml"
DEAD_S, TIMEOUT_S = 5.0, 60.0  # of the job: fault.dead_after_s and comm.init_timeout_s
Message = dict[str, Any]


@pytest.fixture(scope="module")
def plan() -> Plan:
    return plan_for_run(load_job(str(JOB), overrides=[], cluster=None, steps=0))


@dataclass(kw_only=True)
class Stage:
    """A coordinator, the agents it hears, and a clock."""

    run: Run
    plan: Plan
    saved: list[Message] = field(default_factory=list)  # the memory, every time it was written down
    agents: dict[str, Agent] = field(default_factory=dict)
    now_s: float = 100.0
    pid: int = 1000

    def __post_init__(self) -> None:
        self.begin(SavedState())

    def begin(self, saved: SavedState) -> None:
        """A coordinator starts; agents of an earlier one have yet to find it."""
        events = EventWriter(self.run.supervisor, rank=-1)
        coordinator_plan = CoordinatorPlan.from_json(self.plan.to_json())
        self.coordinator = Coordinator(
            self.run, coordinator_plan, self._send, events, saved=saved, save=self._save, clock=lambda: self.now_s
        )

    def restart(self) -> None:
        """The coordinator dies, and another reads what it wrote down."""
        self.begin(SavedState.from_json(self.saved[-1]))

    def _save(self, saved: SavedState) -> None:
        self.saved.append(json.loads(json.dumps(saved.to_json())))

    def _send(self, send: Send) -> None:
        for host in send.hosts:
            self.agents[host].take(json.loads(json.dumps(send.message_for(host))))

    def pass_time(self, seconds: float, *, beats: bool = True, by_s: float = 0.25) -> None:
        """Ticks; agents that are connected say that they live."""
        until_s = self.now_s + seconds
        while self.now_s < until_s and not self.coordinator.state.is_over:
            self.now_s += by_s
            for agent in self.agents.values():
                if beats and agent.connected:
                    agent.beat()
            self.coordinator.tick()

    def host(self, name: str, slots: int) -> Agent:
        """An agent that connects with a process in every slot."""
        agent = Agent(stage=self, name=name, slots=slots)
        self.agents[name] = agent
        agent.join()
        return agent

    def start(self, step: int = 0) -> None:
        """All are ready and go; `step` steps are done."""
        self.coordinator.tick()
        self.ready()
        if step:
            self.advance(step)

    def ready(self) -> None:
        for agent in self.agents.values():
            agent.ready()
        self.coordinator.tick()

    def advance(self, step: int) -> None:
        for agent in self.agents.values():
            agent.step = step
            if agent.connected:
                agent.beat()
        self.coordinator.tick()

    def events(self, kind: str) -> list[Message]:
        return [one for one in read_events(self.run.supervisor)[0] if one["event"] == kind]

    @property
    def world(self) -> int:
        formation = self.coordinator.state.saved.membership
        return formation.world if formation is not None else 0

    @property
    def seats(self) -> list[list[Any]]:
        """Host and slot of every rank of the membership; what agents were told agrees with it."""
        membership = self.coordinator.state.membership
        for name, agent in self.agents.items():
            if agent.connected and agent.epoch == membership.generation:
                assert agent.ranks == membership.ranks_on(name)
        return [list(one) for one in membership.slots]

    @property
    def epoch(self) -> int:
        return self.coordinator.state.saved.generation

    @property
    def status(self) -> tuple[str, int]:
        status = self.run.status()
        return status["state"], status.get("exit_code", -1)

    @property
    def message(self) -> str:
        return str(self.run.status().get("message", ""))


@dataclass(kw_only=True)
class Agent:
    """What an agent would say and hear."""

    stage: Stage
    name: str
    slots: int
    pids: dict[int, int] = field(default_factory=dict)
    ranks: dict[int, int] = field(default_factory=dict)
    epoch: int = 0
    digest: str = ""
    went: int = 0
    step: int = -1
    age_s: float = 0.0
    phase: Phase = Phase.TRAINING
    wishes: int = 0
    held: list[ReplicaInfo] = field(default_factory=list)
    heard: list[Message] = field(default_factory=list)
    connected: bool = False

    def __post_init__(self) -> None:
        self.fill()

    def fill(self) -> None:
        """A process in every empty slot."""
        for slot in set(range(self.slots)) - set(self.pids):
            self.stage.pid += 1
            self.pids[slot] = self.stage.pid

    def say(self, kind: str, **fields: Any) -> None:
        self.stage.coordinator.hear(self.name, json.loads(json.dumps({"kind": kind, **fields})))

    def join(self, **hello: Any) -> None:
        self.connected = True
        self.say("joined", hello={"host": self.name, "address": "10.0.0.1", "time": time.time(), **hello})
        self.say("status", slots=self.pids, epoch=self.epoch, digest=self.digest, went=self.went, wishes=self.wishes)

    def hang_up(self) -> None:
        self.connected = False
        self.say("gone")

    def take(self, message: Message) -> None:
        if not self.connected:
            return
        self.heard.append(message)
        if message["kind"] == "form":
            if "same_as" in message:
                assert message["same_as"] == [self.epoch, self.digest]
            else:
                self.ranks = {int(slot): rank for slot, rank in message["ranks"].items()}
            self.epoch, self.digest = message["epoch"], message["digest"]
            self.step = -1
        elif message["kind"] == "go":
            self.went = message["epoch"]

    def restored(self, step: int, source: str, *, epoch: int | None = None, slot: int = 0) -> None:
        """Rank 0 reports which state the ranks went on from."""
        self.say("restored", epoch=self.epoch if epoch is None else epoch, slot=slot, step=step, source=source)

    def ready(self) -> None:
        ports = {slot: [7000 + slot, 8000 + slot] for slot in self.ranks}
        self.say("ready", epoch=self.epoch, ports=ports, held=[one.to_json() for one in fold_held(self.held)])

    def beat(self) -> None:
        progress = {slot: (self.step, int(self.phase), self.age_s) for slot in self.ranks} if self.went else {}
        self.say("beat", epoch=self.epoch, **fold_progress(progress))

    def lose(self, slot: int, *, up: bool = True, leaving: bool = False, **failure: Any) -> None:
        """A process ends: by SIGKILL, or as `failure` says; another takes its slot.

        `leaving`: it had not yet come out of a formation that is over.
        """
        pid = self.pids.pop(slot)
        told = asdict(failing.by_signal(self.ranks.get(slot, -1), self.step, 9)) | failure
        self.say("lost", slot=slot, pid=pid, epoch=self.epoch, failure=told, leaving=leaving)
        if up:
            self.up()

    def up(self) -> None:
        before = dict(self.pids)
        self.fill()
        for slot in set(self.pids) - set(before):
            self.say("up", slots={slot: self.pids[slot]})

    def left(self, slot: int, *, epoch: int | None = None, **fields: Any) -> None:
        said = {"step": self.step, "why": "", "last_collective": f"all_gather of slot {slot}", **fields}
        self.say("left", slot=slot, epoch=self.epoch if epoch is None else epoch, **said)

    def kinds(self) -> list[str]:
        return [message["kind"] for message in self.heard if message["kind"] != "beat"]

    def last(self, kind: str) -> Message:
        return [message for message in self.heard if message["kind"] == kind][-1]


@pytest.fixture
def make_stage(tmp_path: Path, plan: Plan) -> Callable[..., Stage]:
    def build(*, launch: Message | None = None, **fault: Any) -> Stage:
        job = replace(plan.job, fault=replace(plan.job.fault, **fault))
        run = create_run(tmp_path, "coordinator", job_toml="", job={}, plan_json=plan.to_json())
        run.set_launch(**{"hosts": [], "slots": [], **(launch or {})})
        return Stage(run=run, plan=replace(plan, job=job))

    return build


@pytest.fixture
def stage(make_stage: Callable[..., Stage]) -> Stage:
    return make_stage()


def snapshots(*, epoch: int, step: int, world: int, slots: dict[int, int]) -> list[ReplicaInfo]:
    """What a host's memory holds after a step, by slot -> rank."""
    return [
        ReplicaInfo(
            rank=rank,
            world=world,
            generation=epoch,
            step=step,
            slot=slot,
            kind="own",
            buffer=0,
            tensors=1,
            size_bytes=1,
        )
        for slot, rank in slots.items()
    ]


# ---- start -----------------------------------------------------------------------------------------------------------


def test_a_run_starts_when_every_rank_is_there(stage: Stage) -> None:
    first, second = stage.host("a", 2), stage.host("b", 1)
    stage.coordinator.tick()
    assert (first.kinds(), stage.epoch) == ([], 0)
    second.slots = 2
    second.up()
    stage.coordinator.tick()
    assert first.kinds() == second.kinds() == ["form"]
    assert stage.seats == [["a", 0], ["a", 1], ["b", 0], ["b", 1]]
    assert current_generation(stage.run) == 1
    first.ready()
    stage.coordinator.tick()
    assert first.kinds() == ["form"], "not before the other is ready too"
    second.ready()
    stage.coordinator.tick()
    go = second.last("go")
    assert go["store"] == ["10.0.0.1", 7000]
    assert go["peers"] == {"0": [0, "10.0.0.1", 8000], "1": [1, "10.0.0.1", 8001]}, "who takes its copies, by slot"
    assert go["restore"] is None
    assert stage.status[0] == "running"
    assert stage.events("restore") == [], "not before a rank reports it"
    first.restored(0, "start")
    second.restored(0, "start")  # of another model replica
    assert [(one["epoch"], one["step"], one["source"]) for one in stage.events("restore")] == [(1, 0, "start")]
    assert [one["pid"] for one in stage.events("epoch")[0]["members"]] == [*first.pids.values(), *second.pids.values()]


def test_after_a_replaced_process_all_hosts_are_sent_the_same_few_bytes(stage: Stage) -> None:
    """Nobody moved: hosts hear that, and what it adds up to, however many there are."""
    first, second = stage.host("a", 2), stage.host("b", 2)
    stage.start(step=3)
    first.lose(1)
    stage.coordinator.tick()
    assert stage.epoch == 2
    assert first.last("form") == second.last("form")
    assert "ranks" not in first.last("form")
    assert first.last("form")["same_as"][0] == 1
    stage.ready()
    second.hang_up()
    second.join()  # what was said on the old connection is not built upon
    stage.advance(5)
    second.lose(0)
    stage.pass_time(0.25)
    assert (stage.epoch, "same_as" in first.last("form"), "ranks" in second.last("form")) == (3, True, False)
    stage.ready()
    stage.advance(7)
    second.hang_up()
    second.digest = "of another history"
    second.join()
    first.lose(0)
    stage.pass_time(0.25)
    assert stage.seats == [["a", 0], ["a", 1], ["b", 0], ["b", 1]]
    assert "ranks" in second.last("form"), "told in full"


def test_members_of_many_are_recorded_in_ranges_that_readers_follow(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The event of 16,384 hosts would be longer than readers take a line to be."""
    monkeypatch.setattr(decide_membership, "MOST_LISTED", 2)
    for name in "abcd":
        stage.host(name, 1)
    stage.start()
    told = [one for one in read_events(stage.run.supervisor)[0] if one["event"] in ("epoch", "members")]
    assert [(one["event"], len(one["members"])) for one in told] == [("epoch", 2), ("members", 2)]
    assert told[1]["members"][0] == {"rank": 2, "host": "c", "slot": 0, "count": 1}
    assert rank_places({}, told).hosts == dict(enumerate("abcd"))


def test_hosts_that_never_come_end_it_with_who_is_there(stage: Stage) -> None:
    stage.host("a", 3)
    stage.pass_time(TIMEOUT_S + 1, by_s=1.0)
    assert stage.status == ("failed", 3)
    assert f"{stage.run.path}: 3 of 4 ranks arrived within 60 s\n  here: a\n" in stage.message


def test_of_several_hosts_those_that_came_begin_without_the_others(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(launch={"hosts": ["a", "b"], "slots": [2, 2]})
    stage.host("a", 2)
    stage.pass_time(TIMEOUT_S + 1, by_s=1.0)
    assert (stage.world, stage.events("epoch")[0]["reason"]) == (2, "some hosts did not arrive")


def test_a_host_that_fails_its_preflight_takes_no_part(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(launch={"hosts": ["a", "b"], "slots": [2, 2]})
    bad = Agent(stage=stage, name="b", slots=2)
    stage.agents["b"] = bad
    bad.join(problems=["b: its disk is full"])
    good = Agent(stage=stage, name="a", slots=0)
    stage.agents["a"] = good
    good.join()
    stage.coordinator.tick()
    assert stage.world == 0, "its processes are only being started"
    good.slots = 2
    good.up()
    stage.coordinator.tick()
    assert (stage.world, stage.seats) == (2, [["a", 0], ["a", 1]])
    assert stage.events("quarantine")[0]["reason"] == "b: its disk is full"


def test_when_no_host_passes_its_preflight_the_run_says_why(stage: Stage) -> None:
    bad = Agent(stage=stage, name="a", slots=4)
    stage.agents["a"] = bad
    bad.join(problems=["a: its disk is full\n  delete something"])
    stage.coordinator.tick()
    assert (stage.status, stage.message.splitlines()[:2]) == (
        ("failed", 3),
        ["a host failed its preflight", "  a: its disk is full"],
    )


def test_agents_hear_of_the_end_though_the_disk_is_full(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise they would wait for the next coordinator, and that for room on the disk."""

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    bad = Agent(stage=stage, name="a", slots=4)
    stage.agents["a"] = bad
    bad.join(problems=["a: its disk is full"])
    monkeypatch.setattr(run_files, "replace_text", fail)
    monkeypatch.setattr(stage, "_save", fail)
    stage.begin(SavedState())
    bad.join(problems=["a: its disk is full"])
    stage.coordinator.tick()
    assert bad.heard[-1]["kind"] == "end"
    assert bad.heard[-1]["code"] == 3


def test_a_clock_that_is_wrong_is_a_problem(stage: Stage) -> None:
    agent = Agent(stage=stage, name="a", slots=4)
    stage.agents["a"] = agent
    agent.join(time=time.time() - 100)
    assert "its clock is " in stage.events("quarantine")[0]["reason"]


# ---- a host turns bad ------------------------------------------------------------------------------------------------


def test_a_host_that_turned_bad_is_left_out_of_the_next_formation(stage: Stage) -> None:
    """It is found when the epoch after a failure is formed; no rank of it fell, so that is no incident of its own."""
    good, bad = stage.host("a", 2), stage.host("b", 2)
    stage.start(step=7)
    good.lose(1)
    stage.coordinator.tick()
    good.ready()
    bad.say("unfit", epoch=stage.epoch, problems=["b: its disk cannot be written"])
    stage.coordinator.tick()
    assert (stage.epoch, stage.seats) == (3, [["a", 0], ["a", 1]])
    assert stage.events("epoch")[-1]["reason"] == "without host b: failed the preflight"
    (told,) = stage.events("quarantine")
    assert (told["host"], told["reason"], told["epoch"]) == ("b", "b: its disk cannot be written", 2)
    assert len(stage.events("incident")) == 1
    stage.ready()
    stage.advance(9)
    stage.pass_time(10.0)
    assert (stage.world, stage.epoch) == (2, 3), "its living processes are no reason to grow"


def test_a_host_found_bad_for_an_older_epoch_is_not_judged(stage: Stage) -> None:
    stage.host("a", 2)
    late = stage.host("b", 2)
    stage.start(step=7)
    late.say("unfit", epoch=stage.epoch - 1, problems=["b: was slow once"])
    assert (stage.events("quarantine"), stage.coordinator.state.hosts["b"].problems) == ([], ())


def test_when_the_last_host_turns_bad_the_run_says_why_and_how_to_go_on(stage: Stage) -> None:
    agent = stage.host("a", 4)
    stage.start(step=7)
    folder = stage.run.path / "checkpoints" / "step-00000006"
    folder.mkdir(parents=True)
    (folder / "manifest.json").touch()
    agent.lose(1)
    stage.coordinator.tick()
    agent.say("unfit", epoch=stage.epoch, problems=["a: GPU 3 is gone\n  look at dmesg"])
    stage.coordinator.tick()
    assert stage.status == ("failed", 3)
    assert stage.message.splitlines() == [
        "a host failed its preflight",
        "  a: GPU 3 is gone",
        "    look at dmesg",
        f"  last good checkpoint: step 6; resume with: phalanx train --resume {stage.run.path}",
    ]


def test_with_replace_a_lost_place_is_waited_for_but_a_bad_one_is_not(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(recovery="replace")
    stage.host("a", 2)
    bad = stage.host("b", 2)
    stage.start(step=3)
    stage.agents["a"].lose(0)
    stage.coordinator.tick()
    bad.say("unfit", epoch=stage.epoch, problems=["b: its disk is full"])
    stage.coordinator.tick()
    assert stage.status == ("failed", 3)
    assert "b: its disk is full" in stage.message


def test_a_failure_that_meets_a_bad_host_names_it(stage: Stage) -> None:
    stage.host("a", 2)
    bad = stage.host("b", 4)
    stage.start(step=3)
    stage.agents["a"].lose(0, up=False)
    stage.agents["a"].lose(1, up=False)
    bad.say("unfit", epoch=stage.epoch, problems=["b: its disk is full"])
    stage.pass_time(TIMEOUT_S + 5, by_s=1.0)
    assert stage.status == ("failed", 3)
    assert "not enough slots left for any layout of this job; a host failed its preflight:\n" in stage.message
    assert "    b: its disk is full" in stage.message


def test_a_clock_that_went_wrong_during_the_run_is_found_when_it_forms(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was read after the host was asked, so how long the way took does not matter."""
    stage.host("a", 2)
    wrong = stage.host("b", 2)
    stage.coordinator.tick()
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + 30.0)
    wrong.say("ready", epoch=stage.epoch, ports={}, held=[], time=real() - 10.0)
    assert stage.events("quarantine") == [], "it is our own clock that was set"
    stage.now_s += 30.0  # the answer took long
    wrong.say("ready", epoch=stage.epoch, ports={}, held=[], time=real() + 1.0)
    assert stage.events("quarantine") == []
    wrong.say("ready", epoch=stage.epoch, ports={}, held=[], time=real() - 10.0)
    assert "b: its clock is " in stage.events("quarantine")[0]["reason"]


def test_a_new_coordinator_hears_of_the_bad_host_from_its_hello(stage: Stage) -> None:
    good, bad = stage.host("a", 2), stage.host("b", 2)
    stage.start(step=7)
    good.lose(1)
    stage.coordinator.tick()
    stage.restart()
    good.join()
    bad.join(problems=["b: its disk cannot be written"])
    stage.pass_time(1.0)
    assert (stage.world, stage.seats) == (2, [["a", 0], ["a", 1]])


# ---- a rank falls ----------------------------------------------------------------------------------------------------


def test_a_killed_rank_is_replaced_in_its_slot(stage: Stage) -> None:
    agent = stage.host("a", 4)
    stage.start(step=7)
    old = dict(agent.pids)
    agent.lose(2)
    stage.coordinator.tick()
    assert (stage.epoch, stage.world, current_generation(stage.run)) == (2, 4, 2)
    assert [one["pid"] for one in stage.events("epoch")[-1]["members"]] == [old[0], old[1], agent.pids[2], old[3]]
    incident = stage.events("incident")[0]
    assert (incident["rank"], incident["slot"], incident["step"], incident["cause"]["signal"]) == (2, 2, 7, 9)
    assert stage.events("epoch")[-1]["reason"] == "rank 2 failed: Signal"


def test_it_waits_for_the_new_process_rather_than_shrink(stage: Stage) -> None:
    agent = stage.host("a", 4)
    stage.start(step=7)
    agent.lose(2, up=False)
    stage.pass_time(1.0)
    assert stage.epoch == 1
    agent.up()
    stage.coordinator.tick()
    assert (stage.epoch, stage.world) == (2, 4)


def test_a_spare_takes_the_place_at_once(stage: Stage) -> None:
    agent = stage.host("a", 5)
    stage.start(step=7)
    agent.lose(2, up=False)
    stage.coordinator.tick()
    assert stage.seats == [["a", 0], ["a", 1], ["a", 4], ["a", 3]]


def test_without_a_place_the_job_shrinks_and_grows_again_at_the_end_of_a_step(stage: Stage) -> None:
    agent = stage.host("a", 4)
    stage.start(step=7)
    agent.lose(2, up=False)
    stage.pass_time(REPLACE_S + 0.5)
    assert (stage.epoch, stage.world) == (2, 3)
    stage.ready()
    stage.advance(8)
    agent.up()
    stage.pass_time(0.75)
    assert "reform" not in agent.kinds(), "the place is to stay for a moment"
    stage.pass_time(0.75)
    assert agent.kinds()[-1] == "reform"
    for slot in agent.ranks:
        agent.left(slot, state="reform", step=12)
    stage.coordinator.tick()
    assert (stage.epoch, stage.world, stage.events("epoch")[-1]["reason"]) == (3, 4, "as planned")
    assert stage.seats == [["a", slot] for slot in range(4)]
    assert len(stage.events("incident")) == 1, "growing is none"


def test_two_that_fall_at_once_are_one_incident(stage: Stage) -> None:
    agent = stage.host("a", 4)
    stage.start(step=7)
    agent.lose(1)
    agent.lose(3)
    stage.coordinator.tick()
    assert (stage.epoch, len(stage.events("incident")), stage.events("incident")[0]["others"]) == (2, 1, [3])


@pytest.mark.parametrize("told", [False, True], ids=["forming", "going"])
def test_a_rank_that_falls_while_the_next_formation_is_made(stage: Stage, told: bool) -> None:
    agent = stage.host("a", 4)
    stage.start(step=7)
    agent.lose(2)
    stage.coordinator.tick()
    if told:
        stage.ready()
    agent.lose(2)
    agent.lose(0)
    stage.pass_time(0.25)
    assert (stage.epoch, stage.world) == (3, 4)
    assert len(stage.events("incident")) == 2
    stage.ready()
    assert agent.last("go")["epoch"] == 3


STUCK = {"kind": "Silence", "message": "did not leave its membership within 5 s", "signal": 0}


def test_survivors_that_must_be_killed_belong_to_the_same_incident(stage: Stage) -> None:
    """One fault is one epoch and one failure in a row, also where nobody gets out of the old epoch by itself."""
    agent = stage.host("a", 4)
    stage.start(step=7)
    agent.lose(2)
    stage.coordinator.tick()
    stage.pass_time(DEAD_S)
    for slot in (0, 1, 3):
        agent.lose(slot, leaving=True, **STUCK)
        stage.pass_time(0.25)
    assert (stage.epoch, stage.coordinator.state.saved.failures, len(stage.events("incident"))) == (2, 1, 1)
    assert [one["slot"] for one in agent.heard if one["kind"] == "seat"] == [0, 1, 3]
    told = stage.events("replacement")
    assert [(one["rank"], one["epoch"], one["pid"]) for one in told] == [(n, 2, agent.pids[n]) for n in (0, 1, 3)]
    assert told[0]["cause"]["message"] == STUCK["message"]
    assert "go" not in agent.kinds()[2:]
    stage.ready()
    assert agent.last("go")["epoch"] == 2
    stage.advance(8)
    agent.lose(0)
    stage.coordinator.tick()
    assert (stage.epoch, stage.events("incident")[-1]["in_a_row"]) == (3, 1), (
        "its new process is a member like any other"
    )


def test_a_survivor_that_is_not_replaced_makes_another_epoch_but_no_other_incident(
    make_stage: Callable[..., Stage],
) -> None:
    stage = make_stage(restarts=1)
    agent = stage.host("a", 5)
    stage.start(step=7)
    agent.lose(2, up=False)  # the spare takes its place
    stage.coordinator.tick()
    agent.lose(0, up=False, leaving=True, **STUCK)
    agent.slots = 0  # nor does any other place get a process
    stage.pass_time(2 * REPLACE_S + 1.0)
    assert (stage.epoch, stage.world, stage.coordinator.state.saved.failures) == (3, 3, 1)
    assert len(stage.events("incident")) == 1
    assert not stage.coordinator.state.is_over


def test_under_shrink_a_survivor_that_must_be_killed_is_not_replaced(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(recovery="shrink")
    agent = stage.host("a", 4)
    stage.start(step=7)
    agent.lose(2)
    stage.coordinator.tick()
    for slot in (0, 1):
        agent.lose(slot, leaving=True, **STUCK)
    stage.pass_time(0.5)
    assert (stage.epoch, stage.world, len(stage.events("incident"))) == (3, 1, 1)


def test_a_fault_of_its_own_while_others_are_replaced_is_another_incident(stage: Stage) -> None:
    agent = stage.host("a", 4)
    stage.start(step=7)
    agent.lose(2)
    stage.coordinator.tick()
    agent.lose(0, up=False, leaving=True, **STUCK)
    agent.lose(2, up=False)  # had answered, and joined what is being made
    stage.pass_time(0.75)
    assert stage.epoch == 2, "their new processes are waited for"
    agent.up()
    stage.pass_time(0.5)
    assert (stage.epoch, stage.world) == (3, 4)
    assert [one["in_a_row"] for one in stage.events("incident")] == [1, 2]
    second = stage.events("incident")[1]
    assert {second["rank"], *second["others"]} == {0, 2}, "who was to be replaced is lost in it as well"


def test_a_seat_that_was_told_to_an_agent_that_hung_up_is_told_again(stage: Stage) -> None:
    agent = stage.host("a", 4)
    stage.start(step=7)
    agent.lose(2)
    stage.coordinator.tick()
    agent.lose(0, up=False, leaving=True, **STUCK)
    agent.hang_up()
    agent.fill()
    agent.join()
    stage.pass_time(0.25)
    assert 0 in [one["slot"] for one in agent.heard if one["kind"] == "seat"]
    stage.ready()
    assert (agent.last("go")["epoch"], len(stage.events("incident"))) == (2, 1)


def test_a_rank_that_died_before_the_form_reached_it_is_replaced_in_it(stage: Stage) -> None:
    """Its agent had not yet noticed; the end it tells of is of a process that was counted on."""
    agent = stage.host("a", 4)
    stage.start(step=7)
    agent.lose(2)
    stage.coordinator.tick()
    agent.epoch = 1  # the form is still on its way
    agent.lose(3)
    stage.pass_time(0.25)
    assert (stage.epoch, agent.last("seat")["slot"], len(stage.events("incident"))) == (2, 3, 1)
    agent.epoch = 2
    stage.ready()
    assert agent.last("go")["epoch"] == 2


def test_the_end_of_a_process_that_was_replaced_before_is_no_news(stage: Stage) -> None:
    agent = stage.host("a", 4)
    stage.start(step=7)
    old = agent.pids[2]
    agent.lose(2)
    stage.coordinator.tick()
    agent.say("lost", slot=2, pid=old, epoch=1, failure=asdict(failing.by_signal(2, 7, 9)))
    stage.ready()
    stage.advance(8)
    assert (stage.epoch, len(stage.events("incident"))) == (2, 1)


def test_messages_of_old_epochs_are_ignored(stage: Stage) -> None:
    agent = stage.host("a", 4)
    stage.start(step=7)
    agent.lose(2)
    stage.coordinator.tick()
    for slot in range(4):
        agent.left(slot, epoch=1, state="done")
    agent.say("ready", epoch=1, ports={}, held=[])
    agent.say("beat", epoch=1, progress=[99, 2, 0.0])
    stage.pass_time(2.0)
    assert (stage.epoch, stage.coordinator.state.is_over, "go" in agent.kinds()[2:]) == (2, False, False)
    assert stage.coordinator.state.saved.step == 7


def test_what_survivors_say_of_the_last_collective_is_kept_by_the_rank_they_were(stage: Stage) -> None:
    agent = stage.host("a", 4)
    stage.start(step=7)
    agent.lose(0, up=False)
    stage.pass_time(REPLACE_S + 0.5)
    assert stage.seats == [["a", 1], ["a", 2], ["a", 3]]
    agent.left(3, epoch=1)
    stage.ready()
    (evidence,) = stage.events("evidence")
    assert (evidence["epoch"], evidence["last_collectives"]) == (1, {"3": "all_gather of slot 3"})


def test_under_shrink_a_lost_rank_is_not_replaced(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(recovery="shrink")
    agent = stage.host("a", 5)
    stage.start(step=7)
    agent.lose(1)
    stage.coordinator.tick()
    assert stage.seats == [["a", 0], ["a", 2], ["a", 3]]
    stage.ready()
    stage.advance(8)
    stage.pass_time(3.0)
    assert "reform" not in agent.kinds()


def test_under_replace_it_waits_for_a_place_and_then_gives_up(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(recovery="replace")
    agent = stage.host("a", 4)
    stage.start(step=7)
    agent.lose(1, up=False)
    stage.pass_time(10.0)
    assert (stage.epoch, stage.coordinator.state.is_over) == (1, False)
    stage.pass_time(TIMEOUT_S)
    assert stage.status == ("failed", 3)
    assert "given up: there are not enough slots left" in stage.message
    assert len(stage.events("incident")) == 1


def test_under_stop_the_first_failure_ends_the_run(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(recovery="stop")
    agent = stage.host("a", 4)
    stage.start(step=7)
    agent.left(1, why="RuntimeError: Connection closed by peer")
    agent.lose(2, kind="KeyError", message="'x'", signal=0)
    stage.pass_time(1.0)
    assert (stage.status, stage.epoch) == (("failed", 3), 1)
    assert stage.message.startswith("step 7: rank 2 of 4 (host ")
    assert "KeyError: 'x'\n  other ranks: 1 lost their peer, 2 stopped by us\n" in stage.message
    assert agent.last("end")["code"] == 3
    assert len(stage.events("incident")) == 1, "the cause is recorded also when it is the end"


@pytest.mark.parametrize("all_failed", [False, True])
def test_a_run_ends_once_every_rank_has_said_what_happened_or_half_a_second_later(
    make_stage: Callable[..., Stage], all_failed: bool
) -> None:
    stage = make_stage(recovery="stop")
    agent = stage.host("a", 4)
    stage.start(step=7)
    agent.lose(2)
    if all_failed:
        agent.lose(3)
        agent.left(0, why="RuntimeError: Connection closed by peer")
        stage.coordinator.tick()
        assert not stage.coordinator.state.is_over
        agent.left(1, why="RuntimeError: Connection closed by peer")
        stage.coordinator.tick()
    else:
        stage.pass_time(0.5)
        assert not stage.coordinator.state.is_over, "its cause may be another rank's failure"
        stage.pass_time(0.25)
    assert stage.status == ("failed", 3)
    assert "in a row" not in stage.message, "it is not the count that ends it"


def test_a_mistake_of_the_user_in_one_rank_is_not_the_fault_of_its_slot(stage: Stage) -> None:
    agent = stage.host("a", 4)
    stage.start(step=7)
    agent.lose(2, kind="UserError", message="data: is cut", signal=0, exit_code=2)
    stage.pass_time(1.0)
    assert (stage.status, stage.epoch, stage.events("quarantine")) == (("failed", 2), 1, [])


def test_a_mistake_of_the_user_ends_it_at_once_with_code_2(stage: Stage) -> None:
    agent = stage.host("a", 4)
    stage.start(step=7)
    for slot in (2, 3):
        agent.lose(slot, kind="UserError", message="data: is cut", signal=0, exit_code=2)
    stage.pass_time(1.0)
    assert (stage.status, stage.epoch) == (("failed", 2), 1)
    assert stage.message.startswith("data: is cut\n  said by rank 2, step 7\n  other ranks: 1 said the same")


@pytest.mark.parametrize("is_rescued", [True, False])
def test_a_last_save_that_fails_ends_it_at_once_with_the_cure_that_the_rank_gave(
    stage: Stage, is_rescued: bool
) -> None:
    agent = stage.host("a", 4)
    stage.start(step=7)
    problem = Problem(where="c", what="step 7 is not saved: full", why="the ranks held it", fix="make room")
    told = asdict(failing.failure_of(0, failing.LastSaveFailed(problem, is_rescued=is_rescued), step=7))
    for slot in range(4):
        agent.lose(slot, **told)
    stage.pass_time(1.0)
    assert (stage.status, stage.epoch) == (("failed", 3), 1)
    assert (
        "c: step 7 is not saved: full\n  the ranks held it\n  make room\n  other ranks: 3 said the same"
        in stage.message
    )
    assert ("no checkpoint was written yet" in stage.message) != is_rescued
    assert (agent.last("end")["rescue"] is None) == is_rescued, "memory is written unless the ranks have done it"


def test_a_failure_says_on_which_of_several_hosts(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(recovery="stop")
    stage.host("a", 2)
    other = stage.host("b", 2)
    stage.start(step=7)
    other.lose(1)
    stage.pass_time(1.0)
    assert stage.message.startswith("step 7: rank 3 of 4 (host b): was killed (SIGKILL)")


# ---- again and again -------------------------------------------------------------------------------------------------


def test_a_slot_that_fails_again_and_again_is_left_out_once_before_the_run_gives_up(stage: Stage) -> None:
    agent = stage.host("a", 4)
    stage.start(step=7)
    lost = []
    for _ in range(20):
        slot = next(slot for slot, rank in agent.ranks.items() if rank == 1)
        lost.append(slot)
        agent.lose(slot)
        stage.pass_time(6.0)
        if stage.coordinator.state.is_over:
            break
        stage.ready()
    (quarantine,) = stage.events("quarantine")
    assert (quarantine["slot"], lost[:4], set(lost[4:]) & {1}) == (1, [1, 1, 1, 1], set())
    assert [len(one["members"]) < 4 for one in stage.events("epoch")][:5] == [False] * 4 + [True]
    assert len(lost) == 8, "what fails on another slot too is not the slot's fault"
    assert "given up: 4 failures in a row" in stage.message


@pytest.mark.parametrize(
    ("incidents", "is_left_out"),
    [
        ([{1}, {1}, {1}, {1}], True),
        ([{1}, {2}, {1}, {2}], False),
        ([{2}, {1}, {1}, {1}], False),
        ([{1}, {1}, {1}, {1, 2}], False),
    ],
)
def test_a_slot_is_left_out_only_if_no_other_slot_failed(
    stage: Stage, incidents: list[set[int]], is_left_out: bool
) -> None:
    agent = stage.host("a", 4)
    stage.start(step=7)
    for slots in incidents:
        for slot in slots:
            agent.lose(slot)
        stage.pass_time(6.0)
        stage.ready()
    assert [one["slot"] for one in stage.events("quarantine")] == ([1] if is_left_out else [])
    assert len(stage.events("incident")) == 4
    assert stage.coordinator.state.is_over != is_left_out


def test_restarts_without_progress_are_bounded_and_ever_slower(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(recovery="replace")
    agent = stage.host("a", 4)
    stage.start(step=7)
    waits = []
    for _ in range(10):
        before, epoch = stage.now_s, stage.epoch
        agent.lose(1)
        while stage.epoch == epoch and not stage.coordinator.state.is_over:
            stage.pass_time(0.05, by_s=0.05)
        if stage.coordinator.state.is_over:
            break
        waits.append(round(stage.now_s - before, 1))
        stage.ready()
    assert len(waits) == 3, "fault.restarts"
    assert waits[0] <= 0.1
    assert waits[2] >= 0.5
    assert stage.status == ("failed", 3)
    assert "given up: 4 failures in a row, without a new step between (fault.restarts = 3)" in stage.message
    assert [one["in_a_row"] for one in stage.events("incident")] == [1, 2, 3, 4]
    assert stage.events("quarantine") == [], "under replace no rank goes without its slot"


def test_the_pause_before_a_restart_doubles_up_to_ten_seconds(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(recovery="replace", restarts=8)
    agent = stage.host("a", 4)
    stage.start(step=7)
    waits = []
    for _ in range(8):
        before, epoch = stage.now_s, stage.epoch
        agent.lose(1)
        while stage.epoch == epoch:
            stage.pass_time(0.0625, by_s=0.0625)
        waits.append(stage.now_s - before)
        stage.ready()
    assert waits == [0.0625, 0.0625, 0.5, 1.0, 2.0, 4.0, 8.0, 10.0]
    assert [one["waited_s"] for one in stage.events("incident")] == pytest.approx(waits, abs=0.001)


def test_a_step_further_than_ever_forgives_and_one_done_again_does_not(stage: Stage) -> None:
    agent = stage.host("a", 4)
    stage.start(step=7)
    for _ in range(2):
        agent.lose(1)
        stage.pass_time(1.0)
        stage.ready()
    assert stage.coordinator.state.saved.failures == 2
    stage.advance(5)  # there was no copy in memory: it began anew
    assert stage.coordinator.state.saved.failures == 2
    stage.advance(8)
    assert stage.coordinator.state.saved.failures == 0


def test_a_place_that_fails_again_and_again_is_left_alone_when_there_is_another(stage: Stage) -> None:
    agent = stage.host("a", 5)
    stage.start(step=7)
    for _ in range(3):
        slot = next(slot for slot, rank in agent.ranks.items() if rank == 1)
        agent.lose(slot)  # the new process is there at once, so the rank stays in its slot
        stage.pass_time(2.0)
        stage.ready()
    (told,) = stage.events("quarantine")
    assert (told["slot"], told["reason"]) == (1, "failed 3 times in a row")
    assert stage.seats == [["a", 0], ["a", 4], ["a", 2], ["a", 3]]


# ---- hosts -----------------------------------------------------------------------------------------------------------


def test_a_host_that_is_gone_and_comes_back(stage: Stage) -> None:
    first, second = stage.host("a", 2), stage.host("b", 2)
    stage.start(step=7)
    second.hang_up()
    stage.pass_time(0.75)
    assert stage.epoch == 1, "it may only have lost the connection"
    stage.pass_time(0.75)
    assert (stage.epoch, stage.world) == (2, 2)
    assert stage.events("incident")[0]["cause"]["message"] == "host b is lost: its agent closed the connection"
    first.ready()
    stage.coordinator.tick()
    stage.advance(8)
    second.epoch, second.went, second.ranks, second.pids = 0, 0, {}, {}
    second.fill()
    second.join()
    stage.pass_time(1.5)
    assert first.kinds()[-1] == "reform"
    for slot in first.ranks:
        first.left(slot, state="reform", step=9)
    stage.coordinator.tick()
    assert stage.coordinator.state.saved.step == 9, "the layout of the next membership is that of step 9"
    assert (stage.epoch, stage.world) == (3, 4)


def test_the_first_cause_of_a_rank_stays_its_cause(stage: Stage) -> None:
    stage.host("a", 2)
    second = stage.host("b", 2)
    stage.start(step=7)
    second.lose(1, up=False)
    second.hang_up()
    stage.pass_time(1.5)
    incident = stage.events("incident")[0]
    assert (incident["rank"], incident["cause"]["signal"]) == (3, 9)


def test_a_connection_that_only_broke_changes_nothing(stage: Stage) -> None:
    stage.host("a", 2)
    second = stage.host("b", 2)
    stage.start(step=7)
    second.hang_up()
    stage.pass_time(0.5)
    second.join()
    stage.pass_time(2.0)
    assert (stage.epoch, stage.events("incident")) == (1, [])


def test_a_silent_host_is_given_up_and_introduces_itself_again(stage: Stage) -> None:
    first, second = stage.host("a", 2), stage.host("b", 2)
    stage.start(step=7)
    for _ in range(12):
        stage.now_s += 0.5
        first.beat()
        stage.coordinator.tick()
    assert (stage.epoch, stage.world) == (2, 2)
    assert stage.events("host")[-1]["reason"] == "stopped sending heartbeats"
    second.beat()
    assert second.kinds()[-1] == "again"
    second.join()
    stage.ready()
    stage.advance(8)
    stage.pass_time(1.5)
    assert first.kinds()[-1] == "reform"


def test_a_host_that_was_frozen_is_told_that_the_run_went_on_without_it(make_stage: Callable[..., Stage]) -> None:
    """All ranks were there, so they would train on together, beside those that took their places."""
    launch = {"hosts": ["a", "b"], "slots": [4, 4]}
    stage = make_stage(launch=launch)
    first, second = stage.host("a", 4), stage.host("b", 4)
    stage.start(step=7)
    assert (first.ranks, second.ranks) == ({slot: slot for slot in range(4)}, {})
    for _ in range(24):
        stage.now_s += 0.25
        second.beat()
        stage.coordinator.tick()
    assert (stage.epoch, second.ranks) == (2, {slot: slot for slot in range(4)})
    first.join()
    assert (first.epoch, first.ranks) == (2, {})


def test_ranks_begin_in_the_spare_slots_of_a_host_only_if_others_do_not_come(make_stage: Callable[..., Stage]) -> None:
    launch = {"hosts": ["a", "b"], "slots": [4, 4], "spares": [2, 2]}
    for does_other_come in (True, False):
        stage = make_stage(launch=launch)
        stage.host("a", 4)
        stage.coordinator.tick()
        assert stage.world == 0
        if does_other_come:
            stage.host("b", 4)
        stage.pass_time(SPREAD_S + 1, by_s=0.5)
        places = [["a", 0], ["a", 1], *([["b", 0], ["b", 1]] if does_other_come else [["a", 2], ["a", 3]])]
        assert stage.seats == places


def test_hosts_that_are_to_join_are_waited_for_before_spare_slots_are_used(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(launch={"hosts": ["a"], "slots": [4], "spares": [2], "join": 2})
    stage.host("a", 4)
    stage.coordinator.tick()
    assert stage.world == 0
    stage.host("b", 2)
    stage.coordinator.tick()
    assert stage.seats == [["a", 0], ["a", 1], ["b", 0], ["b", 1]]


def test_a_lost_host_s_ranks_go_to_spare_slots_last(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(launch={"hosts": ["a", "b", "c"], "slots": [3, 2, 2], "spares": [1, 0, 0]})
    for name, slots in (("a", 3), ("b", 2), ("c", 2)):
        stage.host(name, slots)
    stage.start(step=7)
    assert stage.seats == [["a", 0], ["a", 1], ["b", 0], ["b", 1]]
    stage.agents["b"].hang_up()
    stage.pass_time(1.5)
    assert stage.seats == [["a", 0], ["a", 1], ["c", 0], ["c", 1]]


def test_a_coordinator_that_was_stopped_itself_blames_nobody(stage: Stage) -> None:
    agent = stage.host("a", 4)
    stage.start(step=7)
    stage.now_s += 60.0  # SIGSTOP, SIGCONT
    stage.coordinator.tick()
    agent.beat()
    stage.coordinator.tick()
    assert (stage.epoch, stage.events("incident")) == (1, [])


@pytest.mark.parametrize(
    ("pause_s", "is_excused"),
    [(1.0, False), (1.25, True), (30.0, True)],  # what an idle coordinator takes between two turns is no pause
)
def test_a_pause_of_the_coordinator_is_no_silence_of_a_host_and_the_rest_is(
    stage: Stage, pause_s: float, is_excused: bool
) -> None:
    first, second = stage.host("a", 2), stage.host("b", 2)
    stage.start(step=7)
    second.connected = False  # it hangs, and does not hang up
    stage.pass_time(3.0)
    stage.now_s += pause_s
    first.beat()
    stage.coordinator.tick()
    rest_s = DEAD_S - 3.0 - (0.0 if is_excused else pause_s)
    stage.pass_time(rest_s - 0.25)
    assert stage.events("host")[-1]["state"] != "lost"
    stage.pass_time(0.5)
    assert (stage.events("host")[-1]["host"], stage.events("host")[-1]["state"]) == ("b", "lost")


@pytest.mark.parametrize(("something_failed", "waits_s"), [(False, 5.0), (True, 1.0)])
def test_a_new_coordinator_waits_for_hosts_longer_where_nothing_seems_wrong(
    stage: Stage, something_failed: bool, waits_s: float
) -> None:
    first, second = stage.host("a", 2), stage.host("b", 2)
    stage.start(step=7)
    second.connected = False
    stage.restart()
    first.join()
    if something_failed:
        first.left(0, why="RuntimeError: Connection closed by peer")
    stage.pass_time(waits_s - 0.25)
    assert "did not come back" not in [one.get("reason") for one in stage.events("host")]
    stage.pass_time(0.25)
    assert stage.events("host")[-1]["reason"] == "did not come back"


def test_one_that_says_nothing_through_several_own_pauses_is_given_up(stage: Stage) -> None:
    """A coordinator on a starved machine that never runs for two seconds in a row; it listens between its pauses."""
    first, _ = stage.host("a", 2), stage.host("b", 2)
    stage.start(step=7)
    for _ in range(8):
        stage.now_s += 1.5
        first.beat()
        stage.coordinator.tick()
    assert [one["host"] for one in stage.events("host") if one["state"] == "lost"] == ["b"]
    assert (stage.epoch, stage.world) == (2, 2)


def test_the_only_host_is_waited_for(stage: Stage) -> None:
    agent = stage.host("a", 4)
    stage.start(step=7)
    agent.hang_up()
    stage.pass_time(30.0)
    assert not stage.coordinator.state.is_over
    agent.epoch, agent.went, agent.ranks, agent.pids = 0, 0, {}, {}
    agent.join()
    agent.up()
    stage.coordinator.tick()
    assert (stage.epoch, stage.world) == (2, 4)
    assert len(stage.events("incident")) == 1


@pytest.mark.parametrize("away_s", [0.0, 0.5, 3.0], ids=["no word of its end", "soon", "given up first"])
@pytest.mark.parametrize("takes_over", [False, True], ids=["same coordinator", "another"])
def test_the_reason_names_the_lost_agent_whichever_message_comes_first(
    make_stage: Callable[..., Stage], away_s: float, takes_over: bool
) -> None:
    stage = make_stage(recovery="stop")
    agent = stage.host("a", 4)
    stage.start(step=7)
    if takes_over:
        stage.restart()
    elif away_s:
        agent.hang_up()
    stage.pass_time(away_s, beats=False)
    agent.epoch, agent.went, agent.ranks, agent.pids = 0, 0, {}, {}
    if not stage.coordinator.state.is_over:
        agent.join()
        agent.up()
        stage.pass_time(3.0)
    (incident,) = stage.events("incident")
    assert (incident["cause"]["kind"], incident["host"]) == ("HostLost", "a")
    assert incident["cause"]["message"].startswith("host a is lost: its agent ")
    assert stage.run.status()["cause"] == "HostLost"


def test_the_only_host_is_not_waited_for_forever(stage: Stage) -> None:
    stage.host("a", 4).hang_up()
    stage.agents["a"].join()
    stage.start(step=7)
    stage.agents["a"].hang_up()
    stage.pass_time(TIMEOUT_S + 5, by_s=1.0)
    assert stage.status == ("failed", 3)


def test_it_does_not_shrink_while_it_is_not_clear_who_is_there(stage: Stage) -> None:
    first, second = stage.host("a", 2), stage.host("b", 2)
    stage.start(step=7)
    second.hang_up()
    first.lose(0)
    stage.coordinator.tick()
    assert stage.epoch == 1
    second.join()
    stage.coordinator.tick()
    assert (stage.epoch, stage.world) == (2, 4)


# ---- state -----------------------------------------------------------------------------------------------------------


def test_the_newest_step_that_memory_holds_in_full_is_taken_up(stage: Stage) -> None:
    first, second = stage.host("a", 2), stage.host("b", 2)
    stage.start(step=9)
    first.held = snapshots(epoch=1, step=9, world=4, slots={0: 0, 1: 1}) + snapshots(
        epoch=1, step=8, world=4, slots={0: 0, 1: 1}
    )
    second.held = snapshots(epoch=1, step=8, world=4, slots={0: 2, 1: 3}) + snapshots(
        epoch=1, step=9, world=4, slots={0: 2}
    )
    second.lose(1)
    stage.coordinator.tick()
    stage.ready()
    go = first.last("go")
    assert (go["restore"]["epoch"], go["restore"]["step"]) == (1, 8)
    assert (go["restore"]["hosts"], go["restore"]["writers"]) == (2, [[0, 3]])
    first.restored(8, "memory")
    assert [(one["step"], one["source"]) for one in stage.events("restore")][-1] == (8, "memory")
    first.held = snapshots(epoch=1, step=9, world=4, slots={0: 0, 1: 1})  # undone: epoch 2 went on from step 8
    second.held = snapshots(epoch=1, step=9, world=4, slots={0: 2, 1: 3})
    second.lose(1)
    stage.pass_time(0.25)
    stage.ready()
    assert first.last("go")["restore"] is None


def test_what_ranks_restored_is_recorded_and_not_what_they_were_asked_to(stage: Stage) -> None:
    """Copies of step 9 and the checkpoint of step 8 turn out damaged: the ranks go on from step 4."""
    agent = stage.host("a", 4)
    stage.start(step=9)
    commit(stage, 4, 8)
    agent.held = snapshots(epoch=1, step=9, world=4, slots=agent.ranks)
    agent.lose(1)
    stage.coordinator.tick()
    stage.ready()
    assert agent.last("go")["restore"]["step"] == 9
    agent.restored(3, "disk", epoch=1)  # a report from before: of the membership that is over
    assert stage.events("restore") == []
    agent.restored(4, "disk")
    assert [(one["epoch"], one["step"], one["source"]) for one in stage.events("restore")] == [(2, 4, "disk")]
    assert stage.coordinator.state.saved.step == 4
    agent.lose(1)  # the copies of step 9 are still there, and are no part of the run any more
    stage.pass_time(0.5)
    stage.ready()
    assert agent.last("go")["epoch"] == 3
    assert agent.last("go")["restore"] is None


def test_a_report_that_comes_late_takes_no_step_back(stage: Stage) -> None:
    agent = stage.host("a", 4)
    stage.start(step=9)
    agent.held = snapshots(epoch=1, step=9, world=4, slots=agent.ranks)
    agent.lose(1)
    stage.coordinator.tick()
    stage.ready()
    stage.advance(10)
    agent.restored(9, "memory")
    assert stage.coordinator.state.saved.step == 10
    assert [(one["step"], one["source"]) for one in stage.events("restore")] == [(9, "memory")]
    lineage = stage.coordinator.state.saved.lineage
    assert lineage.allows(1, 9), "what memory gave is an ancestor"


def test_the_next_coordinator_records_what_was_restored(stage: Stage) -> None:
    agent = stage.host("a", 4)
    stage.start()
    stage.restart()
    agent.join()
    agent.restored(0, "start")
    assert [one["step"] for one in stage.events("restore")] == [0]


def test_what_a_host_outside_of_the_formation_holds_cannot_be_reached(stage: Stage) -> None:
    first, second = stage.host("a", 4), stage.host("b", 1)
    stage.start(step=9)
    first.held = snapshots(epoch=1, step=9, world=4, slots={0: 0, 1: 1, 2: 2})
    second.held = snapshots(epoch=1, step=9, world=4, slots={0: 3})
    first.lose(3)
    stage.coordinator.tick()
    assert {host for host, _ in stage.seats} == {"a"}
    stage.ready()
    assert first.last("go")["restore"] is None


# ---- astray ----------------------------------------------------------------------------------------------------------


def astray(agent: Agent, **fields: Any) -> None:
    """All ranks of a host leave at once, and its agent tells it at once."""
    how = {"fault": "not-finite", "why": "the gradient was not finite", "sound": 6, "step": 9, **fields}
    agent.say("left", ranks=[{"kind": "left", "slot": slot, "epoch": agent.epoch, **how} for slot in agent.ranks])


def test_numbers_that_go_astray_are_rolled_back_once(stage: Stage) -> None:
    agent = stage.host("a", 4)
    stage.start(step=9)
    agent.held = [one for step in (6, 8) for one in snapshots(epoch=1, step=step, world=4, slots=agent.ranks)]
    astray(agent)
    stage.pass_time(0.25)
    assert stage.events("epoch")[-1]["reason"] == "roll back to step 6: the gradient was not finite"
    stage.ready()
    go = agent.last("go")
    assert (go["restore"]["step"], go["at_most"]) == (6, 6)
    stage.advance(9)
    astray(agent)
    stage.pass_time(0.25)
    assert stage.status == ("failed", 3)
    assert "given up: it happened again at the same step after going back" in stage.message
    assert [(one["epoch"], one["target"]) for one in stage.events("rollback")] == [(1, 6), (2, 6)]


def commit(stage: Stage, *steps: int) -> None:
    """Checkpoints with a manifest, as far as the coordinator looks."""
    for step in steps:
        folder = stage.run.path / "checkpoints" / f"step-{step:08d}"
        folder.mkdir(parents=True)
        (folder / "manifest.json").touch()


def test_a_roll_back_sets_checkpoints_aside_and_records_which(stage: Stage) -> None:
    agent = stage.host("a", 4)
    stage.start(step=9)
    commit(stage, 4, 6, 7, 8)
    (stage.run.path / "checkpoints" / "untrusted-step-00000005").mkdir()  # of an earlier launch, and before the target
    astray(agent)  # the newest sound step is 6
    stage.pass_time(0.25)
    (event,) = stage.events("rollback")
    assert (event["epoch"], event["step"], event["target"], event["set_aside"]) == (1, 9, 6, [7, 8])
    assert event["reason"] == "the gradient was not finite"
    assert stage.run.saved_steps() == [4, 6]
    assert (stage.run.path / "checkpoints" / "untrusted-step-00000008" / "manifest.json").exists(), "not deleted"
    stage.ready()
    assert (agent.last("go")["restore"], agent.last("go")["at_most"]) == (None, 6)
    assert stage.coordinator.state.saved.step == 6, "the target itself is trusted"


def test_a_run_that_ends_untrusted_records_what_it_set_aside(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(recovery="stop")
    agent = stage.host("a", 4)
    stage.start(step=9)
    commit(stage, 4, 8)
    astray(agent)
    stage.pass_time(1.0)
    assert stage.status == ("failed", 3)
    assert [(one["target"], one["set_aside"]) for one in stage.events("rollback")] == [(6, [8])]


def test_rolling_back_at_ever_other_steps_comes_to_an_end(stage: Stage) -> None:
    agent = stage.host("a", 4)
    stage.start(step=20)
    for step in range(12, 20):
        astray(agent, step=step)
        stage.pass_time(0.5)
        if stage.coordinator.state.is_over:
            break
        stage.ready()
        stage.advance(step)
    assert (step, stage.status) == (15, ("failed", 3))
    assert "failures in a row, without a new step between" in stage.message
    assert [one["step"] for one in stage.events("rollback")] == [12, 13, 14, 15], "also where the run ends"


def test_without_the_rank_to_blame_there_may_be_no_slots_left(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(recovery="replace")
    agent = stage.host("a", 4)
    stage.start(step=9)
    commit(stage, 8)
    astray(agent, fault="diverged", why="rank 2 differs", suspects=[2], evidence=None)
    stage.pass_time(0.5)
    assert stage.status == ("failed", 3)
    assert [(one["target"], one["set_aside"]) for one in stage.events("rollback")] == [(6, [8])]


def test_another_rank_to_blame_at_the_same_step_is_put_aside_too(stage: Stage) -> None:
    agent = stage.host("a", 6)
    for suspect in (1, 2):
        if suspect == 1:
            stage.start(step=9)
        astray(agent, fault="diverged", why=f"rank {suspect} differs", sound=8, suspects=[suspect], evidence=None)
        stage.pass_time(0.5)
        stage.ready()
        stage.advance(9)
    assert (stage.epoch, stage.coordinator.state.is_over) == (3, False)


def test_one_rank_whose_copy_was_wrong_is_put_aside(stage: Stage) -> None:
    agent = stage.host("a", 5)
    stage.start(step=9)
    agent.left(2, fault="diverged", why="rank 2 differs", sound=8, step=9, suspects=[2], evidence=None)
    stage.pass_time(0.25)
    assert stage.epoch == 1, "the others may have more to say"
    stage.pass_time(0.5)
    assert stage.events("quarantine")[0]["slot"] == 2
    assert stage.seats == [["a", 0], ["a", 1], ["a", 4], ["a", 3]]
    stage.ready()
    assert agent.last("go")["at_most"] == 8


def test_all_ranks_whose_memory_changed_are_put_aside(stage: Stage) -> None:
    agent = stage.host("a", 6)
    stage.start(step=9)
    astray(agent, fault="diverged", why="memory of ranks 1 and 2 changed", sound=8, suspects=[1, 2], evidence=None)
    stage.pass_time(0.5)
    assert [event["slot"] for event in stage.events("quarantine")] == [1, 2]
    assert stage.seats == [["a", 0], ["a", 4], ["a", 5], ["a", 3]]


def test_when_nobody_knows_who_was_wrong_the_evidence_goes_along(stage: Stage) -> None:
    agent = stage.host("a", 4)
    stage.start(step=9)
    astray(agent, fault="diverged", why="ranks 0 and 1 differ", suspects=[], evidence={"step": 9})
    stage.pass_time(0.25)
    stage.ready()
    assert agent.last("go")["case"] == {"step": 9}
    stage.restart()
    agent.join()
    agent.lose(1)
    stage.pass_time(0.25)
    stage.ready()
    assert agent.last("go")["case"] == {"step": 9}, "it outlives the coordinator"


def test_what_was_saved_of_a_state_that_went_astray_is_not_called_good(make_stage: Callable[..., Stage]) -> None:
    """It is set aside: a resumed run would take it for the newest."""
    stage = make_stage(recovery="stop")
    agent = stage.host("a", 4)
    stage.start(step=9)
    for step in (4, 8):
        folder = stage.run.path / "checkpoints" / f"step-{step:08d}"
        folder.mkdir(parents=True)
        (folder / "manifest.json").touch()
    astray(agent, sound=6)
    stage.coordinator.tick()
    assert "last good checkpoint: step 4;" in stage.message
    assert "not to be trusted: step 8, now called untrusted-step-…" in stage.message
    assert stage.run.saved_steps() == [4]
    assert (stage.run.path / "checkpoints" / "untrusted-step-00000008" / "manifest.json").exists()
    assert current_generation(stage.run) == stage.epoch + 1, "nobody who still lives commits another"


def test_under_stop_going_astray_ends_the_run(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(recovery="stop")
    agent = stage.host("a", 4)
    stage.start(step=9)
    astray(agent)
    stage.pass_time(1.0)
    assert (stage.status, stage.epoch) == (("failed", 3), 1)
    assert "Astray: the gradient was not finite" in stage.message


# ---- nobody fell -----------------------------------------------------------------------------------------------------


def test_ranks_that_lose_each_other_form_again(stage: Stage) -> None:
    agent = stage.host("a", 4)
    stage.start(step=7)
    for slot in range(4):
        agent.left(slot, why="RuntimeError: Connection reset by peer")
    stage.pass_time(0.5)
    assert stage.epoch == 2
    assert stage.events("incident")[0]["cause"]["message"] == "RuntimeError: Connection reset by peer"


def test_some_that_are_done_wait_for_the_others(stage: Stage) -> None:
    agent = stage.host("a", 4)
    stage.start(step=7)
    for slot in (1, 2, 3):
        agent.left(slot, state="done")
    stage.pass_time(20.0)
    assert (stage.epoch, stage.coordinator.state.is_over) == (1, False)
    agent.left(0, state="done")
    stage.coordinator.tick()
    assert stage.status == ("done", 0)
    assert agent.last("end")["code"] == 0


def test_one_that_dies_when_others_are_done_is_done_again(stage: Stage) -> None:
    agent = stage.host("a", 4)
    stage.start(step=7)
    for slot in (1, 2, 3):
        agent.left(slot, state="done")
    agent.lose(0)
    stage.coordinator.tick()
    assert (stage.epoch, stage.world) == (2, 4)


def test_a_stuck_rank_is_found_by_where_the_others_wait(stage: Stage) -> None:
    agent = stage.host("a", 4)
    stage.start(step=6)
    stage.pass_time(2.0)
    stage.advance(7)
    assert stage.coordinator.state.step_s == 2.0
    agent.age_s = DEAD_S + 3 * 2.0
    stage.pass_time(0.5)
    assert "where" not in agent.kinds(), "three steps more are allowed"
    agent.age_s = DEAD_S + 10
    stage.pass_time(0.25)
    assert agent.kinds()[-1] == "where"
    agent.say("where", ranks={0: [True, "all_reduce"], 1: [True, "all_reduce"], 2: [False, "sleep"], 3: [True, "x"]})
    stage.coordinator.tick()
    kill = agent.last("kill")
    assert (kill["slot"], kill["place"], kill["silent_s"], kill["epoch"]) == (2, "sleep", DEAD_S + 10, 1)
    assert kill["patience"] == "", "the duration of a step is known"
    stage.pass_time(1.0)
    assert agent.kinds().count("kill") == agent.kinds().count("where") == 1, "its end is on its way"
    agent.age_s = 0.0
    agent.lose(2, kind="Silence", message="stopped answering", signal=0)
    stage.coordinator.tick()
    assert stage.epoch == 2


@pytest.mark.parametrize(
    ("steps", "waiting", "culprit"),
    [
        ((7, 7), [], ("a", 0)),  # the first of those that came equally far
        ((7, 6), [], ("b", 0)),  # the one that came least far
        ((6, 7), [0, 1], ("b", 0)),  # of those that do not wait
        ((7, 7), [0], ("a", 1)),
    ],
)
def test_of_several_that_do_not_wait_the_one_that_came_least_far_is_ended(
    stage: Stage, steps: tuple[int, int], waiting: list[int], culprit: tuple[str, int]
) -> None:
    agents = [stage.host("a", 2), stage.host("b", 2)]
    stage.start(step=5)
    for agent, step in zip(agents, steps, strict=True):
        agent.step, agent.age_s = step, 100.0
    stage.pass_time(0.25)
    for agent in reversed(agents):
        agent.say("where", ranks={slot: [agent.ranks[slot] in waiting, "sleep"] for slot in agent.ranks})
    stage.coordinator.tick()
    assert [(agent.name, agent.last("kill")["slot"]) for agent in agents if "kill" in agent.kinds()] == [culprit]


def test_a_host_that_does_not_say_where_its_ranks_are_is_waited_for_two_seconds(stage: Stage) -> None:
    first, second = stage.host("a", 2), stage.host("b", 2)
    stage.start(step=7)
    first.age_s = second.age_s = 100.0
    stage.pass_time(0.25)
    second.say("where", ranks={0: [True, "all_reduce"], 1: [False, "sleep"]})
    stage.pass_time(2.0)
    assert "kill" not in second.kinds()
    stage.pass_time(0.25)
    assert second.last("kill")["slot"] == 1
    asked = second.kinds().count("where")
    stage.pass_time(1.75)
    assert second.kinds().count("where") == asked, "its end is on its way"
    stage.pass_time(0.25)
    assert second.kinds().count("where") == asked + 1


def test_ranks_that_move_while_they_are_asked_where_they_are_are_not_ended(stage: Stage) -> None:
    agent = stage.host("a", 4)
    stage.start(step=7)
    agent.age_s = 100.0
    stage.pass_time(0.25)
    assert agent.kinds()[-1] == "where"
    agent.age_s = 0.0
    agent.beat()
    agent.say("where", ranks={slot: [slot != 2, "sleep"] for slot in range(4)})
    stage.pass_time(3.0)
    assert ("kill" in agent.kinds(), stage.epoch) == (False, 1)


def test_when_all_wait_for_each_other_they_form_again(stage: Stage) -> None:
    agent = stage.host("a", 4)
    stage.start(step=7)
    agent.age_s = 100.0
    stage.pass_time(0.25)
    agent.say("where", ranks={slot: [True, "all_reduce"] for slot in range(4)})
    stage.pass_time(0.5)
    assert stage.epoch == 2
    assert stage.events("incident")[0]["cause"]["kind"] == "Deadlock"


def test_resting_ranks_have_more_patience(stage: Stage) -> None:
    agent = stage.host("a", 4)
    stage.start(step=7)
    for phase, at in (
        (Phase.RESTING, "evaluating or saving"),
        (Phase.BUILDING, "setting up"),
        (Phase.LOCKED, "in native code that holds the interpreter lock"),
    ):
        agent.phase, agent.age_s = phase, TIMEOUT_S + 10
        agent.heard.clear()
        stage.pass_time(5.0)
        assert "where" not in agent.kinds()
        agent.age_s = TIMEOUT_S + 11
        stage.pass_time(0.25)
        agent.say("where", ranks={0: [False, "connect"], **{slot: [True, "all_reduce"] for slot in (1, 2, 3)}})
        stage.coordinator.tick()
        assert f", {at}" in agent.last("kill")["patience"]
        assert "which may take comm.init_timeout_s + 10 s = 70 s" in agent.last("kill")["patience"]
        agent.age_s = 0.0
        stage.pass_time(3.0)


def test_those_that_gave_up_waiting_point_at_the_one_that_did_not(stage: Stage) -> None:
    agent = stage.host("a", 4)
    stage.start(step=7)
    agent.age_s = TIMEOUT_S
    agent.phase = Phase.RESTING
    for slot in (0, 1, 3):
        agent.left(slot, why="RuntimeError: Timed out waiting 60000ms")
    stage.pass_time(1.0)
    assert agent.kinds()[-1] == "where"
    agent.say("where", ranks={slot: [False, "behave"] for slot in range(4)})
    stage.pass_time(0.25)
    assert agent.last("kill")["slot"] == 2
    agent.lose(2, kind="Silence", message="stopped answering", signal=0)
    stage.coordinator.tick()
    assert (stage.epoch, stage.events("incident")[0]["rank"]) == (2, 2)


def test_those_that_gave_up_waiting_for_one_that_waits_too_form_again(stage: Stage) -> None:
    agent = stage.host("a", 4)
    stage.start(step=7)
    agent.age_s = TIMEOUT_S
    agent.phase = Phase.RESTING
    for slot in (0, 1, 3):
        agent.left(slot, why="RuntimeError: Timed out waiting 60000ms")
    stage.pass_time(1.0)
    agent.say("where", ranks={slot: [True, "all_reduce"] for slot in range(4)})
    stage.pass_time(1.0)
    assert "kill" not in agent.kinds()
    assert (stage.epoch, stage.events("incident")[0]["cause"]["kind"]) == (2, "Left")


# ---- another coordinator ---------------------------------------------------------------------------------------------


def test_a_new_coordinator_goes_on_without_disturbing_anybody(stage: Stage) -> None:
    agent = stage.host("a", 4)
    stage.start(step=7)
    stage.restart()
    stage.pass_time(2.0, beats=False)
    agent.join()
    stage.pass_time(5.0)
    assert (stage.epoch, stage.events("incident"), agent.kinds()) == (1, [], ["form", "go"])
    stage.advance(20)
    agent.lose(1)
    stage.coordinator.tick()
    assert stage.epoch == 2


def test_one_that_takes_over_while_forming_says_go(stage: Stage) -> None:
    agent = stage.host("a", 4)
    stage.coordinator.tick()
    stage.restart()
    agent.join()
    agent.ready()
    stage.coordinator.tick()
    assert [kind for kind in agent.kinds() if kind != "seat"] == ["form", "go"]


def test_a_form_that_was_written_down_and_never_said(stage: Stage) -> None:
    agent = stage.host("a", 4)
    agent.connected = False  # nothing reaches it
    stage.coordinator.tick()
    assert (agent.kinds(), stage.epoch) == ([], 1)
    stage.restart()
    agent.join()
    assert agent.kinds() == ["form"]
    agent.ready()
    stage.coordinator.tick()
    assert (agent.kinds(), stage.epoch, stage.events("incident")) == (["form", "go"], 1, [])


def test_a_go_that_was_written_down_and_never_said(stage: Stage) -> None:
    first, second = stage.host("a", 2), stage.host("b", 2)
    stage.coordinator.tick()
    second.connected = False
    stage.ready()
    assert (first.kinds()[-1], second.kinds()[-1]) == ("go", "form")
    stage.restart()
    first.join()
    second.join()
    assert first.kinds().count("go") == 1
    assert second.last("go") == first.last("go")
    stage.pass_time(2.0)
    assert stage.epoch == 1


def test_an_epoch_that_began_before_it_was_written_down_is_not_used_twice(stage: Stage) -> None:
    agent = stage.host("a", 4)
    stage.start(step=7)
    before = stage.saved[-1]
    agent.lose(2)
    stage.coordinator.tick()
    assert current_generation(stage.run) == 2
    stage.begin(SavedState.from_json(before))  # its memory is of epoch 1, and agents have heard of epoch 2
    agent.join()
    stage.pass_time(1.0)
    assert stage.epoch == 3


def test_a_rank_that_fell_while_there_was_no_coordinator(stage: Stage) -> None:
    agent = stage.host("a", 4)
    stage.start(step=7)
    stage.restart()
    pid = agent.pids.pop(2)
    agent.fill()
    agent.join()
    agent.say("lost", slot=2, pid=pid, epoch=1, failure=asdict(failing.by_signal(2, 7, 9)))
    stage.coordinator.tick()
    assert stage.epoch == 2
    assert stage.events("incident")[0]["cause"]["signal"] == 9, "its agent knows how"


def test_ranks_that_finished_while_there_was_no_coordinator(stage: Stage) -> None:
    agent = stage.host("a", 4)
    stage.start(step=7)
    stage.restart()
    agent.join()
    for slot in range(4):
        agent.left(slot, state="done")
    stage.coordinator.tick()
    assert stage.status == ("done", 0)


def test_a_host_that_does_not_find_the_new_coordinator_is_lost(stage: Stage) -> None:
    first, second = stage.host("a", 2), stage.host("b", 2)
    stage.start(step=7)
    second.connected = False
    stage.restart()
    first.join()
    stage.pass_time(2.0)
    assert stage.epoch == 1, "as long as nobody misses it"
    first.left(0, why="RuntimeError: Connection closed by peer")
    stage.pass_time(1.0)
    assert (stage.epoch, stage.world) == (2, 2)
    assert stage.events("host")[-1]["reason"] == "did not come back"


def test_an_agent_that_was_started_anew_has_lost_its_ranks(stage: Stage) -> None:
    agent = stage.host("a", 4)
    stage.start(step=7)
    stage.restart()  # it was a child of the agent
    agent.epoch, agent.went, agent.pids = 0, 0, {}
    agent.join()
    agent.up()
    stage.coordinator.tick()
    assert (stage.epoch, stage.world) == (2, 4)


def test_quarantine_and_counts_outlive_the_coordinator(stage: Stage) -> None:
    agent = stage.host("a", 5)
    stage.start(step=9)
    astray(agent, fault="diverged", why="rank 2 differs", suspects=[2])
    stage.pass_time(0.25)
    stage.restart()
    agent.join()
    agent.lose(0)
    stage.pass_time(1.0)
    assert stage.coordinator.state.saved.failures == 2
    assert ["a", 2] not in stage.seats


# ---- stopping --------------------------------------------------------------------------------------------------------


def test_a_wish_before_there_is_a_formation(stage: Stage) -> None:
    agent = stage.host("a", 4)
    agent.say("stop", count=1)
    stage.coordinator.tick()
    assert (stage.status, stage.message) == (("stopped", 130), "stopped before the first rank was started")
    assert agent.kinds() == ["stop", "end"]


def test_a_wish_that_comes_with_the_slots_is_heard_before_they_are_used(stage: Stage) -> None:
    agent = Agent(stage=stage, name="a", slots=4, wishes=1)
    stage.agents["a"] = agent
    agent.join()
    stage.coordinator.tick()
    assert (stage.status, stage.epoch) == (("stopped", 130), 0)


@pytest.mark.parametrize("phase", ["forming", "running", "recovering"])
def test_a_wish_reaches_every_host_and_ends_with_what_was_saved(stage: Stage, phase: str) -> None:
    first, second = stage.host("a", 2), stage.host("b", 2)
    stage.coordinator.tick()
    if phase != "forming":
        stage.ready()
        stage.advance(7)
    if phase == "recovering":
        second.lose(1, up=False)
    first.say("stop", count=1)
    stage.coordinator.tick()
    assert second.kinds()[-1] == "stop"
    second.up()
    stage.coordinator.tick()
    stage.ready()
    for agent in (first, second):
        for slot in agent.ranks:
            agent.left(slot, state="stopped", step=8)
    stage.coordinator.tick()
    assert stage.status == ("stopped", 130)
    assert stage.message == f"stopped as asked: nothing was saved; resume with: phalanx train --resume {stage.run.path}"


def test_the_stop_file(stage: Stage) -> None:
    agent = stage.host("a", 4)
    stage.start(step=7)
    stage.run.stop_file.touch()
    stage.pass_time(1.25)
    assert agent.kinds()[-1] == "stop"


def test_a_second_wish_ends_it_at_once(stage: Stage) -> None:
    agent = stage.host("a", 4)
    stage.start(step=7)
    agent.say("stop", count=1)
    stage.coordinator.tick()
    agent.say("stop", count=2)
    stage.coordinator.tick()
    assert (stage.status, stage.message) == (("stopped", 130), "killed at once, as asked; no checkpoint was written")


@pytest.mark.parametrize(("count", "how", "code"), [(2, "killed at once, as asked", 130), (1, "stopped as asked", 3)])
def test_steps_that_were_not_saved_are_told_and_are_a_failure_unless_asked_for(
    stage: Stage, count: int, how: str, code: int
) -> None:
    agent = stage.host("a", 4)
    stage.start(step=0)
    (stage.run.path / "checkpoints" / "step-00000003").mkdir(parents=True)
    (stage.run.path / "checkpoints" / "step-00000003" / "manifest.json").write_text("{}")
    with closing(EventWriter(stage.run.events(0), rank=0)) as events:
        events.write("run_start", step=0, steps=9, world=4, epoch=1)
        for step in range(5):
            events.write("step", step=step, loss=1.0)
    for number in range(1, count + 1):
        agent.say("stop", count=number)
        stage.coordinator.tick()
    if count == 1:
        for slot in agent.ranks:
            agent.left(slot, state="stopped", step=5)
        stage.coordinator.tick()
    assert stage.status == ("stopped", code)
    assert stage.message.startswith(how)
    assert "NOT saved: 2 steps, up to step 5" in stage.message


def test_grace_has_an_end(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(grace_s=10.0)
    agent = stage.host("a", 4)
    stage.start(step=7)
    agent.say("stop", count=1, hurry=True)
    stage.pass_time(9.0)
    assert not stage.coordinator.state.is_over
    stage.pass_time(2.0)
    assert stage.status == ("stopped", 130)
    assert stage.message.startswith("killed: not done within fault.grace_s = 10 s after it was asked; ")


def test_a_person_who_asked_waits_as_long_as_it_takes(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(grace_s=10.0)
    agent = stage.host("a", 4)
    stage.start(step=7)
    agent.say("stop", count=1, hurry=False)
    stage.pass_time(11.0)
    assert not stage.coordinator.state.is_over


def test_a_wish_while_there_is_nobody_to_go_on_with(stage: Stage) -> None:
    agent = stage.host("a", 4)
    stage.start(step=7)
    agent.hang_up()
    stage.pass_time(3.0)
    stage.run.stop_file.touch()
    stage.pass_time(1.0)
    assert stage.status == ("stopped", 130)
    assert stage.message.startswith("stopped as asked, while not enough ranks were there to go on; ")


def test_a_host_that_comes_late_hears_of_the_wish(stage: Stage) -> None:
    stage.host("a", 4)
    stage.start(step=7)
    stage.run.stop_file.touch()
    stage.pass_time(1.0)
    assert stage.host("b", 1).kinds() == ["stop"]


# ---- replay ----------------------------------------------------------------------------------------------------------


def test_a_replay_takes_the_formations_that_it_is_told(make_stage: Callable[..., Stage], plan: Plan) -> None:
    small = asdict(replace(plan.layout, data=2, shard=2, accumulation=4))
    stage = make_stage(
        launch={"formations": [{"from_step": 0, "layout": asdict(plan.layout)}, {"from_step": 5, "layout": small}]}
    )
    agent = stage.host("a", 4)
    stage.start(step=4)
    assert stage.world == 4
    for slot in agent.ranks:
        agent.left(slot, state="reform", step=5)
    stage.coordinator.tick()
    assert stage.world == 2
    stage.ready()
    stage.advance(6)
    stage.pass_time(3.0)
    assert "reform" not in agent.kinds(), "nothing grows in a replay"


# ---- incidents that each let the run do a step -----------------------------------------------------------------------


def crawl(stage: Stage, monkeypatch: pytest.MonkeyPatch, *, bad_slots: Callable[[str, int], bool], most: int) -> int:
    """Hang the first rank in a bad slot (or rank 2) after every step; the number of incidents until the run is over."""
    start_s = time.time() - stage.now_s
    monkeypatch.setattr(time, "time", lambda: start_s + stage.now_s)
    for step in range(8, 8 + most):
        stage.advance(step)
        seats = [(host, slot) for host, slot in stage.seats]
        rank = next((rank for rank, seat in enumerate(seats) if bad_slots(*seat)), None)
        if rank is None:
            return step - 8
        stage.pass_time(25.0)
        host, slot = seats[rank]
        stage.agents[host].lose(slot, kind="Silence", signal=0, message="stopped answering 25 s ago")
        stage.pass_time(1.0)
        if stage.coordinator.state.is_over:
            return step - 7
        stage.ready()
        stage.pass_time(0.25)
    return most


def test_a_slot_that_hangs_once_per_step_loses_its_rank_to_a_spare_slot(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.host("a", 5)
    stage.start(step=7)
    assert crawl(stage, monkeypatch, bad_slots=lambda host, slot: slot == 2, most=20) == 3
    (quarantine,) = stage.events("quarantine")
    assert (quarantine["host"], quarantine["slot"]) == ("a", 2)
    assert re.fullmatch(
        r"slot 2 of host a failed 3 times with Silence; incidents cost [\d.]+ s of the last [\d.]+ s "
        r"\(fault.max_lost = 0.8\)",
        quarantine["reason"],
    )
    assert (stage.world, stage.seats[2]) == (4, ["a", 4])


def test_a_host_whose_slots_hang_is_excluded_also_when_its_agent_starts_again(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.host("a", 4)
    spare = stage.host("b", 4)
    stage.start(step=7)
    assert crawl(stage, monkeypatch, bad_slots=lambda host, slot: host == "a", most=40) == 6
    moved, excluded = stage.events("quarantine")
    assert (moved["host"], moved["slot"], excluded["host"], "slot" in excluded) == ("a", 0, "a", False)
    assert "host a failed 6 times with Silence, last in slot 1 of host a; incidents cost" in excluded["reason"]
    assert stage.seats == [["b", slot] for slot in range(4)]
    spare.lose(3, up=False)
    stage.agents["a"].hang_up()
    stage.pass_time(3.0)
    stage.agents["a"].join()
    assert stage.coordinator.state.num_usable == 3, "it takes no part"
    stage.restart()
    spare.join()
    stage.agents["a"].join()
    assert stage.coordinator.state.num_usable == 3, "nor with another coordinator"


def test_a_hang_that_follows_the_rank_from_host_to_host_is_the_end(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in "abcd":
        stage.host(name, 2)
    stage.start(step=7)
    count = crawl(stage, monkeypatch, bad_slots=lambda host, slot: [host, slot] == stage.seats[2], most=60)
    assert stage.status == ("failed", 3)
    assert count == 6
    assert re.search(
        r"given up: slot 0 of host c failed 3 times with Silence, as others on b did: it is no fault of a host; "
        r"incidents cost .* of the last .* \(fault.max_lost = 0.8\)",
        stage.message,
    )


@pytest.mark.parametrize("recovery", ["replace", "auto"])
def test_a_hang_once_per_step_without_a_spare_ends_with_slot_host_cause_and_cost(
    make_stage: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch, recovery: str
) -> None:
    stage = make_stage(recovery=recovery)
    stage.host("a", 4)
    stage.start(step=7)
    count = crawl(stage, monkeypatch, bad_slots=lambda host, slot: [host, slot] == stage.seats[-1], most=40)
    assert stage.status == ("failed", 3)
    assert count == {"replace": 4, "auto": 7}[recovery]
    reason = stage.message.partition("given up: ")[2]
    start, ending = {
        "replace": ("slot 3 of host a failed 4 times with Silence; incidents cost", "no other slot is free"),
        "auto": ("host a failed 7 times with Silence, last in slot 2 of host a; incidents cost", "no other host"),
    }[recovery]
    assert reason.startswith(start)
    assert ending in reason
    assert stage.agents["a"].kinds()[-1] == "end", "nothing is formed after it"


@pytest.mark.parametrize(("incidents", "quarantined"), [(3, 0), (4, 1)])
def test_a_job_that_may_shrink_gives_a_slot_one_more_chance_where_there_is_no_spare(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, incidents: int, quarantined: int
) -> None:
    stage.host("a", 4)
    stage.start(step=7)
    crawl(stage, monkeypatch, bad_slots=lambda host, slot: slot == 3, most=incidents)
    assert (len(stage.events("quarantine")), stage.world) == (quarantined, 4 - quarantined)


def test_a_host_is_excluded_with_as_many_slots_elsewhere_as_the_job_can_shrink_to(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.host("a", 3)
    stage.host("b", 1)
    stage.start(step=7)
    assert crawl(stage, monkeypatch, bad_slots=lambda host, slot: host == "a", most=40) == 7
    assert [(one["host"], one.get("slot")) for one in stage.events("quarantine")] == [("a", 0), ("a", None)]
    assert stage.seats == [["b", 0]]


def test_a_host_that_is_lost_again_and_again_is_excluded(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    start_s = time.time() - stage.now_s
    monkeypatch.setattr(time, "time", lambda: start_s + stage.now_s)
    agent, other = stage.host("a", 1), stage.host("b", 3)
    stage.start()
    for count in range(1, 5):
        assert stage.world == 4
        stage.advance(stage.coordinator.state.saved.step + 1)
        stage.pass_time(25.0)
        agent.hang_up()
        stage.pass_time(2.0)
        assert stage.world == 3
        assert len(stage.events("quarantine")) == (count == 4), "at first it may come back"
        stage.ready()
        agent.epoch, agent.went, agent.ranks = 0, 0, {}
        agent.join()
        stage.advance(stage.coordinator.state.saved.best_step + 1)
        stage.pass_time(1.5)
        if count < 4:
            for slot in other.ranks:
                other.left(slot, state="reform")
            stage.coordinator.tick()
            stage.ready()
    excluded, refused = stage.events("quarantine")  # the second one when it came back
    assert {(one["host"], "slot" in one) for one in (excluded, refused)} == {("a", False)}
    assert excluded["reason"].startswith("host a was lost 4 times; incidents cost")
    assert stage.world == 3


def test_the_true_cause_is_waited_for_before_a_slot_is_quarantined(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_s = time.time() - stage.now_s
    monkeypatch.setattr(time, "time", lambda: start_s + stage.now_s)
    agent = stage.host("a", 5)
    stage.start(step=7)
    lost_peer = {"kind": "RuntimeError", "module": "torch", "message": "Connection closed by peer", "signal": 0}
    for step in (8, 9, 10):
        stage.advance(step)
        stage.pass_time(25.0)
        agent.lose(2, **lost_peer)
        stage.pass_time(0.5)
        if step == 10:
            agent.lose(3)
        stage.pass_time(1.0)
        stage.ready()
    assert [(one["slot"], one["cause"]["kind"]) for one in stage.events("incident")][2:] == [(3, "Signal")]
    assert stage.events("quarantine") == []


def test_incidents_that_leave_time_to_train_reach_no_limit(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    start_s = time.time() - stage.now_s
    monkeypatch.setattr(time, "time", lambda: start_s + stage.now_s)
    agent = stage.host("a", 5)
    stage.start(step=7)
    for step in range(10, 210, 10):
        for more in range(10):  # as long as the incident takes
            stage.pass_time(2.6)
            stage.advance(step + more)
        stage.pass_time(25.0)
        agent.lose(2, kind="Silence", signal=0, message="stopped answering 25 s ago")
        stage.pass_time(1.0)
        stage.ready()
    assert (len(stage.events("incident")), stage.events("quarantine")) == (20, [])
    assert not stage.coordinator.state.is_over


def test_the_history_outlives_the_coordinator_and_0_7_wrote_none(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    stage.host("a", 5)
    stage.start(step=7)
    assert crawl(stage, monkeypatch, bad_slots=lambda host, slot: slot == 2, most=2) == 2
    history = stage.coordinator.state.saved.history
    body = stage.coordinator.state.saved.to_json()
    assert SavedState.from_json(json.loads(json.dumps(body))).history == history
    assert [one.place.slot for one in history.incidents] == [2, 2]
    del body["history"]
    assert SavedState.from_json(body).history.incidents == ()
