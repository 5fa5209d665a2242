"""Pings between real sockets: honest peers, strangers, the dead and the late."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from phalanx.record.events import Event, EventWriter, read_events
from phalanx.train.parallel.dims import ParallelDims
from phalanx.train.telemetry import peer_latency
from phalanx.train.telemetry.peer_latency import (
    BURST,
    LOST_S,
    PACKET_BYTES,
    PENANCE_S,
    PING,
    PONG,
    Packet,
    PeerPair,
    Peers,
    ring_neighbours,
)

KEY = b"k" * 32
SECRET = b"s" * 32


class Board(dict[str, bytes]):
    """A store in this process."""

    def set(self, key: str, value: str) -> None:
        self[key] = value.encode()

    def check(self, keys: list[str]) -> bool:
        return all(key in self for key in keys)

    def get(self, key: str) -> bytes:  # type: ignore[override]
        return self[key]


@contextmanager
def membership(tmp_path: Path, dims: ParallelDims, **changes: Any) -> Iterator[list[Peers]]:
    board = Board()
    with ExitStack() as stack:
        ranks = []
        for rank in range(dims.world):
            events = EventWriter(tmp_path / f"events-{rank:05d}.jsonl", rank=rank)
            settings = {"generation": 7, "secret": SECRET, **changes.get(f"rank_{rank}", {})}
            one = Peers(events, board, rank=rank, dims=dims, address="127.0.0.1", **{"every_s": 0.5, **settings})
            stack.callback(events.close)
            stack.callback(one.close)
            ranks.append(one)
        for one in ranks:
            one.start()
        yield ranks


def told(tmp_path: Path, rank: int) -> list[Event]:
    return [event for event in read_events(tmp_path / f"events-{rank:05d}.jsonl")[0] if event["event"] == "peers"]


def until(ready: Callable[[], object]) -> None:
    end_s = time.monotonic() + 300
    while not ready() and time.monotonic() < end_s:
        time.sleep(0.02)
    assert ready()


def test_every_axis_has_a_ring_of_neighbours() -> None:
    dims = ParallelDims(pipeline=2, data=3, context=2, tensor=4)
    for axis in ("pipeline", "data", "context", "tensor"):
        nexts = {rank: ring_neighbours(rank, dims)[axis] for rank in range(dims.world)}
        assert sorted(nexts.values()) == list(range(dims.world))  # everybody has one that pings it
        rank, seen = 0, 0
        while not seen or rank:
            rank, seen = nexts[rank], seen + 1
        assert seen == getattr(dims, axis)  # around the axis and nowhere else
    assert ring_neighbours(0, ParallelDims()) == {}
    assert ring_neighbours(5, ParallelDims(pipeline=2, tensor=4)) == {"tensor": 6, "pipeline": 1}


def test_ranks_measure_each_other(tmp_path: Path) -> None:
    with membership(tmp_path, ParallelDims(pipeline=2, data=2)):
        until(lambda: all(told(tmp_path, rank) for rank in range(4)))
    first = told(tmp_path, 3)[0]
    assert first["epoch"] == 7
    assert [(pair["axis"], pair["peer"]) for pair in first["pairs"]] == [("data", 2), ("pipeline", 1)]
    for pair in first["pairs"]:
        assert pair["count"] >= 1
        assert pair["lost"] == 0
        assert 0 < pair["p50_s"] <= pair["p99_s"]


def test_a_short_run_tells_at_its_end(tmp_path: Path) -> None:
    slow = {"every_s": 9.0}
    with membership(tmp_path, ParallelDims(tensor=2), rank_0=slow, rank_1=slow) as ranks:
        until(lambda: all(pair.round_trips_s for one in ranks for pair in one._pairs.values()))
    assert [event["pairs"][0]["count"] >= 1 for event in told(tmp_path, 0)] == [True]


def test_a_peer_of_another_generation_or_run_gets_no_answer(tmp_path: Path) -> None:
    with membership(tmp_path, ParallelDims(data=3), rank_1={"generation": 6}, rank_2={"secret": b"o" * 32}) as ranks:
        until(lambda: ranks[0].strangers and ranks[1].strangers and ranks[2].strangers)
        until(lambda: all(told(tmp_path, rank) for rank in range(3)))
    for rank in range(3):
        assert told(tmp_path, rank)[0]["pairs"][0]["p50_s"] is None


def test_a_peer_that_never_comes_costs_nothing(tmp_path: Path) -> None:
    events = EventWriter(tmp_path / "events-00000.jsonl", rank=0)
    dims = ParallelDims(data=2)
    one = Peers(events, Board(), rank=0, dims=dims, generation=1, secret=SECRET, address="127.0.0.1", every_s=0.2)
    one.start()
    until(lambda: told(tmp_path, 0))
    one.close()
    one.close()
    pair = told(tmp_path, 0)[0]["pairs"][0]
    assert pair == {"peer": 1, "axis": "data", "count": 0, "p50_s": None, "p99_s": None, "lost": 0}


def test_packets_are_refused_unless_every_bit_is_right() -> None:
    packet = Packet(kind=PONG, generation=9, source=1, target=2, nonce=b"n" * 16, held_ns=5)
    data = packet.encode(KEY)
    assert len(data) == PACKET_BYTES == 64
    assert Packet.decode(data, KEY) == packet
    assert Packet.decode(data, SECRET) is None
    for place in range(8 * len(data)):
        changed = bytearray(data)
        changed[place // 8] ^= 1 << place % 8
        assert Packet.decode(bytes(changed), KEY) is None
    for wrong in (b"", data[:-1], data + b"\0", b"GET / HTTP/1.1\r\n"):
        assert Packet.decode(wrong, KEY) is None


def test_strangers_are_slowed_down_and_the_ring_goes_on(tmp_path: Path) -> None:
    with membership(tmp_path, ParallelDims(data=2)) as ranks, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as flood:
        where = ranks[0]._sock.getsockname()
        began_s = time.monotonic()
        while not ranks[0].strangers or time.monotonic() - began_s < 0.5:
            flood.sendto(b"x" * 64, where)
        looked_at, taken_s = ranks[0].strangers, time.monotonic() - began_s
        until(lambda: len(told(tmp_path, 1)) >= 2 and told(tmp_path, 1)[-1]["pairs"][0]["p50_s"] is not None)
    assert 0 < looked_at <= BURST * (taken_s / PENANCE_S + 2)


def test_only_an_answer_to_our_own_ping_counts_and_only_once() -> None:
    pair = PeerPair(peer=1, axis="data", sent_ns={b"a": 1_000_000})
    pair.answered(b"b", 2_000_000, 0)
    pair.answered(b"a", 5_000_000, 3_000_000)
    pair.answered(b"a", 9_000_000, 0)
    assert pair.report() == {"peer": 1, "axis": "data", "count": 1, "p50_s": 0.001, "p99_s": 0.001, "lost": 0}


@pytest.mark.parametrize("arrived_ns", [-(10**9), int((LOST_S + 1) * 1e9)])
def test_a_clock_that_was_set_spoils_nothing(arrived_ns: int) -> None:
    pair = PeerPair(peer=1, axis="data", sent_ns={b"a": 0})
    pair.answered(b"a", arrived_ns, 0)
    assert (pair.round_trips_s, pair.sent_ns, pair.lost) == ([], {}, 0)


def test_pings_without_an_answer_are_lost_and_those_under_way_are_not() -> None:
    pair = PeerPair(peer=1, axis="data", sent_ns={b"a": 100, b"b": 200, b"c": 300})
    pair.give_up(250)
    assert pair.report()["lost"] == 2
    assert pair.report()["lost"] == 0
    assert list(pair.sent_ns) == [b"c"]


def test_an_answer_says_how_long_it_was_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time that a busy rank takes to answer is not the network's: it counts from when the kernel saw the ping."""
    board, dims = Board(), ParallelDims(data=2)
    events: Any = None
    one = Peers(events, board, rank=0, dims=dims, generation=1, secret=SECRET, address="127.0.0.1", every_s=1e9)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        asking.bind(("127.0.0.1", 0))
        asking.settimeout(300)
        ping = Packet(kind=PING, generation=1, source=1, target=0, nonce=b"n" * 16)
        sent_ns = time.time_ns()
        asking.sendto(ping.encode(one._key), one._sock.getsockname())
        select.select([one._sock], [], [])  # it lies there, and the rank is busy: its thread is not running
        lay_ns = time.time_ns()
        now_ns = lay_ns + 10**12
        monkeypatch.setattr(peer_latency, "time", SimpleNamespace(time_ns=lambda: now_ns))
        one._take_packets()
        taken_ns = (
            time.time_ns()
        )  # the kernel begins to stamp in the background: until then the stamp is of the reading
        answer = Packet.decode(asking.recv(100), one._key)
    one.close()
    assert answer is not None
    assert (answer.kind, answer.source, answer.target, answer.nonce) == (PONG, 0, 1, b"n" * 16)
    assert now_ns - taken_ns <= answer.held_ns <= now_ns - sent_ns
