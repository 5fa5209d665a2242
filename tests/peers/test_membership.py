"""How views are agreed on, under every order of messages that hypothesis thinks of."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.peers.facts import Member, MemberView
from phalanx.peers.messages import Accepted, Agreed, NextView, Prepare, Promise, Propose, RoundPlan
from phalanx.peers.view_agreement import Acceptor, choose_proposal, is_majority, may_decide


def member(place: int) -> Member:
    return Member(id=f"{place:016x}", name=f"p{place}", address=("127.0.0.1", 1000 + place), instance="i")


def plan(attempt: int) -> RoundPlan:
    return RoundPlan(
        view_number=1,
        round_number=0,
        attempt=attempt,
        values=0,
        codec="fp32",
        top_share=0.03,
        segment=4096,
        weights={},
        norms={},
        owners={},
        dropped={},
    )


@given(count=st.integers(1, 7), data=st.data())
def test_two_sets_that_may_decide_always_meet(count: int, data: st.DataObject) -> None:
    ids = [member(place).id for place in range(count)]
    one = data.draw(st.sets(st.sampled_from(ids)))
    other = data.draw(st.sets(st.sampled_from(ids)))
    if is_majority(ids, one) and is_majority(ids, other):
        assert one & other
    assert not (is_majority(ids, one) and is_majority(ids, set(ids) - one))


@pytest.mark.parametrize("count", range(1, 7))
def test_of_any_two_halves_exactly_one_may_decide(count: int) -> None:
    ids = [member(place).id for place in range(count)]
    for size in range(count + 1):
        for half in itertools.combinations(ids, size):
            assert is_majority(ids, half) != is_majority(ids, set(ids) - set(half))


class Bench:
    """A view whose messages are delivered, delayed and lost at will."""

    def __init__(self, count: int) -> None:
        self.view = MemberView(
            number=1, members=tuple(member(place) for place in range(count)), next_round=0, history="h"
        )
        self.acceptors = {one: Acceptor(self.view) for one in self.view.ids}
        self.held: dict[str, Accepted] = {}
        self.committed: Accepted | None = None
        self.decided: list[NextView] = []
        self.open: list[tuple[tuple[int, str], NextView, set[str]]] = []
        self.counter = 0
        self.attempt = 0

    def hold(self, peers: set[str]) -> None:
        """The leader's next attempt reaches some members, which then hold its result."""
        if self.committed is not None:
            return
        self.attempt += 1
        accepted = Accepted(plan=plan(self.attempt), digest=f"{self.attempt:064x}")
        fresh = {peer for peer in peers if not self.acceptors[peer].is_frozen}
        self.held |= dict.fromkeys(fresh, accepted)
        if is_majority(self.view.ids, fresh):
            self.committed = accepted

    def prepare(self, candidate: str, peers: set[str]) -> None:
        """A candidate asks some members and, with a majority, has a proposal to make."""
        self.counter += 1
        ballot = (self.counter, candidate)
        message = Prepare(view_number=1, ballot=ballot)
        answers = {
            peer: self.acceptors[peer].prepare(message, committed=-1, accepted=self.held.get(peer)) for peer in peers
        }
        promises = {peer: answer for peer, answer in answers.items() if isinstance(answer, Promise)}
        if is_majority(self.view.ids, promises):
            self.open.append((ballot, choose_proposal(self.view, promises, joining=(), leaving=()), set()))

    def propose(self, which: int, peers: set[str]) -> None:
        """One of the proposals reaches some more members."""
        if not self.open:
            return
        ballot, proposal, agreed = self.open[which % len(self.open)]
        message = Propose(view_number=1, ballot=ballot, proposal=proposal)
        agreed |= {peer for peer in peers if isinstance(self.acceptors[peer].propose(message), Agreed)}
        if is_majority(self.view.ids, agreed):
            self.decided.append(proposal)


STEPS = st.lists(
    st.tuples(st.sampled_from(["hold", "prepare", "propose"]), st.integers(0, 6), st.sets(st.integers(0, 4))),
    max_size=25,
)


@settings(max_examples=600, deadline=None)
@given(count=st.integers(2, 5), steps=STEPS)
def test_a_view_has_one_successor_and_a_committed_round_is_in_it(
    count: int, steps: list[tuple[str, int, set[int]]]
) -> None:
    bench = Bench(count)
    ids = bench.view.ids
    for action, number, places in steps:
        peers = {ids[place % count] for place in places}
        if action == "hold":
            bench.hold(peers)
        elif action == "prepare":
            bench.prepare(ids[number % count], peers)
        else:
            bench.propose(number, peers)
    assert len({one.view.ids for one in bench.decided}) <= 1
    for decided in bench.decided:
        assert decided == bench.decided[0]
        if bench.committed is not None:
            assert decided.outcome == bench.committed
            assert decided.view.next_round == 1


def test_a_frozen_member_holds_nothing_new_and_newcomers_are_in_the_next_view() -> None:
    bench = Bench(3)
    ids = bench.view.ids
    bench.prepare(ids[0], set(ids[:2]))
    bench.hold(set(ids[:2]))
    assert bench.committed is None
    promises = {
        peer: bench.acceptors[peer].prepare(Prepare(view_number=1, ballot=(9, ids[0])), committed=-1, accepted=None)
        for peer in ids
    }
    chosen = choose_proposal(bench.view, promises, joining=[member(4)], leaving={ids[1]})  # type: ignore[arg-type]
    assert chosen.view.ids == (ids[0], ids[2], member(4).id)
    restarted = replace(member(2), instance="other")
    chosen = choose_proposal(bench.view, promises, joining=[restarted], leaving=set())  # type: ignore[arg-type]
    assert chosen.view.member(restarted.id) == restarted


@pytest.mark.parametrize("count", range(1, 5))
def test_sets_that_may_decide_meet_whoever_has_heard_of_a_revocation(count: int) -> None:
    """Of two that know different lists: they share a member, unless the newer list revoked all of the other."""
    ids = [member(place).id for place in range(count)]
    every = [set(found) for size in range(count + 1) for found in itertools.combinations(ids, size)]
    for older, newer in itertools.product(every, every):
        if not older <= newer:
            continue
        for one, other in itertools.product(every, every):
            if may_decide(ids, one, older) and may_decide(ids, other, newer):
                assert (one - older) & (other - newer) or one - older <= newer
        assert may_decide(ids, set(ids), newer) == bool(set(ids) - newer)
        assert not may_decide(ids, newer, newer)
    for one in every:
        assert may_decide(ids, one, set()) == is_majority(ids, one)
