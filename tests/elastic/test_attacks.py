"""Strangers at the door of a real process, while an honest peer goes on working through it all.

This file is also that process: `python test_attacks.py HELLO_S DESCRIPTORS`, the secret on stdin.
"""

from __future__ import annotations

import contextlib
import os
import random
import resource
import selectors
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import pytest

from phalanx.elastic import handshake
from phalanx.elastic.channel import Channel, Closed, Refused, connect
from phalanx.elastic.listener import HALF_OPEN, Listener
from phalanx.elastic.socket_stream import MAX_MESSAGE_BYTES, PREFIX

SECRET = bytes(reversed(range(32)))
PATIENCE_S = 30.0
LONG_S = 600  # to say hello, where a test must not pass because strangers were thrown out for being late
SCANS, GARBAGE, LORISES = 1000, 200, 200
GROWTH_BYTES = 16 << 20


def serve(secret: bytes, hello_s: float) -> None:
    """A coordinator in small: repeats what it is told, and says how it is."""
    listener, seen = Listener("", 0, secret, {"role": "coordinator"}, hello_s=hello_s), 0
    print(listener.address[1], flush=True)
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    refused: list[str] = []
    while True:
        ready = selector.select(0.1)
        for channel in listener.pump():
            selector.register(channel, selectors.EVENT_READ)
            seen += 1
        for channel in [key.fileobj for key, _ in ready if key.fileobj is not listener]:
            try:
                for message in channel.receive():
                    if message == {"stop": True}:
                        return
                    told = status(seen, refused) if message == {"how": "are you"} else message
                    channel.send({"told": told})
            except ConnectionError as error:
                if isinstance(error, Refused):
                    refused.append(str(error))
                selector.unregister(channel)
                channel.close()


def status(seen: int, refused: list[str]) -> dict[str, object]:
    with open("/proc/self/statm") as file:
        resident_bytes = int(file.read().split()[1]) * resource.getpagesize()
    sockets = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            sockets += os.readlink(f"/proc/self/fd/{name}").startswith("socket:")
    return {"seen": seen, "refused": refused, "resident_bytes": resident_bytes, "sockets": sockets}


if __name__ == "__main__":
    if int(sys.argv[2]):
        resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[2]),) * 2)
    serve(bytes.fromhex(sys.stdin.readline()), float(sys.argv[1]))


