"""How members change the view, with messages that a test delivers, delays and loses, on a clock that costs no time."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Collection, Coroutine
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from instant_loop import InstantLoop

from phalanx.errors import UserError
from phalanx.peers import messages as say
from phalanx.peers import view_change
from phalanx.peers.facts import Member, MemberView
from phalanx.peers.messages import Accepted, NextView, PeerMessage, RoundPlan
from phalanx.peers.view_agreement import Acceptor
from phalanx.peers.view_change import ViewKeeper

IDS = "abcde"
DEAD_S, HEARTBEAT_S, RECONNECT_S = 3.0, 0.5, 1.0


def member(peer: str, instance: str = "i", *, client_only: bool = False) -> Member:
    return Member(id=peer, name=f"peer-{peer}", address=("h", 1), instance=instance, client_only=client_only)


def view_of(
    peers: Collection[str], *, number: int = 1, next_round: int = 5, clients: Collection[str] = ()
) -> MemberView:
    members = tuple(member(peer, client_only=peer in clients) for peer in sorted(peers))
    return MemberView(number=number, members=members, next_round=next_round, history="h", first_round=0)


def accepted(attempt: int = 1, round_number: int = 5) -> Accepted:
    plan = RoundPlan(
        view_number=1,
        round_number=round_number,
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
    return Accepted(plan=plan, digest=f"{attempt:064x}")


class Peer:
    """A member without links, rounds or a state of its own: what it is asked to do is noted."""

    def __init__(self, network: Network, me: str, view: MemberView) -> None:
        self.network, self.me, self.view, self.instance = network, me, view, "i"
        self.identity = SimpleNamespace(name=f"peer-{me}")
        self.settings = SimpleNamespace(heartbeat_s=HEARTBEAT_S, dead_after_s=DEAD_S, reconnect_s=RECONNECT_S)
        self.lost: set[str] = set()  # whom it suspects
        self.leaving: set[str] = set()
        self.revoked: set[str] = set()
        self.syncing: set[str] = set()
        self.closing = False
        self.told: list[str] = []
        self.evictions: list[str] = []
        self.fetches: list[str] = []
        self.installed: list[NextView] = []
        self.held: Accepted | None = None
        self.links = SimpleNamespace(post=self._post, absent=set(), control={}, probe=self._probe)
        self.joining = SimpleNamespace(evicted=self.evictions.append, is_rejoining=False)
        self.calls = Counter[str]()
        self.leader = SimpleNamespace(on_view=lambda: self.calls.update(["on_view"]))
        self.rounds = SimpleNamespace(fetch_first=self.fetches.append, on_view=self.installed.append)
        node: Any = self
        self.views = ViewKeeper(node)

    @property
    def is_revoked(self) -> bool:
        return self.me in self.revoked

    def suspects(self) -> set[str]:
        return self.lost & set(self.view.ids)

    def name_of(self, peer: str) -> str:
        return f"peer-{peer}"

    def tell(self, kind: str, text: str, **_: object) -> None:
        self.told.append(f"{kind}: {text}")

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        return asyncio.get_running_loop().create_task(coroutine)

    def view_changed(self) -> None:
        self.calls["view_changed"] += 1
        self.lost &= set(self.view.ids)

    def _post(self, peer: str, message: PeerMessage) -> None:
        self.network.post(self.me, peer, message)

    async def _probe(self, found: Member) -> None:
        self.network.probed.append(found.id)

    def hear(self, peer: str, message: PeerMessage) -> None:
        """As `PeerNode` passes messages on."""
        # What `RoundKeeper` says of itself: the last committed round, and the attempt held whole.
        self.rounds.committed, self.rounds.accepted = self.view.next_round - 1, self.held
        if isinstance(message, say.Install):
            self.views.on_install(message.proposal)
        else:
            self.views.on_message(peer, message)

    def consider(self, complained: Collection[str] = ()) -> None:
        self.rounds.committed, self.rounds.accepted = self.view.next_round - 1, self.held
        self.views.consider(self.suspects(), set(complained))

    @property
    def ids(self) -> str:
        return "".join(self.view.ids)


class Network:
    """Peers of one view; what goes to or comes from those that are `cut` off is lost."""

    def __init__(self, peers: str, **view: Any) -> None:
        self.posted: list[tuple[str, str, PeerMessage]] = []
        self.probed: list[str] = []
        self.cut: set[str] = set()
        self.lost_kinds: tuple[type[PeerMessage], ...] = ()
        self.peers = {peer: Peer(self, peer, view_of(peers, **view)) for peer in peers}

    def __getitem__(self, peer: str) -> Peer:
        return self.peers[peer]

    def post(self, sender: str, receiver: str, message: PeerMessage) -> None:
        self.posted.append((sender, receiver, message))
        if isinstance(message, self.lost_kinds):
            return
        if not {sender, receiver} & self.cut and receiver in self.peers:
            asyncio.get_running_loop().call_soon(self.peers[receiver].hear, sender, message)

    def lose(self, *peers: str) -> None:
        """They die; the others notice."""
        self.cut |= set(peers)
        for peer in self.peers.values():
            peer.lost |= set(peers) - {peer.me}

    def sent(self, kind: type[PeerMessage]) -> list[tuple[str, str]]:
        return [(sender, receiver) for sender, receiver, message in self.posted if isinstance(message, kind)]

    async def settle(self, seconds: float = 20.0) -> None:
        """Members look at who is there at every heartbeat, as nodes do."""
        for _ in range(int(seconds / HEARTBEAT_S)):
            for name, peer in self.peers.items():
                if name not in self.cut:
                    peer.consider()
            await asyncio.sleep(HEARTBEAT_S)


@pytest.fixture
def play() -> Callable[[Callable[[], Coroutine[Any, Any, None]]], None]:
    """Run a scene on a loop that waits for nothing."""

    def run(scene: Callable[[], Coroutine[Any, Any, None]]) -> None:
        random.seed(1)
        with asyncio.Runner(loop_factory=InstantLoop) as runner:
            runner.run(scene())

    return run


Play = Callable[[Callable[[], Coroutine[Any, Any, None]]], None]


# ---- whose turn it is ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lost", "leaving", "clients", "candidate"),
    [
        ("", "", "", ""),  # all are well
        ("d", "", "", "a"),
        ("a", "", "", "b"),  # the lowest that is left
        ("", "a", "", "b"),  # whoever leaves has the next one do it
        ("a", "b", "", "c"),
        ("a", "", "b", "c"),  # a peer that takes no connections cannot lead
        ("c", "ab", "d", "a"),  # none that can lead stays: the lowest of those that leave
        ("abc", "", "", ""),  # too few are left
        ("cd", "", "", "a"),  # half, with the lowest id
        ("ab", "", "", ""),
        ("cd", "", "ab", ""),  # those who are left cannot lead
    ],
)
def test_the_lowest_member_that_stays_and_can_lead_proposes_the_next_view(
    play: Play, lost: str, leaving: str, clients: str, candidate: str
) -> None:
    async def scene() -> None:
        network = Network("abcd", clients=clients)
        network.lose(*lost)
        for name, peer in network.peers.items():
            peer.leaving |= set(leaving)
            if name not in lost:
                peer.consider()
                peer.consider()  # at the next heartbeat: one candidature at a time
        await asyncio.sleep(0)
        assert {sender for sender, _ in network.sent(say.Prepare)} == set(candidate)
        assert len(set(network.sent(say.Prepare))) == len(network.sent(say.Prepare))

    play(scene)


def test_no_view_is_made_that_none_can_lead(play: Play) -> None:
    async def scene() -> None:
        for network in (Network("ab"), Network("abc", clients="c")):
            for peer in network.peers.values():
                peer.leaving |= {"a", "b"}
            await network.settle()
            assert network.sent(say.Prepare)
            assert not network.sent(say.Propose) + network.sent(say.Install)

    play(scene)


def test_a_member_alone_or_revoked_or_not_in_the_view_proposes_nothing(play: Play) -> None:
    async def scene() -> None:
        alone, revoked, outside = Network("a"), Network("ab"), Network("ab")
        alone["a"].leaving.add("a")
        revoked["a"].revoked.add("a")
        outside["a"].view = view_of("bc")
        for network in (alone, revoked, outside):
            network["a"].lost.add("b")
            network["a"].consider()
        await asyncio.sleep(DEAD_S)
        assert not alone.posted + revoked.posted + outside.posted
        assert [network["a"].view.number for network in (alone, revoked, outside)] == [1, 1, 1]
        assert not alone["a"].views.acceptor.is_frozen, "it may do its last round"
        assert not revoked["a"].told + outside["a"].told, "a majority is not theirs to miss"

    play(scene)


def test_too_few_say_so_once_and_go_on_when_the_others_return(play: Play) -> None:
    async def scene() -> None:
        network = Network("abc")
        network["c"].lost |= {"a", "b"}
        network["c"].name_of = {"a": "peer-a", "b": ""}.__getitem__  # type: ignore[method-assign]
        for _ in range(3):
            network["c"].consider()
        assert network["c"].told == [
            "no-majority: 1 of 3 peers are left, which is no majority (lost: b, peer-a): rounds wait until more "
            "return; phalanx peers go-on-alone RUN gives up the lost ones"
        ]
        assert network["c"].views.is_stuck
        network["c"].lost.clear()
        network["c"].consider()
        assert not network["c"].views.is_stuck
        network["c"].lost |= {"a", "b"}
        network["c"].consider()
        assert len(network["c"].told) == 2
        # Revoked members have no vote, and are not missed.
        network["c"].revoked |= {"a", "b"}
        network["c"].consider()
        assert not network["c"].views.is_stuck

    play(scene)


# ---- the next view ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("peers", "lost", "stays"),
    [("abc", "c", "ab"), ("abc", "a", "bc"), ("abcde", "ad", "bce"), ("ab", "b", "a"), ("abcd", "cd", "ab")],
)
def test_those_who_are_left_go_on_in_one_view_with_the_same_rounds(
    play: Play, peers: str, lost: str, stays: str
) -> None:
    async def scene() -> None:
        network = Network(peers)
        network.lose(*lost)
        await network.settle()
        assert [network[peer].ids for peer in stays] == [stays] * len(stays)
        assert {(network[peer].view.number, network[peer].view.next_round) for peer in stays} == {(2, 5)}
        for peer in stays:
            assert [one.split(":")[0] for one in network[peer].told] == ["left"] * len(lost) + ["view"]
            assert network[peer].told[-1] == f"view: view 2: {len(stays)} members, next round 5"
            assert len(network[peer].installed) == network[peer].calls["on_view"] == 1
            assert network[peer].calls["view_changed"] == 1
            assert not network[peer].fetches + sorted(network[peer].syncing)
        # Whoever was lost is told when it is back.
        network.cut.clear()
        network[lost[0]].hear(stays[0], say.Install(proposal=network[stays[0]].installed[0]))
        assert network[lost[0]].evictions == ["view 2 was formed without this peer"]

    play(scene)


@pytest.mark.parametrize("held", ["a", "b", "ab"])
def test_a_result_that_a_member_holds_whole_is_committed_with_the_next_view(play: Play, held: str) -> None:
    async def scene() -> None:
        network = Network("abc")
        for peer in held:
            network[peer].held = accepted()
        network.lose("c")
        await network.settle()
        for peer in "ab":
            (proposal,) = network[peer].installed
            assert (proposal.outcome, proposal.view.next_round) == (accepted(), 6)
            assert proposal.holders == list(held)

    play(scene)


def test_of_two_halves_only_one_commits_though_its_leader_holds_the_result_alone(play: Play) -> None:
    """A view of two: its lower id is a majority, and may commit a round that the other has not."""

    async def cut_off() -> None:
        network = Network("ab")
        network["a"].view = replace(network["a"].view, next_round=6)  # round 5, which b does not know to be committed
        network.lose("a", "b")
        for peer in "ab":
            for _ in range(4):
                network[peer].consider()
                await asyncio.sleep(DEAD_S)
        assert (network["a"].ids, network["a"].view.next_round) == ("a", 6)
        assert (network["b"].ids, network["b"].view.next_round, network["b"].views.is_stuck) == ("ab", 5, True)

    async def leaves() -> None:
        network = Network("ab")
        network["a"].view = replace(network["a"].view, next_round=6)
        for peer in network.peers.values():
            peer.leaving.add("a")
        await network.settle()
        # It has asked for a's promise, which names the last committed round: b never does round 5 otherwise.
        assert (network["b"].ids, network["b"].view.next_round) == ("b", 6)
        assert network["a"].evictions

    async def leaves_unheard() -> None:
        network = Network("ab")
        network["b"].leaving.add("a")
        network.lose("a")
        await network.settle()
        assert (network["b"].ids, network["b"].views.is_stuck) == ("ab", True)

    for scene in (cut_off, leaves, leaves_unheard):
        play(scene)


def test_a_member_that_promised_holds_back_its_own_leader(play: Play) -> None:
    async def scene() -> None:
        network = Network("ab")
        network["a"].leaving.add("a")
        network["a"].hear("b", say.Prepare(view_number=1, ballot=(1, "b")))
        assert network["a"].views.acceptor.is_frozen

    play(scene)


@pytest.mark.parametrize(
    "why",
    ["suspected", "gone", "leaving", "revoked", "the leader closes", "well", "reconnected", "it closes", "it leads"],
)
def test_while_the_leader_lives_no_other_member_freezes_the_view(play: Play, why: str) -> None:
    async def scene() -> None:
        network = Network("abc")
        hears = network["a" if why in ("the leader closes", "it leads") else "c"]
        if why == "suspected":
            hears.lost.add("a")
        elif why in ("gone", "reconnected"):
            hears.links.absent.add("a")
            if why == "reconnected":
                hears.links.control["a"] = object()
        elif why in ("leaving", "revoked"):
            getattr(hears, why).add("a")
        hears.closing = "closes" in why
        hears.hear("b", say.Prepare(view_number=1, ballot=(1, "b")))
        may_freeze = why not in ("well", "reconnected", "it closes", "it leads")
        assert hears.views.acceptor.is_frozen == may_freeze
        (answer,) = [message for _, _, message in network.posted]
        assert isinstance(answer, say.Promise if may_freeze else say.Nack)
        if not may_freeze:
            hears.hear("a", say.Prepare(view_number=1, ballot=(1, "a")))
            assert hears.views.acceptor.is_frozen, "the leader itself may"

    play(scene)


def test_a_candidate_that_was_outbid_tries_again_with_a_higher_ballot(play: Play) -> None:
    async def scene() -> None:
        network = Network("abc")
        network["b"].views.acceptor.promised = (7, "c")  # to a candidate that died
        network.lose("c")
        await network.settle()
        assert (network["a"].ids, network["b"].ids) == ("ab", "ab")
        ballots = [message.ballot[0] for _, _, message in network.posted if isinstance(message, say.Prepare)]
        assert ballots == [1, 8], "just above the one that was promised"

    play(scene)


def test_a_first_ballot_is_higher_than_all_that_were_heard_in_the_view(play: Play) -> None:
    async def scene() -> None:
        network = Network("abc")
        network.lose("a")
        for counter in (7, 3):
            network["b"].hear("c", say.Prepare(view_number=1, ballot=(counter, "c")))
        network["b"].consider()
        await asyncio.sleep(0)
        assert [message.ballot for _, _, message in network.posted if isinstance(message, say.Prepare)] == [(8, "b")]

    play(scene)


def test_a_member_that_froze_for_a_candidate_that_died_begins_a_view_itself(play: Play) -> None:
    async def scene() -> None:
        network = Network("abc")
        network["b"].leaving.add("a")
        network["b"].hear("c", say.Prepare(view_number=1, ballot=(1, "c")))
        network["b"].leaving.clear()
        network["a"].hear("c", say.Propose(view_number=1, ballot=(1, "c"), proposal=next_view("abc")))
        await network.settle()
        assert {network[peer].view.number for peer in "abc"} == {2}

    play(scene)


def next_view(peers: Collection[str], *, number: int = 2, next_round: int = 5, **changes: Any) -> NextView:
    forced_from = changes.pop("forced_from", "")
    view = replace(view_of(peers, number=number, next_round=next_round), **changes)
    return NextView(view=view, forced_from=forced_from)


def test_what_a_member_agreed_to_is_what_the_next_candidate_proposes(play: Play) -> None:
    async def scene() -> None:
        network = Network("abc")
        agreed = next_view("abc", next_round=9)
        network["b"].hear("a", say.Propose(view_number=1, ballot=(3, "a"), proposal=agreed))
        network.lose("a")
        await network.settle(2.0)
        assert network["b"].installed[0] == network["c"].installed[0] == agreed

    play(scene)


def test_votes_for_another_candidature_or_of_another_view_count_for_nothing(play: Play) -> None:
    async def scene() -> None:
        network = Network("abc")
        network.lose("c")
        network.cut.add("b")
        network["a"].consider()
        await asyncio.sleep(0)
        for ballot, number in (((2, "a"), 1), ((1, "b"), 1), ((1, "a"), 2)):
            promise = say.Promise(view_number=number, ballot=ballot, committed=4)
            network["a"].hear("b", promise)
            network["a"].hear("b", say.Agreed(view_number=number, ballot=ballot))
        await asyncio.sleep(2 * DEAD_S)
        assert not network.sent(say.Propose)
        assert network["a"].view.number == 1

    play(scene)


def test_without_the_agreement_of_a_majority_no_view_is_installed(play: Play) -> None:
    async def scene() -> None:
        network = Network("abc")
        network.lose("c")
        network.lost_kinds = (say.Propose,)
        network["a"].consider()
        await asyncio.sleep(2 * DEAD_S)
        assert network.sent(say.Propose)
        assert not network.sent(say.Install)
        assert network["a"].view.number == 1
        # Members have promised: only a next view lets them hold results again.
        network.lost_kinds = ()
        network["a"].lost.clear()
        await network.settle()
        assert network["a"].ids == network["b"].ids == "ab"

    play(scene)


@pytest.mark.parametrize("what", ["nack", "install"])
def test_a_candidature_ends_when_it_is_outbid_or_another_view_is_there(play: Play, what: str) -> None:
    """A majority has promised, and the candidate still waits for the others' answers."""

    async def scene() -> None:
        network = Network("abc")
        network.cut.add("c")
        network["a"].leaving.add("c")
        network["a"].consider()
        await asyncio.sleep(0.1)
        if what == "nack":
            network["a"].hear("c", say.Nack(view_number=1, ballot=(1, "a"), promised=(4, "c")))
            await asyncio.sleep(HEARTBEAT_S)
            network["a"].consider()
            second = (1, (5, "a"))
        else:
            network["a"].hear("b", say.Install(proposal=next_view("abc", next_round=7)))
            network["a"].leaving.add("b")
            await asyncio.sleep(HEARTBEAT_S)
            network["a"].consider()
            second = (2, (1, "a"))
        await asyncio.sleep(0)
        asked = [message for _, receiver, message in network.posted if receiver == "b"]
        assert not network.sent(say.Propose)
        asked = [message for message in asked if isinstance(message, say.Prepare)]
        assert [(message.view_number, message.ballot) for message in asked] == [(1, (1, "a")), second], "at once"
        await asyncio.sleep(0.1)
        assert not network.sent(say.Propose)

    play(scene)


