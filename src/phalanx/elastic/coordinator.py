"""The coordinator process, `python -m phalanx.elastic.coordinator RUN ADDRESS PARENT [PIPE [ELECTION [WATCHED]]]`.

It decides which hosts and ranks take part. One per run: the process that holds the newest term (election.py). An agent
starts it, and another agent starts the next one when it is gone or frozen. Its state is in `coordinator.json`: ranks
train on while there is no coordinator, and the next one takes over. It writes the address where it listens into the
pipe of the agent that started it (-1: none). Imports no torch.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import select
import selectors
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from phalanx.elastic.bandwidth import ROLE, Gauge
from phalanx.elastic.channel import Channel, Closed, Refused, encode_frame, extend_frame
from phalanx.elastic.coordinator_actions import Coordinator
from phalanx.elastic.coordinator_memory import CoordinatorMemory
from phalanx.elastic.coordinator_plan import CoordinatorPlan
from phalanx.elastic.coordinator_state import SavedState, Send
from phalanx.elastic.election import Deposed, Election, ElectionUnavailable, elected_by, open_election
from phalanx.elastic.handshake import read_secret
from phalanx.elastic.heartbeat_board import first_sign_s, heartbeat_every_s
from phalanx.elastic.listener import Listener
from phalanx.elastic.rank_process import die_with, ignore_system_stop
from phalanx.errors import PhalanxError
from phalanx.record.events import EventWriter
from phalanx.record.run import Run, open_run
from phalanx.record.run_lock import ENDED

# Seconds between decisions while something is under way.
TICK_S = 0.01
# Seconds between decisions while all train: then only hosts that were silent for seconds are looked for.
SETTLED_S = 0.05
# Silence after which another agent may take a host's name; longer where heartbeats are rarer.
SPEAKS_S = 2.0
# Events taken per poll: the kernel interface allocates room for them every time.
MOST_EVENTS = 8192
PUMP_S = 0.1  # between checks for connections whose handshake is late
# Between writes of the run's progress.
PROGRESS_S = 1.0


def main(arguments: list[str]) -> int:
    """Coordinate until the run is over; return at once when another process coordinates."""
    folder, address, parent, *rest = arguments
    pipe, election_name, watched = (*rest, *("-1", "", "")[len(rest) :])
    if int(parent):
        die_with(int(parent))
    ignore_system_stop()
    run = open_run(folder)
    try:
        election = open_election(election_name or elected_by(run), run, watched=watched)
        if run.status().get("state") in ENDED or not election.take():
            return 0
        # The previous holder may have come to the run's end.
        if run.status().get("state") not in ENDED:
            _coordinate(run, address, election, pipe=int(pipe))
        election.release()
    except Deposed as error:
        print(f"another process coordinates: {error}", file=sys.stderr)
    except ElectionUnavailable as error:
        print(f"no coordinator can be elected: {error}", file=sys.stderr)
        return 3
    return 0


def _coordinate(run: Run, address: str, election: Election, *, pipe: int) -> None:
    plan = CoordinatorPlan.from_json(run.plan_text(), where=str(run.plan_json))
    hosts = len(run.launch().get("hosts", ()))
    allow_descriptors(hosts)
    # Every message makes some immutable values anew, hardly ever with reference cycles: the search for cycles costs
    # a third of the time of 16,384 hosts, because each search goes through all that is known of them.
    gc.set_threshold(1_000_000, 50, 100)
    beat_every_s = heartbeat_every_s(hosts, plan.job.fault.dead_after_s)
    greet = partial(_greet, answer_of(election.term, every_s=beat_every_s, sign_s=first_sign_s(hosts)))
    listener = Listener(address, 0, read_secret(run.path / "secret"), greet, half_open=max(64, 2 * hosts))
    events = EventWriter(run.supervisor, rank=-1)
    agents = AgentConnections(listener, beat_every_s=beat_every_s)

    memory = CoordinatorMemory(run, started_s=float(run.launch().get("launched") or 0.0))

    def save(saved: SavedState) -> None:
        election.check()
        memory.save(saved, listener.address, term=election.term)

    try:
        saved_before = memory.load()
        coordinator = Coordinator(run, plan, agents.send, events, saved=saved_before, save=save, check=election.check)
        noted = coordinator.state.saved
        # Publish the address where this coordinator listens.
        save(noted)
        if pipe >= 0:
            with suppress(OSError), os.fdopen(pipe, "w") as writer:
                writer.write(json.dumps(list(listener.address)) + "\n")
        noted_s = ticked_s = time.monotonic()
        while not coordinator.state.is_over:
            messages = agents.receive(TICK_S if not coordinator.state.is_settled else SETTLED_S)
            # Before any message is acted on: this process may have been frozen.
            election.renew()
            coordinator.hear_all(messages)
            is_settled = coordinator.state.is_settled
            if messages and is_settled and not agents.is_measuring:
                time.sleep(rest_s(hosts))
            if time.monotonic() - ticked_s >= (SETTLED_S if is_settled else TICK_S):
                ticked_s = time.monotonic()
                coordinator.tick()
            if coordinator.state.saved is not noted and time.monotonic() - noted_s > PROGRESS_S:
                noted, noted_s = coordinator.state.saved, time.monotonic()
                # The disk is full: training continues, and the next write is tried again.
                with suppress(OSError):
                    save(noted)
        agents.drain()
    finally:
        events.close()
        listener.close()


def rest_s(num_hosts: int) -> float:
    """Return the seconds to pause while all train: heartbeats that arrive meanwhile cost less when handled together.

    A failure is noticed that much later; the more hosts there are, the smaller that is against the time of a recovery.

    >>> [rest_s(hosts) for hosts in (2, 1024, 16384)]
    [0.01, 0.03125, 0.05]
    """
    return min(max(0.01, num_hosts / 32768), SETTLED_S)


def allow_descriptors(hosts: int) -> None:
    """Raise the limit on open files: every host needs a socket, and the usual soft limit is 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * hosts + 1024
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def answer_of(term: int, **rhythm: float) -> dict[str, Any]:
    """Return the answer to an agent's hello.

    It contains the heartbeat interval at once, because there may be thousands.
    """
    return {"role": "coordinator", "term": term, **rhythm}


