"""A real dashboard on a real socket, for tests: `with dashboard(folder) as page: page.json("/api/runs")`."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A response, read whole."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


@dataclass(frozen=True, kw_only=True)
class Dashboard:
    """A server that runs in a thread of the test."""

    port: int
    store: Any
    complaints: list[str] = field(default_factory=list)  # faults of the server itself

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/"

    def get(self, path: str, *, method: str = "GET", **headers: str) -> Answer:
        """One request; header names are written with underscores."""
        caller = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        try:
            caller.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
            found = caller.getresponse()
            named = {name.lower(): value for name, value in found.getheaders()}
            return Answer(status=found.status, headers=named, body=found.read())
        finally:
            caller.close()

    def json(self, path: str) -> Any:
        """The body of an answer that must be fine."""
        found = self.get(path)
        assert found.status == 200, (path, found.status, found.body[:500])
        return found.json()

    def raw(self, request: bytes, *, least: int = 1) -> bytes:
        """Send bytes as they are, and read until `least` bytes came or the server closes."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=120) as caller:
            caller.sendall(request)
            found = b""
            while len(found) < least and (data := caller.recv(65536)):
                found += data
            return found


@contextmanager
def dashboard(runs: Path, *, token: str | None = None) -> Iterator[Dashboard]:
    """Serve a folder of runs, or one run, until the block ends."""
    from phalanx.io.listen import Address, bound_address, open_socket
    from phalanx.web.app import AccessPolicy
    from phalanx.web.request_guard import AccessKey
    from phalanx.web.run_store import open_run_store
    from phalanx.web.serve import allowed_hosts, serving

    store = open_run_store(runs)
    listener = open_socket(Address(host="127.0.0.1", port=0), guarded=False)
    bound = bound_address(listener)
    page = Dashboard(port=bound.port, store=store)
    door = AccessPolicy(hosts=allowed_hosts(bound), key=AccessKey(token, port=bound.port) if token else None)
    stop = threading.Event()
    work = serving(listener, store, door=door, complain=page.complaints.append, stop=stop)
    thread = threading.Thread(target=asyncio.run, args=(work,))
    thread.start()
    try:
        yield page
    finally:
        stop.set()
        thread.join(20)
        assert not thread.is_alive()
