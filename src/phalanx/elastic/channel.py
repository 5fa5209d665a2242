"""Messages between agents, coordinator and ranks: JSON over TCP, signed with the run's secret.

A channel has no thread of its own. It serves a loop over selectors (`fileno`, `receive`) and a blocking caller (`wait`,
`read_into`) alike, because it never reads further than the frame it is in: whatever was not taken is still in the
socket, where a selector sees it. One thread may send while another receives.

    frame   size of the message, bytes of data, crc32 of the data | message | HMAC      then the data as it is
"""

from __future__ import annotations

import contextlib
import select
import selectors
import socket
import struct
import threading
import time
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import NoReturn

from phalanx.elastic import handshake
from phalanx.elastic.handshake import ANSWER, MAC_BYTES, OPENING, Handshake, Message, Refused, Seal

__all__ = ["Channel", "Closed", "Listener", "Message", "Refused", "connect", "encode_frame"]

Address = tuple[str, int]
Hello = Message | Callable[[Message], Message]
PREFIX = struct.Struct("!IQI")  # bytes of the message, bytes of data after it, crc32 of the data
MAX_MESSAGE_BYTES = 1 << 24  # none of the coordinator's grows with the number of hosts
PIECE_BYTES = 1 << 20  # bulk data is moved and summed in pieces that stay in a core's cache
BURST = 64  # messages one receive() takes, so that a talkative peer does not starve a loop
STALL_S = 10.0  # without one byte moving, after which a peer counts as gone
HALF_OPEN = 64  # connections that have not yet proved anything
HELLO_S = 5.0  # for which a connection may prove nothing
BACKLOG = 1024
LOOPBACK = "127.0.0.1"
MOST_OPENING_BYTES = OPENING.size + handshake.MAX_HELLO_BYTES + MAC_BYTES


def encode_frame(message: Message) -> bytes:
    """A message without data as a frame, but for its HMAC; raises ValueError for one that no channel takes."""
    text = _encode(message)
    return PREFIX.pack(len(text), 0, 0) + text


def _encode(message: Message) -> bytes:
    text = handshake.encode(message)
    if len(text) > MAX_MESSAGE_BYTES:
        raise ValueError(f"a message of {len(text)} bytes; a channel takes {MAX_MESSAGE_BYTES}: send it as data")
    return text


class Channel:
    """An authentic connection; made by `connect` and `Listener.pump`."""

    def __init__(self, sock: socket.socket, *, send: Seal, receive: Seal, peer: Message, stall_s: float) -> None:
        self.peer = peer
        self.stall_s = stall_s
        self._sock = sock
        self._intake = Intake(sock)
        self._sign, self._check = send, receive
        self._sending = threading.Lock()
        # Apart for each way: what a dying peer said last can still be read though nothing can be sent to it any more.
        self._sends, self._receives = _Way(), _Way()
        self._prefix: bytes | None = None
        self._owed_bytes, self._owed_crc32 = 0, 0

    def fileno(self) -> int:
        """The descriptor for a selector; -1 once closed."""
        return self._sock.fileno()

    def send(self, message: Message, data: memoryview | bytes = b"", *, crc32: int | None = None) -> None:
        """Send a message and the data that goes with it; raises Closed when the peer is gone or takes nothing.

        `crc32` spares reading the data once more where the caller knows it. The receiver finds the size of the data in
        the message, as `data_bytes`.
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
        """`send` for what `encode_frame` has made: thousands of hosts are told the same, one after the other."""
        with self._sending, self._sends:
            self._push(frame + self._sign.next(frame))

    def receive(self, most: int = BURST) -> list[Message]:
        """The messages that have arrived, without waiting; the last may announce data, which `read_into` takes.

        Raises Closed when the peer is gone, Refused when a frame is not authentic (the channel is then of no more use).
        Data that nobody read is skipped.
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
            self._hang_up(socket.SHUT_RD)  # wakes the selector once more: the next call says why
        return messages

    def receive_all(self) -> list[Message]:
        """`receive` for a peer that never sends data: one look at the socket takes whatever it has said.

        Reads ahead, so a channel is read either with this or with the others. Raises as `receive` does.
        """
        messages: list[Message] = []
        try:
            with self._receives:
                for signed, text, mac in self._intake.take_frames():
                    if not handshake.same(mac, self._check.next(signed)):
                        raise Refused(f"a frame from {self._who()} is not authentic: changed, repeated or out of order")
                    messages.append(handshake.decode(text))
        except ConnectionError:
            if not messages:
                raise
            self._hang_up(socket.SHUT_RD)  # as in `receive`
        return messages

    def wait(self, timeout_s: float) -> Message:
        """The next message; raises TimeoutError, Closed or Refused."""
        deadline = time.monotonic() + timeout_s
        while (message := self._next()) is None:
            if not ready(self._sock, select.POLLIN, deadline - time.monotonic()):
                raise TimeoutError(f"no message from {self._who()} in {timeout_s:g} s")
        return message

    def read_into(self, buffer: memoryview | bytearray) -> int:
        """Fill `buffer` with the data that the last message announced; returns its crc32, which was right."""
        view = _flat(buffer)
        if view.nbytes != self._owed_bytes:
            raise ValueError(f"a buffer of {view.nbytes} bytes for {self._owed_bytes} bytes of data")
        with self._receives:
            crc32 = self._fill(view)
            if crc32 != self._owed_crc32:
                raise Refused(f"{view.nbytes} bytes from {self._who()} were damaged on the way")
        return crc32

    def close(self) -> None:
        """Say goodbye and give the socket back."""
        self._finish("this side closed the channel")
        self._hang_up(socket.SHUT_RDWR)  # reaches the peer though a forked child may hold a copy of the socket
        self._sock.close()

    def forget(self) -> None:
        """In a forked child: give back its copy of the socket; the parent's conversation goes on."""
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
        """Drop what has arrived of data that nobody wants; whether that is all of it."""
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
        view = data
        while view:
            try:
                sent = self._sock.send(view if len(view) <= PIECE_BYTES else memoryview(view)[:PIECE_BYTES])
                if sent == len(view):
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
    """One direction of a channel. After an error the stream may be inside a frame: it is used no more."""

    __slots__ = ("end",)

    def __init__(self) -> None:
        self.end: ConnectionError | None = None

    def __enter__(self) -> None:
        """Do one thing in this direction, unless an earlier one failed."""
        if self.end is not None:
            raise type(self.end)(*self.end.args)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, ConnectionError):
            self.end = error
        elif error is not None:  # of a signal handler
            self.end = Closed("the channel was interrupted in the middle of a frame")


