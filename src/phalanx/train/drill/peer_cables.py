"""Cables between the peers of a drill that can be cut and made slow: a relay in this process for every pair of them.

Bytes of a cut cable wait, connections stay open and new ones get no answer until it heals, as if every packet were
lost on the way: neither side is told that the other is gone.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress
from types import TracebackType

Address = tuple[str, int]
CHUNK_BYTES = 65_536
MOST_CHUNKS = 64  # that wait in one direction of a connection
RETRY_S = 0.05


class Cable:
    """Between two peers, in both directions."""

    def __init__(self) -> None:
        self.is_up = asyncio.Event()
        self.is_up.set()
        self.delay_s = 0.0


class PeerCables:
    """All cables of a drill. `targets` are functions that tell where a peer listens now, None while it does not."""

    def __init__(self, targets: dict[int, Callable[[], Address | None]]) -> None:
        self._targets = targets
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="peer-cables", daemon=True)
        self._cables: dict[frozenset[int], Cable] = {}
        self._addresses: dict[tuple[int, int], Address] = {}
        self._servers: list[asyncio.Server] = []

    def __enter__(self) -> PeerCables:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._open(), self._loop).result()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(5.0)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5.0)
        if not self._thread.is_alive():
            self._loop.close()

    def address(self, near: int, far: int) -> Address:
        """Where the peer `near` connects to in order to reach the peer `far`."""
        return self._addresses[near, far]

    def cut(self, some: Collection[int]) -> None:
        """Between the peers named and all others."""
        self._change(some, lambda cable: cable.is_up.clear())

    def slow(self, some: Collection[int], delay_s: float) -> None:
        """What passes between the peers named and all others takes so much longer."""
        self._change(some, lambda cable: setattr(cable, "delay_s", delay_s))

    def heal(self, some: Collection[int]) -> None:
        """Cables of the peers named are as new."""
        self._change(some, _mend)

    def _change(self, some: Collection[int], change: Callable[[Cable], object]) -> None:
        chosen = [cable for pair, cable in self._cables.items() if len(pair & set(some)) == 1]
        self._loop.call_soon_threadsafe(lambda: [change(cable) for cable in chosen])

    async def _open(self) -> None:
        for near in self._targets:
            for far in self._targets:
                if near != far:
                    cable = self._cables.setdefault(frozenset((near, far)), Cable())
                    server = await asyncio.start_server(self._acceptor(cable, self._targets[far]), "127.0.0.1", 0)
                    self._servers.append(server)
                    host, port = server.sockets[0].getsockname()[:2]
                    self._addresses[near, far] = (str(host), int(port))

    async def _close(self) -> None:
        for server in self._servers:
            server.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)  # aborted transports are freed in the loop's next round

    def _acceptor(
        self, cable: Cable, target: Callable[[], Address | None]
    ) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]:
        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await cable.is_up.wait()
            try:
                place = target()
                if place is None:
                    raise ConnectionRefusedError
                far_reader, far_writer = await asyncio.open_connection(*place)
            except OSError:
                writer.transport.abort()
                return
            ways = ((reader, far_writer), (far_reader, writer))
            try:
                await asyncio.gather(*(_carry(cable, source, sink) for source, sink in ways))
            finally:
                for one in (writer, far_writer):
                    one.transport.abort()

        return accept


async def _carry(cable: Cable, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    """Bytes in one direction, in order, each chunk as late as the cable is slow when it comes in."""
    waiting: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(MOST_CHUNKS)
    now = asyncio.get_running_loop().time

    async def read() -> None:
        data = b"-"
        while data:
            try:
                data = await source.read(CHUNK_BYTES)
            except OSError:
                data = b""
            await waiting.put((now() + cable.delay_s, data))

    reading = asyncio.create_task(read())
    try:
        with suppress(OSError):
            while True:
                due, data = await waiting.get()
                if (left := due - now()) > 0:
                    await asyncio.sleep(left)
                await cable.is_up.wait()
                if not data:
                    break
                sink.write(data)
                await sink.drain()
    finally:
        reading.cancel()
        sink.close()


def _mend(cable: Cable) -> None:
    cable.delay_s = 0.0
    cable.is_up.set()
