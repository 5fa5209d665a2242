"""Accept connections: unproven ones are held back until they prove that they know the run's secret."""

from __future__ import annotations

import select
import socket
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import NoReturn

from phalanx.elastic import handshake
from phalanx.elastic.channel import Address, Channel
from phalanx.elastic.handshake import ANSWER, MAC_BYTES, OPENING, FrameSigner, Handshake, Message, Refused
from phalanx.elastic.socket_stream import STALL_S, receive_some, say, tune

Hello = Message | Callable[[Message], Message]
# Connections that have not proved anything yet.
HALF_OPEN = 64
# Seconds in which a connection must complete its handshake.
HELLO_S = 5.0
BACKLOG = 1024
LOOPBACK = "127.0.0.1"
MOST_OPENING_BYTES = OPENING.size + handshake.MAX_HELLO_BYTES + MAC_BYTES


class Listener:
    """Accepts connections, and returns those that prove to know the secret; others cost a socket for some seconds.

    `hello` is this side's hello, or a function of an authentic client's hello; it may raise Refused. Set `half_open`
    where more honest peers may connect at once: the oldest of the waiting ones is dropped first.
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
        self._answer: tuple[Message, bytes] = ({}, handshake.encode({}))  # the last answer, and its encoded text
        self._guests: OrderedDict[int, _Guest] = OrderedDict()  # by descriptor, oldest first
        family, _, _, _, place = socket.getaddrinfo(address or LOOPBACK, port, type=socket.SOCK_STREAM)[0]
        self._sock = socket.create_server(place, family=family, backlog=max(BACKLOG, half_open))
        self._sock.setblocking(False)
        # The kernel gives every accepted connection the same options.
        tune(self._sock, stall_s)
        # One descriptor for the listening socket and all unproven connections: a loop that watches it wakes for
        # both. Not `selectors`, whose record of each socket costs as much as the kernel's, where thousands come at
        # once.
        self._poll = select.epoll()
        self._door = self._sock.fileno()
        self._poll.register(self._door, select.EPOLLIN)

    @property
    def address(self) -> Address:
        """The address on which it listens, with the port that was assigned."""
        host, port = self._sock.getsockname()[:2]
        return host, port

    def fileno(self) -> int:
        """Return the descriptor for a selector: readable when `pump` has something to do."""
        return self._poll.fileno()

    def pump(self, timeout_s: float = 0) -> list[Channel]:
        """Accept new connections and advance the unproven ones; returns the channels that have become authentic.

        Waits up to `timeout_s` for an event, not for a channel. A loop calls it on every turn, ready or not: late
        connections are dropped here.
        """
        guests, channels, is_knocking = self._guests, list[Channel](), False
        for descriptor, _ in self._poll.poll(max(0, timeout_s), len(guests) + 1):
            if descriptor == self._door:
                is_knocking = True
            elif (channel := self._advance(guests[descriptor])) is not None:
                channels.append(channel)
        self._drop_late(time.monotonic() - self._hello_s)
        # After the others had their turn, because new connections may push out the oldest.
        if is_knocking:
            self._accept()
        return channels

    def close(self) -> None:
        """Stop listening and drop unproven connections; channels that were returned stay open."""
        for guest in list(self._guests.values()):
            self._drop(guest)
        self.forget()

    def forget(self) -> None:
        """Close this forked child's copies of all sockets; the parent continues to listen."""
        # Not unregistered: the child shares the kernel's list of watched sockets with its parent.
        self._poll.close()
        for sock in (self._sock, *(guest.sock for guest in self._guests.values())):
            sock.close()
        self._guests.clear()

    def _accept(self) -> None:
        # Half of the places at a time: a burst of connections cannot push out those that have just been greeted.
        for _ in range(max(1, self._half_open // 2)):
            try:
                sock, _ = self._sock.accept()
            except BlockingIOError:
                return
            except ConnectionError:
                # The client has disconnected again.
                continue
            except OSError:
                # Out of descriptors or memory: unproven connections are the first to be dropped.
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
        descriptor = sock.fileno()
        self._guests[descriptor] = _Guest(sock, descriptor, nonce_s, self._stall_s)
        self._poll.register(descriptor, select.EPOLLIN)

    def _advance(self, guest: _Guest) -> Channel | None:
        try:
            channel = guest.listen(self._secret, self._answer_text)
        except OSError:
            self._drop(guest)
            return None
        if channel is not None:
            self._poll.unregister(guest.descriptor)
            del self._guests[guest.descriptor]
        return channel

    def _answer_text(self, peer: Message) -> bytes:
        """Return the encoded answer to an authentic client; where thousands get the same one it is encoded once."""
        answer = self._hello(peer) if callable(self._hello) else self._hello
        if answer is not self._answer[0]:
            self._answer = (answer, handshake.encode_hello(answer))
        return self._answer[1]

    def _drop_late(self, before_s: float) -> None:
        while self._guests and (oldest := next(iter(self._guests.values()))).since_s < before_s:
            self._drop(oldest)

    def _drop_oldest(self, *, keep: int) -> None:
        while len(self._guests) > keep:
            self._drop(next(iter(self._guests.values())))

    def _drop(self, guest: _Guest) -> None:
        del self._guests[guest.descriptor]
        # Closing is not enough: a forked child may hold the same socket.
        self._poll.unregister(guest.descriptor)
        guest.sock.close()


class _Guest:
    """A connection that has proved nothing yet."""

    __slots__ = ("_nonce_s", "_said", "_stall_s", "descriptor", "since_s", "sock")

    def __init__(self, sock: socket.socket, descriptor: int, nonce_s: bytes, stall_s: float) -> None:
        self.since_s = time.monotonic()
        self.sock, self.descriptor, self._nonce_s, self._stall_s = sock, descriptor, nonce_s, stall_s
        self._said = b""

    def listen(self, secret: bytes, answer_text: Callable[[Message], bytes]) -> Channel | None:
        """Return a channel once the client has proved itself, None while bytes are missing.

        Raises Closed or Refused.
        """
        # Read at once: an honest client sends nothing after its hello before the answer.
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
        return self._answer(shaken, hello_c, answer_text)

    def _answer(self, shaken: Handshake, hello_c: bytes, answer_text: Callable[[Message], bytes]) -> Channel | None:
        peer = handshake.decode(hello_c)
        try:
            hello_s = answer_text(peer)
        except Refused as refusal:
            self._refuse(str(refusal))
        mac, key = shaken.server_mac_and_key(hello_c, hello_s)
        say(self.sock, ANSWER.pack(len(hello_s)) + hello_s + mac)
        send, receive = FrameSigner(key, handshake.FROM_SERVER), FrameSigner(key, handshake.FROM_CLIENT)
        return Channel(self.sock, send=send, receive=receive, peer=peer, stall_s=self._stall_s)

    def _refuse(self, why: str) -> NoReturn:
        """Refuse a client that speaks the protocol, so that it need not try again."""
        say(self.sock, ANSWER.pack(0))
        raise Refused(why)
