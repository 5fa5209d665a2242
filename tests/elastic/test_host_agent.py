"""How an agent finds its coordinator: not one that is over, and without wearing out the disk that all hosts share."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest

from phalanx.elastic import host_agent as hosting
from phalanx.elastic.channel import Listener
from phalanx.elastic.coordinator import _greet
from phalanx.elastic.handshake import make_secret
from phalanx.elastic.host_agent import HostAgent
from phalanx.elastic.local_launch import StopSignals
from phalanx.plan.plan import Plan
from phalanx.record.run import Run, create_run
from phalanx.train.prepare import load_job, make

JOB = Path(__file__).parents[2] / "examples" / "drill.toml"


@pytest.fixture(scope="module")
def plan() -> Plan:
    return make(load_job(str(JOB), overrides=[], cluster=None, steps=0))


@pytest.fixture
def run(tmp_path: Path, plan: Plan) -> Run:
    run = create_run(tmp_path, "x", job_toml="", job={}, plan_json=plan.to_json())
    make_secret(run.path / "secret")
    run.set_launch(hosts=["a", "b"], slots=[1, 1])
    return run


@pytest.fixture
def agent(run: Run) -> Iterator[HostAgent]:
    agent = HostAgent(run, host="b", slots=1, address="127.0.0.1", wishes=StopSignals())
    yield agent
    agent.replica_store.close()


def listen(run: Run, term: int, stop: threading.Event, threads: list[threading.Thread]) -> Listener:
    """A coordinator of a term, as far as its door."""
    listener = Listener("127.0.0.1", 0, hosting.read_secret(run.path / "secret"), partial(_greet, term))

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
    monkeypatch.setattr(hosting, "coordinator_address", lambda run: looks.append(now_s[0]))
    monkeypatch.setattr(hosting.time, "monotonic", lambda: now_s[0])
    agent._lost_s = now_s[0]
    for _ in range(100):
        now_s[0] += 0.05
        agent._reach_coordinator()
    assert 4 <= len(looks) <= 6
    assert all(later - one >= hosting.DISK_S for one, later in pairwise(looks))


def test_somebody_starts_a_coordinator_though_the_first_thousand_hosts_are_lost() -> None:
    turns = [hosting.turn_s(place) for place in range(16384)]
    assert turns == sorted(turns)
    assert max(turns) + hosting.DEAF_S < hosting.LOST_S / 2
