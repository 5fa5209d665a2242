"""`python -m phalanx.elastic.coordinator RUN ADDRESS PARENT`: decides who takes part, one generation after another.

One per run, whoever holds `coordinator.lock`; started by an agent, and by another one when it is gone. What it must not
forget is in `coordinator.json`: ranks go on training while there is no coordinator, and the next one takes over.
No torch here.
"""

from __future__ import annotations

import fcntl
import json
import selectors
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from phalanx.elastic.bandwidth import ROLE, Gauge
from phalanx.elastic.channel import Channel, Closed, Listener, Refused
from phalanx.elastic.coordinator_actions import Coordinator
from phalanx.elastic.coordinator_state import SavedState
from phalanx.elastic.fence import current_generation
from phalanx.elastic.handshake import read_secret
from phalanx.elastic.local_launch import ENDED
from phalanx.elastic.rank_process import die_with
from phalanx.errors import PhalanxError
from phalanx.io.files import replace_text
from phalanx.plan.plan import Plan
from phalanx.record.events import EventWriter
from phalanx.record.run import Run, open_run

TICK_S = 0.01
SPEAKS_S = 2.0  # an agent beats four times a second
PROGRESS_S = 1.0  # between notes of how far the run is


def main(arguments: list[str]) -> int:
    """Coordinate until the run is over; ends at once when somebody else does."""
    folder, address, parent = arguments
    if int(parent):
        die_with(int(parent))
    run = open_run(folder)
    with open(run.path / "coordinator.lock", "a", encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return 0
        if run.status().get("state") in ENDED:  # whoever had the lock before us came to the end
            return 0
        return _coordinate(run, address)


def _coordinate(run: Run, address: str) -> int:
    plan = Plan.from_json(run.plan_json.read_text(encoding="utf-8"), where=str(run.plan_json))
    hosts = len(run.launch().get("hosts", ()))
    listener = Listener(address, 0, read_secret(run.path / "secret"), _greet, half_open=max(64, 2 * hosts))
    events = EventWriter(run.supervisor, rank=-1)
    agents = AgentConnections(listener)
    started = float(run.launch().get("launched") or 0.0)

    def save(saved: SavedState) -> None:
        where = {"address": list(listener.address), "started": started, **saved.to_json()}
        replace_text(run.path / "coordinator.json", json.dumps(where) + "\n")

    before = read_saved_state(run, since_s=started)
    coordinator = Coordinator(run, plan, agents.send, events, saved=before, save=save)
    noted = coordinator.state.saved
    save(noted)  # where we are
    noted_s = time.monotonic()
    try:
        while not coordinator.state.is_over:
            for host, message in agents.receive(TICK_S):
                coordinator.hear(host, message)
            coordinator.tick()
            if coordinator.state.saved is not noted and time.monotonic() - noted_s > PROGRESS_S:
                noted, noted_s = coordinator.state.saved, time.monotonic()
                save(noted)
        agents.drain()
        return 0
    finally:
        events.close()
        listener.close()


def _greet(hello: dict[str, Any]) -> dict[str, Any]:
    """Only agents belong here: a replica on its way to a peer may reach a port that was the peer's before."""
    if hello.get("role") == ROLE:
        return {"role": "coordinator"}
    if hello.get("role") != "agent" or not isinstance(hello.get("time"), int | float):
        raise Refused(f"a {hello.get('role')!r} has no business with the coordinator")
    return {"role": "coordinator"}


def read_saved_state(run: Run, *, since_s: float) -> SavedState:
    """What the coordinator before this one knew, if it was one of the same launch; nothing otherwise."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        body = json.loads((run.path / "coordinator.json").read_text(encoding="utf-8"))
        if float(body["started"]) == since_s:
            return SavedState.from_json(body)
    return SavedState(generation=current_generation(run))


def coordinator_address(run: Run) -> tuple[str, int] | None:
    """Where the last coordinator that is known listens."""
    try:
        host, port = json.loads((run.path / "coordinator.json").read_text(encoding="utf-8"))["address"]
        return str(host), int(port)
    except (OSError, ValueError, KeyError, TypeError):
        return None


class AgentConnections:
    """The agents' connections: messages come with the name of the host that sent them."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._gauge = Gauge(self._selector)
        self._channels: dict[str, Channel] = {}
        self._heard_s: dict[str, float] = {}

    def receive(self, timeout_s: float) -> list[tuple[str, dict[str, Any]]]:
        """What was said within `timeout_s`; an agent that came or went is told as `joined` and `gone`."""
        heard: list[tuple[str, dict[str, Any]]] = []
        ready = self._selector.select(timeout_s)
        heard += [
            one for channel in self._listener.pump() for one in self._admit(channel)
        ]  # every turn: it drops who is late
        for key, _ in ready:
            if key.data is self._gauge:
                self._gauge.listen()
            elif key.fileobj is not self._listener:
                heard += self._listen(key.data, key.fileobj)  # type: ignore[arg-type]
        return heard

    def _admit(self, channel: Channel) -> list[tuple[str, dict[str, Any]]]:
        if channel.peer.get("role") == ROLE:
            self._gauge.admit(channel)
            return []
        host = str(channel.peer.get("host", ""))[:200]
        if self._is_taken(host, channel):
            with suppress(Closed, OSError, TimeoutError):
                channel.send({"kind": "taken"})
            channel.close()
            return []
        if host in self._channels:
            self._drop(host)
        self._channels[host] = channel
        self._heard_s[host] = time.monotonic()
        self._selector.register(channel, selectors.EVENT_READ, host)
        return [(host, {"kind": "joined", "hello": channel.peer})]

    def _is_taken(self, host: str, channel: Channel) -> bool:
        """Whether another agent of that name is there and speaks: two would drive each other out for ever."""
        old = self._channels.get(host)
        other = old is not None and old.peer.get("id") != channel.peer.get("id")
        return other and time.monotonic() - self._heard_s[host] < SPEAKS_S

    def _listen(self, host: str, channel: Channel) -> list[tuple[str, dict[str, Any]]]:
        if self._channels.get(host) is not channel:
            return []
        try:
            messages = channel.receive()
            self._heard_s[host] = time.monotonic()
            return [(host, message) for message in messages]
        except (Closed, Refused, OSError):
            self._drop(host)
            return [(host, {"kind": "gone"})]

    def _drop(self, host: str) -> None:
        channel = self._channels.pop(host)
        with suppress(KeyError, ValueError):
            self._selector.unregister(channel)
        channel.close()

    def send(self, host: str, message: dict[str, Any]) -> None:
        """Say something to an agent; one that is gone shows as such when we listen."""
        channel = self._channels.get(host)
        if channel is not None:
            with suppress(Closed, OSError, TimeoutError):
                channel.send(message)

    def drain(self) -> None:
        """Wait a moment until the agents have hung up, so that the last word reaches them."""
        until_s = time.monotonic() + 2.0
        while self._channels and time.monotonic() < until_s:
            self.receive(0.05)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except PhalanxError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
    except FileNotFoundError as error:  # the run folder was deleted under us
        print(f"the run is gone: {Path(str(error.filename)).name}", file=sys.stderr)
        sys.exit(3)
