"""A lost model replica as the coordinator sees it: left out, cleared, built by new processes, and taken in again."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pure_coordinator import PureRun

from phalanx.elastic import decide_replicas
from phalanx.elastic.coordinator_state import (
    Action,
    AgentMessage,
    CheckpointList,
    ClockTick,
    CoordinatorSettings,
    ListCheckpoints,
    RecordEvent,
    SavedState,
    Send,
)
from phalanx.elastic.decide import decide, initial_state
from phalanx.elastic.failure import by_signal
from phalanx.elastic.membership import HostSlot, Membership
from phalanx.plan.layout import Layout
from phalanx.plan.plan import Plan

LAYOUT = Layout(
    data=6, shard=2, tensor=1, context=1, pipeline=1, virtual_pipeline=1, expert=1, zero=2, sequence_parallel=False,
    micro_batch=1, accumulation=1, recompute="none", precision="fp32", schedule="1f1b", offload="none",
    compression="none",
)  # fmt: skip
PLAN = Path(__file__).parents[1] / "synthetic_plan.json"


class Play:
    """Three replicas of two ranks on hosts of some slots, and a clock that is moved by hand.

    With one host the ranks are in the slots of "a"; with more, each host has a replica, and those after them are spare.
    Times are whole eighths of a second, which floats hold exactly.
    """

    def __init__(self, hosts: str = "a", *, layout: Layout = LAYOUT, slots: int | None = None, **fault: Any) -> None:
        job = Plan.from_json(PLAN.read_text()).job
        job = replace(
            job,
            fault=replace(job.fault, **{"on_loss": "leave-out", "recovery": "auto", **fault}),
            batch=replace(job.batch, global_sequences=12),
        )
        self.slots = slots or (layout.devices if len(hosts) == 1 else 2)
        settings = CoordinatorSettings(run_path="run", job=job, planned=layout, num_slots=self.slots * len(hosts))
        self.now_s, self.sent, self.events = 100.0, list[dict[str, Any]](), list[dict[str, Any]]()
        self.told: list[tuple[str, str]] = []  # host and kind of every message
        self.here = list(hosts)
        self.pids = {slot: 1000 + slot for slot in range(self.slots)}  # of the first host
        self.state, _ = initial_state(settings, SavedState(), hosts=tuple(hosts), now_s=self.now_s, unix_s=self.now_s)
        for host in hosts:
            self.join(host)
        self.tick()
        self.ready()
        self.step(3)

    def join(self, host: str, first_pid: int = 1000) -> None:
        """An agent comes, with a process in every slot."""
        self.hear("joined", host=host, hello={"host": host, "address": "127.0.0.1", "time": self.now_s})
        pids = {slot: first_pid + slot for slot in range(self.slots)}
        self.hear("status", host=host, slots=pids, epoch=0, digest="", went=0, wishes=0)

    def lose_host(self, host: str) -> None:
        """An agent hangs up and does not come back."""
        self.here.remove(host)
        self.hear("gone", host=host)
        for _ in range(12):
            self.tick()

    def give(self, message: Any) -> None:
        self.state, actions = decide(self.state, message)
        for action in actions:
            self._perform(action)

    def _perform(self, action: Action) -> None:
        if isinstance(action, Send):
            self.sent += [json.loads(json.dumps(action.message_for(host))) for host in action.hosts[-1:]]
            self.told += [(host, action.message["kind"]) for host in action.hosts]
        elif isinstance(action, RecordEvent):
            self.events.append({"event": action.event, **action.fields})
        elif isinstance(action, ListCheckpoints):
            self.give(CheckpointList(now_s=self.now_s, unix_s=self.now_s, steps=()))

    def hear(self, kind: str, host: str = "a", **fields: Any) -> None:
        body = json.loads(json.dumps({"kind": kind, **fields}))
        self.give(AgentMessage(now_s=self.now_s, unix_s=self.now_s, host=host, body=body))

    def tick(self, seconds: float = 0.125) -> None:
        self.now_s += seconds
        self.give(ClockTick(now_s=self.now_s, unix_s=self.now_s))

    def ready(self, door: int = 7000) -> None:
        for host in self.here:
            ports = {slot: [door + slot, 8000 + slot] for slot in range(self.slots)}
            self.hear("ready", host=host, epoch=self.state.saved.generation, ports=ports, held=[])
        self.tick()

    def pass_time(self, seconds: float) -> None:
        """Ticks, and heartbeats of the hosts that are there."""
        until_s = self.now_s + seconds
        while self.now_s < until_s:
            self.step(3)
            self.tick(min(0.25, until_s - self.now_s))

    def step(self, step: int) -> None:
        for host in self.here:
            self.hear("beat", host=host, epoch=self.state.saved.generation, progress=[step, 2, 0.0])

    def lose(self, slot: int) -> None:
        """A process ends, and its agent starts another."""
        pid, self.pids[slot] = self.pids[slot], self.pids[slot] + 100
        failure = by_signal(slot, 3, 9)
        told = {name: getattr(failure, name) for name in failure.__dataclass_fields__}
        self.hear("lost", slot=slot, pid=pid, epoch=1, failure=told)
        self.hear("up", slots={slot: self.pids[slot]})
        self.tick()
        self.tick()

    def count(self, kind: str) -> int:
        return [one["kind"] for one in self.sent].count(kind)

    def last(self, kind: str) -> dict[str, Any]:
        return [one for one in self.sent if one["kind"] == kind][-1]

    def come_back(self) -> None:
        """What the agent does about the orders to end, to start and to build the replica."""
        for slot in self.last("clear")["slots"]:
            self.lose(slot)
        self.tick()
        slots = self.last("rejoin")["slots"]
        self.ready(door=7100)
        assert self.last("go")["slots"] == slots
        for slot in slots:
            self.hear("built", epoch=1, slot=slot)
        self.connect()

    def connect(self) -> None:
        """The first rank of every replica of this round says that the replica is connected."""
        for host in self.here:
            for slot in range(0, self.slots, 2):
                self.hear("connected", host=host, epoch=1, slot=slot, round=self.state.saved.round)
        self.tick()


def test_the_others_go_on_in_the_same_generation() -> None:
    play = Play()
    play.lose(3)
    told = play.last("regroup")
    assert (told["epoch"], told["round"], told["present"], told["urgent"]) == (1, 1, [0, 2], True)
    assert told["store"] == ["127.0.0.1", 7000]
    assert play.state.saved.absent == (1,)
    assert [one["kind"] for one in play.sent].count("form") == 1
    assert [one["rank"] for one in play.events if one["event"] == "incident"] == [3]
    assert play.last("clear")["slots"] == [2], "what is left of the replica waits for the lost rank"


def test_a_replica_that_is_built_again_is_taken_in_at_the_end_of_a_step() -> None:
    play = Play()
    play.lose(3)
    play.come_back()
    told = play.last("regroup")
    assert (told["round"], told["present"], told["urgent"]) == (2, [0, 1, 2], False)
    go = play.last("go")
    assert go["late"]
    assert go["stores"] == [None, ["127.0.0.1", 7102], None]
    assert play.state.saved.absent == ()
    states = [(one["replica"], one["state"]) for one in play.events if one["event"] == "replica"]
    assert states == [(1, "left out"), (1, "rejoined")]
    assert play.state.saved.pids == tuple(play.pids.values())


def test_a_replica_is_taken_in_only_when_all_others_are_connected() -> None:
    play = Play()
    play.lose(3)
    for slot in play.last("clear")["slots"]:
        play.lose(slot)
    play.tick()
    play.ready(door=7100)
    for slot in (2, 3):
        play.hear("built", epoch=1, slot=slot)
    play.hear("connected", epoch=1, slot=0, round=1)
    play.hear("connected", epoch=1, slot=4, round=0)  # of the round before
    play.tick()
    assert play.state.saved.round == 1, "one of them would wait in this round for another that is in the next"
    play.hear("connected", epoch=1, slot=4, round=1)
    play.tick()
    assert (play.state.saved.round, play.state.saved.absent) == (2, ())


def test_replicas_meet_at_one_that_was_there_before() -> None:
    play = Play()
    play.lose(0)
    assert play.last("regroup")["store"] == ["127.0.0.1", 7002]
    play.come_back()
    assert play.last("regroup")["store"] == ["127.0.0.1", 7002], "the newcomer's store is not known to the others yet"


def test_with_a_second_replica_lost_everything_is_rebuilt() -> None:
    play = Play()
    for slot in (3, 5):
        play.lose(slot)
    play.tick(1.0)
    assert play.state.saved.generation == 2
    assert (play.state.saved.absent, play.state.saved.round) == ((), 0)


def test_a_replica_that_was_being_built_when_everything_was_rebuilt_can_be_left_out_again() -> None:
    play = Play()
    play.lose(3)
    play.lose(2)
    assert [one["kind"] for one in play.sent].count("rejoin") == 1
    play.lose(5)
    play.tick(1.0)
    play.ready()
    play.step(4)
    assert (play.state.saved.generation, play.state.saved.absent) == (2, ())
    play.tick(3.0)
    play.lose(3)
    assert (play.state.saved.generation, play.state.saved.absent) == (2, (1,))
    play.lose(2)
    assert [one["kind"] for one in play.sent].count("rejoin") == 2


def test_a_rank_lost_while_its_replica_is_built_disturbs_nobody() -> None:
    play = Play()
    play.lose(3)
    for slot in play.last("clear")["slots"]:
        play.lose(slot)
    play.tick()
    rounds = play.state.saved.round
    play.lose(2)
    assert (play.state.saved.round, play.state.saved.absent) == (rounds, (1,))
    assert [one["rank"] for one in play.events if one["event"] == "incident"] == [3]


def test_a_replica_that_is_not_built_in_time_is_ended_and_started_again() -> None:
    play = Play()
    play.lose(3)
    for slot in play.last("clear")["slots"]:
        play.lose(slot)
    play.tick()
    asked_s, bound_s = play.state.rejoining.get(1).asked_s, play.state.job.comm.init_timeout_s + 10  # type: ignore[union-attr]
    step, orders = 4, [one["kind"] for one in play.sent].count("clear")
    while play.now_s + 0.9 < asked_s + bound_s:
        play.tick(0.9)
        play.step(step := step + 1)
    assert [one["kind"] for one in play.sent].count("clear") == orders
    play.tick(0.9)
    play.tick(0.9)
    assert [one["kind"] for one in play.sent].count("clear") == orders + 1
    assert play.last("clear")["slots"] == [2, 3]


def test_a_rank_that_gave_up_in_another_replica_means_that_everything_is_rebuilt() -> None:
    play = Play()
    play.hear("left", slot=0, epoch=1, step=3, why="connection lost")
    play.lose(3)
    play.tick()
    assert play.state.saved.generation == 2


def test_the_run_is_done_when_all_who_are_present_are() -> None:
    play = Play()
    play.lose(3)
    for slot in (0, 1, 4, 5):
        play.hear("left", slot=slot, epoch=1, step=9, state="done", why="")
    play.tick()
    assert play.state.is_over


@pytest.mark.parametrize("on_loss", ["leave-out", "rebuild"])
def test_the_run_is_done_when_all_ranks_are(on_loss: str) -> None:
    play = Play(on_loss=on_loss)
    done(play, 0, 1, 2, 3, 4)
    assert not play.state.is_over
    done(play, 5)
    assert play.state.is_over


def test_another_coordinator_knows_who_is_left_out() -> None:
    play = Play()
    play.lose(3)
    saved = SavedState.from_json(json.loads(json.dumps(play.state.saved.to_json())))
    assert (saved.absent, saved.round) == ((1,), 1)


@pytest.mark.parametrize("kind", ["Deadlock", "Astray"])
def test_failures_that_name_no_lost_process_rebuild_everything(kind: str) -> None:
    play = Play()
    failure = replace(by_signal(3, 3, 9), kind=kind)
    told = {name: getattr(failure, name) for name in failure.__dataclass_fields__}
    play.hear("lost", slot=3, pid=1003, epoch=1, failure=told)
    play.pids[3] += 100
    play.hear("up", slots={3: play.pids[3]})
    play.tick()
    assert play.state.saved.generation == 2


def test_an_order_to_end_what_is_left_of_a_replica_is_repeated_every_two_seconds() -> None:
    play = Play()
    play.lose(3)
    assert play.count("clear") == 1
    for _ in range(2):
        orders = play.count("clear")
        play.pass_time(1.875)
        assert play.count("clear") == orders
        play.tick()
        assert play.count("clear") == orders + 1


def test_a_replica_has_the_time_of_connections_and_ten_seconds_to_be_built() -> None:
    play = Play()
    play.lose(3)
    play.lose(2)
    began = play.state.rejoining.get(1)
    assert began is not None
    play.pass_time(began.asked_s + play.state.job.comm.init_timeout_s + 10.0 - play.now_s)
    play.tick(0.0)
    assert play.state.rejoining.get(1) == began
    play.tick()
    assert play.state.rejoining.get(1) is None


@pytest.mark.parametrize("num_replicas", [1, 2, 3])
def test_a_replica_is_left_out_where_there_is_another(num_replicas: int) -> None:
    play = Play(layout=replace(LAYOUT, data=2 * num_replicas))
    assert ("stores" in play.last("go")) == (num_replicas > 1)
    play.lose(1)
    expected = (1, (0,)) if num_replicas > 1 else (2, ())
    assert (play.state.saved.generation, play.state.saved.absent) == expected


def test_one_of_two_failures_without_a_lost_process_rebuilds_everything() -> None:
    play = Play()
    for slot, kind in ((2, "Signal"), (3, "Deadlock")):
        told = {name: getattr(by_signal(slot, 3, 9), name) for name in by_signal(slot, 3, 9).__dataclass_fields__}
        play.hear("lost", slot=slot, pid=1000 + slot, epoch=1, failure=told | {"kind": kind})
    play.hear("up", slots={2: 1102, 3: 1103})
    play.tick()
    assert play.state.saved.generation == 2


@pytest.mark.parametrize("on_loss", ["leave-out", "rebuild"])
@pytest.mark.parametrize("kind", ["built", "connected"])
@pytest.mark.parametrize("epoch", [0, 1])
def test_a_rank_that_is_not_waited_for_changes_nothing(on_loss: str, kind: str, epoch: int) -> None:
    play = Play(on_loss=on_loss)
    before = play.state.saved
    play.hear(kind, epoch=epoch, slot=0, round=0)
    play.tick()
    assert (play.state.saved, len(play.state.rejoining)) == (before, 0)


@pytest.mark.parametrize("kind", ["built", "connected"])
def test_a_rank_of_an_earlier_launch_changes_nothing_before_the_first_membership(kind: str) -> None:
    run = PureRun({"a": 3}, on_loss="leave-out")
    run.join("a")
    run.hear("a", kind, epoch=0, slot=0, round=0)
    run.tick()
    assert (run.generation, run.end) == (0, None)


# ---- hosts -----------------------------------------------------------------------------------------------------------


def test_a_lost_host_is_left_out_and_its_replica_built_on_a_spare_one() -> None:
    play = Play("abcs")
    play.lose_host("b")
    assert play.state.saved.generation == 1
    assert play.last("regroup")["present"] == [0, 2]
    rejoin = play.last("rejoin")
    assert (rejoin["slots"], rejoin["ranks"]) == ([0, 1], {"0": 2, "1": 3})
    assert [host for host, kind in play.told if kind == "rejoin"] == ["s"]
    assert rejoin["digest"] == play.state.membership.digest
    assert play.state.membership.ranks_on("s") == {0: 2, 1: 3}
    assert play.state.membership.ranks_on("b") == {}
    play.hear("ready", host="s", epoch=1, ports={0: [7200, 1], 1: [7201, 1]}, held=[])
    play.tick()
    assert play.last("go")["stores"] == [None, ["127.0.0.1", 7200], None]
    for slot in (0, 1):
        play.hear("built", host="s", epoch=1, slot=slot)
    play.connect()
    assert (play.last("regroup")["present"], play.state.saved.absent) == ([0, 1, 2], ())
    moved = [one for one in play.events if one["event"] == "members"]
    assert [(one["rank"], one["host"]) for one in moved[0]["members"]] == [(2, "s"), (3, "s")]
    saved = SavedState.from_json(json.loads(json.dumps(play.state.saved.to_json())))
    assert saved.membership is not None
    assert saved.membership.ranks_on("s") == {0: 2, 1: 3}, "another coordinator knows where it went"
    # The lost one was only frozen, and its ranks live: they belong to nobody any more.
    play.hear("joined", host="b", hello={"host": "b", "address": "127.0.0.1", "time": play.now_s})
    play.hear("status", host="b", slots={0: 1000, 1: 1001}, epoch=1, digest="as it was", went=1, wishes=0)
    assert (play.told[-1], play.sent[-1]["slots"]) == (("b", "clear"), [0, 1])


def test_after_ranks_have_moved_the_next_membership_is_told_in_full() -> None:
    play = Play("abcs")
    play.lose_host("b")
    before = len(play.sent)
    play.lose_host("c")  # a second replica: everything is rebuilt
    play.tick(1.0)
    forms = [one for one in play.sent[before:] if one["kind"] == "form"]
    assert play.state.saved.generation == 2
    assert not any("same_as" in one for one in forms)


def test_a_lost_host_that_comes_back_gets_its_replica_again() -> None:
    play = Play("abc", recovery="replace")
    play.lose_host("b")
    assert play.state.saved.absent == (1,)
    assert "rejoin" not in [one["kind"] for one in play.sent]
    play.tick(60.0)
    assert "reform" not in [one["kind"] for one in play.sent], "lost ranks are replaced, never done without"
    play.here.append("b")
    play.join("b", first_pid=2000)
    play.tick()
    assert [kind for host, kind in play.told if host == "b"][-2:] == ["form", "rejoin"]
    assert play.last("form")["ranks"] == {"0": 2, "1": 3}, "its agent is another, and knows nothing of the membership"
    assert play.state.saved.generation == 1
    assert play.state.saved.pids == (1000, 1001, 2000, 2001, 1000, 1001)


def test_without_a_spare_host_the_job_shrinks_at_the_end_of_a_step() -> None:
    play = Play("abc")
    play.lose_host("b")
    short_s = play.state.short_s
    assert short_s is not None
    for step in range(4, 20):
        play.tick(0.9)
        play.step(step)
        assert [one["kind"] for one in play.sent].count("reform") == (play.now_s - short_s >= 10.0)
    for host in "ac":
        for slot in (0, 1):
            play.hear("left", host=host, slot=slot, epoch=1, step=20, state="reform", why="")
    play.tick()
    assert (play.state.saved.generation, play.state.membership.world) == (2, 4)


@pytest.mark.parametrize("comes_back", [False, True])
def test_a_job_that_was_asked_to_shrink_is_not_disturbed_before_it_does(comes_back: bool) -> None:
    play = Play("abc")
    play.lose_host("b")
    assert play.state.short_s is not None
    play.pass_time(play.state.short_s + 9.875 - play.now_s)
    assert play.count("reform") == 0
    play.tick()
    assert play.count("reform") == 1
    if comes_back:
        play.here.append("b")
        play.join("b", first_pid=2000)
    play.pass_time(30.0)
    assert (play.count("reform"), play.count("rejoin")) == (1, 0)


def test_a_job_that_cannot_shrink_looks_for_a_layout_every_ten_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    play, looked_s = Play("abc"), list[float]()
    monkeypatch.setattr(decide_replicas, "next_membership", lambda **_: looked_s.append(play.now_s))
    play.lose_host("b")
    short_s = play.state.short_s
    assert short_s is not None
    play.pass_time(25.0)
    assert looked_s == [short_s + 10.0, short_s + 20.0]
    assert play.count("reform") == 0


def test_a_host_that_is_lost_twice_has_all_the_time_to_come_back_again() -> None:
    play = Play("abc")
    play.lose_host("b")
    play.pass_time(6.0)
    play.here.append("b")
    play.join("b", first_pid=2000)
    play.tick()
    assert play.count("rejoin") == 1
    play.lose_host("b")
    play.pass_time(6.0)
    assert play.count("reform") == 0
    play.pass_time(5.0)
    assert play.count("reform") == 1


def test_a_process_that_is_slow_to_start_does_not_make_the_job_shrink() -> None:
    play = Play()
    for slot in (3, 2):
        lose_process(play, slot, is_replaced=False)
    play.pass_time(15.0)
    assert (play.state.saved.absent, play.count("reform")) == ((1,), 0)


def test_an_agent_that_starts_anew_while_its_replica_is_built_is_asked_again() -> None:
    play = Play("abc", recovery="replace")
    play.lose_host("b")
    play.here.append("b")
    play.join("b", first_pid=2000)
    play.tick()
    play.join("b", first_pid=3000)
    play.tick()
    assert play.count("rejoin") == 1
    play.pass_time(play.state.job.comm.init_timeout_s + 11.0)
    assert (play.count("rejoin"), play.state.saved.pids[2:4]) == (2, (3000, 3001))


def test_a_replica_of_two_hosts_of_which_one_is_lost() -> None:
    play = Play("abcdef", slots=1)
    play.lose_host("c")
    assert {host for host, kind in play.told if kind == "regroup"} == set("abdef")
    assert {host for host, kind in play.told if kind == "clear"} == {"d"}
    failure = {name: getattr(by_signal(3, 3, 9), name) for name in by_signal(3, 3, 9).__dataclass_fields__}
    play.hear("lost", host="d", slot=0, pid=1000, epoch=1, failure=failure)
    play.hear("up", host="d", slots={0: 1100})
    play.here.append("c")
    play.join("c", first_pid=2000)
    play.tick()
    play.tick()
    assert [host for host, kind in play.told if kind == "rejoin"] == ["c", "d"]
    orders = play.count("go")
    for host in "cd":
        assert play.count("go") == orders
        play.hear("ready", host=host, epoch=1, ports={0: [7200, 1]}, held=[])
        play.tick()
    assert play.last("go")["stores"][1] == ["127.0.0.1", 7200]
    assert play.count("go") == orders + 2, "to both hosts"


# ---- the end of a run ------------------------------------------------------------------------------------------------


def test_a_replica_that_is_taken_in_too_late_does_not_hold_up_the_end() -> None:
    play = Play()
    play.lose(3)
    play.come_back()
    for slot in (0, 1, 4, 5):
        play.hear("left", slot=slot, epoch=1, step=9, state="done", why="")
    play.tick(0.2)
    assert not play.state.is_over, "it may be one of them, and a moment later"
    play.tick(0.5)
    assert play.state.is_over


@pytest.mark.parametrize("slots", [(0, 1), (2,)])
def test_a_replica_lost_when_some_ranks_are_done_is_not_left_out(slots: tuple[int, ...]) -> None:
    play = Play()
    for slot in slots:
        play.hear("left", slot=slot, epoch=1, step=9, state="done", why="")
    play.lose(3)
    play.tick()
    assert play.state.saved.generation == 2, "what it was saving is saved by the next generation"


def test_nobody_is_taken_in_by_those_who_are_asked_to_stop() -> None:
    play = Play()
    play.lose(3)
    play.hear("stop", count=1)
    before = len(play.sent)
    play.tick()
    play.tick(3.0)
    assert not {"rejoin", "clear"} & {one["kind"] for one in play.sent[before:]}


def done(play: Play, *slots: int) -> None:
    for slot in slots:
        play.hear("left", slot=slot, epoch=play.state.saved.generation, step=9, state="done", why="")
    for _ in range(3):
        play.tick(0.3)


@pytest.mark.parametrize(
    ("slots", "is_over"),
    [((0, 1), False), ((0, 1, 4, 5), True), ((0, 1, 2, 4), False), ((0, 1, 2, 4, 5), True)],
)
def test_the_end_waits_for_all_but_a_replica_that_was_just_taken_in(slots: tuple[int, ...], is_over: bool) -> None:
    play = Play()
    play.lose(3)
    play.come_back()
    done(play, *slots)
    assert play.state.is_over == is_over


def test_a_replica_that_trains_with_the_others_again_is_waited_for_at_the_end() -> None:
    play = Play()
    play.lose(3)
    play.come_back()
    play.connect()
    done(play, 0, 1, 4, 5)
    play.pass_time(3.0)
    assert not play.state.is_over, "it may still save what it has"
    done(play, 2, 3)
    assert play.state.is_over


def test_a_replica_that_was_taken_in_before_another_loss_is_waited_for_at_the_end() -> None:
    play = Play()
    play.lose(3)
    play.come_back()
    play.lose(5)
    done(play, 0, 1)
    assert not play.state.is_over


def lose_process(play: Play, slot: int, *, is_replaced: bool = True, **failure: Any) -> None:
    """A process ends with a failure of some kind."""
    told = {name: getattr(by_signal(slot, 3, 9), name) for name in by_signal(slot, 3, 9).__dataclass_fields__}
    pid, play.pids[slot] = play.pids[slot], play.pids[slot] + 100
    play.hear("lost", slot=slot, pid=pid, epoch=play.state.saved.generation, failure=told | failure)
    if is_replaced:
        play.hear("up", slots={slot: play.pids[slot]})
    play.tick()


def test_a_replica_taken_in_before_everything_was_rebuilt_is_waited_for_like_any_other() -> None:
    play = Play()
    play.lose(3)
    play.come_back()
    lose_process(play, 0, kind="Astray")
    play.tick()
    assert play.state.saved.generation == 2
    play.ready()
    play.step(4)
    done(play, 0, 1, 4, 5)
    assert not play.state.is_over


# ---- where a replica is not left out ---------------------------------------------------------------------------------


def test_a_job_that_rebuilds_leaves_no_replica_out() -> None:
    play = Play(on_loss="rebuild")
    play.lose(3)
    assert (play.state.saved.generation, play.state.saved.absent) == (2, ())


def test_ranks_that_are_asked_to_stop_leave_no_replica_out() -> None:
    play = Play()
    play.hear("stop", count=1)
    play.lose(3)
    assert (play.state.saved.generation, play.state.saved.absent) == (2, ())


def test_a_rank_lost_before_the_members_go_makes_another_membership() -> None:
    play = Play()
    lose_process(play, 0, kind="Astray")
    play.tick()
    assert play.state.saved.forming
    lose_process(play, 3)
    play.tick()
    assert (play.state.saved.generation, play.state.saved.absent) == (3, ())


def test_a_mistake_of_the_user_is_no_reason_to_leave_a_replica_out() -> None:
    play = Play()
    lose_process(play, 3, kind="UserError", message="data: is cut", signal=0, exit_code=2)
    play.tick(1.0)
    assert (play.state.is_over, play.state.saved.absent) == (True, ())


def test_a_rank_that_gave_up_in_the_lost_replica_is_left_out_with_it() -> None:
    play = Play()
    play.hear("left", slot=2, epoch=1, step=3, why="connection lost")
    play.lose(3)
    for _ in range(4):
        play.tick(0.5)
    assert (play.state.saved.generation, play.state.saved.absent) == (1, (1,))


# ---- while a replica is built ----------------------------------------------------------------------------------------


def test_a_replica_begins_when_there_is_a_process_in_each_of_its_slots() -> None:
    play = Play()
    lose_process(play, 3, is_replaced=False)
    lose_process(play, 2)
    play.tick(1.0)
    assert "rejoin" not in [one["kind"] for one in play.sent]
    play.hear("up", slots={3: play.pids[3]})
    play.tick()
    assert play.last("rejoin")["slots"] == [2, 3]
    assert "digest" not in play.last("rejoin"), "its ranks are where they were"
    assert play.state.saved.pids == tuple(play.pids.values())
    assert [kind for _, kind in play.told].count("form") == 1, "its host knows the membership"


def test_a_replica_goes_when_all_its_ranks_are_ready_and_comes_in_when_all_are_built() -> None:
    play = Play()
    play.lose(3)
    play.lose(2)
    orders = [one["kind"] for one in play.sent].count("go")
    play.hear("ready", epoch=1, ports={2: [7102, 8002]}, held=[])
    play.tick()
    assert [one["kind"] for one in play.sent].count("go") == orders
    play.ready(door=7100)
    assert [one["kind"] for one in play.sent].count("go") == orders + 1
    play.hear("built", epoch=1, slot=2)
    play.connect()
    assert play.state.saved.absent == (1,)
    play.hear("built", epoch=1, slot=3)
    play.tick()
    assert play.state.saved.absent == ()


def test_a_replica_that_was_built_before_it_was_told_where_to_meet_is_told_all_the_same() -> None:
    play = Play()
    play.lose(3)
    play.lose(2)
    orders = play.count("go")
    for slot in (2, 3):
        play.hear("built", epoch=1, slot=slot)
    play.connect()
    assert play.state.saved.absent == (1,)
    play.ready(door=7100)
    assert play.count("go") == orders + 1
    play.connect()
    assert play.state.saved.absent == (1,)


def test_a_rank_lost_while_its_replica_is_built_makes_the_replica_begin_again() -> None:
    play = Play()
    play.lose(3)
    play.lose(2)
    assert [one["kind"] for one in play.sent].count("rejoin") == 1
    play.tick(3.0)
    play.lose(2)
    play.tick(3.0)
    assert play.last("clear")["slots"] == [3]
    play.lose(3)
    assert [one["kind"] for one in play.sent].count("rejoin") == 2


def test_replicas_may_meet_later_where_one_that_was_built_again_listens() -> None:
    play = Play()
    play.lose(3)
    play.come_back()
    play.lose(0)
    assert (play.last("regroup")["present"], play.last("regroup")["store"]) == ([1, 2], ["127.0.0.1", 7102])


# ---- which spare slots a replica moves to ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lost", "spare", "num_usable", "moved"),
    [
        ([2, 3], "s0 t0 t1", 7, "t0 t1"),  # on as few hosts as can be
        ([2, 3], "s0 t0 u0", 7, "s0 t0"),
        ([2], "s0 s1 b2", 7, "b2"),  # next to the rank that stays
        ([2, 3], "s0 s1 b2", 7, "s0 s1"),  # none stays
        ([2], "s0", 6, "s0"),  # as many as there are ranks
        ([2, 3], "s0", 7, None),
        ([2], "", 7, None),
        ([2], "s0", 5, None),  # too few slots for all: it was not looked for a spare one
    ],
)
def test_a_replica_moves_to_few_hosts_and_near_the_ranks_that_stay(
    lost: list[int], spare: str, num_usable: int, moved: str | None
) -> None:
    def slots(text: str) -> tuple[HostSlot, ...]:
        return tuple(HostSlot(word[0], int(word[1:])) for word in text.split())

    taken = slots("a0 a1 b0 b1 c0 c1")
    membership = Membership(generation=1, layout=LAYOUT, slots=taken)
    state: Any = SimpleNamespace(
        membership=membership, num_usable=num_usable, living_slots=lambda: [*taken, *slots(spare)]
    )
    found = decide_replicas._spare_slots(state, {2: taken[2], 3: taken[3]}, lost)
    assert found == (dict(zip(lost, slots(moved), strict=True)) if moved is not None else None)