@pytest.mark.parametrize("why", ["revoked", "complained", "leaving"])
def test_who_is_to_go_is_left_out_though_its_promise_came(play: Play, why: str) -> None:
    async def scene() -> None:
        network = Network("abcd")
        network.cut |= {"d"}
        network["a"].consider(complained="c" if why == "complained" else "d")
        await asyncio.sleep(0)
        network["a"].hear("c", say.Promise(view_number=1, ballot=(1, "a"), committed=4))
        if why != "complained":
            getattr(network["a"], why).add("c")
        await asyncio.sleep(2 * DEAD_S)
        assert network["a"].ids == "ab"

    play(scene)


def test_a_connection_that_is_new_is_asked_again_what_it_has_missed(play: Play) -> None:
    async def scene() -> None:
        network = Network("abc")
        network.lose("c")
        network.cut.add("b")
        network["a"].consider()
        await asyncio.sleep(0)
        network.cut.discard("b")
        network["a"].views.greet("c")  # was not asked
        network["a"].views.greet("b")
        await asyncio.sleep(0.1)
        assert network["a"].ids == network["b"].ids == "ab"
        assert network.sent(say.Prepare) == [("a", "b"), ("a", "b")]

    play(scene)


def test_whoever_speaks_of_an_older_view_is_told_the_newest(play: Play) -> None:
    async def scene() -> None:
        network = Network("abc")
        network["a"].hear("b", say.Prepare(view_number=0, ballot=(1, "b")))
        assert network.posted == []  # it is in the first view that it knows
        network["a"].views.install(next_view("abc"))
        network["a"].hear("b", say.Prepare(view_number=1, ballot=(1, "b")))
        network["a"].hear("b", say.Prepare(view_number=3, ballot=(1, "b")))
        assert network.posted == [("a", "b", say.Install(proposal=next_view("abc")))]
        assert not network["a"].views.acceptor.is_frozen

    play(scene)


