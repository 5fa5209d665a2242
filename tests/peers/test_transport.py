"""Who is let in: wrong keys, runs, models and addresses each get one clear sentence, and nothing changes."""

from __future__ import annotations

import asyncio
import errno
import http.server
import socket
import ssl
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from crew import RUN, Crew, allowlist, identities, together, until
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.errors import SystemFailure, UserError
from phalanx.peers import messages as say
from phalanx.peers.allowlist import AllowList
from phalanx.peers.doorway import HALF_OPEN, Doorway
from phalanx.peers.facts import Bandwidth, PeerState
from phalanx.peers.frames import PeerConnection
from phalanx.peers.group import PeerGroup
from phalanx.peers.identity import PeerIdentity
from phalanx.peers.messages import decode_message, encode_message
from phalanx.peers.state_transfer import describe_state


def refused(group: PeerGroup, address: Any) -> str:
    with pytest.raises(UserError) as caught:
        group.join([address], timeout_s=15.0)
    assert caught.value.exit_code == 2
    assert group.view().number == 0
    return str(caught.value)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"model_digest": "other"}, "has another model, or other settings: mmmmmmmm there, other here"),
        ({"tokenizer_digest": "other"}, "has another tokenizer: tttttttt there, other here"),
        ({"code_digest": "other"}, "has another version of the code: cccccccc there, other here"),
    ],
)
def test_another_model_tokenizer_or_code_is_refused(change: dict[str, str], text: str) -> None:
    with Crew(4) as crew:
        (first,) = crew.join_all(1)
        assert text in refused(crew.start(1, run=replace(RUN, **change)), first.address)
        assert first.view().number == 1


def test_another_run_is_refused() -> None:
    people = identities(4)
    other = AllowList.create(people[0], "other", [one.certificate_pem for one in people])
    with Crew(4) as crew:
        (first,) = crew.join_all(1)
        group = crew.start(1, run=replace(RUN, run_id="other"), allowed=other)
        assert "has another run: trial there, other here" in refused(group, first.address)
        with pytest.raises(UserError) as caught:
            crew.start(1, run=replace(RUN, run_id="other"))
        assert "the allowlist is of run trial, this is run other" in str(caught.value)


def test_a_key_that_nobody_knows_is_refused() -> None:
    stranger = PeerIdentity.create("stranger")
    with Crew(4) as crew:
        (first,) = crew.join_all(1)
        # The stranger trusts the run, the run does not know the stranger.
        own = AllowList.create(stranger, RUN.run_id, [one.certificate_pem for one in identities(4)])
        with PeerGroup(stranger, RUN, allowed=own, heartbeat_s=0.1, dead_after_s=3.0) as group:
            text = refused(group, first.address)
            assert "does not know the key of stranger" in text
        # And the other way round: something else listens with a key that is not on the list.
        with PeerGroup(stranger, RUN, allowed=own, heartbeat_s=0.1, dead_after_s=3.0) as group:
            group.join()
            text = refused(crew.start(1), group.address)
            assert "answers with a key that is not on the run's allowlist" in text
        with pytest.raises(UserError) as caught:
            PeerGroup(stranger, RUN, allowed=allowlist(4))
        assert "is not on the run's allowlist" in str(caught.value)


@contextmanager
def web_server() -> Iterator[tuple[str, int]]:
    class Quiet(http.server.BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Quiet)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server.server_address[:2]  # type: ignore[misc]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_an_address_that_answers_something_else_and_one_that_does_not_answer() -> None:
    with Crew(4) as crew, web_server() as address:
        assert "answers, but not as a peer of Phalanx" in refused(crew.start(0), address)
        free = socket.create_server(("127.0.0.1", 0))
        nobody = free.getsockname()
        free.close()
        group = crew.start(1)
        with pytest.raises(SystemFailure) as caught:
            group.join([nobody], timeout_s=1.0)
        assert "no peer of the run could be reached" in str(caught.value)
        told = [event.text for event in crew.events[1] if event.kind == "no-answer"]
        assert len(told) == 1
        assert f"no peer of the run answers yet (127.0.0.1:{nobody[1]}: " in told[0]
        # One address of several is enough.
        crew.groups[0].join()
        group.join([nobody, address, crew.groups[0].address], timeout_s=20.0)


