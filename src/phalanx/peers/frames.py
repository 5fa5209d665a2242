"""Frames on an encrypted connection between two peers that have proved who they are.

    frame   bytes of the message (4), bytes of data (4) | message as JSON | data

No frame is large: values travel in segments. What a stranger announces is compared with a limit before it is read.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import sys
import time

from phalanx.peers.messages import PeerMessage, decode_message, encode_message

PREFIX = struct.Struct("!II")
MOST_HELLO_BYTES = 16 * 1024  # before the other side has shown that it is of the run
MOST_MESSAGE_BYTES = 4 * 2**20  # a view of thousands of members
MOST_DATA_BYTES = 16 * 2**20  # a segment, a block of a state, an allowlist
MOST_UNSENT_BYTES = 16 * 2**20  # of messages that are not waited for: a peer that takes none of them is gone
# Data that waits for a link, here and in the kernel: 0.4 s at 10 Mbit/s, so that a busy machine keeps it busy, while
# an attempt that is given up leaves no more than that behind.
BUFFER_BYTES = 512 * 1024
READ_BYTES = 1024 * 1024
# Of Linux' struct tcp_info: tcpi_bytes_acked and tcpi_bytes_received.
TCP_INFO_BYTES, TCP_INFO_MOVED_AT, TCP_INFO_MOVED = 136, 120, struct.Struct("=QQ")


class PeerConnection:
    """One TLS connection, after both sides have proved who they are."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, peer: str) -> None:
        self.peer = peer
        self.instance = ""
        self.heard_at = time.monotonic()
        self.sent_bytes = self.received_bytes = 0
        self._reader, self._writer = reader, writer
        self._sending = asyncio.Lock()
        self._parting: asyncio.TimerHandle | None = None
        sock = writer.get_extra_info("socket")
        if sock is not None:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # What the kernel holds unsent cannot be taken back; what is in flight may be as much as the link carries.
            with contextlib.suppress(OSError, AttributeError):
                sock.setsockopt(socket.IPPROTO_TCP, 25, BUFFER_BYTES)  # TCP_NOTSENT_LOWAT of Linux
        self._sock = sock
        writer.transport.set_write_buffer_limits(high=BUFFER_BYTES)

    @property
    def is_open(self) -> bool:
        """Whether it can still be sent on."""
        return not self._writer.is_closing()

    def post(self, message: PeerMessage, data: bytes = b"") -> None:
        """Send without waiting; a connection that is closed, or takes nothing, drops it (the reader notices)."""
        if not self.is_open:
            return
        self._write(message, data)
        if self._writer.transport.get_write_buffer_size() > MOST_UNSENT_BYTES:
            self.abort()

    async def send(self, message: PeerMessage, data: bytes = b"") -> None:
        """Send, and wait until the link has taken it; raises ConnectionError."""
        async with self._sending:
            if not self.is_open:
                raise ConnectionResetError("the connection is closed")
            self._write(message, data)
            await self._writer.drain()

    async def receive(self, most_bytes: int = MOST_MESSAGE_BYTES) -> tuple[PeerMessage, bytes]:
        """The next frame; raises ConnectionError at the end, ValueError for what no peer sends."""
        try:
            size, data_bytes = PREFIX.unpack(await self._reader.readexactly(PREFIX.size))
            if size > most_bytes or data_bytes > min(MOST_DATA_BYTES, most_bytes * 4):
                raise ValueError(f"a frame of {size} and {data_bytes} bytes is more than a peer sends")
            text = await self._reader.readexactly(size)
            data = await self._reader.readexactly(data_bytes) if data_bytes else b""
        except (asyncio.IncompleteReadError, OSError) as error:  # errors of TLS are OSErrors too
            self._forget_parting()
            raise ConnectionResetError(str(error)) from error
        self.heard_at = time.monotonic()
        self.received_bytes += size + data_bytes
        return decode_message(text), data

    def moved_bytes(self) -> tuple[int, int]:
        """Bytes that the other side has acknowledged and that came from it, by the kernel's count where it has one.

        It counts while this process waits for a processor; ours only when it runs.
        """
        if self._sock is not None and sys.platform == "linux":
            try:
                found = self._sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_BYTES)
                acknowledged, received = TCP_INFO_MOVED.unpack_from(found, TCP_INFO_MOVED_AT)
            except (OSError, struct.error):
                return 0, 0  # it is closed
            return acknowledged, received
        return self.sent_bytes - self._writer.transport.get_write_buffer_size(), self.received_bytes

    def part(self, message: PeerMessage, data: bytes, *, within_s: float) -> None:
        """Send one last message; until the other side has read it and closed, or it is late, `abort` does nothing.

        Who closes first, with bytes of the other side unread, resets the connection, and its last message is lost.
        """
        self.post(message, data)
        if self._parting is None:
            self._parting = asyncio.get_running_loop().call_later(within_s, self._end_parting)

    def _end_parting(self) -> None:
        self._forget_parting()
        self.abort()

    def _forget_parting(self) -> None:
        if self._parting is not None:
            self._parting.cancel()
            self._parting = None

    def abort(self) -> None:
        """Close at once; what was not sent is lost."""
        if self._parting is None:
            self._writer.transport.abort()

    async def close(self) -> None:
        """Close after what was posted has been sent, or soon."""
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(1.0):
                await self._writer.drain()
                self._writer.close()
                await self._writer.wait_closed()
        self.abort()

    def _write(self, message: PeerMessage, data: bytes) -> None:
        text = encode_message(message)
        # One write: two would be two TLS records, and without Nagle's waiting two packets.
        self._writer.write(b"".join((PREFIX.pack(len(text), len(data)), text, data)))
        self.sent_bytes += len(text) + len(data)