# ---- coming, leaving, and going on without a majority ----------------------------------------------------------------


@pytest.mark.parametrize(("is_new", "next_round"), [(True, 5), (False, 5), (True, 0)])
def test_a_newcomer_is_admitted_and_fetches_the_state_if_it_has_none(play: Play, is_new: bool, next_round: int) -> None:
    async def scene() -> None:
        network = Network("ab", next_round=next_round)
        network["a"].leaving.add("c")  # it left before
        network["a"].rounds.committed, network["a"].rounds.accepted = next_round - 1, None
        proposal = await network["a"].views.admit(member("c"), is_new=is_new)
        assert proposal is not None
        assert (proposal.view.ids, network["a"].ids) == (("a", "b", "c"), "abc")
        assert network["a"].syncing == ({"c"} if is_new and next_round else set())
        assert network["a"].leaving == set()
        assert "joined: peer-c is a member since view 2" in network["a"].told
        await network.settle(2.0)
        assert network["a"].view.number == 2, "admitted once"

    play(scene)


def test_a_founder_alone_admits_the_second(play: Play) -> None:
    async def scene() -> None:
        network = Network("a")
        network["a"].rounds.committed, network["a"].rounds.accepted = 4, None
        proposal = await network["a"].views.admit(member("b"), is_new=True)
        assert proposal is not None
        assert network["a"].ids == "ab"

    play(scene)