def _greet(answer: dict[str, Any], hello: dict[str, Any]) -> dict[str, Any]:
    """Answer a hello; refuses all but agents, since a replica sender may reach a port that was its peer's before.

    All agents get the same value, so that it is encoded once.
    """
    if hello.get("role") == ROLE:
        return {"role": "coordinator"}
    if hello.get("role") != "agent" or not isinstance(hello.get("time"), int | float):
        raise Refused(f"role {hello.get('role')!r} may not connect to the coordinator")
    return answer


class AgentConnections:
    """The connections to the agents; each message comes with the name of the host that sent it."""

    def __init__(self, listener: Listener, *, beat_every_s: float = 0.0) -> None:
        self._listener, self._beat_every_s = listener, beat_every_s
        # Not `selectors`, because there are thousands: its records and lookups cost more than the kernel's.
        self._poll = select.epoll()
        self._poll.register(listener.fileno(), select.EPOLLIN)
        # For the one agent that measures its link.
        measured = selectors.EpollSelector()
        self._gauge, self._gauge_descriptor = Gauge(measured), measured.fileno()
        self._poll.register(self._gauge_descriptor, select.EPOLLIN)
        self._pumped_s = -1e9
        self._channels: dict[str, Channel] = {}
        self._by_descriptor: dict[int, tuple[str, Channel]] = {}
        self._heard_s: dict[str, float] = {}

    def receive(self, timeout_s: float) -> list[tuple[str, dict[str, Any]]]:
        """Return the messages that arrive within `timeout_s`.

        An agent that connects or disconnects appears as `joined`, `gone`.
        """
        now = time.monotonic()
        messages: list[tuple[str, dict[str, Any]]] = []
        # Pumping also drops connections whose handshake is late.
        is_due = now - self._pumped_s > PUMP_S
        by_descriptor, heard_s = self._by_descriptor, self._heard_s
        for descriptor, _ in self._poll.poll(timeout_s, MOST_EVENTS):
            known = by_descriptor.get(descriptor)
            if known is None:
                if descriptor == self._gauge_descriptor:
                    self._gauge.listen()
                else:
                    is_due = True
                continue
            host, channel = known
            try:
                for message in channel.receive_all():
                    messages.append((host, message))
                heard_s[host] = now
            except (Closed, Refused, OSError):
                self._drop(host)
                messages.append((host, {"kind": "gone"}))
        if not is_due:
            return messages
        self._pumped_s = time.monotonic()
        for channel in self._listener.pump():
            self._admit(channel, messages)
        return messages

    @property
    def is_measuring(self) -> bool:
        """True while an agent may be measuring its link; then this process must read without pauses."""
        return self._gauge.is_busy

    def _admit(self, channel: Channel, heard: list[tuple[str, dict[str, Any]]]) -> None:
        if channel.peer.get("role") == ROLE:
            self._gauge.admit(channel)
            return
        host = str(channel.peer.get("host", ""))[:200]
        if host in self._channels:
            if self._is_taken(host, channel):
                with suppress(Closed, OSError, TimeoutError):
                    channel.send({"kind": "taken"})
                channel.close()
                return
            self._drop(host)
        descriptor = channel.fileno()
        self._channels[host], self._by_descriptor[descriptor] = channel, (host, channel)
        self._heard_s[host] = self._pumped_s
        self._poll.register(descriptor, select.EPOLLIN)
        # The hello contains the status where it fits in: one message less from each of thousands.
        status = channel.peer.pop("status", None)
        joined = {"kind": "joined", "hello": channel.peer}
        if isinstance(status, dict):
            joined["status"] = status
        heard.append((host, joined))

    def _is_taken(self, host: str, channel: Channel) -> bool:
        """True when another agent of that name is active: the two would disconnect each other for ever."""
        old = self._channels.get(host)
        is_other = old is not None and old.peer.get("id") != channel.peer.get("id")
        speaks_s = max(SPEAKS_S, 2 * max(self._beat_every_s, heartbeat_every_s(len(self._channels))))
        return is_other and time.monotonic() - self._heard_s[host] < speaks_s

    def _drop(self, host: str) -> None:
        channel = self._channels.pop(host)
        descriptor = channel.fileno()
        del self._by_descriptor[descriptor]
        with suppress(OSError):
            self._poll.unregister(descriptor)
        channel.close()

    def send(self, send: Send) -> None:
        """Send a message to agents, encoded once; an agent that is gone is noticed at the next `receive`."""
        frame, channels, shares = encode_frame(send.message), self._channels, send.shares
        for host in send.hosts:
            channel = channels.get(host)
            if channel is not None:
                # Not `suppress`: this is done thousands of times a second.
                try:
                    channel.send_frame(extend_frame(frame, shares[host]) if host in shares else frame)
                except (OSError, TimeoutError):
                    # Closed is an OSError.
                    continue

    def drain(self) -> None:
        """Wait up to 2 s until the agents have disconnected, so that the last message reaches them."""
        until_s = time.monotonic() + 2.0
        while self._channels and time.monotonic() < until_s:
            self.receive(0.05)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except PhalanxError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
    except FileNotFoundError as error:
        # The run folder was deleted while this process ran.
        print(f"the run is gone: {Path(str(error.filename)).name}", file=sys.stderr)
        sys.exit(3)
