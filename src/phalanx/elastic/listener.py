"""Where connections come in: strangers are held at the door until they prove to know the run's secret."""

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
HALF_OPEN = 64  # connections that have not yet proved anything
HELLO_S = 5.0  # for which a connection may prove nothing
BACKLOG = 1024
LOOPBACK = "127.0.0.1"
MOST_OPENING_BYTES = OPENING.size + handshake.MAX_HELLO_BYTES + MAC_BYTES


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
        self._answer: tuple[Message, bytes] = ({}, handshake.encode({}))  # the last one, and its text
        self._guests: OrderedDict[int, _Guest] = OrderedDict()  # by descriptor, oldest first
        family, _, _, _, place = socket.getaddrinfo(address or LOOPBACK, port, type=socket.SOCK_STREAM)[0]
        self._sock = socket.create_server(place, family=family, backlog=max(BACKLOG, half_open))
        self._sock.setblocking(False)
        tune(self._sock, stall_s)  # the kernel gives every connection that it takes the same
        # One descriptor for the door and everybody in the hall: a loop that watches it wakes for both. Not `selectors`,
        # whose records of each socket cost as much as the kernel's, where thousands come at once.
        self._poll = select.epoll()
        self._door = self._sock.fileno()
        self._poll.register(self._door, select.EPOLLIN)

    @property
    def address(self) -> Address:
        """Where it listens, with the port that was really given."""
        host, port = self._sock.getsockname()[:2]
        return host, port

    def fileno(self) -> int:
        """The descriptor for a selector: readable when `pump` has something to do."""
        return self._poll.fileno()

    def pump(self, timeout_s: float = 0) -> list[Channel]:
        """Take new connections and let the unproven ones go on; the channels that have become authentic.

        Waits up to `timeout_s` for something to happen, not for a channel. A loop calls it on every turn, ready or not:
        strangers who are late are thrown out here.
        """
        guests, channels, is_knocking = self._guests, list[Channel](), False
        for descriptor, _ in self._poll.poll(max(0, timeout_s), len(guests) + 1):
            if descriptor == self._door:
                is_knocking = True
            elif (channel := self._advance(guests[descriptor])) is not None:
                channels.append(channel)
        self._drop_late(time.monotonic() - self._hello_s)
        if is_knocking:  # after the others had their turn: newcomers may push out the oldest
            self._accept()
        return channels

    def close(self) -> None:
        """Stop listening and hang up on whoever has proved nothing; channels handed out live on."""
        for guest in list(self._guests.values()):
            self._drop(guest)
        self.forget()

    def forget(self) -> None:
        """In a forked child: give back the copies of all sockets; the parent goes on listening."""
        # Not unregistered: the child shares the kernel's list of watched sockets with its parent.
        self._poll.close()
        for sock in (self._sock, *(guest.sock for guest in self._guests.values())):
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
        """What is said to an authentic client; where thousands are told the same it is encoded once."""
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
        self._poll.unregister(guest.descriptor)  # closing is not enough: a forked child may hold the same socket
        guest.sock.close()


class _Guest:
    """A connection that has proved nothing yet."""

    __slots__ = ("_nonce_s", "_said", "_stall_s", "descriptor", "since_s", "sock")

    def __init__(self, sock: socket.socket, descriptor: int, nonce_s: bytes, stall_s: float) -> None:
        self.since_s = time.monotonic()
        self.sock, self.descriptor, self._nonce_s, self._stall_s = sock, descriptor, nonce_s, stall_s
        self._said = b""

    def listen(self, secret: bytes, answer_text: Callable[[Message], bytes]) -> Channel | None:
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
        """Tell a guest who speaks our language that it is not let in: it need not try again."""
        say(self.sock, ANSWER.pack(0))
        raise Refused(why)
