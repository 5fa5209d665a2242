"""A listener that bounds unauthenticated connections: at most 64 at a time, and the oldest is closed first.

`asyncio.start_server(ssl=...)` hides a connection until its TLS handshake is complete, so that connections that never
begin one are not counted. Here sockets are accepted directly, as `elastic/listener.py` does for the coordinator.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Coroutine
from typing import Any

HALF_OPEN = 64  # connections that have not yet proved who they are
# Pause in accepting when the process has no file descriptor left and no unauthenticated connection to close.
PAUSE_S = 1.0

Admit = Callable[[], None]


class Doorway:
    """Runs `serve` for each connection; `serve` calls its second argument once the caller is authenticated.

    Unauthenticated connections are cancelled when too many wait, and when the listener is closed.
    """

    def __init__(self, sock: socket.socket, serve: Callable[[socket.socket, Admit], Coroutine[Any, Any, None]]) -> None:
        self._sock, self._serve = sock, serve
        self._loop = asyncio.get_running_loop()
        self._guests: dict[asyncio.Task[None], None] = {}  # oldest first
        self._tasks: set[asyncio.Task[None]] = set()
        self._resuming: asyncio.TimerHandle | None = None
        sock.setblocking(False)
        self._listen()

    @property
    def guests(self) -> int:
        """Number of connections that are not yet authenticated."""
        return len(self._guests)

    @property
    def is_listening(self) -> bool:
        """True while connections are accepted; false while the process has no file descriptor for them."""
        return self._resuming is None

    async def close(self) -> None:
        """Stop listening and cancel unauthenticated connections; authenticated ones continue."""
        if self._resuming is not None:
            self._resuming.cancel()
        self._loop.remove_reader(self._sock)
        self._sock.close()
        waiting = list(self._guests)
        self._send_away(keep=0)
        await asyncio.gather(*waiting, return_exceptions=True)

    def _listen(self) -> None:
        self._resuming = None
        self._loop.add_reader(self._sock, self._accept)

    def _accept(self) -> None:
        """Accept waiting connections; called by the event loop when the socket is readable."""
        # At most half of the places per call: a burst of new connections cannot push out those just accepted.
        for _ in range(HALF_OPEN // 2):
            try:
                sock, _ = self._sock.accept()
            except (BlockingIOError, InterruptedError):
                return
            except ConnectionError:  # the caller has closed already
                continue
            except OSError:  # no descriptor or memory: close unauthenticated connections first
                if not self._guests:
                    self._loop.remove_reader(self._sock)
                    self._resuming = self._loop.call_later(PAUSE_S, self._listen)
                self._send_away(keep=len(self._guests) // 2)
                return
            sock.setblocking(False)
            self._send_away(keep=HALF_OPEN - 1)
            self._receive(sock)

    def _receive(self, sock: socket.socket) -> None:
        """Start a task that serves a connection, and close the socket when the task ends."""
        has_begun = False

        async def run() -> None:
            nonlocal has_begun
            has_begun = True
            await self._serve(sock, admit)

        def admit() -> None:
            self._guests.pop(task, None)

        def end(done: asyncio.Task[None]) -> None:
            self._tasks.discard(done)
            self._guests.pop(done, None)
            # A transport that was cancelled before it began would hold the socket until its handshake times out.
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            if not has_begun:
                sock.close()

        task = self._loop.create_task(run())
        self._guests[task] = None
        self._tasks.add(task)
        task.add_done_callback(end)

    def _send_away(self, *, keep: int) -> None:
        """Cancel the oldest unauthenticated connections until `keep` are left."""
        while len(self._guests) > keep:
            oldest = next(iter(self._guests))
            del self._guests[oldest]
            oldest.cancel()
