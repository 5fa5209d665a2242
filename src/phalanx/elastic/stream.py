"""A TCP connection that never blocks by itself: read exactly so much, wait at most so long."""

from __future__ import annotations

import select
import socket
import time

READ_BYTES = 1 << 16  # of a message at a time: a size that is not yet known to be authentic reserves no more


class Closed(ConnectionError):
    """The other side is gone."""


class Intake:
    """Reads from a socket that does not block exactly what is asked for, in as many visits as it takes."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._part = bytearray()

    def take(self, count: int) -> bytes | None:
        """The next `count` bytes, or None while some are missing; raises Closed at the end of the stream."""
        while missing := count - len(self._part):
            with memoryview(bytearray(min(missing, READ_BYTES))) as piece:
                read = self.take_into(piece)
                if not read:
                    return None
                self._part += piece[:read]
        whole, self._part = bytes(self._part), bytearray()
        return whole

    def take_into(self, view: memoryview) -> int:
        """How many bytes went into `view`, 0 when none are there yet; raises Closed at the end of the stream."""
        try:
            count = self._sock.recv_into(view)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise Closed(f"the connection broke: {error.strerror or error}") from None
        if not count:
            raise Closed("the other side closed the connection")
        return count


def tune(sock: socket.socket, stall_s: float) -> None:
    """No blocking, no delay for small messages, and a host that vanished is noticed though nothing is sent to it."""
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
        if hasattr(socket, name):  # Linux has all of them
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def take_before(sock: socket.socket, intake: Intake, count: int, deadline: float) -> bytes:
    """The next `count` bytes, waiting until `deadline` of the monotonic clock; raises TimeoutError."""
    while (text := intake.take(count)) is None:
        if not ready(sock, select.POLLIN, deadline - time.monotonic()):
            raise TimeoutError("no answer to our hello")
    return text


def say(sock: socket.socket, text: bytes) -> None:
    """Send a few words on a fresh connection: whose buffers, unlike its owner, always have room for them."""
    try:
        sent = sock.send(text)
    except OSError as error:
        raise Closed(f"the connection broke: {error.strerror or error}") from None
    if sent < len(text):
        raise Closed("the connection takes no hello")


def ready(sock: socket.socket, event: int, timeout_s: float) -> bool:
    """Wait until the socket can be read or written (or has failed); whether that came within `timeout_s`."""
    poll = select.poll()  # unlike select.select, knows descriptors above 1024
    poll.register(sock, event)
    return bool(poll.poll(max(0.0, timeout_s) * 1000))
