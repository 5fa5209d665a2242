"""Network links between the peers of a drill that can be cut and slowed: a relay in this process per pair of peers.

While a link is cut, its bytes wait, connections stay open and new ones get no answer, as if every packet were lost on
the way: neither side is notified that the other is gone.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress
from types import TracebackType

Address = tuple[str, int]
CHUNK_BYTES = 65_536
# Chunks that may wait in one direction of a connection.
MOST_CHUNKS = 64
RETRY_S = 0.05


class Cable:
    """The link between two peers, in both directions: whether it is up, and its delay."""

    def __init__(self) -> None:
        self.is_up = asyncio.Event()
        self.is_up.set()
        self.delay_s = 0.0


class PeerCables:
    """All links of a drill.

    A function in `targets` returns the address where a peer listens, None while it does not.
    """

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
        """Return the address to which the peer `near` connects in order to reach the peer `far`."""
        return self._addresses[near, far]

    def cut(self, some: Collection[int]) -> None:
        """Cut the links between the named peers and all others."""
        self._change(some, lambda cable: cable.is_up.clear())

    def slow(self, some: Collection[int], delay_s: float) -> None:
        """Delay the bytes between the named peers and all others by `delay_s`."""
        self._change(some, lambda cable: setattr(cable, "delay_s", delay_s))

    def heal(self, some: Collection[int]) -> None:
        """Restore the links between the named peers and all others."""
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
        # Aborted transports are freed in the loop's next iteration.
        await asyncio.sleep(0)

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
                for end in (writer, far_writer):
                    end.transport.abort()

        return accept


async def _carry(cable: Cable, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    """Relay bytes in one direction, in order; each chunk is delayed by the link's delay at its arrival."""
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
                if (remaining_s := due - now()) > 0:
                    await asyncio.sleep(remaining_s)
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
