"""Agreement on the next view by Paxos: state and decisions only, without sockets or clocks.

The successor of each view is decided once, by Paxos among that view's members: a candidate collects the promises of a
majority, takes over any proposal that one of them has agreed to before, proposes, and needs a majority to agree. A
round is committed once a majority of the view holds its complete result; a member that has promised accepts no new
result in the old view. Two majorities share a member, so the next view knows of every round that was committed, and
two halves of a broken network never both continue.

In a view of two, the peer with the lower id is a majority by itself: it may commit a round that the other has not, and
leave. The other is not a majority, so its next view needs the promise of the first, which names the committed round. If
the first is gone without a promise, the other is stuck and commits nothing, unless the first was revoked or an
operator lets the other continue alone: then the commits of the first are no longer part of the run.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from phalanx.peers.facts import Member, MemberView
from phalanx.peers.messages import Accepted, Agreed, Ballot, Nack, NextView, Prepare, Promise, Propose


def is_majority(view: Collection[str], present: Collection[str]) -> bool:
    """Return True if the members present may decide for a view: more than half, or exactly half with the lowest id.

    >>> is_majority("abcd", "ab"), is_majority("abcd", "cd"), is_majority("abcd", "bcd"), is_majority("abc", "a")
    (True, False, True, False)
    """
    counted = set(view) & set(present)
    if 2 * len(counted) != len(view):
        return 2 * len(counted) > len(view)
    return bool(view) and min(view) in counted


def may_decide(view: Collection[str], present: Collection[str], revoked: Collection[str]) -> bool:
    """Return True if the members present may decide for a view of which some were revoked; their votes never count.

    The present members decide if they are a majority of the whole view, or all members that were not revoked. A
    majority of those not revoked would be too few: a member that has not learnt of the revocation yet may form a
    majority with the revoked.

    >>> may_decide("ab", "b", "a"), may_decide("abc", "ab", "c"), may_decide("abc", "a", "c")
    (True, True, False)
    """
    voters = set(view) - set(revoked)
    counted = voters & set(present)
    return bool(counted) and (counted == voters or is_majority(view, counted))


class Acceptor:
    """One member's promise and agreement on the successor of its view; every view has a new one."""

    def __init__(self, view: MemberView) -> None:
        self.view = view
        self.promised: Ballot | None = None
        self.proposal: NextView | None = None
        self.proposal_ballot: Ballot | None = None

    @property
    def is_frozen(self) -> bool:
        """True once a next view is under way: this member then accepts no more results in the old one."""
        return self.promised is not None

    def prepare(self, message: Prepare, *, committed: int, accepted: Accepted | None) -> Promise | Nack:
        """Promise a candidate to accept no lower ballot, and state what this member has committed and accepted."""
        ballot = message.ballot
        if self.promised is not None and ballot < self.promised:
            return Nack(view_number=self.view.number, ballot=ballot, promised=self.promised)
        self.promised = ballot
        return Promise(
            view_number=self.view.number,
            ballot=ballot,
            committed=committed,
            accepted=accepted,
            proposal=self.proposal,
            proposal_ballot=self.proposal_ballot,
        )

    def propose(self, message: Propose) -> Agreed | Nack:
        """Agree to a proposal unless a higher ballot was promised."""
        if self.promised is not None and message.ballot < self.promised:
            return Nack(view_number=self.view.number, ballot=message.ballot, promised=self.promised)
        self.promised = self.proposal_ballot = message.ballot
        self.proposal = message.proposal
        return Agreed(view_number=self.view.number, ballot=message.ballot)


def choose_proposal(
    view: MemberView, promises: Mapping[str, Promise], *, joining: Iterable[Member], leaving: Collection[str]
) -> NextView:
    """Return the view that a candidate must propose after a majority has promised.

    A proposal that a member has already agreed to comes first. Otherwise the view consists of the members that have
    promised and do not leave, and the newcomers; the newest attempt whose complete result a member holds is committed
    with it, because it may have been committed already.
    """
    agreed = [
        (promise.proposal_ballot, promise.proposal)
        for promise in promises.values()
        if promise.proposal_ballot is not None and promise.proposal is not None
    ]
    if agreed:
        return max(agreed, key=lambda pair: pair[0])[1]
    committed = max([view.next_round - 1, *(promise.committed for promise in promises.values())])
    results = [
        (peer, promise.accepted)
        for peer, promise in promises.items()
        if promise.accepted is not None and promise.accepted.plan.round_number == committed + 1
    ]
    outcome = max((accepted for _, accepted in results), key=lambda accepted: accepted.plan.key, default=None)
    holders = sorted(peer for peer, accepted in results if accepted == outcome)
    members = {member.id: member for member in view.members if member.id in promises and member.id not in leaving}
    members |= {member.id: member for member in joining if member.id not in leaving}
    next_round = committed + 1 if outcome is None else committed + 2
    ordered = tuple(members[peer] for peer in sorted(members))
    newer = replace(view, number=view.number + 1, members=ordered, next_round=next_round)
    return NextView(view=newer, outcome=outcome, holders=holders)


def worst_complaints(pairs: Iterable[tuple[str, str]]) -> list[str]:
    """Return peers to leave out so that all that remain reach each other; most complaints first, then the highest id.

    >>> worst_complaints([("a", "c"), ("b", "c")]), worst_complaints([("a", "b")]), worst_complaints([])
    (['c'], ['b'], [])
    """
    remaining, worst_peers = {frozenset(pair) for pair in pairs if pair[0] != pair[1]}, []
    while remaining:
        count: dict[str, int] = {}
        for pair in remaining:
            for peer in pair:
                count[peer] = count.get(peer, 0) + 1
        worst = max(count, key=lambda peer: (count[peer], peer))
        worst_peers.append(worst)
        remaining = {pair for pair in remaining if worst not in pair}
    return worst_peers
