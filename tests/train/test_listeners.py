"""Strangers at gloo's sockets: while groups are made everybody may connect, afterwards nobody."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from phalanx.train.listeners import listening_sockets, refuse_strangers

# Two ranks in two processes; the first tells where gloo listens, once nobody may connect any more.
RANK = """
import os, sys
import torch, torch.distributed as dist
from torch.distributed import FileStore
from phalanx.train.listeners import listening_sockets, raise_descriptor_limit, refuse_strangers
import socket

rank, path = int(sys.argv[1]), sys.argv[2]
os.environ["GLOO_SOCKET_IFNAME"] = "lo"
raise_descriptor_limit()
dist.init_process_group("gloo", store=FileStore(path, 2), rank=rank, world_size=2)
closed = refuse_strangers(())
group = dist.new_group([0, 1])  # listens anew, and ranks connect though the first sockets are closed
closed += refuse_strangers(())
if rank == 0:
    ports = []
    for number in listening_sockets().values():
        with socket.socket(fileno=os.dup(number)) as one:
            ports.append(one.getsockname()[1])
    print(closed, *ports, flush=True)
    sys.stdin.readline()
for number in range(3):
    x = torch.full((1000,), float(rank + 1))
    dist.all_reduce(x, group=group)
    dist.all_reduce(x)
    assert x[0] == 6.0, x
dist.destroy_process_group()
print("whole", flush=True)
"""


def is_let_in(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=0.3):
            return True
    except OSError:
        return False


def test_gloo_takes_no_stranger_once_its_ranks_are_connected(tmp_path) -> None:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    ranks = [
        subprocess.Popen([sys.executable, "-c", RANK, str(rank), str(tmp_path / "store")], **pipes) for rank in range(2)
    ]
    try:
        assert ranks[0].stdout is not None
        closed, *ports = ranks[0].stdout.readline().split()
        assert int(closed) >= len(ports) >= 1
        assert not any(is_let_in(int(port)) for port in ports)
        assert ranks[0].communicate("go\n", timeout=240)[0] == "whole\n"
        assert ranks[1].communicate(timeout=240)[0] == "whole\n"
    finally:
        for one in ranks:
            one.kill()


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_what_is_known_stays_open_and_connections_live_on(address: str) -> None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        kept = socket.create_server((address, 0), family=family)
    except OSError:
        pytest.skip(f"no {address} here")
    known = listening_sockets()
    with kept, socket.create_server((address, 0), family=family) as door:
        with socket.create_connection(door.getsockname()[:2]) as ours:
            theirs, _ = door.accept()
            with theirs:
                assert refuse_strangers(known) == 1
                ours.sendall(b"still here")
                assert theirs.recv(20) == b"still here"
        with socket.create_connection(kept.getsockname()[:2]):
            pass
        with pytest.raises(OSError), socket.create_connection(door.getsockname()[:2], timeout=0.3):
            pass


def test_lazy_groups_connect_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", "1")
    with socket.create_server(("127.0.0.1", 0)) as door:
        assert refuse_strangers(()) == 0
        with socket.create_connection(door.getsockname()):
            pass