def test_a_revoked_peer_is_sent_away_and_cannot_come_back() -> None:
    with Crew(4) as crew:
        groups = crew.join_all(3)
        vectors = [np.ones(5000) * place for place in range(3)]
        newer = crew.allowed.revoke(crew.people[0], crew.people[2].id)
        groups[0].set_allowed(newer)
        crew.wait_for(lambda: [len(group.view().members) for group in groups[:2]] == [2, 2])
        crew.wait_for(lambda: "revoked" in [event.kind for event in crew.events[1]])  # it spreads
        results = together(
            [lambda p=p: groups[p].average(0, vectors[p], 1.0, "fp64", timeout_s=20.0) for p in range(2)]
        )
        assert all(result.committed and len(result.members_counted) == 2 for result in results)
        with pytest.raises(UserError) as caught:
            groups[2].average(0, vectors[2], 1.0, "fp64", timeout_s=20.0)
        assert "this key was revoked by the run's owner" in str(caught.value)
        groups[2].close()
        back = crew.start(2)  # with the list of before, on which it still is
        for group in groups[:2]:
            assert "this key was revoked by the run's owner" in refused(back, group.address)
        with pytest.raises(UserError) as caught:
            crew.start(2, allowed=newer)
        assert "revoked by the run's owner" in str(caught.value)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_revoked_peer_of_two_is_told_and_the_owner_goes_on(victim: int) -> None:
    """The lower id too, which alone would be the majority of two."""
    people, owner = identities(4), 1 - victim
    allowed = AllowList.create(people[owner], RUN.run_id, [one.certificate_pem for one in people])
    with Crew(4, allowed=allowed) as crew:
        groups = crew.join_all(2)
        until(lambda: all(len(group.links()) == 1 for group in groups))
        with ThreadPoolExecutor(1) as pool:
            waits = pool.submit(groups[victim].average, 0, np.ones(100), 1.0, timeout_s=60.0)
            groups[owner].set_allowed(allowed.revoke(people[owner], people[victim].id))
            with pytest.raises(UserError) as caught:
                waits.result(60.0)  # the owner never calls: it ends because it was told
        assert "this key was revoked by the run's owner" in str(caught.value)
        assert caught.value.exit_code == 2
        crew.wait_for(lambda: groups[owner].view().ids == (people[owner].id,))
        result = groups[owner].average(0, np.ones(100), 1.0, timeout_s=20.0)
        assert result.committed
        assert result.members_counted == (people[owner].id,)
        assert groups[owner].has_majority
        assert not {"no-majority", "lost"} & set(crew.kinds(owner))
        for call in (lambda: groups[victim].average(0, np.ones(100), 1.0), lambda: groups[victim].fetch_state(print)):
            with pytest.raises(UserError) as caught:
                call()
            assert "this key was revoked" in str(caught.value)
        assert "committed" not in crew.kinds(victim)
        assert groups[victim].view().next_round == 0


def test_a_newcomer_that_was_invited_later_is_let_in_by_all() -> None:
    with Crew(4) as crew:
        groups = crew.join_all(2)
        newcomer = PeerIdentity.create("newcomer")
        newer = crew.allowed.add(crew.people[0], newcomer.certificate_pem)
        groups[0].set_allowed(newer)
        with PeerGroup(newcomer, RUN, allowed=newer, heartbeat_s=0.1, dead_after_s=3.0) as group:
            group.join([groups[0].address], timeout_s=20.0)
            calls = [lambda one=one: one.average(0, np.ones(100), 1.0, timeout_s=25.0) for one in (*groups, group)]
            assert all(len(result.members_counted) == 3 for result in together(calls))