def test_a_newcomer_that_gave_up_is_in_no_later_view(play: Play) -> None:
    async def scene() -> None:
        network = Network("abc")
        network["b"].rounds.committed, network["b"].rounds.accepted = 4, None
        waits = asyncio.create_task(network["b"].views.admit(member("d"), is_new=True))  # it is not b's turn
        await asyncio.sleep(0.1)
        network["b"].views.install(next_view("abc"))
        earlier = next_view("abc", number=3)
        earlier = msgspec.structs.replace(
            earlier, view=replace(earlier.view, members=(*earlier.view.members, member("d", "its earlier process")))
        )
        network["b"].views.install(earlier)
        await asyncio.sleep(0.1)
        assert not waits.done(), "neither of these views has admitted it"
        assert await waits is None
        for peer in "abc":
            network[peer].view = view_of("abc", number=3)
            network[peer].views.acceptor = Acceptor(network[peer].view)
        network.lose("a")
        await network.settle()
        assert network["b"].ids == network["c"].ids == "bc"

    play(scene)


def test_a_newcomer_s_own_earlier_process_is_not_waited_for(play: Play) -> None:
    async def scene() -> None:
        network = Network("abc")
        network.cut.add("c")
        loop = asyncio.get_running_loop()
        network["a"].rounds.committed, network["a"].rounds.accepted = 4, None
        proposal = await network["a"].views.admit(member("c", "another"), is_new=False)
        assert proposal is not None
        found = proposal.view.member("c")
        assert found is not None
        assert found.instance == "another"
        assert loop.time() < DEAD_S

    play(scene)


