"""Cables between peers: what is cut waits and is not told, what is slow comes late and in order."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest

from phalanx.train.drill.peer_cables import PeerCables


@pytest.fixture
def ends() -> Iterator[tuple[PeerCables, socket.socket, socket.socket]]:
    """Peer 1 has connected to peer 2."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        place = listener.getsockname()[:2]
        with PeerCables({1: lambda: None, 2: lambda: place, 3: lambda: None}) as cables:
            near = socket.create_connection(cables.address(1, 2), timeout=20.0)
            far, _ = listener.accept()
            far.settimeout(20.0)
            with near, far:
                yield cables, near, far


def test_what_is_cut_waits_and_comes_when_it_heals(ends: tuple[PeerCables, socket.socket, socket.socket]) -> None:
    cables, near, far = ends
    near.sendall(b"before ")
    assert far.recv(100) == b"before "
    cables.cut([3])  # another cable
    near.sendall(b"still ")
    assert far.recv(100) == b"still "
    cables.cut([2, 3])
    near.sendall(b"after")
    near.shutdown(socket.SHUT_WR)  # nor is the other side told that this one is gone
    far.settimeout(0.3)
    with pytest.raises(TimeoutError):
        far.recv(100)
    far.settimeout(20.0)
    cables.heal([2, 3])
    assert far.recv(100) == b"after"
    assert far.recv(100) == b""


def test_what_is_slow_comes_late_and_in_order(ends: tuple[PeerCables, socket.socket, socket.socket]) -> None:
    cables, near, far = ends
    cables.slow([1], 0.2)
    near.sendall(b"x")  # the change has come to the relay's thread before what is sent next
    began = time.monotonic()
    far.recv(1)
    near.sendall(b"a" * 200_000 + b"b")
    got = b""
    while len(got) < 200_001:
        got += far.recv(65536)
    assert got.endswith(b"ab")
    assert time.monotonic() - began >= 0.2


def test_nobody_listens() -> None:
    with PeerCables({1: lambda: None, 2: lambda: None}) as cables:
        near = socket.create_connection(cables.address(1, 2), timeout=20.0)
        with near, suppress(ConnectionResetError):  # or an ordinary end, as the system likes
            assert near.recv(1) == b""
