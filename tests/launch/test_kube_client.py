"""Requests to the API: retries, expired tokens, pages and watches that come too late, kubeconfig files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kube_server import TOKEN, Fault, KubeServer, running_server

import phalanx
from phalanx.launch.kube.access import has_access, read_access
from phalanx.launch.kube.client import KubeClient, KubeRefusal, RequestRate, WatchExpired
from phalanx.launch.kube.refusals import explain_refusal

PODS = "/api/v1/namespaces/default/pods"


@pytest.fixture
def server() -> Iterator[KubeServer]:
    with running_server() as made:
        yield made


class Waits:
    """A clock that nobody waits for."""

    def __init__(self) -> None:
        self.now, self.waits = 0.0, list[float]()

    def sleep(self, seconds: float) -> None:
        self.waits.append(seconds)
        self.now += seconds


def client_of(path: Path, waits: Waits | None = None) -> KubeClient:
    waits = waits or Waits()
    rate = RequestRate(clock=lambda: waits.now, sleep=waits.sleep)
    return KubeClient(read_access({"KUBECONFIG": str(path)}), rate=rate)


def test_throttled_broken_and_lost_requests_are_sent_again_within_bounds(server: KubeServer, tmp_path: Path) -> None:
    waits = Waits()
    client = client_of(server.kubeconfig(tmp_path / "config"), waits)
    server.put(f"{PODS}/one", {})
    server.faults = [
        Fault("GET", "one", 429, "TooManyRequests", "slow down", {"Retry-After": "7"}),
        Fault("GET", "one", 503, "ServiceUnavailable", "starting"),
        Fault("GET", "one"),  # the connection is cut
    ]
    assert client.get(f"{PODS}/one")["metadata"]["name"] == "one"
    assert waits.waits[0] == 7.0  # as the server asked
    assert len(waits.waits) == 3
    server.faults = [Fault("GET", "one", 429, "TooManyRequests", "slow down", times=99)]
    server.requests.clear()
    with pytest.raises(KubeRefusal) as throttled:
        client.get(f"{PODS}/one")
    assert len(server.requests) == 6
    error = explain_refusal(throttled.value, client.access, what="x")
    assert isinstance(error, phalanx.SystemFailure)
    assert "the API is throttling us" in str(error)
    server.faults = []
    server.server.shutdown()
    server.server.server_close()
    client.close()
    with pytest.raises(phalanx.SystemFailure, match=r"does not answer: .*6 attempts"):
        client.get(f"{PODS}/one")


def test_lists_in_pages_begin_again_when_a_page_has_expired_and_watches_say_so(
    server: KubeServer, tmp_path: Path
) -> None:
    client = client_of(server.kubeconfig(tmp_path / "config"))
    for number in range(1203):
        server.put(f"{PODS}/pod-{number:04d}", {"metadata": {"labels": {"kind": str(number % 2)}}})
    server.faults = [Fault("GET", "pods$", 410, "Expired", "too old", query="continue=500")]
    found, version = client.list_objects(PODS)
    assert [one["metadata"]["name"] for one in found] == [f"pod-{number:04d}" for number in range(1203)]
    assert version == str(server.version)
    assert len(client.list_objects(PODS, labels="kind=1")[0]) == 601
    server.faults = [Fault("GET", "pods$", 410, "Expired", "too old", query="continue=500", times=2)]
    with pytest.raises(KubeRefusal):  # twice: something else is wrong
        client.list_objects(PODS)
    server.faults = []
    gone = {"type": "ERROR", "object": {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old"}}
    server.watches = [[{"type": "ADDED", "object": {"metadata": {"name": "new"}}}, gone]]
    changes = client.watch(PODS, version)
    assert next(changes) == ("ADDED", {"metadata": {"name": "new"}})
    with pytest.raises(WatchExpired):
        next(changes)
    server.faults = [Fault("GET", "pods$", 410, "Expired", "too old")]
    with pytest.raises(WatchExpired):
        list(client.watch(PODS, "1"))


def test_an_expired_token_is_one_sentence_and_a_helper_is_asked_again(server: KubeServer, tmp_path: Path) -> None:
    client = client_of(server.kubeconfig(tmp_path / "config", token="old"))
    with pytest.raises(KubeRefusal) as refused:
        client.get(f"{PODS}/one")
    error = explain_refusal(refused.value, client.access, what="x")
    assert error.exit_code == 2
    assert "the token is wrong or has expired" in str(error)
    assert "log in again" in str(error)
    # A helper gives a token that is refused, then a good one; a file is read anew.
    helper = tmp_path / "helper"
    helper.write_text(
        "#!/bin/sh\n"
        f"test -e {tmp_path}/asked && token={TOKEN} || token=stale\ntouch {tmp_path}/asked\n"
        'echo "{\\"status\\": {\\"token\\": \\"$token\\"}}"\n'
    )
    helper.chmod(0o755)
    login = {"apiVersion": "client.authentication.k8s.io/v1", "command": "./helper", "args": []}
    client = client_of(server.kubeconfig(tmp_path / "config", exec=login))
    assert client.get(f"{PODS}/one") is None
    helper.write_text("#!/bin/sh\necho session over >&2\nexit 1\n")
    client = client_of(server.kubeconfig(tmp_path / "config", exec=login))
    with pytest.raises(phalanx.UserError, match="the log-in helper helper gave no token: session over"):
        client.get(f"{PODS}/one")
    (tmp_path / "token").write_text(TOKEN + "\n")
    client = client_of(server.kubeconfig(tmp_path / "config", tokenFile="token"))
    assert client.get(f"{PODS}/one") is None


def test_kubeconfig_files_are_merged_and_mistakes_in_them_are_said(server: KubeServer, tmp_path: Path) -> None:
    assert not has_access({"HOME": str(tmp_path)})
    with pytest.raises(phalanx.UserError, match="no cluster is configured on this machine") as caught:
        read_access({"HOME": str(tmp_path)})
    assert "--dry-run" not in str(caught.value)  # which `cluster health` does not have
    with pytest.raises(phalanx.UserError, match="KUBECONFIG names no file that exists"):
        read_access({"KUBECONFIG": str(tmp_path / "none")})
    good = server.kubeconfig(tmp_path / "good", namespace="ml")
    other = tmp_path / "other"
    other.write_text("current-context: tset\n")
    with pytest.raises(phalanx.UserError, match="has no context 'tset'\n  did you mean test"):
        read_access({"KUBECONFIG": f"{other}:{good}"})
    access = read_access({"KUBECONFIG": f"{other}:{good}"}, context="test")
    assert (access.server, access.namespace, access.headers()) == (
        server.url,
        "ml",
        {"Authorization": f"Bearer {TOKEN}"},
    )
    for text, said in (
        ("- a", "it holds no table"),
        ("a: [", "is no kubeconfig"),
        (broken(good, server="ftp://x"), "'ftp://x' is no address"),
        (
            broken(good, server="https://x", **{"certificate-authority-data": "!"}),
            "a certificate or key cannot be read",
        ),
    ):
        other.write_text(text)
        with pytest.raises(phalanx.UserError, match=said):
            read_access({"KUBECONFIG": str(other)})


def broken(path: Path, **cluster: Any) -> str:
    table = json.loads(path.read_text())
    table["clusters"][0]["cluster"] = cluster
    return json.dumps(table)


def test_requests_are_bounded_in_rate() -> None:
    waits = Waits()
    rate = RequestRate(per_s=50.0, burst=100.0, clock=lambda: waits.now, sleep=waits.sleep)
    for _ in range(1100):
        rate.take()
    assert waits.now == pytest.approx(1000 / 50.0)
