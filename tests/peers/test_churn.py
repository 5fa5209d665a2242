"""Peers that die, hang, leave and come late, as processes with real sockets: the others go on, none restarts."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from crew import ProcessPeer
from peer_process import vector_of

VALUES = 60_000


@contextmanager
def processes(count: int, held: int | None = None, **settings: Any) -> Iterator[list[ProcessPeer]]:
    """Peers that have joined; `held` stops in the middle of round 1."""
    peers: list[ProcessPeer] = []
    try:
        for place in range(count):
            hold = {"hold_round": 1} if place == held else {}
            peers.append(ProcessPeer(place, 4, **settings, **hold))
        address = peers[0].join(None)
        for peer in peers[1:]:
            peer.join(address)
        yield peers
    finally:
        for peer in peers:
            peer.close()


def begin(peers: list[ProcessPeer], number: int, **more: Any) -> None:
    for peer in peers:
        peer.tell({"do": "average", "round": number, "values": VALUES, "weight": 1.0, **more})


def said(line: dict[str, Any]) -> str:
    return f"{line['kind']} {line.get('text', '')} {line.get('peer', '')[:4]}"


def check(peers: list[ProcessPeer], counted: list[ProcessPeer], number: int) -> str:
    """All have the mean of those counted, and the same bytes; returns their digest."""
    lines = [peer.wait_for("result", round=number) for peer in peers]
    ids = sorted(peer.id for peer in counted)
    wanted = np.mean([vector_of(peer, number, VALUES) for peer in ids], axis=0)
    for line in lines:
        assert line["committed"], line
        assert line["counted"] == ids, [[said(one) for one in peer.lines] for peer in peers]
        assert np.max(np.abs(np.array(line["head"]) - wanted[:50])) < 1e-12
    assert len({line["digest"] for line in lines}) == 1
    return str(lines[0]["digest"])


@pytest.mark.parametrize("victim", [0, 2])  # the leader, and another
def test_a_peer_killed_in_the_middle_of_a_round(victim: int) -> None:
    with processes(4, held=victim) as peers:
        begin(peers, 0)
        check(peers, peers, 0)
        begin(peers, 1)
        peers[victim].wait_for("held")
        peers[victim].process.send_signal(signal.SIGKILL)
        rest = [peer for place, peer in enumerate(peers) if place != victim]
        check(rest, rest, 1)
        begin(rest, 2)
        check(rest, rest, 2)
        assert all(peer.process.poll() is None for peer in rest)
        assert rest[0].wait_for("left", peer=peers[victim].id)


def test_a_peer_that_hangs_in_the_middle_of_a_round_is_left_out_and_comes_back() -> None:
    with processes(4, held=1, dead_after_s=2.0) as peers:
        begin(peers, 0)
        check(peers, peers, 0)
        begin(peers, 1)
        peers[1].wait_for("held")
        peers[1].process.send_signal(signal.SIGSTOP)
        rest = [peers[0], peers[2], peers[3]]
        digest = check(rest, rest, 1)
        peers[1].tell({"do": "release"})
        peers[1].process.send_signal(signal.SIGCONT)
        peers[1].wait_for("rejoined")
        line = peers[1].wait_for("result", round=1)
        # It learns the round that was committed without it, and is not counted in it.
        assert line["digest"] == digest
        assert line["counted"] == sorted(peer.id for peer in rest)
        begin(peers, 2)
        check(peers, peers, 2)
        assert all(peer.process.poll() is None for peer in peers)


def test_of_two_peers_the_higher_waits_for_the_lower_and_goes_on_alone_only_when_told() -> None:
    with processes(2, dead_after_s=2.0) as (lower, higher):
        begin([lower, higher], 0)
        check([lower, higher], [lower, higher], 0)
        lower.process.send_signal(signal.SIGSTOP)
        begin([lower, higher], 1)
        assert "1 of 2 peers are left, which is no majority (lost: peer-" in higher.wait_for("no-majority")["text"]
        assert not [line for line in higher.lines if line["kind"] == "result" and line["round"] == 1]
        higher.tell({"do": "go-on"})
        assert higher.wait_for("alone")["members"] == [higher.id]
        check([higher], [higher], 1)
        # Once it wakes, the one that was given up learns of it, and brings nothing before it has the others' state.
        lower.process.send_signal(signal.SIGCONT)
        lower.wait_for("rejoined")
        line = lower.wait_for("result", round=1)
        assert line["behind"]
        assert not line["committed"]
        lower.tell({"do": "fetch"})
        assert lower.wait_for("fetched")["round"] == 1
        for number in range(2, 12):  # nobody waits for it until it is heard to have the state
            begin([lower, higher], number)
            lines = [peer.wait_for("result", round=number) for peer in (lower, higher)]
            assert len({line["digest"] for line in lines}) == 1
            if lower.id in lines[0]["counted"]:
                break
        check([lower, higher], [lower, higher], number)


def test_a_late_joiner_gets_the_state_and_takes_part() -> None:
    """Its clocks are years behind: nobody compares times of two machines."""
    with processes(2) as peers:
        for number in range(2):
            begin(peers, number)
            digest = check(peers, peers, number)
        late = ProcessPeer(3, 4, clock_skew_s=-1e8)
        try:
            late.join(peers[0].wait_for("address")["address"])
            assert late.wait_for("address")["next_round"] == 2
            late.tell({"do": "fetch"})
            fetched = late.wait_for("fetched")
            assert fetched["digest"] == digest
            assert (fetched["round"], fetched["step"], fetched["names"]) == (1, "1", ["step", "weights"])
            # Nobody waits for a newcomer until it is heard to have the state: this round counts it, or a later one.
            for number in range(2, 12):
                begin([*peers, late], number)
                lines = [peer.wait_for("result", round=number) for peer in (*peers, late)]
                assert all(line["committed"] for line in lines)
                assert len({line["digest"] for line in lines}) == 1
                if late.id in lines[0]["counted"]:
                    break
            check([*peers, late], [*peers, late], number)
        finally:
            late.close()


def test_peers_leave_one_after_the_other_and_the_last_goes_on_alone() -> None:
    with processes(3) as peers:
        begin(peers, 0)
        check(peers, peers, 0)
        peers[0].tell({"do": "leave"})  # the leader
        peers[0].wait_for("gone")
        peers[0].process.wait(300.0)
        begin(peers[1:], 1)
        check(peers[1:], peers[1:], 1)
        peers[1].tell({"do": "leave"})
        peers[1].wait_for("gone")
        begin(peers[2:], 2)
        check(peers[2:], peers[2:], 2)
