"""Votes on rounds that harm the held-out loss, and on the peers that cause it: pure functions (decision 0071).

Every counted member judges a round before it is committed. A round that more than half of them find harmful is not
committed: it is repeated with every member's contribution kept apart, so that each member can find by leave-one-out
whose removal takes the harm away. A peer that more than half of the other counted members accuse is excluded. With
more than two thirds of the counted members honest, liars can neither discard a sound round nor exclude an honest peer,
and cannot keep a harmful round from being discarded.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

import numpy as np

from phalanx.peers.facts import Vector

MIN_ACCUSERS = 2  # with two peers, neither can show that the other lies
# One of so many judged rounds keeps contributions apart although no harm was found. The interval is shorter at first:
# one liar among four peers that sent noise through seven of twelve rounds cost 0.12 nats.
AUDIT_EVERY = 8
# At the start, and after an exclusion: keeping a peer that learnt from wrong labels one round longer cost 0.03 nats.
FIRST_AUDITS = 4
# Rounds with contributions kept apart, after a harmful round was harmless when repeated.
WARY_ROUNDS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundTrial:
    """A round before it is committed: its mean, and each member's contribution if the plan keeps them apart.

    `mean_without` computes the weighted mean without some members, whatever the aggregation; it is called only if
    there are contributions.
    """

    round_number: int
    weights: Mapping[str, float]
    mean: Vector
    contributions: Mapping[str, Vector] = field(default_factory=dict)
    mean_without: Callable[[Collection[str]], Vector] = lambda removed: np.empty(0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Judgement:
    """A member's judgement of a round: `harms` is None if it could not be judged, `accused` holds reasons by peer."""

    harms: bool | None = None
    accused: Mapping[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    def objects(self, *, gathered: bool) -> bool:
        """Return True if this member does not hold the result for the group, so that no later view can commit it.

        A repeated round with contributions kept apart is committed although it harms, if no peer is the cause.
        """
        return bool(self.accused) or (self.harms is True and not gathered)


ABSTAINED = Judgement()


@dataclass(frozen=True, kw_only=True, slots=True)
class Ballots:
    """Votes on one attempt: `voters` may vote, `votes` holds those that have arrived, by voter."""

    voters: frozenset[str]
    votes: Mapping[str, Judgement]

    @property
    def counted(self) -> dict[str, Judgement]:
        """Votes by members that may vote."""
        return {voter: vote for voter, vote in self.votes.items() if voter in self.voters}

    @property
    def is_harmful(self) -> bool:
        """True if more than half of all voters, present or not, find the round harmful."""
        return 2 * sum(vote.harms is True for vote in self.counted.values()) > len(self.voters)

    @property
    def excluded(self) -> dict[str, str]:
        """Peers that more than half of the other voters accuse, with the reason of the first accuser by id."""
        excluded = {}
        for peer in sorted(self.voters):
            reasons = self._accusations(peer)
            if is_enough(len(reasons), len(self.voters - {peer})):
                excluded[peer] = reasons[0]
        return excluded

    def is_settled(self, *, may_discard: bool) -> bool:
        """Return True if missing votes can change no verdict; `may_discard` means that harm discards the round."""
        counted = self.counted
        missing = self.voters - set(counted)
        harmful = sum(vote.harms is True for vote in counted.values())
        if may_discard and not self.is_harmful and 2 * (harmful + len(missing)) > len(self.voters):
            return False
        return not any(
            is_enough(len(self._accusations(peer)) + len(missing - {peer}), len(self.voters - {peer}))
            for peer in self.voters - set(self.excluded)
        )

    def _accusations(self, peer: str) -> list[str]:
        return [
            vote.accused[peer] for voter, vote in sorted(self.counted.items()) if voter != peer and peer in vote.accused
        ]


def is_enough(accusers: int, others: int) -> bool:
    """Return True if `accusers` of `others` other voters exclude a peer.

    >>> [is_enough(accusers, 3) for accusers in range(4)], is_enough(1, 1)
    ([False, False, True, True], False)
    """
    return accusers >= MIN_ACCUSERS and 2 * accusers > others


@dataclass(frozen=True, kw_only=True, slots=True)
class AuditSchedule:
    """The leader's schedule of audits: judged rounds that keep contributions apart although no harm was found."""

    interval: int = 1  # judged rounds from one audit to the next; doubles up to AUDIT_EVERY
    since: int = 0  # judged rounds since contributions were last kept apart
    wary: int = FIRST_AUDITS  # next rounds that are audited in any case

    @property
    def is_due(self) -> bool:
        """True if the next judged round keeps contributions apart."""
        return self.wary > 0 or self.since >= self.interval - 1

    def after_round(self, *, gathered: bool, hid: bool) -> AuditSchedule:
        """Return the schedule after a judged round.

        `hid` means that a harmful round was harmless when it was repeated, so that a liar may hide from audits.
        """
        wary = WARY_ROUNDS if hid else max(0, self.wary - 1)
        interval = min(2 * self.interval, AUDIT_EVERY) if gathered and not self.wary else self.interval
        return AuditSchedule(interval=interval, since=0 if gathered else self.since + 1, wary=wary)
