"""A listening socket whose callers have proved nothing yet: few of them at a time, and the oldest goes first.

`asyncio.start_server(ssl=...)` hides a caller until its handshake is over, so that nobody counts those who never begin
one. Here sockets are accepted by hand, as `elastic/listener.py` does for the coordinator.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Coroutine
from typing import Any

HALF_OPEN = 64  # callers that have not yet proved anything
PAUSE_S = 1.0  # without accepting anybody, where a process has no descriptor left and no caller to send away

Admit = Callable[[], None]


class Doorway:
    """Runs `serve` for each caller until it returns; `serve` calls what it is given once the caller has proved itself.

    Whoever has not is cancelled when too many wait, and when this side closes.
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
        """Callers that have proved nothing yet."""
        return len(self._guests)

    @property
    def is_listening(self) -> bool:
        """Whether callers are accepted now; not while the process has no descriptor for them."""
        return self._resuming is None

    async def close(self) -> None:
        """Take nobody more, and send away whoever has proved nothing; the others live on."""
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
        # Half of the places at a time: a crowd at the door cannot push out those who were just let in.
        for _ in range(HALF_OPEN // 2):
            try:
                sock, _ = self._sock.accept()
            except (BlockingIOError, InterruptedError):
                return
            except ConnectionError:  # the caller has left again
                continue
            except OSError:  # no descriptor or memory to spare: strangers are the first to go
                if not self._guests:
                    self._loop.remove_reader(self._sock)
                    self._resuming = self._loop.call_later(PAUSE_S, self._listen)
                self._send_away(keep=len(self._guests) // 2)
                return
            sock.setblocking(False)
            self._send_away(keep=HALF_OPEN - 1)
            self._receive(sock)

    def _receive(self, sock: socket.socket) -> None:
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
            # A transport that was cancelled before it began would hold the socket until its handshake is late.
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            if not has_begun:
                sock.close()

        task = self._loop.create_task(run())
        self._guests[task] = None
        self._tasks.add(task)
        task.add_done_callback(end)

    def _send_away(self, *, keep: int) -> None:
        while len(self._guests) > keep:
            oldest = next(iter(self._guests))
            del self._guests[oldest]
            oldest.cancel()
