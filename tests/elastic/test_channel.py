"""Channels between honest processes: messages, data, waiting, ends, forks; and the file that holds the secret."""

from __future__ import annotations

import os
import select
import selectors
import signal
import socket
import threading
import time
import warnings
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from phalanx.elastic.channel import BURST, Channel, Closed, Refused, connect, encode_frame, extend_frame
from phalanx.elastic.handshake import (
    FROM_CLIENT,
    FROM_SERVER,
    GREETING_BYTES,
    MAGIC,
    OPENING,
    FrameSigner,
    Handshake,
    make_nonce,
    make_secret,
    read_greeting,
    read_secret,
)
from phalanx.elastic.listener import Listener
from phalanx.elastic.socket_stream import MAX_MESSAGE_BYTES, ready
from phalanx.errors import UserError

SECRET = bytes(range(32))
PATIENCE_S = 20.0  # a bound on waiting, never what is measured


def open_pair(listener: Listener, hello: dict[str, object] | None = None, **options: object) -> tuple[Channel, Channel]:
    """Both ends of one channel: the client's, the server's."""
    ends: list[Channel] = []
    caller = threading.Thread(
        target=lambda: ends.append(
            connect(listener.address, SECRET, hello or {"role": "agent"}, timeout_s=PATIENCE_S, **options)
        )
    )
    caller.start()
    server = next_channel(listener)
    caller.join()
    return ends[0], server


def next_channel(listener: Listener) -> Channel:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        if channels := listener.pump(0.1):
            return channels[0]
    raise TimeoutError("no channel became authentic")


@pytest.fixture
def listener() -> Iterator[Listener]:
    listener = Listener("", 0, SECRET, {"role": "coordinator", "epoch": 7})
    yield listener
    listener.close()


@pytest.fixture
def pair(listener: Listener) -> Iterator[tuple[Channel, Channel]]:
    ends = open_pair(listener)
    yield ends
    for end in ends:
        end.close()


def test_each_side_learns_what_the_other_said_of_itself(listener: Listener) -> None:
    client, server = open_pair(listener, {"role": "agent", "host": "a", "epoch": 3})
    assert client.peer == {"role": "coordinator", "epoch": 7}
    assert server.peer == {"role": "agent", "host": "a", "epoch": 3}  # an old epoch is seen by whoever must fence it
    client.close()
    server.close()


def test_one_read_takes_all_that_was_said(pair: tuple[Channel, Channel]) -> None:
    client, server = pair
    for number in range(5):
        client.send({"number": number})
    long = threading.Thread(target=client.send, args=({"text": "x" * 200_000},))  # more than one read takes
    long.start()
    heard: list[dict[str, object]] = []
    while len(heard) < 6:
        assert ready(server._sock, select.POLLIN, PATIENCE_S)
        heard += server.receive_all()
    long.join()
    assert [one.get("number") for one in heard[:5]] == [0, 1, 2, 3, 4]
    assert len(str(heard[5]["text"])) == 200_000
    assert server.receive_all() == [], "nothing more has come"
    client.send({"put": 1}, b"data")
    assert ready(server._sock, select.POLLIN, PATIENCE_S)
    with pytest.raises(Refused, match="where only messages are taken"):
        server.receive_all()


def test_a_changed_frame_is_refused_by_the_one_read_too(pair: tuple[Channel, Channel]) -> None:
    client, server = pair
    client.send({"number": 1})
    client._sign.next(b"")  # a frame that never came
    client.send({"number": 2})
    assert ready(server._sock, select.POLLIN, PATIENCE_S)
    assert server.receive_all() == [{"number": 1}]
    assert ready(server._sock, select.POLLIN, PATIENCE_S)
    with pytest.raises(Refused, match="not authentic"):
        server.receive_all()


def test_a_listener_binds_loopback_unless_told_otherwise(listener: Listener) -> None:
    assert listener.address[0] == "127.0.0.1"


