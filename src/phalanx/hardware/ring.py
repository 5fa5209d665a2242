"""A ring of processes on this machine, joined by TCP over 127.0.0.1: just enough to time an all-reduce."""

from __future__ import annotations

import hmac
import select
import socket
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from phalanx.io.files import replace_text

_PATIENCE_S = 20.0
_TOKEN_BYTES = 32


class Ring:
    """Each rank sends to the next and receives from the one before; the folder holds their ports and a shared token."""

    def __init__(self, *, rank: int, ranks: int, folder: Path) -> None:
        self.rank = rank
        self.ranks = ranks
        token = (folder / "token").read_bytes()
        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.settimeout(_PATIENCE_S)
            replace_text(folder / f"port.{rank}", str(listener.getsockname()[1]))
            port = int(_await(folder / f"port.{(rank + 1) % ranks}"))
            self._next = socket.create_connection(("127.0.0.1", port), timeout=_PATIENCE_S)
            self._next.sendall(token)
            self._previous = _accept(listener, token)
        for peer in (self._next, self._previous):
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            peer.setblocking(False)

    def all_reduce(self, values: NDArray[np.float32]) -> None:
        """Sum `values` over all ranks, in place: reduce-scatter, then all-gather, 2(n-1) steps."""
        chunks = np.array_split(values, self.ranks)
        scratch = np.empty(len(chunks[0]), dtype=np.float32)
        for step in range(self.ranks - 1):
            target = chunks[(self.rank - step - 1) % self.ranks]
            incoming = scratch[: len(target)]
            self._exchange(chunks[(self.rank - step) % self.ranks], incoming)
            target += incoming
        for step in range(self.ranks - 1):
            self._exchange(chunks[(self.rank + 1 - step) % self.ranks], chunks[(self.rank - step) % self.ranks])

    def _exchange(self, outgoing: NDArray[np.float32], incoming: NDArray[np.float32]) -> None:
        """Send and receive at once; doing one after the other would deadlock once socket buffers are full."""
        to_send, to_fill = outgoing.view(np.uint8).data, incoming.view(np.uint8).data
        while to_send or to_fill:
            readers = [self._previous] if to_fill else []
            writers = [self._next] if to_send else []
            ready, writable, _ = select.select(readers, writers, [], _PATIENCE_S)
            if not ready and not writable:
                raise TimeoutError(f"rank {self.rank} waited {_PATIENCE_S:.0f} s for its neighbours")
            if writable:
                to_send = to_send[self._next.send(to_send) :]
            if ready:
                received = self._previous.recv_into(to_fill)
                if received == 0:
                    raise ConnectionError(f"rank {(self.rank - 1) % self.ranks} left the ring")
                to_fill = to_fill[received:]

    def close(self) -> None:
        """Leave the ring."""
        self._next.close()
        self._previous.close()


def _await(path: Path) -> str:
    deadline = time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline:
        if path.exists():
            return path.read_text()
        time.sleep(0.005)
    raise TimeoutError(f"no other process wrote {path.name} within {_PATIENCE_S:.0f} s")


def _accept(listener: socket.socket, token: bytes) -> socket.socket:
    """The neighbour, told from any other local program that happens to connect by the token it sends."""
    while True:
        peer, _ = listener.accept()
        peer.settimeout(_PATIENCE_S)
        received = peer.recv(_TOKEN_BYTES, socket.MSG_WAITALL)
        if hmac.compare_digest(received, token):
            return peer
        peer.close()
