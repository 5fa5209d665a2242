"""How views are agreed on, under every order of messages that hypothesis thinks of."""

from __future__ import annotations

import itertools
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.peers.facts import Member, MemberView
from phalanx.peers.messages import Accepted, Agreed, Nack, NextView, Prepare, Promise, Propose, RoundPlan
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


def promise(committed: int = 4, held: Accepted | None = None, **changes: object) -> Promise:
    """Of a member that has agreed to nothing."""
    return msgspec.structs.replace(
        Promise(view_number=1, ballot=(9, "a"), committed=committed, accepted=held), **changes
    )


def result(attempt: int, round_number: int = 5, view_number: int = 1) -> Accepted:
    made = msgspec.structs.replace(plan(attempt), round_number=round_number, view_number=view_number)
    return Accepted(plan=made, digest=f"{attempt:064x}")


VIEW = MemberView(number=1, members=tuple(member(place) for place in (1, 2, 3)), next_round=5, history="h")
A, B, C = VIEW.ids


@pytest.mark.parametrize(
    ("promises", "outcome", "holders", "next_round"),
    [
        ({A: promise(), B: promise()}, None, [], 5),
        ({A: promise(2), B: promise(3)}, None, [], 5),  # the candidate knows of more rounds than they do
        ({A: promise(4), B: promise(7)}, None, [], 8),  # and one of them of more than the candidate
        ({C: promise(held=result(1)), B: promise(held=result(1))}, result(1), [B, C], 6),
        ({A: promise(held=result(2)), B: promise(held=result(3)), C: promise(held=result(1))}, result(3), [B], 6),
        ({A: promise(held=result(1, view_number=2)), B: promise(held=result(3))}, result(1, view_number=2), [A], 6),
        ({A: promise(5), B: promise(held=result(1))}, None, [], 6),  # it was committed meanwhile
        ({A: promise(), B: promise(held=result(1, 6))}, None, [], 5),  # of no round that can be next
    ],
)
def test_the_newest_result_that_a_member_holds_is_committed_with_the_view(
    promises: dict[str, Promise], outcome: Accepted | None, holders: list[str], next_round: int
) -> None:
    chosen = choose_proposal(VIEW, promises, joining=(), leaving=())
    assert (chosen.outcome, chosen.holders, chosen.view.next_round) == (outcome, holders, next_round)
    assert (chosen.view.number, chosen.view.ids) == (2, tuple(sorted(promises)))


def test_the_next_view_has_those_who_answered_and_newcomers_by_id() -> None:
    promises, newcomers = {A: promise(), C: promise()}, [member(0), member(9)]
    chosen = choose_proposal(VIEW, promises, joining=newcomers, leaving={member(9).id, C})
    assert chosen.view.ids == (member(0).id, A)


def test_what_any_has_agreed_to_goes_first_and_the_newest_of_that() -> None:
    older, newer = (NextView(view=replace(VIEW, number=2, next_round=number)) for number in (6, 7))
    promises = {
        A: promise(held=result(1), proposal=newer, proposal_ballot=(3, "b")),
        B: promise(proposal=older, proposal_ballot=(2, "c")),
        C: promise(),
    }
    for order in itertools.permutations(promises):
        answers = {peer: promises[peer] for peer in order}
        assert choose_proposal(VIEW, answers, joining=[member(0)], leaving={A}) == newer
    # Half of a proposal, which only a broken peer sends, is none.
    halves = {A: promise(proposal=older), B: promise(proposal_ballot=(3, "b"))}
    assert choose_proposal(VIEW, halves, joining=(), leaving=()).view.next_round == 5


def test_an_acceptor_answers_the_same_ballot_again_and_no_lower_one() -> None:
    acceptor, proposal = Acceptor(VIEW), NextView(view=replace(VIEW, number=2))
    first = Propose(view_number=1, ballot=(1, "a"), proposal=proposal)
    assert isinstance(Acceptor(VIEW).propose(first), Agreed), "also one that was not asked to promise"
    ask, low = Prepare(view_number=1, ballot=(2, "b")), Prepare(view_number=1, ballot=(2, "a"))
    for _ in range(2):
        assert isinstance(acceptor.prepare(ask, committed=4, accepted=None), Promise)
    assert isinstance(acceptor.prepare(low, committed=4, accepted=None), Nack)
    lower = Propose(view_number=1, ballot=low.ballot, proposal=NextView(view=replace(VIEW, number=3)))
    assert acceptor.propose(lower) == Nack(view_number=1, ballot=low.ballot, promised=(2, "b"))
    for _ in range(2):
        same = Propose(view_number=1, ballot=ask.ballot, proposal=proposal)
        assert acceptor.propose(same) == Agreed(view_number=1, ballot=ask.ballot)
    told = acceptor.prepare(Prepare(view_number=1, ballot=(3, "a")), committed=4, accepted=result(1))
    assert told == Promise(
        view_number=1, ballot=(3, "a"), committed=4, accepted=result(1), proposal=proposal, proposal_ballot=(2, "b")
    )


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