@pytest.mark.parametrize(
    ("settings_", "text"),
    [
        ({"bandwidth": Bandwidth(up_mbps=0.0, down_mbps=5.0)}, "0 Mbit/s up and 5 down"),
        ({"bandwidth": Bandwidth(up_mbps=float("nan"), down_mbps=5.0)}, "nan Mbit/s up"),
        ({"heartbeat_s": 5.0, "dead_after_s": 1.0}, "heartbeat_s = 5 and dead_after_s = 1"),
        ({"norm_limit": 0.5}, "0.5 drops ordinary updates"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings_: dict[str, Any], text: str) -> None:
    with Crew(4) as crew, pytest.raises(UserError) as caught:
        crew.start(0, **settings_)
    assert text in str(caught.value)


def test_a_client_only_peer_cannot_found_a_group_and_a_list_of_a_stranger_is_refused() -> None:
    with Crew(4) as crew:
        group = crew.start(0, client_only=True)
        with pytest.raises(UserError) as caught:
            group.join()
        assert "a client-only peer cannot found a group" in str(caught.value)
        stranger = PeerIdentity.create("stranger")
        theirs = AllowList.create(stranger, RUN.run_id).add(stranger, identities(4)[0].certificate_pem)
        with pytest.raises(UserError) as caught:
            group.set_allowed(theirs)
        assert "of another run or another owner" in str(caught.value)


def knock(address: Any, count: int) -> list[socket.socket]:
    """Callers that say nothing, one after the other."""
    return [socket.create_connection(address, timeout=20.0) for _ in range(count)]


def is_shut(sock: socket.socket) -> bool:
    """Whether the other side has hung up; looks without waiting."""
    sock.setblocking(False)
    try:
        return sock.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


def hang_up(sock: socket.socket) -> None:
    """Wait until the other side does."""
    with suppress(ConnectionError):
        assert sock.recv(1) == b""


def test_strangers_who_say_nothing_push_out_each_other_and_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phalanx.peers.tls_transport.HANDSHAKE_S", 1000.0)  # nobody is sent away for being late
    with Crew(4) as crew:
        groups = crew.join_all(2)
        with ExitStack() as stack:
            strangers = [stack.enter_context(one) for one in knock(groups[0].address, HALF_OPEN)]
            strangers += [stack.enter_context(one) for one in knock(groups[0].address, 1)]
            hang_up(strangers[0])  # the 65th pushed out the first, and no other
            assert not any(map(is_shut, strangers[1:]))
            for _ in range(2):
                strangers += [stack.enter_context(one) for one in knock(groups[0].address, HALF_OPEN)]
            hang_up(strangers[2 * HALF_OPEN])
            assert [is_shut(one) for one in strangers[-HALF_OPEN:]] == [False] * HALF_OPEN
            late = crew.start(2)  # an honest peer is one more caller
            late.join([groups[0].address], timeout_s=20.0)
            calls = [lambda one=one: one.average(0, np.ones(100), 1.0, timeout_s=25.0) for one in groups]
            assert all(len(result.members_counted) == 3 for result in together(calls))
        told = [event.text for event in crew.events[0] if event.kind == "refused"]
        assert not told  # strangers do not fill the record


def test_a_process_without_descriptors_sends_strangers_away_and_takes_callers_again_later() -> None:
    """The kernel's answer is made up, so that it comes when it should."""

    class Listener:
        def __init__(self, real: socket.socket) -> None:
            self.real, self.is_full = real, False
            self.fileno, self.setblocking, self.close = real.fileno, real.setblocking, real.close

        def accept(self) -> Any:
            if self.is_full:
                raise OSError(errno.EMFILE, "Too many open files")
            return self.real.accept()

    async def stand() -> None:
        taken: asyncio.Queue[socket.socket] = asyncio.Queue()

        async def serve(sock: socket.socket, admit: Any) -> None:
            with sock:
                taken.put_nowait(sock)
                await asyncio.Event().wait()

        real = socket.create_server(("127.0.0.1", 0))
        listener = Listener(real)
        door = Doorway(listener, serve)  # type: ignore[arg-type]
        with socket.create_connection(real.getsockname()) as first:
            await taken.get()
            first.setblocking(False)
            listener.is_full = True
            with socket.create_connection(real.getsockname()):
                assert await asyncio.get_running_loop().sock_recv(first, 1) == b""
                while door.is_listening:  # it does not ask again and again
                    await asyncio.sleep(0)
                assert door.guests == 0
                listener.is_full = False
                await taken.get()
        await door.close()

    asyncio.run(asyncio.wait_for(stand(), 30.0))


def test_damaged_state_is_refused_and_the_next_peer_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    good, bad = {"w": b"right" * 100_000}, {"w": b"wrong" * 100_000}
    with Crew(4) as crew:
        groups = crew.join_all(2)
        together([lambda g=g: g.average(0, np.ones(10), 1.0, timeout_s=20.0) for g in groups])
        groups[0].serve_state(lambda: PeerState(round_number=0, tensors=bad))
        groups[1].serve_state(lambda: PeerState(round_number=0, tensors=good))
        listed = describe_state(PeerState(round_number=0, tensors=good))
        monkeypatch.setattr("phalanx.peers.state_transfer.describe_state", lambda state: listed)
        late, found = crew.start(2), {}
        late.join([groups[0].address], timeout_s=20.0)
        assert late.fetch_state(found.__setitem__, timeout_s=30.0) == 0
        assert found == good
        groups[1].serve_state(lambda: None)
        with pytest.raises(SystemFailure) as caught:
            late.fetch_state(found.__setitem__, timeout_s=30.0)
        assert "tensor w does not have the SHA-256 that was announced" in str(caught.value)
        assert "it has no state to give" in str(caught.value)
        monkeypatch.undo()
        evil = [replace_name(listed[0], "../../etc/passwd")]
        monkeypatch.setattr("phalanx.peers.state_transfer.describe_state", lambda state: evil)
        with pytest.raises(SystemFailure):
            late.fetch_state(found.__setitem__, timeout_s=30.0)
        assert list(found) == ["w"]


def replace_name(fact: say.TensorFacts, name: str) -> say.TensorFacts:
    return say.TensorFacts(name=name, size=fact.size, sha256=fact.sha256)


# ---- hostile bytes ---------------------------------------------------------------------------------------------------


@settings(max_examples=300, deadline=None)
@given(data=st.binary(max_size=300))
def test_hostile_messages_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError):
        decode_message(data)


VALID = encode_message(
    say.Ready(
        view_number=1,
        round_number=0,
        weight=1.0,
        norm=1.0,
        values=5,
        codec="fp32",
        top_share=0.5,
        quorum=0,
        grace_s=0.0,
        timeout_s=1.0,
        call=0,
    )
)


@settings(max_examples=300, deadline=None)
@given(at=st.integers(0, len(VALID) - 1), byte=st.integers(0, 255))
def test_a_changed_message_is_a_message_or_refused(at: int, byte: int) -> None:
    changed = VALID[:at] + bytes([byte]) + VALID[at + 1 :]
    try:
        found = decode_message(changed)
    except ValueError:
        return
    assert isinstance(found, say.Ready)
    assert found.weight >= 0.0
    assert 0 <= found.values <= 2**53


class _Transport:
    def set_write_buffer_limits(self, high: int) -> None: ...


class _Writer:
    transport = _Transport()

    def get_extra_info(self, name: str) -> None:
        return None


@settings(max_examples=200, deadline=None)
@given(raw=st.binary(max_size=200), size=st.integers(0, 2**32 - 1), data_bytes=st.integers(0, 2**32 - 1))
def test_hostile_frames_are_refused_before_anything_is_reserved(raw: bytes, size: int, data_bytes: int) -> None:
    async def read() -> None:
        reader = asyncio.StreamReader()
        reader.feed_data(struct.pack("!II", size, data_bytes) + raw)
        reader.feed_eof()
        connection = PeerConnection(reader, _Writer(), peer="x")  # type: ignore[arg-type]
        with pytest.raises((ConnectionError, ValueError)):
            await connection.receive()

    asyncio.run(read())


@pytest.mark.parametrize("version", [3, 5])
def test_another_version_of_the_protocol_is_refused_with_both_numbers(version: int) -> None:
    """Version 3 has no aggregation in its plans: its members would compute other bits."""
    with Crew(4) as crew:
        group = crew.start(0)
        hello = say.Hello(protocol=version, purpose="join", run=RUN, instance="other")
        refusal = group._node.transport._refusal(crew.people[1].fingerprint, hello)
        assert refusal is not None
        assert refusal.what == f"speaks version 4 of the protocol between peers, this side version {version}"
        assert refusal.fix == "install the same version of Phalanx on both"


def test_a_member_that_sends_nonsense_after_its_hello_harms_nobody(tmp_path: Path) -> None:
    """Raw TLS with a good key: random frames on every kind of connection, while the others average."""
    rng = np.random.default_rng(5)
    with Crew(4) as crew:
        groups = crew.join_all(2)
        person = crew.people[3]
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.load_verify_locations(cadata="\n".join(crew.allowed.certificates))
        (tmp_path / "id.pem").write_text(person.key_pem + person.certificate_pem)
        context.load_cert_chain(tmp_path / "id.pem")
        for purpose in ("join", "control", "data", "state"):
            for group in groups:
                with (
                    socket.create_connection(group.address, timeout=10.0) as raw,
                    context.wrap_socket(raw) as sock,
                    suppress(OSError),
                ):
                    hello = encode_message(say.Hello(protocol=1, purpose=purpose, run=RUN, instance="evil"))
                    sock.sendall(struct.pack("!II", len(hello), 0) + hello)
                    for message in (
                        say.Begin(plan=_plan()),
                        say.Commit(key=(2, 0, 1), digest="0" * 64),
                        say.Install(proposal=say.NextView(view=replace(groups[0].view(), number=99, members=()))),
                        say.Prepare(view_number=2, ballot=(2**50, person.id)),
                    ):
                        text = encode_message(message)
                        sock.sendall(struct.pack("!II", len(text), 0) + text)
                    sock.sendall(rng.bytes(5000))
        calls = [lambda one=one: one.average(0, np.ones(9000), 1.0, timeout_s=25.0) for one in groups]
        for result in together(calls):
            assert result.committed, result.reason
            assert len(result.members_counted) == 2


def _plan() -> say.RoundPlan:
    return say.RoundPlan(
        view_number=2,
        round_number=0,
        attempt=1,
        values=2**50,
        codec="fp32",
        top_share=0.1,
        segment=4096,
        weights={"0" * 16: 1.0},
        norms={"0" * 16: 1.0},
        owners={"0" * 16: (0, 2**50)},
        dropped={},
    )


def test_that_its_key_was_revoked_a_peer_believes_the_owner_or_everybody() -> None:
    with Crew(4) as crew:
        groups = crew.join_all(3)
        why = "peer at 127.0.0.1:1: this key was revoked by the run's owner"
        node = groups[2]._node
        for peer, expected in ((crew.people[1].id, False), (crew.people[0].id, True)):
            told, at = threading.Event(), peer
            groups[2]._loop.call_soon_threadsafe(lambda at=at, told=told: (node._on_refused(at, why), told.set()))
            assert told.wait(300.0)
            assert node.is_revoked is expected
        with pytest.raises(UserError) as caught:
            groups[2].average(0, np.ones(100), 1.0)
        assert "this key was revoked by the run's owner" in str(caught.value)
