"""A non-blocking TCP connection: read exact numbers of bytes, wait for limited times.

frame   size of the message, bytes of data, crc32 of the data | message | MAC      then the data as it is
"""

from __future__ import annotations

import select
import socket
import struct
import time
from collections.abc import Iterable, Iterator

from phalanx.elastic.handshake import MAC_BYTES, Refused

# Bytes of the message, bytes of data after it, crc32 of the data.
PREFIX = struct.Struct("!IQI")
PREFIX_BYTES = PREFIX.size
# No message of the coordinator grows with the number of hosts.
MAX_MESSAGE_BYTES = 1 << 24
# Of a message at a time: a size that is not yet known to be authentic reserves no more.
READ_BYTES = 1 << 16
# If not one byte moves for so long, a peer counts as gone.
STALL_S = 10.0


class Closed(ConnectionError):
    """Raised when the other side is gone."""


class Intake:
    """Reads exact numbers of bytes from a non-blocking socket, in as many calls as it takes."""

    __slots__ = ("_part", "_sock", "_wanted_bytes")

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._part = bytearray()
        self._wanted_bytes = 0  # of the frame that `_part` begins with, where that is known

    def take(self, count: int) -> bytes | None:
        """Return the next `count` bytes, or None while some are missing; raises Closed at the end of the stream."""
        while missing := count - len(self._part):
            with memoryview(bytearray(min(missing, READ_BYTES))) as piece:
                read = self.take_into(piece)
                if not read:
                    return None
                self._part += piece[:read]
        taken, self._part = bytes(self._part), bytearray()
        return taken

    def take_frames(self) -> Iterable[tuple[bytes, bytes, bytes]]:
        """Read once and return every complete frame as (signed bytes, message, MAC).

        The rest waits for the next call.
        """
        read = receive_some(self._sock, READ_BYTES)
        # Nearly always it is exactly one complete frame.
        if not self._part and len(read) > PREFIX_BYTES:
            size, data_bytes, _ = PREFIX.unpack_from(read)
            end = PREFIX_BYTES + size
            if len(read) == end + MAC_BYTES and not data_bytes:
                return ((read[:end], read[PREFIX_BYTES:end], read[end:]),)
        return self._split_frames(read)

    def _split_frames(self, read: bytes) -> Iterator[tuple[bytes, bytes, bytes]]:
        if self._part:
            self._part += read
            # A long message in pieces: it is parsed once, when it is complete.
            if len(self._part) < self._wanted_bytes:
                return
            read, self._part = bytes(self._part), bytearray()
        at = self._wanted_bytes = 0
        while len(read) - at >= PREFIX.size:
            size, data_bytes, _ = PREFIX.unpack_from(read, at)
            if size > MAX_MESSAGE_BYTES or data_bytes:
                raise Refused(f"a frame of {size} bytes and {data_bytes} bytes of data, where only messages are taken")
            begin, end = at + PREFIX.size, at + PREFIX.size + size
            if len(read) < end + MAC_BYTES:
                self._wanted_bytes = end + MAC_BYTES - at
                break
            yield read[at:end], read[begin:end], read[end : end + MAC_BYTES]
            at = end + MAC_BYTES
        if at < len(read):
            self._part += read[at:]

    def take_into(self, view: memoryview) -> int:
        """Read into `view` and return how many bytes came, 0 when none are there yet.

        Raises Closed at the end of the stream.
        """
        try:
            count = self._sock.recv_into(view)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise Closed(f"the connection broke: {error.strerror or error}") from None
        if not count:
            raise Closed("the other side closed the connection")
        return count


def receive_some(sock: socket.socket, most: int) -> bytes:
    """Return the bytes that have arrived, b"" when none have; raises Closed at the end of the stream."""
    try:
        read = sock.recv(most)
    except BlockingIOError:
        return b""
    except OSError as error:
        raise Closed(f"the connection broke: {error.strerror or error}") from None
    if not read:
        raise Closed("the other side closed the connection")
    return read


def tune(sock: socket.socket, stall_s: float) -> None:
    """Set the options of a connection: no blocking, no delay for small messages, keepalive for peers that vanish."""
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    probes = 3
    for name, value in (
        ("TCP_KEEPIDLE", max(1, round(stall_s / 2))),
        ("TCP_KEEPINTVL", max(1, round(stall_s / 2 / probes))),
        ("TCP_KEEPCNT", probes),
        ("TCP_USER_TIMEOUT", round(stall_s * 1000)),
    ):
        # Linux has all of them.
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def take_before(sock: socket.socket, intake: Intake, count: int, deadline: float) -> bytes:
    """Return the next `count` bytes, waiting until `deadline` of the monotonic clock; raises TimeoutError."""
    while (text := intake.take(count)) is None:
        if not ready(sock, select.POLLIN, deadline - time.monotonic()):
            raise TimeoutError("no answer to our hello")
    return text


def say(sock: socket.socket, text: bytes) -> None:
    """Send a few bytes on a new connection, whose buffers have room for them; raises Closed when they do not."""
    try:
        sent = sock.send(text)
    except OSError as error:
        raise Closed(f"the connection broke: {error.strerror or error}") from None
    if sent < len(text):
        raise Closed("the connection takes no hello")


def ready(sock: socket.socket, event: int, timeout_s: float) -> bool:
    """Wait until the socket can be read or written (or has failed); False when `timeout_s` passes first."""
    # Unlike select.select, poll supports descriptors above 1024.
    poll = select.poll()
    poll.register(sock, event)
    return bool(poll.poll(max(0.0, timeout_s) * 1000))