def test_a_newcomer_that_asks_twice_is_answered_once_and_one_that_cannot_be_admitted_is_told_so(play: Play) -> None:
    async def scene() -> None:
        network = Network("ab")
        network.cut.add("b")
        network["a"].lost.add("b")
        network["a"].leaving |= {"a"}
        network["a"].views.is_stuck = True
        first = asyncio.create_task(network["b"].views.admit(member("c", "one"), is_new=True))
        await asyncio.sleep(1.0)
        second = asyncio.create_task(network["b"].views.admit(member("c", "two"), is_new=True))
        await asyncio.sleep(0.1)
        assert first.done()
        assert first.result() is None
        assert await second is None  # b is not the one whose turn it is
        assert asyncio.get_running_loop().time() == pytest.approx(1.0 + 4 * DEAD_S, abs=0.2)

    play(scene)


def test_a_complaint_of_others_leaves_a_member_out(play: Play) -> None:
    async def scene() -> None:
        network = Network("abc")
        network["a"].consider(complained="c")
        await asyncio.sleep(DEAD_S)
        assert [network[peer].ids for peer in "abc"] == ["ab", "ab", "abc"]
        assert network["c"].evictions == ["view 2 was formed without this peer"]

    play(scene)


def test_a_suspect_that_answers_all_the_same_stays(play: Play) -> None:
    """One that was slow to connect: whoever promises is alive."""

    async def scene() -> None:
        network = Network("abc")
        network["a"].lost.add("b")
        network["a"].consider()
        await asyncio.sleep(0)
        promise = say.Promise(view_number=1, ballot=(1, "a"), committed=4)
        network["a"].hear("b", promise)
        await asyncio.sleep(DEAD_S)
        assert network["a"].ids == "abc"

    play(scene)


