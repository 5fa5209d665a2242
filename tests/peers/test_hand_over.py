"""A peer that leaves stays until another has the last result, on a clock that costs no time."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from instant_loop import InstantLoop

from phalanx.peers import group_entry
from phalanx.peers.facts import Member, MemberView
from phalanx.peers.group_entry import GroupEntry

DEAD_S, HEARTBEAT_S, MAX_S = 3.0, 0.5, 20.0


@pytest.mark.parametrize(
    ("peers", "known", "gone", "takes_s", "stays_s"),
    [
        ("ab", {"b": 5}, {}, 0.0, 0.0),  # it has the result of round 5, the last one
        ("ab", {"b": 4}, {}, 0.0, DEAD_S),  # it has not, and takes nothing
        ("ab", {"b": 4}, {}, 7.0, 7.0),  # it takes its time
        ("ab", {"b": 4}, {}, 99.0, MAX_S),  # and has no end
        ("ab", {}, {}, 0.0, DEAD_S),
        ("ab", {"b": 4}, {"suspected": "b"}, 0.0, 0.0),
        ("ab", {"b": 4}, {"leaving": "b"}, 0.0, 0.0),
        ("ab", {"b": 4}, {"revoked": "b"}, 0.0, 0.0),
        ("abc", {"b": 4, "c": 5}, {}, 7.0, 0.0),  # b can ask c
        ("abc", {"b": 4, "c": 5}, {"leaving": "c"}, 7.0, 7.0),
        ("abc", {"b": 4, "c": 4}, {}, 7.0, 7.0),
        ("a", {}, {}, 0.0, 0.0),
    ],
)
def test_a_peer_leaves_once_another_has_what_it_committed(
    monkeypatch: pytest.MonkeyPatch,
    peers: str,
    known: dict[str, int],
    gone: dict[str, str],
    takes_s: float,
    stays_s: float,
) -> None:
    """`takes_s`: for so long the others acknowledge bytes, after which b has the result."""
    loop = InstantLoop()
    monkeypatch.setattr(group_entry, "time", SimpleNamespace(monotonic=loop.time))
    monkeypatch.setattr(group_entry, "MAX_HAND_OVER_S", MAX_S)
    told_at_s: list[float] = []
    control = SimpleNamespace(post=lambda message: told_at_s.append(loop.time()))
    data = SimpleNamespace(moved_bytes=lambda: (int(min(loop.time(), takes_s)), 0))
    members = tuple(Member(id=peer, name=peer, address=("h", 1), instance="i") for peer in peers)
    node: Any = SimpleNamespace(
        me="a",
        view=MemberView(number=1, members=members, next_round=6),
        rounds=SimpleNamespace(committed=5),
        committed=dict(known),
        suspects=lambda: set(gone.get("suspected", "")),
        leaving=set(gone.get("leaving", "")),
        revoked=set(gone.get("revoked", "")),
        links=SimpleNamespace(control={"b": control}, data={"b": data} if "b" in peers else {}),
        views=SimpleNamespace(consider=lambda *_: None),
        settings=SimpleNamespace(dead_after_s=DEAD_S, heartbeat_s=HEARTBEAT_S),
    )
    if takes_s:
        loop.call_later(takes_s, node.committed.update, {"b": 5})
    entry = GroupEntry(node)
    entry.left = True
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(entry.leave())
    assert told_at_s == [pytest.approx(stays_s, abs=0.6)]
    assert node.leaving >= {"a"}


def test_before_the_first_round_there_is_nothing_to_hand_over() -> None:
    node: Any = SimpleNamespace(view=MemberView(number=1, members=(), next_round=3, first_round=3))
    node.rounds, node.me = SimpleNamespace(committed=2), "a"
    asyncio.run(GroupEntry(node)._hand_over())
