"""Elections in etcd, against a real server, and in a Kubernetes Lease, against a stand-in for the API server.

The stand-in does what the real one promises of a Lease: every change has a version, and a change is taken only with the
version that was read. A real Kubernetes was not seen.
"""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from phalanx.elastic.election import Deposed, Election, ElectionUnavailable, choose_election
from phalanx.elastic.etcd_election import EtcdElection
from phalanx.elastic.json_http import HttpProblem, ask_json
from phalanx.elastic.kubernetes_election import KubernetesElection
from phalanx.elastic.lease_clock import LeaseClock
from phalanx.record.run import create_run

PATIENCE_S = 60.0
TOKEN = "a token of the test"


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


# ---- etcd ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a real etcd, Debian's where `make test` could get it."""
    found = shutil.which("etcd") or shutil.which("etcd", path=str(Path(sys.executable).parent))
    if found is None:
        pytest.skip("no etcd here: Debian's package etcd-server has it, and make test fetches it where it can")
    folder = tmp_path_factory.mktemp("etcd")
    url, peers = f"http://127.0.0.1:{free_port()}", f"http://127.0.0.1:{free_port()}"
    command = [found, "--data-dir", str(folder / "data"), "--log-level", "error"]
    command += ["--listen-client-urls", url, "--advertise-client-urls", url, "--listen-peer-urls", peers]
    command += ["--initial-advertise-peer-urls", peers, "--initial-cluster", f"default={peers}"]
    with open(folder / "log", "wb") as log:
        # ETCD_UNSUPPORTED_ARCH: version 3.4 asks for it on arm64.
        process = subprocess.Popen(command, stdout=log, stderr=log, env={"ETCD_UNSUPPORTED_ARCH": "arm64"})
    try:
        until_s = time.monotonic() + PATIENCE_S
        while not answers(url):
            if process.poll() is not None or time.monotonic() > until_s:
                pytest.skip(f"etcd does not start: {(folder / 'log').read_text(errors='replace')[-500:]}")
            time.sleep(0.05)
        yield url
    finally:
        process.kill()
        process.wait()


def answers(url: str) -> bool:
    try:
        return ask_json(url, "/v3/kv/range", body={"key": "AA=="})[0] == 200
    except HttpProblem:
        return False


def test_etcd_elects_one_and_a_holder_that_renews_keeps_its_term(etcd: str) -> None:
    holder, other = EtcdElection([etcd], "kept"), EtcdElection([etcd], "kept")
    assert not holder.is_held()
    assert holder.take()
    stop = threading.Event()

    def renew() -> None:
        while not stop.wait(0.2):
            holder.lease_clock.tried_s = -1e9  # more often than a coordinator would
            holder.renew()

    thread = threading.Thread(target=renew)
    thread.start()
    try:
        assert other.is_held()
        assert not other.take()
    finally:
        stop.set()
        thread.join()
    holder.check()
    holder.release()
    assert (other.take(), other.term > holder.term) == (True, True), "a term that was given back is free at once"
    with pytest.raises(Deposed):
        holder.check()


def test_etcd_takes_the_term_from_a_silent_holder(etcd: str) -> None:
    holder, other = (EtcdElection([etcd], "silent", lease_clock=LeaseClock(lease_s=2.0)) for _ in range(2))
    assert holder.take()
    # A busy etcd that elects itself anew prolongs every lease: then the first look is in vain.
    assert any(other.take() for _ in range(20)), "its lease is over"
    assert other.term > holder.term
    for call in (holder.check, holder.renew):
        holder.lease_clock.tried_s = -1e9
        with pytest.raises(Deposed):
            call()
    other.check()


def test_a_holder_trusts_its_lease_while_etcd_is_away_and_no_longer(etcd: str) -> None:
    now = [100.0]
    holder = EtcdElection(
        [f"http://127.0.0.1:{free_port()}", etcd], "away", lease_clock=LeaseClock(clock=lambda: now[0])
    )
    assert holder.take(), "the second member answers"
    holder._endpoints = [f"http://127.0.0.1:{free_port()}"]
    now[0] += 2.0
    holder.renew()
    holder.check()
    now[0] += 3.0
    for call in (holder.check, holder.renew):
        with pytest.raises(Deposed, match="could not be renewed"):
            call()
    with pytest.raises(ElectionUnavailable, match="Connection refused"):
        holder.is_held()


def test_etcd_is_the_next_where_files_do_not_work(etcd: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = create_run(tmp_path, "x", job_toml="", job={}, plan_json="{}")
    monkeypatch.setattr("phalanx.elastic.file_election.fcntl.flock", lambda file, how: None)
    assert choose_election(["file", f"etcd:{etcd}"], run) == f"etcd:{etcd}"


# ---- Kubernetes ------------------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class Leases:
    """The leases of a namespace, with versions; `before_put` is called before the next change is taken."""

    leases: dict[str, dict[str, Any]] = field(default_factory=dict)
    version: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)
    before_put: Callable[[], None] | None = None
    url: str = ""

    def store(self, lease: dict[str, Any]) -> dict[str, Any]:
        self.version += 1
        lease["metadata"]["resourceVersion"] = str(self.version)
        self.leases[lease["metadata"]["name"]] = lease
        return lease