@pytest.mark.parametrize(
    ("change", "installs", "is_evicted"),
    [
        ({}, True, False),
        ({"number": 1}, False, False),  # known already
        ({"number": 1, "peers": "bc"}, False, False),
        ({"history": "other"}, False, False),  # of another group
        ({"history": "other", "forced_from": "older", "peers": "bc"}, False, False),
        ({"peers": "bc"}, False, True),
        ({"members": (member("a", "its earlier process"), member("b"))}, False, True),
    ],
)
def test_a_decided_view_is_taken_over_if_it_is_newer_and_has_this_process(
    play: Play, change: dict[str, Any], installs: bool, is_evicted: bool
) -> None:
    async def scene() -> None:
        network = Network("abc")
        network["a"].hear("b", say.Install(proposal=next_view(**({"peers": "ab"} | change))))
        assert bool(network["a"].installed) == installs
        assert bool(network["a"].evictions) == is_evicted

    play(scene)


def test_an_installed_view_begins_with_nothing_of_the_one_before(play: Play) -> None:
    async def scene() -> None:
        network = Network("abcd")
        peer = network["a"]
        peer.hear("a", say.Prepare(view_number=1, ballot=(5, "a")))
        peer.leaving |= {"a", "d", "b"}
        peer.views.is_stuck = True
        assert peer.views.install(next_view("abc"))
        assert (peer.views.acceptor.is_frozen, peer.views.is_stuck) == (False, False)
        assert peer.leaving == {"a", "b"}, "who leaves is still a member, and leaves this view too"
        assert peer.told == ["left: peer-d is no member since view 2", "view: view 2: 3 members, next round 5"]
        assert peer.views.install(next_view("abc")), "again: it is a member"
        assert not peer.views.install(next_view("bc", number=3))
        assert not peer.views.install(next_view("abc", number=3)), "older than that"
        assert len(peer.installed) == 2
        peer.lost.add("b")
        peer.view = view_of("abc", number=3)
        peer.consider()
        ballots = {message.ballot[0] for _, _, message in network.posted if isinstance(message, say.Prepare)}
        assert ballots <= {1}, "ballots of another view count from the beginning"

    play(scene)


