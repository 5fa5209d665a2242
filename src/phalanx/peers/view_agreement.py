"""How members agree on the next view, as bookkeeping without sockets or clocks.

The successor of each view is decided once, by Paxos among that view's members: a candidate collects promises of a
majority, takes over what any of them has agreed to before, proposes, and needs a majority to agree. A round is
committed once a majority of the view holds its whole result; whoever has promised holds nothing new in the old view.
Two majorities share a member, so the next view knows of every round that was committed, and two halves of a broken
network never both go on.

Of a view of two, the peer with the lower id is a majority by itself: it may commit a round that the other has not, and
leave. The other is no majority, so that its next view needs the promise of the first, which names the committed round.
Where the first is gone without a promise, the other is stuck and commits nothing, unless the first was revoked or a
person lets the other go on alone: then what the first has committed is no part of the run any more.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from phalanx.peers.facts import Member, MemberView
from phalanx.peers.messages import Accepted, Agreed, Ballot, Nack, NextView, Prepare, Promise, Propose


def is_majority(view: Collection[str], present: Collection[str]) -> bool:
    """Whether those present may decide for a view: more than half, or exactly half with the lowest id.

    >>> is_majority("abcd", "ab"), is_majority("abcd", "cd"), is_majority("abcd", "bcd"), is_majority("abc", "a")
    (True, False, True, False)
    """
    counted = set(view) & set(present)
    if 2 * len(counted) != len(view):
        return 2 * len(counted) > len(view)
    return bool(view) and min(view) in counted


def may_decide(view: Collection[str], present: Collection[str], revoked: Collection[str]) -> bool:
    """Whether those present may decide for a view of which some were revoked, whose votes count nowhere.

    They do where they are a majority of the whole view, or everybody who was not revoked. A majority of those who were
    not revoked would be too few: somebody who has not heard of the revocation yet may be a majority with the revoked.

    >>> may_decide("ab", "b", "a"), may_decide("abc", "ab", "c"), may_decide("abc", "a", "c")
    (True, True, False)
    """
    voters = set(view) - set(revoked)
    counted = voters & set(present)
    return bool(counted) and (counted == voters or is_majority(view, counted))


class Acceptor:
    """What one member has promised and agreed to, of the successor of its view; a new one for every view."""

    def __init__(self, view: MemberView) -> None:
        self.view = view
        self.promised: Ballot | None = None
        self.proposal: NextView | None = None
        self.proposal_ballot: Ballot | None = None

    @property
    def is_frozen(self) -> bool:
        """Whether a next view is under way: this member takes no more results in the old one."""
        return self.promised is not None

    def prepare(self, message: Prepare, *, committed: int, accepted: Accepted | None) -> Promise | Nack:
        """Promise a candidate to listen to no lower ballot, and say what this member knows."""
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
    """What a candidate must propose after a majority has promised.

    What somebody has agreed to already goes first. Otherwise: those who answered and do not leave, and the newcomers;
    the newest attempt that anybody holds whole is committed with the view, as it may have been already.
    """
    agreed = [
        (one.proposal_ballot, one.proposal)
        for one in promises.values()
        if one.proposal_ballot is not None and one.proposal is not None
    ]
    if agreed:
        return max(agreed, key=lambda one: one[0])[1]
    committed = max([view.next_round - 1, *(one.committed for one in promises.values())])
    held = [
        (peer, one.accepted)
        for peer, one in promises.items()
        if one.accepted is not None and one.accepted.plan.round_number == committed + 1
    ]
    outcome = max((one for _, one in held), key=lambda one: one.plan.key, default=None)
    holders = sorted(peer for peer, one in held if one == outcome)
    members = {member.id: member for member in view.members if member.id in promises and member.id not in leaving}
    members |= {member.id: member for member in joining if member.id not in leaving}
    next_round = committed + 1 if outcome is None else committed + 2
    ordered = tuple(members[peer] for peer in sorted(members))
    newer = replace(view, number=view.number + 1, members=ordered, next_round=next_round)
    return NextView(view=newer, outcome=outcome, holders=holders)


def worst_complaints(pairs: Iterable[tuple[str, str]]) -> list[str]:
    """Whom to leave out so that no two remain who cannot reach each other; most complaints first, then the highest id.

    >>> worst_complaints([("a", "c"), ("b", "c")]), worst_complaints([("a", "b")]), worst_complaints([])
    (['c'], ['b'], [])
    """
    left, out = {frozenset(pair) for pair in pairs if pair[0] != pair[1]}, []
    while left:
        count: dict[str, int] = {}
        for pair in left:
            for peer in pair:
                count[peer] = count.get(peer, 0) + 1
        worst = max(count, key=lambda peer: (count[peer], peer))
        out.append(worst)
        left = {pair for pair in left if worst not in pair}
    return out