def handler_of(kept: Leases) -> type[BaseHTTPRequestHandler]:
    base = "/apis/coordination.k8s.io/v1/namespaces/training/leases"

    class Handler(BaseHTTPRequestHandler):
        def answer(self, status: int, body: dict[str, Any]) -> None:
            text = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def serve(self) -> None:
            text = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if self.headers.get("Authorization") != f"Bearer {TOKEN}":
                self.answer(401, {"kind": "Status", "message": "Unauthorized"})
                return
            if self.command == "PUT" and kept.before_put is not None:
                call, kept.before_put = kept.before_put, None
                call()
            body = json.loads(text) if text else {}
            name = self.path.removeprefix(base).lstrip("/")
            with kept.lock:
                known = kept.leases.get(name or body.get("metadata", {}).get("name", ""))
                if self.command == "POST":
                    made = known is None
                    self.answer(201 if made else 409, kept.store(body) if made else {"message": "already exists"})
                elif known is None:
                    self.answer(404, {"kind": "Status", "message": "not found"})
                elif self.command == "GET":
                    self.answer(200, known)
                elif body["metadata"].get("resourceVersion") != known["metadata"]["resourceVersion"]:
                    self.answer(409, {"kind": "Status", "message": "the object has been modified"})
                else:
                    self.answer(200, kept.store(body))

        do_GET = do_POST = do_PUT = serve

        def log_message(self, format: str, *args: object) -> None:
            pass

    return Handler


@pytest.fixture
def leases() -> Iterator[Leases]:
    kept = Leases()
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler_of(kept))
    kept.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield kept
    server.shutdown()
    thread.join()
    server.server_close()


@dataclass(kw_only=True)
class Clock:
    """A clock that only sleeping moves, with somebody who does something meanwhile."""

    now_s: float = 0.0
    meanwhile: Callable[[], None] = lambda: None

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        self.meanwhile()


def lease_election(leases: Leases, clock: Clock, *, token: str = TOKEN) -> KubernetesElection:
    return KubernetesElection(
        leases.url,
        namespace="training",
        name="run",
        token=lambda: token,
        lease_clock=LeaseClock(clock=lambda: clock.now_s, sleep=clock.sleep),
    )


def test_a_lease_elects_one_and_a_holder_that_renews_keeps_its_term(leases: Leases) -> None:
    clock = Clock()
    holder, other = (lease_election(leases, clock) for _ in range(2))
    assert (holder.is_held(), holder.take(), holder.term) == (False, True, 1)
    clock.meanwhile = holder.renew
    assert (other.is_held(), other.take(), other.term) == (True, False, 0)
    spec = leases.leases["run"]["spec"]
    assert (spec["leaseTransitions"], spec["leaseDurationSeconds"]) == (1, 4)
    holder.release()
    assert (other.is_held(), other.take(), other.term) == (False, True, 2)
    with pytest.raises(Deposed):
        holder.check()


def test_a_silent_holder_loses_its_lease(leases: Leases) -> None:
    clock = Clock()
    holder, other = (lease_election(leases, clock) for _ in range(2))
    assert holder.take()
    assert (other.take(), other.term) == (True, 2)
    assert clock.now_s == pytest.approx(4.0), "not before the lease is over"
    for call in (holder.renew, holder.check):
        with pytest.raises(Deposed):
            call()
    other.check()


def test_of_two_that_find_a_lease_free_the_quicker_has_it(leases: Leases) -> None:
    clock = Clock()
    first, second, third = (lease_election(leases, clock) for _ in range(3))
    assert first.take()
    first.release()
    taken: list[bool] = []
    leases.before_put = lambda: taken.append(third.take())  # between what `second` has read and what it writes
    clock.meanwhile = third.renew
    assert (second.take(), taken) == (False, [True])
    assert (second.term, third.term) == (0, 2)


def test_a_lease_that_somebody_labels_stays_ours(leases: Leases) -> None:
    clock = Clock()
    holder = lease_election(leases, clock)
    assert holder.take()
    labelled = {**leases.leases["run"]["metadata"], "labels": {"team": "a"}}
    leases.store({**leases.leases["run"], "metadata": labelled})
    clock.now_s += 1.0
    holder.renew()
    holder.check()


def test_without_the_right_to_a_lease_nobody_is_elected(leases: Leases) -> None:
    with pytest.raises(ElectionUnavailable, match=r"status 401 for lease training/run: Unauthorized"):
        lease_election(leases, Clock(), token="another").take()


def test_a_pod_finds_its_server_and_its_account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.96.0.1")
    with pytest.raises(ElectionUnavailable, match="no service account"):
        KubernetesElection.in_cluster(namespace="", name="run", account=tmp_path / "none")


def test_every_election_has_the_one_interface(leases: Leases) -> None:
    elections: list[Election] = [lease_election(leases, Clock()), EtcdElection([leases.url], "x")]
    assert [one.term for one in elections] == [0, 0]