@pytest.mark.parametrize(
    ("history", "first_round", "next_round", "syncs"),
    [("h", 0, 5, True), ("h", 5, 5, False), ("other", 0, 5, False)],
)
def test_one_that_comes_to_a_group_with_rounds_behind_it_fetches_the_state(
    play: Play, history: str, first_round: int, next_round: int, syncs: bool
) -> None:
    async def scene() -> None:
        newcomer = Network("e")["e"]
        newcomer.view = MemberView(number=0, members=(), next_round=0, history="" if history == "h" else history)
        proposal = next_view("abe", next_round=next_round, first_round=first_round, history="h" if syncs else history)
        if history == "h" and not syncs:
            proposal = next_view("abe", next_round=next_round, first_round=first_round)
        assert newcomer.views.install(proposal)
        assert (newcomer.syncing == {"e"}) == syncs
        assert newcomer.fetches == []

    play(scene)


def test_a_member_of_another_history_fetches_the_state_first(play: Play) -> None:
    async def scene() -> None:
        network = Network("abc")
        network["c"].view = replace(network["c"].view, number=9)  # views of two histories are not compared
        network["c"].views.install(next_view("ac", history="new", forced_from="older"))
        assert network["c"].fetches == ["the group went on from another state than this peer's"]
        network["b"].views.install(next_view("ab", history="new", forced_from="h"))
        assert network["b"].fetches == [], "it left the old history together with the others"
        newcomer = Network("e")["e"]
        newcomer.view = MemberView(number=0, members=(), next_round=0)
        newcomer.views.install(next_view("abe", history="new", forced_from="h"))
        assert (newcomer.fetches, newcomer.syncing) == ([], {"e"}), "it has no state to give up"

    play(scene)


def test_the_ones_that_are_left_go_on_alone_when_asked_to_and_all_agree(play: Play) -> None:
    async def scene() -> None:
        network = Network("abcde", clients="e")
        network.lose("a", "b", "c")
        network["d"].consider()
        network["e"].consider()
        assert network["d"].views.is_stuck
        network["d"].rounds.committed, network["d"].rounds.accepted = 4, None
        newcomer = asyncio.create_task(network["d"].views.admit(member("f"), is_new=True))
        await asyncio.sleep(0)
        await network["d"].views.go_on_without_lost()
        newcomer.cancel()  # it comes later, to those who went on
        await asyncio.sleep(0)
        assert network["d"].ids == network["e"].ids == "de"
        assert network["d"].view.history == network["e"].view.history != "h"
        assert network["d"].views.forced is not None
        assert network["d"].views.forced.forced_from == "h"
        assert network["d"].told[-1] == (
            "forced: 2 of 5 peers are left, which is no majority (lost: peer-a, peer-b, peer-c): they go on alone, "
            "as was asked for at peer-d"
        )
        # The three were not gone: they are the run, and go on without the two.
        network.cut.clear()
        for peer in "abc":
            network[peer].lost = {"d", "e"}
            network[peer].hear("d", say.Install(proposal=network["d"].views.forced))
        assert network["a"].leaving == {"d", "e"}
        assert network["a"].evictions == []
        await asyncio.sleep(0)
        assert ("a", "b") in network.sent(say.Prepare), "at once"
        assert network["d"].syncing == set(), "its state is that of the new history"
        later = replace(network["d"].view, number=3)
        network["d"].views.install(NextView(view=later))
        assert network["d"].views.forced is not None, "others may still have to be told"
        await network.settle(2.0)
        assert [network[peer].ids for peer in "abc"] == ["abc"] * 3

    play(scene)