class Server:
    """The process under attack and an honest peer's channel to it."""

    def __init__(self, *, hello_s: float = LONG_S, descriptors: int = 0) -> None:
        command = [sys.executable, __file__, str(hello_s), str(descriptors)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(SECRET.hex() + "\n")
        self.process.stdin.flush()
        self.address = ("127.0.0.1", int(self.process.stdout.readline()))
        self.honest = self.enter()

    def enter(self, secret: bytes = SECRET) -> Channel:
        return connect(self.address, secret, {"role": "agent"}, timeout_s=PATIENCE_S)

    def stranger(self) -> socket.socket:
        return socket.create_connection(self.address, timeout=PATIENCE_S)

    def is_well(self) -> dict[str, object]:
        """How the server is, told over the channel that was open all the time."""
        self.honest.send({"echo": 1})
        assert self.honest.wait(PATIENCE_S) == {"told": {"echo": 1}}
        self.honest.send({"how": "are you"})
        return self.honest.wait(PATIENCE_S)["told"]

    def stop(self) -> None:
        self.honest.send({"stop": True})
        assert self.process.wait(PATIENCE_S) == 0
        self.honest.close()
        for stream in (self.process.stdin, self.process.stdout):
            stream.close()


@contextlib.contextmanager
def running(**options: float) -> Iterator[Server]:
    server = Server(**options)
    try:
        yield server
    finally:
        with contextlib.suppress(ConnectionError):
            server.stop()
        server.process.kill()
        server.process.wait()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running() as server:
        server.is_well()
        yield server


@pytest.fixture(autouse=True)
def unmoved(request: pytest.FixtureRequest) -> Iterator[None]:
    """After every attack on the common server: the honest peer works, no memory was taken, nobody else got in."""
    if "server" not in request.fixturenames:
        yield
        return
    server: Server = request.getfixturevalue("server")
    before = server.is_well()
    yield
    after = server.is_well()
    assert after["resident_bytes"] - before["resident_bytes"] < GROWTH_BYTES
    assert after["sockets"] <= 2 + HALF_OPEN + 1


def is_hung_up(sock: socket.socket) -> bool:
    """Whether the other side closes, whatever it said before."""
    try:
        while sock.recv(4096):
            pass
    except TimeoutError:
        return False
    except ConnectionError:
        pass
    return True


def test_port_scan(server: Server) -> None:
    seen = server.is_well()["seen"]
    for number in range(SCANS):
        sock = server.stranger()
        if number % 2:  # a reset instead of a goodbye
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        sock.close()
    assert server.is_well()["seen"] == seen
    server.enter().close()


def test_garbage(server: Server) -> None:
    source = random.Random(4)
    for _ in range(GARBAGE):
        with server.stranger() as sock:
            with contextlib.suppress(ConnectionError):
                sock.sendall(source.randbytes(source.randint(handshake.OPENING.size, 20_000)))
            assert is_hung_up(sock)


def test_http_request(server: Server) -> None:
    with server.stranger() as sock:
        sock.sendall(b"GET /status?verbose=1 HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert is_hung_up(sock)


def test_hello_of_absurd_size(server: Server) -> None:
    with server.stranger() as sock:
        sock.sendall(handshake.OPENING.pack(handshake.MAGIC, handshake.MAX_HELLO_BYTES + 1, bytes(32)))
        assert is_hung_up(sock)


def test_slow_loris(server: Server) -> None:
    """Strangers that would stay for ten minutes do not keep an honest peer out."""
    text = handshake.OPENING.pack(handshake.MAGIC, 100, bytes(32)) + bytes(200)
    lorises, over = [server.stranger() for _ in range(LORISES)], threading.Event()

    def drip() -> None:
        for position in range(len(text)):
            for sock in lorises:
                with contextlib.suppress(OSError):
                    sock.send(text[position : position + 1])
            if over.wait(1.0):
                return

    dripping = threading.Thread(target=drip)
    dripping.start()
    try:
        for _ in range(10):
            guest = server.enter()
            assert server.is_well()["sockets"] <= HALF_OPEN + 3  # the listener, the honest peer, the guest
            guest.send({"honest": True})
            assert guest.wait(PATIENCE_S) == {"told": {"honest": True}}
            guest.close()
    finally:
        over.set()
        dripping.join()
    for sock in lorises:
        sock.close()


def test_strangers_are_thrown_out_when_late() -> None:
    with running(hello_s=0.2) as server, server.stranger() as silent, server.stranger() as slow:
        slow.sendall(handshake.MAGIC)
        assert is_hung_up(silent)
        assert is_hung_up(slow)
        server.is_well()


def test_out_of_descriptors() -> None:
    """When strangers hold every descriptor of the process, they are the ones who go."""
    with running(descriptors=40) as server:
        strangers = [server.stranger() for _ in range(60)]
        guests = [server.enter() for _ in range(3)]
        for guest in guests:
            guest.send({"honest": True})
            assert guest.wait(PATIENCE_S) == {"told": {"honest": True}}
        for sock in (*strangers, *guests):
            sock.close()


def test_wrong_secret(server: Server) -> None:
    seen = server.is_well()["seen"]
    for _ in range(20):
        with pytest.raises(Refused, match="it has another secret"):
            server.enter(os.urandom(32))
    assert server.is_well()["seen"] == seen


class Tape:
    """A relay that records what a client says."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._door = socket.create_server(("127.0.0.1", 0))
        self.address = self._door.getsockname()
        self._target, self.recorded = address, b""
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        client, _ = self._door.accept()
        server = socket.create_connection(self._target)
        answers = threading.Thread(target=relay, args=(server, client, lambda piece: None))
        answers.start()
        relay(client, server, self._record)
        answers.join()
        for sock in (client, server, self._door):
            sock.close()

    def _record(self, piece: bytes) -> None:
        self.recorded += piece

    def finish(self) -> bytes:
        self._thread.join()
        return self.recorded


def relay(source: socket.socket, target: socket.socket, note: Callable[[bytes], None]) -> None:
    with contextlib.suppress(OSError):
        while piece := source.recv(65536):
            note(piece)
            target.sendall(piece)
        target.shutdown(socket.SHUT_WR)


def test_replayed_conversation(server: Server) -> None:
    tape = Tape(server.address)
    channel = connect(tape.address, SECRET, {"role": "agent"}, timeout_s=PATIENCE_S)
    channel.send({"order": "stop all ranks"})
    assert channel.wait(PATIENCE_S) == {"told": {"order": "stop all ranks"}}
    channel.close()
    recorded = tape.finish()
    assert b"stop all ranks" in recorded
    seen = server.is_well()["seen"]
    with server.stranger() as sock:
        with contextlib.suppress(ConnectionError):
            sock.sendall(recorded)
        assert is_hung_up(sock)
    assert server.is_well()["seen"] == seen


def capture(channel: Channel, message: dict[str, object]) -> bytes:
    """The frame that `channel` would send next; it counts as sent."""
    frames: list[bytes] = []
    real, channel._push = channel._push, lambda view: frames.append(bytes(view))
    channel.send(message)
    channel._push = real
    return b"".join(frames)


def answers(channel: Channel, *frames: bytes) -> list[object]:
    """What the server says to raw frames, after which it hears nothing more, until it hangs up."""
    assert channel._sock.send(b"".join(frames)) == sum(map(len, frames))
    with contextlib.suppress(OSError):  # it may have hung up by now
        channel._sock.shutdown(socket.SHUT_WR)
    told: list[object] = []
    with contextlib.suppress(Closed):
        while True:
            told.append(channel.wait(PATIENCE_S)["told"])
    channel.close()
    return told


def last_refusal(server: Server) -> str:
    return server.is_well()["refused"][-1]


def test_frames_in_their_order_are_answered(server: Server) -> None:
    """What the attacks below would get if nothing were checked."""
    guest = server.enter()
    assert answers(guest, *(capture(guest, {"n": n}) for n in (1, 2, 3))) == [{"n": 1}, {"n": 2}, {"n": 3}]


@pytest.mark.parametrize("attack", ["replayed", "reordered", "dropped"])
def test_frames_out_of_order(server: Server, attack: str) -> None:
    guest = server.enter()
    first, second, end = (capture(guest, {"n": n}) for n in (1, 2, 3))
    frames = {
        "replayed": (first, first, second, end),
        "reordered": (first, end, second),
        "dropped": (first, end),
    }[attack]
    assert answers(guest, *frames) == [{"n": 1}]
    assert last_refusal(server) == "a frame from agent is not authentic: changed, repeated or out of order"


def test_frame_of_another_session(server: Server) -> None:
    elsewhere, guest = server.enter(), server.enter()
    assert answers(guest, capture(elsewhere, {"n": 3})) == []
    elsewhere.close()


@contextlib.contextmanager
def both_ends() -> Iterator[tuple[Channel, Channel]]:
    """Client and server of a channel in this process."""
    listener, server, client = Listener("", 0, SECRET, {}), [], []
    calling = threading.Thread(
        target=lambda: client.append(connect(listener.address, SECRET, {"role": "agent"}, timeout_s=PATIENCE_S))
    )
    calling.start()
    while not server:
        server += listener.pump(PATIENCE_S)
    calling.join()
    yield client[0], server[0]
    for end in (*client, *server, listener):
        end.close()


def test_frame_sent_back_to_its_author() -> None:
    with both_ends() as (client, server):
        frame = capture(server, {"order": "stop"})
        client._push(memoryview(frame))
        with pytest.raises(Refused, match="not authentic"):
            server.wait(PATIENCE_S)


def test_a_loop_hears_of_the_false_frame_behind_a_true_one() -> None:
    with both_ends() as (client, server), selectors.DefaultSelector() as selector:
        selector.register(server, selectors.EVENT_READ)
        frame = capture(client, {"n": 1})
        client._push(memoryview(frame + frame))
        while not (messages := server.receive()):
            selector.select(PATIENCE_S)
        assert messages == [{"n": 1}]
        assert selector.select(PATIENCE_S), "nothing left in the socket, and nobody to say that the peer is false"
        with pytest.raises(Refused, match="not authentic"):
            server.receive()
        server.send({"answer": 1})  # to the true one
        assert client.wait(PATIENCE_S) == {"answer": 1}


def test_every_bit_of_a_frame_counts(server: Server) -> None:
    guest = server.enter()
    size = len(capture(guest, {"n": 3}))
    guest.close()
    for byte in range(size):
        guest = server.enter()
        frame = bytearray(capture(guest, {"n": 3}))
        frame[byte] ^= 1 << byte % 8
        assert answers(guest, frame) == [], f"bit {byte % 8} of byte {byte}"


def test_message_of_absurd_size(server: Server) -> None:
    guest = server.enter()
    assert answers(guest, PREFIX.pack(0xFFFFFFFF, 0, 0) + bytes(64)) == []
    expected = f"agent announced a message of 4294967295 bytes, more than {MAX_MESSAGE_BYTES}"
    assert last_refusal(server) == expected


@pytest.mark.parametrize("attack", ["random", "reflected", "refusing"])
def test_a_false_server_gets_no_orders_through(attack: str) -> None:
    """A process that took the port, without the secret, cannot pass for the coordinator."""
    door = socket.create_server(("127.0.0.1", 0))

    def pretend() -> None:
        sock, _ = door.accept()
        sock.sendall(handshake.greeting(bytes(32)))
        opening = sock.recv(4096)
        proof = opening[handshake.OPENING.size :]  # hello and HMAC of the client
        answer = {
            "random": struct.pack("!H", 2) + b"{}" + os.urandom(32),
            "reflected": struct.pack("!H", len(proof) - 32) + proof,
            "refusing": struct.pack("!H", 0),
        }[attack]
        sock.sendall(answer)
        is_hung_up(sock)
        sock.close()

    pretending = threading.Thread(target=pretend)
    pretending.start()
    with pytest.raises(Refused):
        connect(door.getsockname(), SECRET, {"role": "agent"}, timeout_s=PATIENCE_S)
    pretending.join()
    door.close()
