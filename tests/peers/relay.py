"""A relay between peers that can be cut: bytes wait, connections stay open, new ones get no answer, until it heals."""

from __future__ import annotations

import contextlib
import socket
import threading

Address = tuple[str, int]


class Switch:
    """One cable with many relays on it."""

    def __init__(self) -> None:
        self.is_up = threading.Event()
        self.is_up.set()
        self._relays: list[Relay] = []

    def relay_to(self, target: Address) -> Address:
        """An address behind which the target is, as long as the cable is whole."""
        self._relays.append(Relay(target, self.is_up))
        return self._relays[-1].address

    def cut(self) -> None:
        self.is_up.clear()

    def heal(self) -> None:
        self.is_up.set()

    def close(self) -> None:
        self.is_up.set()
        for relay in self._relays:
            relay.close()


class Relay:
    """Listens on loopback and passes bytes both ways, by threads."""

    def __init__(self, target: Address, is_up: threading.Event) -> None:
        self._target, self._is_up = target, is_up
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address: Address = self._listener.getsockname()[:2]
        self._open: set[socket.socket] = {self._listener}
        self._threads: list[threading.Thread] = []
        self._closed = False
        self._run(self._accept)

    def close(self) -> None:
        self._closed = True
        for sock in list(self._open):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()
        for thread in self._threads:
            thread.join(5.0)

    def _run(self, work: object, *arguments: object) -> None:
        thread = threading.Thread(target=work, args=arguments, daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                self._open.add(near)
                self._run(self._connect, near)

    def _connect(self, near: socket.socket) -> None:
        self._is_up.wait()
        try:
            if self._closed:
                raise OSError
            far = socket.create_connection(self._target)
        except OSError:
            near.close()
            return
        self._open.add(far)
        self._run(self._pump, near, far)
        self._run(self._pump, far, near)

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                self._is_up.wait()
                sink.sendall(data)
        for sock in (source, sink):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