def test_going_on_alone_is_refused_where_it_is_not_needed_or_not_agreed(play: Play) -> None:
    async def scene() -> None:
        network = Network("abc")
        with pytest.raises(UserError, match="a majority of the peers is here"):
            await network["a"].views.go_on_without_lost()
        network["a"].view = view_of("bc")
        network["a"].lost |= {"b", "c"}
        with pytest.raises(UserError, match="a majority of the peers is here"):
            await network["a"].views.go_on_without_lost()
        clients = Network("abc", clients="c")
        clients["c"].lost |= {"a", "b"}
        with pytest.raises(UserError, match="no peer that accepts connections is left"):
            await clients["c"].views.go_on_without_lost()
        silent = Network("abcde")
        silent["d"].lost |= {"a", "b", "c"}
        silent.cut.add("e")
        silent["d"].rounds.committed, silent["d"].rounds.accepted = 4, None
        with pytest.raises(UserError, match="did not all agree"):
            await silent["d"].views.go_on_without_lost()
        assert silent["d"].view.number == 1

    play(scene)


def test_what_a_peer_does_when_others_went_on_alone(play: Play) -> None:
    async def scene() -> None:
        forced = next_view("cd", history="new", forced_from="h")
        network = Network("abcd")
        network["c"].hear("d", say.Install(proposal=forced))
        assert network["c"].installed == [], "it sees a majority"
        network["c"].views.is_stuck = True
        network["c"].hear("d", say.Install(proposal=forced))
        assert network["c"].installed == [forced]
        # Half of the view was given up, and comes back to those who went on.
        network["a"].hear("d", say.Install(proposal=forced))
        assert network["a"].evictions == ["the others went on without this peer, as was asked for there"]

    play(scene)


def test_a_lost_connection_is_looked_after_before_the_next_heartbeat(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene() -> None:
        loop, network = asyncio.get_running_loop(), Network("abcd", clients="d")
        monkeypatch.setattr(view_change, "time", SimpleNamespace(monotonic=loop.time))
        peer = network["a"]
        peer.rounds.committed, peer.rounds.accepted = 4, None

        async def look_after(lost: str, *, suspected_after_s: float | None = None) -> float:
            """The time it takes."""
            began_s = loop.time()
            if suspected_after_s is not None:
                loop.call_later(suspected_after_s, peer.lost.add, lost)
            await peer.views.look_after(lost)
            return loop.time() - began_s

        assert await look_after("x") == 0.0
        peer.leaving.add("c")
        assert await look_after("c") == 0.0
        peer.leaving.clear()
        assert network.probed == []
        assert await look_after("b") == pytest.approx(RECONNECT_S, abs=0.1)  # it is back
        assert (network.probed, network.posted) == (["b"], [])
        peer.joining.is_rejoining = True
        assert await look_after("b", suspected_after_s=0.1) == pytest.approx(RECONNECT_S, abs=0.1)
        assert network.posted == []
        peer.joining.is_rejoining = False
        peer.lost.clear()
        network.cut |= {"b", "d"}
        assert await look_after("d", suspected_after_s=0.1) == pytest.approx(HEARTBEAT_S, abs=0.1)
        assert network.probed == ["b", "b"], "d takes no connections"
        await asyncio.sleep(DEAD_S + 0.1)
        assert peer.ids == network["c"].ids == "ac"

    play(scene)


def test_a_member_suspected_after_a_heartbeat_is_left_out_all_the_same(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene() -> None:
        loop, network = asyncio.get_running_loop(), Network("abc")
        monkeypatch.setattr(view_change, "time", SimpleNamespace(monotonic=loop.time))
        network.cut.add("b")
        loop.call_later((HEARTBEAT_S + RECONNECT_S) / 2, network["a"].lost.add, "b")
        network["a"].rounds.committed, network["a"].rounds.accepted = 4, None
        await network["a"].views.look_after("b")
        assert loop.time() == pytest.approx(RECONNECT_S, abs=0.1)
        await asyncio.sleep(0.1)
        assert network["a"].ids == network["c"].ids == "ac"

    play(scene)
