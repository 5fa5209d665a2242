"""Messages between agents, coordinator and ranks: JSON over TCP, signed with the run's secret.

A channel has no thread. It serves a loop over selectors (`fileno`, `receive`) and a blocking caller (`wait`,
`read_into`) alike, because it never reads beyond the current frame: unread data stays in the socket, where a selector
sees it. One thread may send while another receives.

    frame   size of the message, bytes of data, crc32 of the data | message | MAC      then the data as it is
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
import zlib

from phalanx.elastic import handshake
from phalanx.elastic.handshake import ANSWER, MAC_BYTES, OPENING, FrameSigner, Handshake, Message, Refused
from phalanx.elastic.socket_stream import (
    MAX_MESSAGE_BYTES,
    PREFIX,
    STALL_S,
    Closed,
    Intake,
    ready,
    say,
    take_before,
    tune,
)

__all__ = ["Channel", "Closed", "Message", "Refused", "connect", "encode_frame", "extend_frame"]

Address = tuple[str, int]
# Bulk data is moved and summed in pieces that fit into a core's cache.
PIECE_BYTES = 1 << 20
# Messages that one receive() returns at most, so that a busy peer does not starve a loop.
BURST = 64


def encode_frame(message: Message) -> bytes:
    """Encode a message without data as a frame, except for its MAC; raises ValueError for one that is too large."""
    text = _encode(message)
    return PREFIX.pack(len(text), 0, 0) + text


def extend_frame(frame: bytes, share: Message) -> bytes:
    """Return the frame of a message with more fields.

    The part that is the same for thousands of hosts is encoded once.
    """
    if not share:
        return frame
    text = frame[PREFIX.size : -1] + b"," + _encode(share)[1:]
    if len(text) > MAX_MESSAGE_BYTES:
        raise ValueError(f"a message of {len(text)} bytes; a channel takes {MAX_MESSAGE_BYTES}: send it as data")
    return PREFIX.pack(len(text), 0, 0) + text


def _encode(message: Message) -> bytes:
    text = handshake.encode(message)
    if len(text) > MAX_MESSAGE_BYTES:
        raise ValueError(f"a message of {len(text)} bytes; a channel takes {MAX_MESSAGE_BYTES}: send it as data")
    return text


class Channel:
    """An authenticated connection; made by `connect` and `Listener.pump`."""

    def __init__(
        self, sock: socket.socket, *, send: FrameSigner, receive: FrameSigner, peer: Message, stall_s: float
    ) -> None:
        self.peer = peer
        self.stall_s = stall_s
        self._sock = sock
        self._intake = Intake(sock)
        self._sign, self._check = send, receive
        self._sending = threading.Lock()
        # One state per direction: the last messages of a dying peer can still be read when sending to it already
        # fails.
        self._sends, self._receives = _Way(), _Way()
        self._prefix: bytes | None = None
        self._owed_bytes, self._owed_crc32 = 0, 0

    def fileno(self) -> int:
        """Return the descriptor for a selector; -1 once closed."""
        return self._sock.fileno()

    def send(self, message: Message, data: memoryview | bytes = b"", *, crc32: int | None = None) -> None:
        """Send a message and its data; raises Closed when the peer is gone or accepts nothing for `stall_s`.

        Pass `crc32` where the caller knows it, so that the data is not read once more. The receiver finds the size of
        the data in the message, as `data_bytes`.
        """
        if "data_bytes" in message:
            raise ValueError("data_bytes is the channel's own key")
        if not data:
            self.send_frame(encode_frame(message))
            return
        view, text = _flat(data), _encode(message)
        frame = PREFIX.pack(len(text), view.nbytes, zlib.crc32(view) if crc32 is None else crc32) + text
        with self._sending, self._sends:
            self._push(frame + self._sign.next(frame))
            self._push(view)

    def send_frame(self, frame: bytes) -> None:
        """Send a frame that `encode_frame` made: thousands of hosts get the same message, one after another."""
        with self._sending:
            if self._sends.end is not None:
                # Raises the error that ended this direction.
                self._sends.__enter__()
            # Not `with`: its two calls cost as much as signing.
            try:
                self._push(frame + self._sign.next(frame))
            except BaseException as error:
                self._sends.fail(error)
                raise

    def receive(self, most: int = BURST) -> list[Message]:
        """Return the messages that have arrived, without waiting; the last may announce data, which `read_into` takes.

        Raises Closed when the peer is gone, Refused when a frame is not authentic (the channel is then unusable). Data
        that the caller did not read is skipped.
        """
        messages: list[Message] = []
        try:
            while len(messages) < most and (message := self._next()) is not None:
                messages.append(message)
                if self._owed_bytes:
                    break
        except ConnectionError:
            if not messages:
                raise
            # It wakes the selector once more: the next call raises the error.
            self._hang_up(socket.SHUT_RD)
        return messages

    def receive_all(self) -> list[Message]:
        """Return what `receive` would, with one read of the socket, from a peer that never sends data.

        Reads ahead, so a channel is read either with this method or with the others. Raises as `receive` does.
        """
        messages: list[Message] = []
        if self._receives.end is not None:
            # Raises the error that ended this direction.
            self._receives.__enter__()
        try:
            for signed, text, mac in self._intake.take_frames():
                if not handshake.same(mac, self._check.next(signed)):
                    raise Refused(f"a frame from {self._who()} is not authentic: changed, repeated or out of order")
                messages.append(handshake.decode(text))
        except BaseException as error:
            self._receives.fail(error)
            if not messages or not isinstance(error, ConnectionError):
                raise
            self._hang_up(socket.SHUT_RD)  # as in `receive`
        return messages

    def wait(self, timeout_s: float) -> Message:
        """Wait for the next message; raises TimeoutError, Closed or Refused."""
        deadline = time.monotonic() + timeout_s
        while (message := self._next()) is None:
            if not ready(self._sock, select.POLLIN, deadline - time.monotonic()):
                raise TimeoutError(f"no message from {self._who()} in {timeout_s:g} s")
        return message

    def read_into(self, buffer: memoryview | bytearray) -> int:
        """Fill `buffer` with the data that the last message announced; returns its crc32 after checking it."""
        view = _flat(buffer)
        if view.nbytes != self._owed_bytes:
            raise ValueError(f"a buffer of {view.nbytes} bytes for {self._owed_bytes} bytes of data")
        with self._receives:
            crc32 = self._fill(view)
            if crc32 != self._owed_crc32:
                raise Refused(f"{view.nbytes} bytes from {self._who()} were damaged on the way")
        return crc32

    def close(self) -> None:
        """Shut down the connection and close the socket."""
        self._finish("this side closed the channel")
        # A shutdown reaches the peer even when a forked child has a copy of the socket.
        self._hang_up(socket.SHUT_RDWR)
        self._sock.close()

    def forget(self) -> None:
        """Close this forked child's copy of the socket; the parent's connection stays open."""
        self._finish("this channel belongs to the parent process")
        self._sock.close()

    def _next(self) -> Message | None:
        with self._receives:
            if self._owed_bytes and not self._skip():
                return None
            if self._prefix is None:
                self._prefix = self._intake.take(PREFIX.size)
            return None if self._prefix is None else self._read_message(self._prefix)

    def _read_message(self, prefix: bytes) -> Message | None:
        size, data_bytes, crc32 = PREFIX.unpack(prefix)
        if size > MAX_MESSAGE_BYTES:
            raise Refused(f"{self._who()} announced a message of {size} bytes, more than {MAX_MESSAGE_BYTES}")
        frame = self._intake.take(size + MAC_BYTES)
        if frame is None:
            return None
        text, mac = frame[:size], frame[size:]
        if not handshake.same(mac, self._check.next(prefix + text)):
            raise Refused(f"a frame from {self._who()} is not authentic: changed, repeated or out of order")
        message = handshake.decode(text)
        self._prefix = None
        self._owed_bytes, self._owed_crc32 = data_bytes, crc32
        return message | {"data_bytes": data_bytes} if data_bytes else message

    def _skip(self) -> bool:
        """Drop data that has arrived unread; True when all of it is dropped."""
        scratch = memoryview(bytearray(min(self._owed_bytes, PIECE_BYTES)))
        while self._owed_bytes:
            count = self._intake.take_into(scratch[: self._owed_bytes])
            if not count:
                return False
            self._owed_bytes -= count
        return True

    def _fill(self, view: memoryview) -> int:
        crc32 = done = 0
        while done < view.nbytes:
            count = self._intake.take_into(view[done : done + PIECE_BYTES])
            if count:
                crc32 = zlib.crc32(view[done : done + count], crc32)
                done += count
                self._owed_bytes -= count
            elif not ready(self._sock, select.POLLIN, self.stall_s):
                raise Closed(f"{self._who()} sent {done} of {view.nbytes} bytes, then nothing for {self.stall_s:g} s")
        return crc32

    def _push(self, data: bytes | memoryview) -> None:
        view, length = data, len(data)
        while length:
            try:
                sent = self._sock.send(view if length <= PIECE_BYTES else memoryview(view)[:PIECE_BYTES])
                length -= sent
                if not length:
                    return
                view = memoryview(view)[sent:]
            except BlockingIOError:
                if not ready(self._sock, select.POLLOUT, self.stall_s):
                    raise Closed(f"{self._who()} took nothing for {self.stall_s:g} s") from None
            except OSError as error:
                raise Closed(f"{self._who()} is gone: {error.strerror or error}") from None

    def _finish(self, why: str) -> None:
        for way in (self._sends, self._receives):
            way.end = way.end or Closed(why)

    def _hang_up(self, how: int) -> None:
        with contextlib.suppress(OSError):
            self._sock.shutdown(how)

    def _who(self) -> str:
        names = " ".join(str(self.peer[key]) for key in ("role", "host") if key in self.peer)
        return names or "the peer"


class _Way:
    """One direction of a channel. After an error the stream may be inside a frame, so the direction is used no more."""

    __slots__ = ("end",)

    def __init__(self) -> None:
        self.end: ConnectionError | None = None

    def __enter__(self) -> None:
        """Enter an operation in this direction; raises the error of an earlier one that failed."""
        if self.end is not None:
            raise type(self.end)(*self.end.args)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """Record the error that ended this direction."""
        if isinstance(error, ConnectionError):
            self.end = error
        else:
            # An exception of a signal handler.
            self.end = Closed("the channel was interrupted in the middle of a frame")


def connect(
    address: Address, secret: bytes, hello: Message, *, timeout_s: float, bind: str = "", stall_s: float = STALL_S
) -> Channel:
    """Connect to the listener at `address`, from the local address `bind`; blocks until both sides are authenticated.

    Raises Refused when the other side does not share the secret, TimeoutError, or the OSError of the network.
    """
    deadline = time.monotonic() + timeout_s
    sock = socket.create_connection(address, timeout=timeout_s, source_address=(bind, 0) if bind else None)
    try:
        # The kernel can assign a free port of this machine to this end itself (TCP simultaneous open).
        if sock.getsockname() == sock.getpeername():
            raise ConnectionRefusedError(f"nobody listens at {address[0]} port {address[1]}")
        tune(sock, stall_s)
        return _introduce(sock, secret, hello, deadline, stall_s)
    except BaseException:
        sock.close()
        raise


def _introduce(sock: socket.socket, secret: bytes, hello: Message, deadline: float, stall_s: float) -> Channel:
    intake, hello_c, nonce_c = Intake(sock), handshake.encode_hello(hello), handshake.make_nonce()
    nonce_s = handshake.read_greeting(take_before(sock, intake, handshake.GREETING_BYTES, deadline))
    shaken = Handshake(secret, nonce_s, nonce_c)
    say(sock, OPENING.pack(handshake.MAGIC, len(hello_c), nonce_c) + hello_c + shaken.client_mac(hello_c))
    (size,) = ANSWER.unpack(take_before(sock, intake, ANSWER.size, deadline))
    if not 0 < size <= handshake.MAX_HELLO_BYTES:
        raise Refused("the other side refused our hello: it has another secret, so it is of another run")
    answer = take_before(sock, intake, size + MAC_BYTES, deadline)
    hello_s, mac = answer[:size], answer[size:]
    expected, key = shaken.server_mac_and_key(hello_c, hello_s)
    if not handshake.same(mac, expected):
        raise Refused("the other side does not know the run's secret")
    outgoing, incoming = FrameSigner(key, handshake.FROM_CLIENT), FrameSigner(key, handshake.FROM_SERVER)
    return Channel(sock, send=outgoing, receive=incoming, peer=handshake.decode(hello_s), stall_s=stall_s)


def _flat(data: memoryview | bytes | bytearray) -> memoryview:
    view = memoryview(data)
    # An empty array cannot be cast.
    return view.cast("B") if view.nbytes else memoryview(b"")
