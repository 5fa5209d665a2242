"""Several peers for tests: identities made once, groups in this process or in processes of their own."""

from __future__ import annotations

import contextlib
import functools
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from phalanx.peers.allowlist import AllowList
from phalanx.peers.facts import PeerEvent, RunFacts
from phalanx.peers.group import PeerGroup
from phalanx.peers.identity import PeerIdentity

RUN = RunFacts(run_id="trial", model_digest="m" * 8, tokenizer_digest="t" * 8, code_digest="c" * 8)
# Short, so that tests are; wide enough that a starved machine does not take a live peer for a dead one.
QUICK = {"heartbeat_s": 0.1, "dead_after_s": 3.0}
T = TypeVar("T")


@functools.cache
def identities(count: int) -> tuple[PeerIdentity, ...]:
    """In the order of their ids: the first leads."""
    made = [PeerIdentity.create(f"peer-{place}") for place in range(count)]
    return tuple(sorted(made, key=lambda one: one.id))


@functools.cache
def allowlist(count: int) -> AllowList:
    people = identities(count)
    return AllowList.create(people[0], RUN.run_id, [one.certificate_pem for one in people])


class Crew:
    """Groups in threads of this process, and what each of them has told."""

    def __init__(self, count: int, **settings: Any) -> None:
        self.people, self.allowed = identities(count), allowlist(count)
        self.groups: list[PeerGroup] = []
        self.events: list[list[PeerEvent]] = []
        self._told = threading.Condition()
        self._settings = {**QUICK, **settings}

    def start(self, place: int, **settings: Any) -> PeerGroup:
        """A group that has not joined yet."""
        events: list[PeerEvent] = []

        def tell(event: PeerEvent) -> None:
            with self._told:
                events.append(event)
                self._told.notify_all()

        merged: dict[str, Any] = {"allowed": self.allowed, "events": tell, **self._settings, **settings}
        run = merged.pop("run", RUN)
        group = PeerGroup(self.people[place], run, **merged)
        self.groups.append(group)
        self.events.append(events)
        return group

    def join_all(self, count: int, settings: Sequence[dict[str, Any]] = ()) -> list[PeerGroup]:
        """The first founds the group, the others join it one after the other."""
        for place in range(count):
            group = self.start(place, **(settings[place] if settings else {}))
            group.join([self.groups[0].address] if place else (), timeout_s=300.0)
        self.wait_for(lambda: all(len(group.view().members) == count for group in self.groups))
        return self.groups

    def wait_for(self, is_so: Callable[[], bool], timeout_s: float = 300.0) -> None:
        """Until something told by an event is so."""
        with self._told:
            assert self._told.wait_for(is_so, timeout_s), [
                [f"{event.kind}: {event.text}" for event in events] for events in self.events
            ]

    def kinds(self, place: int) -> list[str]:
        with self._told:
            return [event.kind for event in self.events[place]]

    def close(self) -> None:
        together([group.close for group in self.groups])

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def together(calls: Sequence[Callable[[], T]]) -> list[T]:
    """All at the same time."""
    with ThreadPoolExecutor(max(1, len(calls))) as pool:
        return [future.result(300.0) for future in [pool.submit(call) for call in calls]]


def until(is_so: Callable[[], bool], timeout_s: float = 300.0) -> None:
    """Look again and again, for what no event tells."""
    deadline = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.02)


class ProcessPeer:
    """A peer in a process of its own, which can be killed and stopped; it is told what to do line by line."""

    def __init__(self, place: int, count: int, **settings: Any) -> None:
        self.id = identities(count)[place].id
        self.lines: list[dict[str, Any]] = []
        self._read = threading.Condition()
        person = identities(count)[place]
        setup = {
            "key": person.key_pem,
            "certificate": person.certificate_pem,
            "allowed": allowlist(count).to_json(),
            "settings": {**QUICK, **settings},
        }
        program = Path(__file__).with_name("peer_process.py")
        self.process = subprocess.Popen(
            [sys.executable, str(program)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        self._thread = threading.Thread(target=self._collect, daemon=True)
        self._thread.start()
        self.tell(setup)

    def tell(self, command: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()

    def wait_for(self, kind: str, timeout_s: float = 300.0, **facts: Any) -> dict[str, Any]:
        """The first line of a kind, with these facts."""

        def found() -> dict[str, Any] | None:
            wanted = {"kind": kind, **facts}
            return next((line for line in self.lines if wanted.items() <= line.items()), None)

        with self._read:
            self._read.wait_for(lambda: found() is not None, timeout_s)
            line = found()
        assert line is not None, (kind, facts, self.lines[-20:])
        return line

    def join(self, address: Sequence[Any] | None) -> Sequence[Any]:
        self.tell({"do": "join", "addresses": [address] if address else []})
        return self.wait_for("address")["address"]

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._thread.join(10.0)
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()

    def _collect(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._read:
                self.lines.append(json.loads(line))
                self._read.notify_all()