def test_the_server_may_answer_by_what_the_client_said() -> None:
    listener = Listener("", 0, SECRET, lambda peer: {"welcome": peer["host"]})
    client, server = open_pair(listener, {"host": "b"})
    assert client.peer == {"welcome": "b"}
    for end in (client, server, listener):
        end.close()


def test_the_server_may_refuse_an_authentic_client() -> None:
    def fence(peer: dict[str, object]) -> dict[str, object]:
        raise Refused(f"epoch {peer['epoch']} is over")

    listener = Listener("", 0, SECRET, fence)
    with pumping(listener) as channels, pytest.raises(Refused, match="refused our hello"):
        connect(listener.address, SECRET, {"epoch": 1}, timeout_s=PATIENCE_S)
    assert channels == []


class pumping:
    """Somebody who pumps a listener, and closes it at the end."""

    def __init__(self, listener: Listener) -> None:
        self._listener, self._over, self._channels = listener, threading.Event(), []
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> list[Channel]:
        self._thread.start()
        return self._channels

    def _run(self) -> None:
        while not self._over.is_set():
            self._channels += self._listener.pump(0.05)

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        for channel in self._channels:
            channel.close()
        self._listener.close()


def test_messages_go_both_ways_in_order(pair: tuple[Channel, Channel]) -> None:
    client, server = pair
    for number in range(5):
        client.send({"number": number})
        server.send({"answer": -number})
    assert [server.wait(PATIENCE_S)["number"] for _ in range(5)] == [0, 1, 2, 3, 4]
    assert [client.wait(PATIENCE_S)["answer"] for _ in range(5)] == [0, -1, -2, -3, -4]


def test_receive_never_waits_and_takes_what_is_there(pair: tuple[Channel, Channel]) -> None:
    client, server = pair
    assert server.receive() == []
    for number in range(BURST + 1):
        client.send({"number": number})
    assert [message["number"] for message in until_received(server)] == list(range(BURST))
    assert until_received(server) == [{"number": BURST}]


def until_received(channel: Channel) -> list[dict[str, object]]:
    """What a selectors loop gets the next time the channel is readable."""
    with selectors.DefaultSelector() as selector:
        selector.register(channel, selectors.EVENT_READ)
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            selector.select(PATIENCE_S)
            if messages := channel.receive():
                return messages
    raise TimeoutError


def test_a_selector_sees_the_message_behind_the_data(pair: tuple[Channel, Channel]) -> None:
    client, server = pair
    client.send({"first": 1}, b"x" * 3000)
    client.send({"second": 2})
    assert until_received(server) == [{"first": 1, "data_bytes": 3000}]
    server.read_into(memoryview(bytearray(3000)))
    assert until_received(server) == [{"second": 2}]  # hangs if the channel had read ahead


def test_data_arrives_whole_with_its_sum(pair: tuple[Channel, Channel]) -> None:
    client, server = pair
    data = os.urandom(8 << 20)  # more than the buffers of a socket hold
    sender = threading.Thread(target=lambda: client.send({"put": 1}, data))
    sender.start()
    assert server.wait(PATIENCE_S) == {"put": 1, "data_bytes": len(data)}
    buffer = bytearray(len(data))
    assert server.read_into(memoryview(buffer)) == zlib.crc32(data)
    sender.join()
    assert buffer == data


def test_data_nobody_wants_is_skipped(pair: tuple[Channel, Channel]) -> None:
    client, server = pair

    def speak() -> None:
        client.send({"old": 1}, bytes(5 << 20))
        client.send({"new": 2})

    sender = threading.Thread(target=speak)
    sender.start()
    assert server.wait(PATIENCE_S)["old"] == 1
    assert server.wait(PATIENCE_S) == {"new": 2}
    sender.join()


def test_an_empty_array_is_no_data(pair: tuple[Channel, Channel]) -> None:
    client, server = pair
    client.send({"put": 1}, memoryview(bytearray(0)).cast("f"))
    assert server.wait(PATIENCE_S) == {"put": 1}
    server.read_into(bytearray(0))