def connect(
    address: Address, secret: bytes, hello: Message, *, timeout_s: float, bind: str = "", stall_s: float = STALL_S
) -> Channel:
    """A channel to the listener at `address`, from the local address `bind`; blocks until both sides have proved it.

    Raises Refused when the other side does not share the secret, TimeoutError, or the OSError of the network.
    """
    deadline = time.monotonic() + timeout_s
    sock = socket.create_connection(address, timeout=timeout_s, source_address=(bind, 0) if bind else None)
    try:
        if sock.getsockname() == sock.getpeername():  # a free port of our own machine can be given to us as our own end
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
    if not handshake.same(mac, shaken.server_mac(hello_c, hello_s)):
        raise Refused("the other side does not know the run's secret")
    ours, theirs = shaken.keys(hello_c, hello_s)
    return Channel(sock, send=Seal(ours), receive=Seal(theirs), peer=handshake.decode(hello_s), stall_s=stall_s)


class Listener:
    """Takes connections, and hands out those that prove to know the secret; strangers cost a socket for some seconds.

    `hello` is what this side says of itself, or a function of what an authentic client said; it may raise Refused.
    Where more than `half_open` honest peers may come at once, say so: the oldest of those who wait is pushed out first.
    """

    def __init__(
        self,
        address: str,
        port: int,
        secret: bytes,
        hello: Hello,
        *,
        half_open: int = HALF_OPEN,
        hello_s: float = HELLO_S,
        stall_s: float = STALL_S,
    ) -> None:
        self._secret, self._hello = secret, hello
        self._half_open, self._hello_s, self._stall_s = half_open, hello_s, stall_s
        self._guests: OrderedDict[socket.socket, _Guest] = OrderedDict()  # oldest first
        self._sock = _listen(address or LOOPBACK, port, half_open)
        tune(self._sock, stall_s)  # the kernel gives every connection that it takes the same
        # One descriptor for the door and everybody in the hall: a loop that watches it wakes for both.
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._sock, selectors.EVENT_READ)

    @property
    def address(self) -> Address:
        """Where it listens, with the port that was really given."""
        host, port = self._sock.getsockname()[:2]
        return host, port

    def fileno(self) -> int:
        """The descriptor for a selector: readable when `pump` has something to do."""
        return self._selector.fileno()

    def pump(self, timeout_s: float = 0) -> list[Channel]:
        """Take new connections and let the unproven ones go on; the channels that have become authentic.

        Waits up to `timeout_s` for something to happen, not for a channel. A loop calls it on every turn, ready or not:
        strangers who are late are thrown out here.
        """
        active = [key.data for key, _ in self._selector.select(max(0, timeout_s))]
        channels = [self._advance(guest) for guest in active if guest is not None]
        self._drop_late(time.monotonic() - self._hello_s)
        if None in active:  # after the others had their turn: newcomers may push out the oldest
            self._accept()
        return [channel for channel in channels if channel is not None]

    def close(self) -> None:
        """Stop listening and hang up on whoever has proved nothing; channels handed out live on."""
        for sock in list(self._guests):
            self._drop(sock)
        self.forget()

    def forget(self) -> None:
        """In a forked child: give back the copies of all sockets; the parent goes on listening."""
        # Not unregistered: the child shares the kernel's list of watched sockets with its parent.
        self._selector.close()
        for sock in (self._sock, *self._guests):
            sock.close()
        self._guests.clear()

    def _accept(self) -> None:
        # Half of the places at a time: a crowd at the door cannot push out those who have just been greeted.
        for _ in range(max(1, self._half_open // 2)):
            try:
                sock, _ = self._sock.accept()
            except BlockingIOError:
                return
            except ConnectionError:  # the guest has left again
                continue
            except OSError:  # no descriptor or memory to spare: strangers are the first to go
                self._drop_oldest(keep=len(self._guests) // 2)
                return
            self._drop_oldest(keep=self._half_open - 1)
            self._admit(sock)

    def _admit(self, sock: socket.socket) -> None:
        try:
            sock.setblocking(False)
            nonce_s = handshake.make_nonce()
            say(sock, handshake.greeting(nonce_s))
        except OSError:
            sock.close()
            return
        self._guests[sock] = guest = _Guest(sock, nonce_s, self._stall_s)
        self._selector.register(sock, selectors.EVENT_READ, guest)

    def _advance(self, guest: _Guest) -> Channel | None:
        try:
            channel = guest.listen(self._secret, self._hello)
        except OSError:
            self._drop(guest.sock)
            return None
        if channel is not None:
            self._selector.unregister(guest.sock)
            del self._guests[guest.sock]
        return channel

    def _drop_late(self, before_s: float) -> None:
        while self._guests and (oldest := next(iter(self._guests.values()))).since_s < before_s:
            self._drop(oldest.sock)

    def _drop_oldest(self, *, keep: int) -> None:
        while len(self._guests) > keep:
            self._drop(next(iter(self._guests)))

    def _drop(self, sock: socket.socket) -> None:
        del self._guests[sock]
        self._selector.unregister(sock)  # closing is not enough: a forked child may hold the same socket
        sock.close()


class _Guest:
    """A connection that has proved nothing yet."""

    def __init__(self, sock: socket.socket, nonce_s: bytes, stall_s: float) -> None:
        self.since_s = time.monotonic()
        self.sock, self._nonce_s, self._stall_s = sock, nonce_s, stall_s
        self._said = b""

    def listen(self, secret: bytes, hello: Hello) -> Channel | None:
        """A channel once the guest has proved itself, None while it has more to say; raises Closed or Refused."""
        # Read at once: an honest guest says nothing after its hello before it was answered.
        self._said += receive_some(self.sock, MOST_OPENING_BYTES - len(self._said))
        if len(self._said) < OPENING.size:
            return None
        size, nonce_c = handshake.read_opening(self._said[: OPENING.size])
        end = OPENING.size + size
        if len(self._said) < end + MAC_BYTES:
            return None
        hello_c, mac = self._said[OPENING.size : end], self._said[end:]
        shaken = Handshake(secret, self._nonce_s, nonce_c)
        if not handshake.same(mac, shaken.client_mac(hello_c)):
            self._refuse("a wrong secret")
        return self._answer(shaken, hello_c, hello)

    def _answer(self, shaken: Handshake, hello_c: bytes, hello: Hello) -> Channel | None:
        peer = handshake.decode(hello_c)
        try:
            hello_s = handshake.encode_hello(hello(peer) if callable(hello) else hello)
        except Refused as refusal:
            self._refuse(str(refusal))
        say(self.sock, ANSWER.pack(len(hello_s)) + hello_s + shaken.server_mac(hello_c, hello_s))
        theirs, ours = shaken.keys(hello_c, hello_s)
        return Channel(self.sock, send=Seal(ours), receive=Seal(theirs), peer=peer, stall_s=self._stall_s)

    def _refuse(self, why: str) -> NoReturn:
        """Tell a guest who speaks our language that it is not let in: it need not try again."""
        say(self.sock, ANSWER.pack(0))
        raise Refused(why)


def _flat(data: memoryview | bytes | bytearray) -> memoryview:
    view = memoryview(data)
    return view.cast("B") if view.nbytes else memoryview(b"")  # an empty array cannot be cast


def _listen(address: str, port: int, half_open: int) -> socket.socket:
    family, _, _, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    sock = socket.create_server(place, family=family, backlog=max(BACKLOG, half_open))
    sock.setblocking(False)
    return sock


# A TCP connection that never blocks by itself: read exactly so much, wait at most so long.


READ_BYTES = 1 << 16  # of a message at a time: a size that is not yet known to be authentic reserves no more


class Closed(ConnectionError):
    """The other side is gone."""


class Intake:
    """Reads from a socket that does not block exactly what is asked for, in as many visits as it takes."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._part = bytearray()
        self._wanted_bytes = 0  # of the frame that `_part` begins with, where that is known

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

    def take_frames(self) -> Iterator[tuple[bytes, bytes, bytes]]:
        """Every frame that has come, by one read: what is signed of it, its message, its HMAC; the rest is kept."""
        read = receive_some(self._sock, READ_BYTES)
        if self._part:
            self._part += read
            if len(self._part) < self._wanted_bytes:  # a long message in pieces: it is looked at once, when it is whole
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


def receive_some(sock: socket.socket, most: int) -> bytes:
    """What has come, nothing where nothing has; raises Closed at the end of the stream."""
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
