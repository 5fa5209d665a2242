"""Hosts in namespaces: packets pass, a pulled cable stops them, nothing stays behind. Skipped where not allowed."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest

from phalanx.errors import SystemFailure
from phalanx.train.drill.network import DrillNetwork


@pytest.fixture
def net() -> Iterator[DrillNetwork]:
    try:
        with DrillNetwork(2) as found:
            yield found
    except SystemFailure as error:
        pytest.skip(str(error).splitlines()[0])


def spaces() -> str:
    return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout


def reaches(net: DrillNetwork, timeout_s: float = 1.0) -> bool:
    """Whether host 0 can connect to a server on host 1."""
    address = net.address(1)
    listen = f"import socket; server = socket.create_server(('{address}', 0))"
    server = f"{listen}; print(server.getsockname()[1], flush=True); server.accept()"
    process = subprocess.Popen([*net.prefix(1), "python3", "-c", server], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        port = process.stdout.readline().strip()
        client = f"import socket; socket.create_connection(('{address}', {port}), timeout={timeout_s})"
        return subprocess.run([*net.prefix(0), "python3", "-c", client], capture_output=True).returncode == 0
    finally:
        process.kill()
        process.communicate()


def test_a_cable_is_pulled_and_plugged_in_again(net: DrillNetwork) -> None:
    assert reaches(net)
    net.cut(1)
    assert not reaches(net)
    net.heal(1)
    assert reaches(net, timeout_s=10.0)


def test_bad_links_still_carry(net: DrillNetwork) -> None:
    assert net.slow(1, 0.01)
    assert net.lose(0, 0.05)
    assert reaches(net, timeout_s=10.0)
    net.heal(0)
    net.heal(1)


def test_nothing_stays_behind(net: DrillNetwork) -> None:
    mark = net.prefix(0)[3].rpartition("-")[0]
    assert mark in spaces()
    net.__exit__(None, None, None)
    assert mark not in spaces()


def test_without_the_tools_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(SystemFailure) as caught:
        DrillNetwork(2).__enter__()
    assert str(caught.value).startswith("network namespaces: not allowed here: ip and tc are not installed")