def test_data_that_does_not_match_its_sum_is_refused(pair: tuple[Channel, Channel]) -> None:
    client, server = pair
    client.send({"put": 1}, b"data", crc32=zlib.crc32(b"date"))
    server.wait(PATIENCE_S)
    with pytest.raises(Refused, match="4 bytes from agent were damaged on the way"):
        server.read_into(bytearray(4))
    with pytest.raises(Refused):  # and stays so
        server.receive()


def test_a_buffer_of_another_size_is_a_mistake_of_the_caller(pair: tuple[Channel, Channel]) -> None:
    client, server = pair
    client.send({"put": 1}, b"four")
    server.wait(PATIENCE_S)
    with pytest.raises(ValueError, match="a buffer of 3 bytes for 4 bytes of data"):
        server.read_into(bytearray(3))
    server.read_into(bytearray(4))


def test_wait_gives_up(pair: tuple[Channel, Channel]) -> None:
    with pytest.raises(TimeoutError, match=r"no message from agent in 0\.05 s"):
        pair[1].wait(0.05)
    pair[0].send({"late": 1})
    assert pair[1].wait(PATIENCE_S) == {"late": 1}  # a timeout in between loses nothing


def test_too_large_messages_are_refused_where_they_are_written(pair: tuple[Channel, Channel]) -> None:
    with pytest.raises(ValueError, match="send it as data"):
        pair[0].send({"text": "x" * MAX_MESSAGE_BYTES})
    with pytest.raises(ValueError, match="the channel's own key"):
        pair[0].send({"data_bytes": 3})
    text = "x" * (MAX_MESSAGE_BYTES - 100)
    sender = threading.Thread(target=lambda: pair[0].send({"text": text}))
    sender.start()
    assert pair[1].wait(PATIENCE_S) == {"text": text}
    sender.join()


def test_last_words_are_heard_then_the_end(pair: tuple[Channel, Channel]) -> None:
    client, server = pair
    client.send({"last": "words"})
    client.close()
    assert until_received(server) == [{"last": "words"}]
    with pytest.raises(Closed):
        until_received(server)
    with pytest.raises(Closed):
        server.wait(PATIENCE_S)


def test_words_are_heard_though_nothing_can_be_sent(pair: tuple[Channel, Channel]) -> None:
    client, server = pair
    client.send({"why": "it failed"})
    client._sock.shutdown(socket.SHUT_WR)
    server._sock.shutdown(socket.SHUT_WR)
    with pytest.raises(Closed, match="agent is gone: Broken pipe"):
        server.send({"are": "you there"})
    assert server.wait(PATIENCE_S) == {"why": "it failed"}


def test_a_peer_that_takes_nothing_does_not_hold_us_for_ever(listener: Listener) -> None:
    client, server = open_pair(listener, stall_s=0.2)
    with pytest.raises(Closed, match=r"coordinator took nothing for 0\.2 s|coordinator is gone"):
        client.send({"put": 1}, bytes(64 << 20))
    with pytest.raises(Closed):  # the other side is inside a frame: nothing more may follow
        client.send({"next": 1})
    client.close()
    server.close()


