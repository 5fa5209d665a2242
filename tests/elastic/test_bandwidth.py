"""The link between two hosts: two loopback addresses stand for them."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from phalanx.elastic import bandwidth
from phalanx.elastic import local_launch as client
from phalanx.elastic.channel import connect
from phalanx.elastic.coordinator import AgentConnections, _greet, answer_of
from phalanx.elastic.listener import Listener
from phalanx.plan.plan import Plan
from phalanx.record.events import read_events
from phalanx.record.run import create_run
from phalanx.train.prepare import load_job, plan_for_run

HERE = Path(__file__).parent
JOB = HERE.parents[1] / "examples" / "drill.toml"
SECRET = bytes(range(32))


@pytest.fixture
def listener() -> Iterator[Listener]:
    door = Listener("127.0.0.1", 0, SECRET, partial(_greet, answer_of(1)))
    yield door
    door.close()


@pytest.fixture
def serve(listener: Listener) -> Iterator[Callable[[], AgentConnections]]:
    """A coordinator's hub, served by a thread."""
    over = threading.Event()
    threads: list[threading.Thread] = []
    hubs: list[AgentConnections] = []
    heard: list[object] = []

    def begin() -> AgentConnections:
        hub = AgentConnections(listener)
        hubs.append(hub)

        def turn() -> None:
            while not over.is_set():
                heard.extend(hub.receive(0.01))

        threads.append(threading.Thread(target=turn))
        threads[-1].start()
        return hub

    yield begin
    over.set()
    for thread in threads:
        thread.join()
    for hub in hubs:
        hub._gauge.close()
    assert heard == [], "who only measures is no host"


def measure(listener: Listener, secret: bytes = SECRET) -> float | None:
    return bandwidth.measure(listener.address, secret, host="b", bind="127.0.0.2", enough=1.0)


def test_it_is_measured_and_can_be_measured_again(listener: Listener, serve: Callable[[], AgentConnections]) -> None:
    serve()
    for _ in range(2):
        rate = measure(listener)
        assert rate is not None
        assert rate > 0


def test_no_stranger_moves_data(listener: Listener, serve: Callable[[], AgentConnections]) -> None:
    serve()
    assert measure(listener, bytes(32)) is None


def test_one_at_a_time(
    listener: Listener, serve: Callable[[], AgentConnections], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bandwidth, "WAIT_S", 0.3)
    serve()
    first = connect(listener.address, SECRET, {"role": "link", "host": "a"}, timeout_s=5.0)
    assert first.wait(60.0) == {"kind": "begin"}
    assert measure(listener) is None, "whoever waits too long joins unmeasured"
    monkeypatch.setattr(bandwidth, "WAIT_S", 20.0)
    first.close()
    assert measure(listener)


def test_one_that_holds_its_turn_is_put_out(
    listener: Listener, serve: Callable[[], AgentConnections], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bandwidth, "TURN_S", 0.2)
    serve()
    held = connect(listener.address, SECRET, {"role": "link", "host": "a"}, timeout_s=5.0)
    assert held.wait(60.0) == {"kind": "begin"}
    assert measure(listener)
    held.close()


def test_a_link_that_takes_only_small_messages_moves_nothing(
    listener: Listener, serve: Callable[[], AgentConnections], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with a wrong MTU: the hello passes, and then no data."""
    monkeypatch.setattr(bandwidth, "ANSWER_S", 0.3)
    monkeypatch.setattr(bandwidth.Gauge, "listen", lambda gauge: gauge.close())
    serve()
    assert measure(listener) == 0.0


def test_nobody_there(listener: Listener) -> None:
    listener.close()
    assert bandwidth.measure(("127.0.0.1", 1), SECRET, host="b", bind="", enough=1.0) is None


def test_an_agent_on_another_address_tells_what_its_link_carries(tmp_path: Path) -> None:
    """Real agents: the coordinator's own host measures nothing, the other one does, and the number is recorded."""
    plan: Plan = plan_for_run(load_job(str(JOB), overrides=[], cluster=None, steps=0))
    run = create_run(tmp_path, "fake", job_toml="", job={}, plan_json=plan.to_json())
    run.set_launch(v=1)
    hosts = [client.HostSpec(name=f"host-{n}", slots=2, address=f"127.0.0.{n + 1}") for n in range(2)]
    agent = (str(HERE / "fake_agent.py"), "finish")
    done = client.launch(run, hosts=hosts, environ=os.environ, tick=lambda: None, asked=lambda count: None, agent=agent)
    assert done.state == "done"
    joined = {one["host"]: one for one in read_events(run.supervisor)[0] if one["event"] == "host"}
    rates = [joined[host]["link_bytes_per_s"] for host in ("host-0", "host-1")]
    assert rates.count(None) == 1, "the host that the coordinator is on"
    assert next(rate for rate in rates if rate is not None) > 0
