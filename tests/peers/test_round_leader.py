"""When a leader commits: never before a majority of the view holds the same result and every norm is true."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from phalanx.peers import messages as say
from phalanx.peers.facts import Member, MemberView
from phalanx.peers.round_leader import RoundLeader

IDS = [f"{place:016x}" for place in range(5)]


class Stage:
    """A leader whose messages are only noted."""

    def __init__(self, count: int, client_only: frozenset[int] = frozenset()) -> None:
        members = tuple(
            Member(id=IDS[p], name=f"p{p}", address=("h", 1), instance="i", client_only=p in client_only)
            for p in range(count)
        )
        self.sent: list[say.PeerMessage] = []
        self.view = MemberView(number=3, members=members, next_round=0)
        node: Any = SimpleNamespace(
            me=self.view.leader,
            view=self.view,
            syncing=set(),
            leaving=set(),
            settings=SimpleNamespace(judge=None, norm_limit=10.0, reconnect_s=0.5, aggregation="mean"),
            views=SimpleNamespace(acceptor=SimpleNamespace(is_frozen=False), installed=None),
            links=SimpleNamespace(post=lambda peer, message: None),
            rounds=SimpleNamespace(on_message=lambda peer, message: self.sent.append(message), pending=None),
            tell=lambda *_, **__: None,
            name_of=lambda peer: peer,
        )
        self.node, self.leader = node, RoundLeader(node)
        for peer in self.view.ids:
            self.leader.on_message(peer, ready())

    @property
    def plan(self) -> say.RoundPlan:
        return [one for one in self.sent if isinstance(one, say.Begin)][-1].plan

    @property
    def is_committed(self) -> bool:
        return any(isinstance(one, say.Commit) for one in self.sent)

    def norms(self, square: float = 0.1) -> None:
        for owner in self.plan.owners:
            squares = dict.fromkeys(self.plan.weights, square)
            self.leader.on_message(owner, say.UpdateNorms(key=self.plan.key, squares=squares))

    def have(self, place: int, digest: str = "a") -> None:
        parts = dict.fromkeys(self.plan.owners, digest * 64)
        self.leader.on_message(IDS[place], say.ResultDigest(key=self.plan.key, digest=digest * 64, parts=parts))


def ready() -> say.Ready:
    return say.Ready(
        view_number=3,
        round_number=0,
        weight=1.0,
        norm=1.0,
        values=50_000,
        codec="fp32",
        top_share=0.03,
        quorum=0,
        grace_s=0.0,
        timeout_s=9.0,
        call=0,
    )


@pytest.mark.parametrize(
    ("count", "holders", "commits"),
    [
        (1, [0], True),
        (2, [0], True),  # half, with the lowest id
        (3, [0], False),
        (3, [0, 2], True),
        (4, [0], False),
        (4, [0, 3], True),
        (5, [0, 1], False),
        (5, [0, 1, 4], True),
        (3, [1, 2], False),  # the leader must hold what it commits: others may have to fetch it from there
    ],
)
def test_a_majority_must_hold_the_result(count: int, holders: list[int], commits: bool) -> None:
    stage = Stage(count)
    stage.norms()
    for place in holders:
        stage.have(place)
    assert stage.is_committed == commits


def test_half_without_the_lowest_id_is_no_majority() -> None:
    stage = Stage(4, client_only=frozenset({0}))
    assert stage.view.leader == IDS[1]
    stage.norms()
    stage.have(1)
    stage.have(2)
    assert not stage.is_committed
    stage.have(0)
    assert stage.is_committed


def test_nothing_is_committed_without_norms_or_while_a_new_view_is_under_way() -> None:
    stage = Stage(3)
    for place in range(3):
        stage.have(place)
    assert not stage.is_committed
    stage.node.views.acceptor.is_frozen = True
    stage.norms()
    assert not stage.is_committed


def test_a_norm_that_only_all_owners_together_can_see_drops_the_update() -> None:
    stage = Stage(3)
    for owner in stage.plan.owners:  # each sees less than was stated, all together more
        stage.leader.on_message(owner, say.UpdateNorms(key=stage.plan.key, squares={IDS[1]: 0.9}))
    for place in range(3):
        stage.have(place)
    assert not stage.is_committed
    assert "larger norm" in stage.plan.dropped[IDS[1]]


def test_an_owner_that_sends_different_sums_is_left_out() -> None:
    stage = Stage(3)
    stage.norms()
    stage.have(0)
    first = stage.plan.attempt
    parts = {owner: ("a" if owner != IDS[2] else "b") * 64 for owner in stage.plan.owners}
    stage.leader.on_message(IDS[1], say.ResultDigest(key=stage.plan.key, digest="b" * 64, parts=parts))
    assert not stage.is_committed
    assert stage.plan.attempt == first + 1
    assert IDS[2] in stage.plan.dropped
    assert IDS[2] not in stage.plan.owners