def test_a_peer_that_stops_in_the_middle_of_data_does_not_hold_us_for_ever(pair: tuple[Channel, Channel]) -> None:
    client, server = pair
    server.stall_s = 0.1
    whole = client._push
    client._push = lambda view: whole(view[: len(view) // 2] if len(view) == 1000 else view)
    client.send({"put": 1}, bytes(1000))
    server.wait(PATIENCE_S)
    with pytest.raises(Closed, match=r"agent sent 500 of 1000 bytes, then nothing for 0\.1 s"):
        server.read_into(bytearray(1000))


def test_connecting_to_nobody_fails(listener: Listener) -> None:
    address = listener.address
    listener.close()
    with pytest.raises(ConnectionRefusedError):
        connect(address, SECRET, {}, timeout_s=PATIENCE_S)
    listener.__init__("", 0, SECRET, {})  # for the fixture to close


def test_connecting_to_something_silent_or_foreign_ends() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        with pytest.raises(TimeoutError, match="no answer to our hello"):
            connect(silent.getsockname(), SECRET, {}, timeout_s=0.1)
        answered = threading.Thread(target=lambda: answer_like_a_web_server(silent))
        answered.start()
        with pytest.raises(Refused, match="not a Phalanx process"):
            connect(silent.getsockname(), SECRET, {}, timeout_s=PATIENCE_S)
        answered.join()


def answer_like_a_web_server(server: socket.socket) -> None:
    for _ in range(2):  # the first is the connection that timed out
        sock, _ = server.accept()
        with sock:
            sock.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")


def test_ipv6() -> None:
    try:
        listener = Listener("::1", 0, SECRET, {})
    except OSError:
        pytest.skip("this machine has no IPv6")
    client, server = open_pair(listener)
    client.send({"six": 6})
    assert server.wait(PATIENCE_S) == {"six": 6}
    assert listener.address[0] == "::1"
    for end in (client, server, listener):
        end.close()


def test_connect_comes_from_the_address_it_is_bound_to(listener: Listener) -> None:
    client, server = open_pair(listener, bind="127.0.0.2")
    assert server._sock.getpeername()[0] == "127.0.0.2"
    client.close()
    server.close()


def fork() -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of threads; the child touches no lock
        return os.fork()


def in_child(action: Callable[[], None]) -> int:
    """Exit status of a forked child that does `action`."""
    child = fork()
    if child == 0:
        code = 1
        try:
            signal.alarm(20)
            action()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_forked_child_that_forgets_does_not_disturb_its_parent(listener: Listener) -> None:
    client, server = open_pair(listener)
    stranger = socket.create_connection(listener.address)
    listener.pump(PATIENCE_S)

    def forget() -> None:
        listener.forget()
        server.forget()
        with pytest.raises(Closed, match="belongs to the parent process"):
            server.send({"not": "mine"})

    assert in_child(forget) == 0
    client.send({"still": "here"})
    assert server.wait(PATIENCE_S) == {"still": "here"}
    again = open_pair(listener)  # the listener was not disturbed either
    for end in (client, server, stranger, *again):
        end.close()


def test_closing_reaches_the_peer_though_a_child_holds_a_copy(pair: tuple[Channel, Channel]) -> None:
    client, server = pair
    told, tell = os.pipe()
    child = fork()
    if child == 0:
        os.read(told, 1)
        os._exit(0)
    server.close()
    with pytest.raises(Closed):
        client.wait(PATIENCE_S)
    os.write(tell, b"x")
    os.waitpid(child, 0)
    os.close(told)
    os.close(tell)


def test_a_secret_is_for_its_owner_and_made_once(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    secret = make_secret(path)
    assert len(secret) == 32
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_secret(path) == secret
    with pytest.raises(UserError, match="a secret is already there"):
        make_secret(path)
    assert read_secret(path) == secret


def test_a_secret_is_not_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "secret").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError):
        make_secret(tmp_path / "secret")
    assert not (tmp_path / "elsewhere").exists()


def test_a_secret_others_can_reach_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    make_secret(path)
    path.chmod(0o640)
    with pytest.raises(UserError) as error:
        read_secret(path)
    assert str(error.value) == (
        f"{path}: the run's secret has mode 0640, not 0600\n"
        "  whoever reads it can give orders to every rank of the run\n"
        f"  chmod 600 {path}, or delete {path} and start the run again: phalanx train makes a new one"
    )


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_secret_of_another_user_is_refused(tmp_path: Path) -> None:
    make_secret(tmp_path / "secret")
    os.chown(tmp_path / "secret", 12345, -1)
    with pytest.raises(UserError, match="belongs to user 12345, not to 0"):
        read_secret(tmp_path / "secret")


@pytest.mark.parametrize(
    ("text", "found"),
    [("", "0 characters"), ("ab" * 31, "62 characters"), ("ab" * 40, "66 or more"), ("zz" * 32, "something else")],
)
def test_a_file_that_is_no_secret_is_refused(tmp_path: Path, text: str, found: str) -> None:
    path = tmp_path / "secret"
    path.touch(0o600)
    path.write_text(text)
    with pytest.raises(UserError, match=f"not 64 hexadecimal digits but {found}"):
        read_secret(path)


@pytest.mark.parametrize("kind", ["missing", "link", "pipe", "folder"])
def test_a_secret_is_a_plain_file(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "secret"
    if kind == "link":
        make_secret(tmp_path / "real")
        path.symlink_to(tmp_path / "real")
    elif kind == "pipe":
        os.mkfifo(path, 0o600)
    elif kind == "folder":
        path.mkdir(0o700)
    with pytest.raises(UserError, match=r"cannot be read|not a regular file"):
        read_secret(path)


def test_a_connection_has_what_was_set_for_its_listener(pair: tuple[Channel, Channel]) -> None:
    """No delay of small messages; and a host that vanished is noticed though nothing is sent to it."""
    options = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE), (socket.IPPROTO_TCP, socket.TCP_NODELAY)]
    options += [(socket.IPPROTO_TCP, getattr(socket, name)) for name in ("TCP_KEEPIDLE", "TCP_USER_TIMEOUT")]
    client, server = ([end._sock.getsockopt(*option) for option in options] for end in pair)
    assert client == server == [1, 1, 5, 10_000]
    assert [end._sock.getblocking() for end in pair] == [False, False]


