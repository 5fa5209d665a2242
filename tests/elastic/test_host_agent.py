"""How an agent finds its coordinator: not one that is over, and without wearing out the disk that all hosts share."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from phalanx.elastic import host_agent as hosting
from phalanx.elastic.channel import Channel
from phalanx.elastic.coordinator import AgentConnections, _greet, answer_of
from phalanx.elastic.coordinator_memory import CoordinatorMemory
from phalanx.elastic.coordinator_state import SavedState
from phalanx.elastic.file_election import FileElection, Watched, read_sign
from phalanx.elastic.handshake import make_secret
from phalanx.elastic.host_agent import HostAgent
from phalanx.elastic.listener import Listener
from phalanx.elastic.local_launch import StopSignals
from phalanx.plan.plan import Plan
from phalanx.record.run import Run, create_run
from phalanx.train.prepare import load_job, plan_for_run

JOB = Path(__file__).parents[2] / "examples" / "drill.toml"


@pytest.fixture(scope="module")
def plan() -> Plan:
    return plan_for_run(load_job(str(JOB), overrides=[], cluster=None, steps=0))


@pytest.fixture
def run(tmp_path: Path, plan: Plan) -> Run:
    run = create_run(tmp_path, "x", job_toml="", job={}, plan_json=plan.to_json())
    make_secret(run.path / "secret")
    run.set_launch(hosts=["a", "b"], slots=[1, 1])
    return run


@pytest.fixture
def agent(run: Run) -> Iterator[HostAgent]:
    agent = HostAgent(run, host="b", slots=1, address="127.0.0.1", stop_requests=StopSignals())
    yield agent
    agent.replica_store.close()


def listen(run: Run, term: int, stop: threading.Event, threads: list[threading.Thread]) -> Listener:
    """A coordinator of a term, as far as its door."""
    listener = Listener("127.0.0.1", 0, hosting.read_secret(run.path / "secret"), partial(_greet, answer_of(term)))

    def pump() -> None:
        channels = []
        while not stop.is_set():
            channels += listener.pump(0.01)
        for one in (*channels, listener):
            one.close()

    threads.append(threading.Thread(target=pump))
    threads[-1].start()
    return listener


def test_a_coordinator_of_an_older_term_is_not_joined_again(run: Run, agent: HostAgent) -> None:
    """It was frozen, and may not know yet that another is in its place."""
    stop, threads = threading.Event(), list[threading.Thread]()
    try:
        frozen, present, following = (listen(run, term, stop, threads) for term in (1, 2, 3))
        assert agent._connect(present.address)
        agent._hang_up()
        assert not agent._connect(frozen.address)
        assert agent._channel is None
        assert agent._connect(following.address)
        agent._hang_up()
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_the_run_folder_is_read_once_a_second(agent: HostAgent, monkeypatch: pytest.MonkeyPatch) -> None:
    looks, now_s = list[float](), [hosting.time.monotonic() + 1.0]
    monkeypatch.setattr(hosting, "known_coordinator", lambda run: looks.append(now_s[0]))
    monkeypatch.setattr(hosting.time, "monotonic", lambda: now_s[0])
    agent._lost_s = now_s[0]
    for _ in range(100):
        now_s[0] += 0.05
        agent._reach_coordinator()
    assert 4 <= len(looks) <= 6
    assert all(later - one >= hosting.DISK_S for one, later in pairwise(looks))


def test_an_agent_that_hears_nothing_goes_over_to_a_newer_coordinator(
    run: Run, agent: HostAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one before is frozen: its connection stays open for ever."""
    stop, threads = threading.Event(), list[threading.Thread]()
    try:
        frozen, present = (listen(run, term, stop, threads) for term in (1, 2))
        assert agent._connect(frozen.address)
        CoordinatorMemory(run, started_s=0.0).save(SavedState(), present.address, term=2)
        agent._watch_coordinator()
        assert agent._channel is not None, "it was heard a moment ago"
        now_s = hosting.time.monotonic() + agent._sign_every_s + hosting.QUIET_S + 0.1
        monkeypatch.setattr(hosting.time, "monotonic", lambda: now_s)
        agent._watch_coordinator()
        assert (agent._channel, agent._where) == (None, present.address)
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_a_silent_coordinator_is_replaced_once_it_does_not_count_on(
    run: Run, agent: HostAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is only slow keeps its place; nobody waits for a lease twice."""
    stop, threads, spawned = threading.Event(), list[threading.Thread](), list[Watched]()
    holder, now_s = FileElection(run), [hosting.time.monotonic()]
    assert holder.take()
    monkeypatch.setattr(agent, "_spawn_coordinator", lambda: spawned.append(agent._watched))
    try:
        assert agent._connect(listen(run, 1, stop, threads).address)
        monkeypatch.setattr(hosting.time, "monotonic", lambda: now_s[0])
        quiet_after_s = agent._sign_every_s + hosting.QUIET_S + hosting.turn_s(1)
        for _ in range(int(quiet_after_s) + 3):
            now_s[0] += 1.0
            holder._write_count()
            agent._watch_coordinator()
        assert spawned == [], "it counts on"
        while not spawned and now_s[0] < agent._heard_s + hosting.DEAF_S:
            now_s[0] += 1.0
            agent._watch_coordinator()
        (watched,) = spawned
        assert (watched.term, watched.count) == read_sign(run)
        assert 2 <= now_s[0] - watched.since_s <= 4, "what it has seen of the lease goes along"
        agent._hang_up()
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_a_pause_of_our_own_is_no_silence_of_the_coordinator(
    run: Run, agent: HostAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent._excuse_own_pause()
    silent_s = hosting.time.monotonic() - agent._heard_s
    now_s = hosting.time.monotonic() + 100.0
    monkeypatch.setattr(hosting.time, "monotonic", lambda: now_s)
    agent._excuse_own_pause()
    assert now_s - agent._heard_s < silent_s + 1.0


def test_somebody_starts_a_coordinator_though_the_first_thousand_hosts_are_lost() -> None:
    turns = [hosting.turn_s(place) for place in range(16384)]
    assert turns == sorted(turns)
    assert max(turns) + hosting.DEAF_S < hosting.LOST_S / 2


@pytest.mark.parametrize("most_bytes", [hosting.MAX_HELLO_BYTES, 10])
def test_an_agent_says_what_it_has_with_its_hello_where_that_is_short(
    run: Run, agent: HostAgent, monkeypatch: pytest.MonkeyPatch, most_bytes: int
) -> None:
    monkeypatch.setattr(hosting, "MAX_HELLO_BYTES", most_bytes)
    listener = Listener("127.0.0.1", 0, hosting.read_secret(run.path / "secret"), partial(_greet, answer_of(1)))
    connections, heard = AgentConnections(listener), list[tuple[str, dict[str, Any]]]()
    caller = threading.Thread(target=agent._connect, args=(listener.address,))
    caller.start()
    is_short = most_bytes > 10
    while len(heard) < (1 if is_short else 2):
        heard += connections.receive(0.1)
    caller.join()
    agent._hang_up()
    connections.drain()
    listener.close()
    kinds = ["joined"] if is_short else ["joined", "status"]
    assert [(host, message["kind"]) for host, message in heard] == [("b", kind) for kind in kinds]
    assert "status" not in heard[0][1]["hello"]
    status = heard[0][1]["status"] if is_short else {key: told for key, told in heard[1][1].items() if key != "kind"}
    assert status == {"slots": {}, "epoch": 0, "digest": "", "went": 0, "wishes": 0}


def test_a_coordinator_starts_without_the_planner(tmp_path: Path) -> None:
    """After a lost one all hosts wait for the next: numpy alone would be most of its start."""
    told = (
        "import sys, pathlib, phalanx.elastic.coordinator as started\n"
        "started.EventWriter(pathlib.Path(sys.argv[1]), rank=-1).close()\n"
        "print(*{name.partition('.')[0] for name in sys.modules})"
    )
    command = [sys.executable, "-c", told, str(tmp_path / "supervisor.jsonl")]
    loaded = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    assert "phalanx" in loaded
    assert not {"numpy", "torch"} & set(loaded)


def test_an_agent_is_told_its_rhythm_with_the_answer_to_its_hello(run: Run, agent: HostAgent) -> None:
    """Thousands who join would beat four times a second each until they were told otherwise."""
    secret = hosting.read_secret(run.path / "secret")
    listener = Listener("127.0.0.1", 0, secret, partial(_greet, answer_of(1, every_s=4.0, sign_s=2.0)))
    caller = threading.Thread(target=agent._connect, args=(listener.address,))
    caller.start()
    channels = list[Channel]()
    while not channels:
        channels += listener.pump(0.1)
    caller.join()
    assert (agent._beat_every_s, agent._sign_every_s) == (4.0, 1.0), "the first hosts are told sooner that it lives"
    assert agent._heard_s - agent._beat_s <= 4.0 / 2, (
        "its hello showed that it lives: no heartbeat before half an interval"
    )
    agent._hang_up()
    for one in (*channels, listener):
        one.close()


def test_what_ranks_restored_reaches_the_next_coordinator(run: Run, agent: HostAgent) -> None:
    """No coordinator is connected when rank 0 reports it: it is kept, and what can be asked again is not."""
    agent._say("restored", epoch=1, slot=0, step=4, source="disk")
    agent._say("beat", epoch=1, progress=None)
    listener = Listener("127.0.0.1", 0, hosting.read_secret(run.path / "secret"), partial(_greet, answer_of(1)))
    connections, received = AgentConnections(listener), list[tuple[str, dict[str, Any]]]()
    caller = threading.Thread(target=agent._connect, args=(listener.address,))
    caller.start()
    while len(received) < 2:
        received += connections.receive(0.1)
    caller.join()
    agent._hang_up()
    connections.drain()
    listener.close()
    assert [message["kind"] for _, message in received] == ["joined", "restored"]
    assert received[1][1]["step"] == 4
