"""Message frames on an encrypted connection between two authenticated peers.

    frame   bytes of the message (4), bytes of data (4) | message as JSON | data

Frames are small: values travel in segments. An announced size is compared with a limit before anything is read.
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
MOST_HELLO_BYTES = 16 * 1024  # before the other side has shown that it belongs to the run
MOST_MESSAGE_BYTES = 4 * 2**20  # a view of thousands of members
MOST_DATA_BYTES = 16 * 2**20  # a segment, a block of a state, an allowlist
# Limit of posted messages; a peer that does not read them is considered gone.
MOST_UNSENT_BYTES = 16 * 2**20
# Data that waits for a link, in this process and in the kernel: 0.4 s at 10 Mbit/s, enough to keep the link busy on a
# busy machine, and no more than that is left to send when an attempt is given up.
BUFFER_BYTES = 512 * 1024
READ_BYTES = 1024 * 1024
# Offset and form of tcpi_bytes_acked and tcpi_bytes_received in Linux' struct tcp_info.
TCP_INFO_BYTES, TCP_INFO_MOVED_AT, TCP_INFO_MOVED = 136, 120, struct.Struct("=QQ")


class PeerConnection:
    """A TLS connection between two authenticated peers."""

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
            # Bytes that the kernel holds unsent cannot be taken back; bytes in flight are limited by the link only.
            with contextlib.suppress(OSError, AttributeError):
                # 25 is TCP_NOTSENT_LOWAT on Linux.
                sock.setsockopt(socket.IPPROTO_TCP, 25, BUFFER_BYTES)
        self._sock = sock
        writer.transport.set_write_buffer_limits(high=BUFFER_BYTES)

    @property
    def is_open(self) -> bool:
        """True while messages can still be sent."""
        return not self._writer.is_closing()

    def post(self, message: PeerMessage, data: bytes = b"") -> None:
        """Send without waiting; the message is dropped if the connection is closed or its buffer is full.

        A full buffer (`MOST_UNSENT_BYTES`) ends the connection, which the reader notices.
        """
        if not self.is_open:
            return
        self._write(message, data)
        if self._writer.transport.get_write_buffer_size() > MOST_UNSENT_BYTES:
            self.abort()

    async def send(self, message: PeerMessage, data: bytes = b"") -> None:
        """Send, and wait until the link has taken the message; raises ConnectionError."""
        async with self._sending:
            if not self.is_open:
                raise ConnectionResetError("the connection is closed")
            self._write(message, data)
            await self._writer.drain()

    async def receive(self, most_bytes: int = MOST_MESSAGE_BYTES) -> tuple[PeerMessage, bytes]:
        """Return the next frame; raises ConnectionError at the end, ValueError for bytes that no peer sends."""
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
        """Return the bytes acknowledged by and received from the other side; (0, 0) for a closed connection.

        On Linux the kernel counts them, also while this process waits for a processor. Elsewhere the connection's own
        counters are used, which advance only while the process runs.
        """
        if self._sock is not None and sys.platform == "linux":
            try:
                tcp_info = self._sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_BYTES)
                acknowledged, received = TCP_INFO_MOVED.unpack_from(tcp_info, TCP_INFO_MOVED_AT)
            except (OSError, struct.error):
                return 0, 0  # it is closed
            return acknowledged, received
        return self.sent_bytes - self._writer.transport.get_write_buffer_size(), self.received_bytes

    def part(self, message: PeerMessage, data: bytes, *, within_s: float) -> None:
        """Send a last message; `abort` has no effect until the other side has closed, or `within_s` has passed.

        A side that closes with received bytes unread resets the connection, and its last message is lost.
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
        """Close at once; unsent bytes are lost. Has no effect while `part` waits for the other side."""
        if self._parting is None:
            self._writer.transport.abort()

    async def close(self) -> None:
        """Close after posted messages have been sent, or after 1 s."""
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(1.0):
                await self._writer.drain()
                self._writer.close()
                await self._writer.wait_closed()
        self.abort()

    def _write(self, message: PeerMessage, data: bytes) -> None:
        text = encode_message(message)
        # One write: two would be two TLS records and, as Nagle's algorithm is off, two packets.
        self._writer.write(b"".join((PREFIX.pack(len(text), len(data)), text, data)))
        self.sent_bytes += len(text) + len(data)