def test_who_speaks_on_before_it_was_answered_is_not_let_in(listener: Listener) -> None:
    """A hello is read at once: nothing may come behind it that would be lost."""
    with socket.create_connection(listener.address) as guest:
        while not listener._guests:
            listener.pump(0.1)
        nonce_s, nonce_c = read_greeting(guest.recv(GREETING_BYTES)), make_nonce()
        mac = Handshake(SECRET, nonce_s, nonce_c).client_mac(b"{}")
        guest.sendall(OPENING.pack(MAGIC, 2, nonce_c) + b"{}" + mac + b"more")
        while listener._guests:
            assert listener.pump(0.1) == []


def test_the_key_of_a_connection_depends_on_all_that_was_said() -> None:
    """And no proof of one side is a proof of the other, nor a frame of one direction one of the other."""
    said = [(SECRET, b"n" * 32, b"m" * 32, b"hello", b"answer")]
    said += [(bytes(32), *said[0][1:]), (SECRET, b"x" * 32, *said[0][2:]), (SECRET, b"n" * 32, b"x" * 32, *said[0][3:])]
    said += [(*said[0][:3], b"helloa", b"nswer"), (*said[0][:3], b"hello", b"other")]
    seen: list[bytes] = []
    for secret, nonce_s, nonce_c, hello_c, hello_s in said:
        shaken = Handshake(secret, nonce_s, nonce_c)
        seen += [*shaken.server_mac_and_key(hello_c, hello_s), shaken.client_mac(hello_c)]
    assert len(set(seen)) == len(seen) - 1, "of the last, only the answer differs: the client has said the same"
    key = seen[1]
    client, server = FrameSigner(key, FROM_CLIENT), FrameSigner(key, FROM_SERVER)
    macs = [seal.next(frame) for seal in (client, server) for frame in (b"frame", b"frame")]
    assert len(set(macs)) == 4
    assert macs[0] == FrameSigner(key, FROM_CLIENT).next(b"frame")


def test_a_frame_is_extended_by_what_only_one_host_is_told(pair: tuple[Channel, Channel]) -> None:
    client, server = pair
    common, share = {"kind": "go", "epoch": 7, "restore": None}, {"peers": {"0": [0, "10.0.0.1", 8000]}}
    frame = encode_frame(common)
    assert extend_frame(frame, share) == encode_frame({**common, **share})
    client.send_frame(extend_frame(frame, share))
    assert server.wait(PATIENCE_S) == {**common, **share}
    with pytest.raises(ValueError, match="a channel takes"):
        extend_frame(frame, {"text": "x" * MAX_MESSAGE_BYTES})
