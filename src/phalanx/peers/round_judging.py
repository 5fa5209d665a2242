"""A member's part in votes on rounds: it judges a round before it is committed, and counts the members' votes."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from phalanx.peers import messages as say
from phalanx.peers.attempt import Attempt
from phalanx.peers.codecs import BadBytes
from phalanx.peers.harm_causes import UpdateHistory, same_updates
from phalanx.peers.harm_votes import ABSTAINED, Ballots, Judgement, RoundTrial
from phalanx.peers.messages import MOST_ACCUSED, RoundPlan

if TYPE_CHECKING:
    from phalanx.peers.peer_node import PeerNode

# Plans of the newest attempts: votes may arrive when the next view has already begun.
KEPT_PLANS = 4


class RoundJudging:
    """Judges rounds and counts accusations; every member counts for itself, so the leader alone excludes no peer."""

    def __init__(self, node: PeerNode) -> None:
        self._node = node
        self._plans: dict[tuple[int, int, int], RoundPlan] = {}
        self._votes: dict[str, say.HarmVote] = {}  # the newest of each voter
        self._history = UpdateHistory()

    def begin(self, plan: RoundPlan) -> None:
        """Register an attempt that has begun, and count the votes on it that have arrived before."""
        self._plans[plan.key] = plan
        self._plans = {key: self._plans[key] for key in sorted(self._plans)[-KEPT_PLANS:]}
        self._count(plan)

    async def judge(self, attempt: Attempt) -> Judgement:
        """Return this member's judgement of an attempt's complete result; it abstains if it cannot evaluate it."""
        judge, plan, node = self._node.settings.judge, attempt.plan, self._node
        if judge is None or node.me not in plan.weights:
            return ABSTAINED

        def evaluate() -> Judgement:
            trial = RoundTrial(
                round_number=plan.round_number,
                weights=plan.weights,
                mean=attempt.result(),
                contributions=attempt.contributions() if plan.gathered else {},
                mean_without=attempt.mean_without,
            )
            return judge(trial)

        try:
            judgement = await asyncio.to_thread(evaluate)
        except BadBytes:
            # The result cannot be decoded; every member detects that when it is committed.
            return ABSTAINED
        repeated = {} if judgement.harms is None else self._repeated(attempt)
        reasons = {**judgement.accused, **repeated}
        accused = {peer: reason[:400] for peer, reason in reasons.items() if peer in plan.weights and peer != node.me}
        if judgement.harms:
            text = f"round {plan.round_number} raises the held-out loss beyond chance"
            node.tell("harmful", text, round_number=plan.round_number)
        return Judgement(
            harms=judgement.harms, accused=dict(sorted(accused.items())[:MOST_ACCUSED]), seconds=judgement.seconds
        )

    def _repeated(self, attempt: Attempt) -> dict[str, str]:
        """Return peers whose update was sent before, with the reason, judged by this member's share of it."""
        for first, second in same_updates(attempt.sketches):
            text = f"it sends the same update as {self._node.name_of(second)}: either may be the copy"
            self._node.tell("doubtful-update", text, peer=first, round_number=attempt.plan.round_number)
        return self._history.repeated(attempt.plan.owners.get(attempt.me, (0, 0)), attempt.sketches)

    def on_committed(self, attempt: Attempt) -> None:
        """Remember the updates of a committed, judged round, to recognise them if they are sent again."""
        share = attempt.plan.owners.get(attempt.me, (0, 0))
        if attempt.plan.judged and share[0] < share[1] and attempt.has_summed_its_share:
            self._history.remember(attempt.plan.round_number, share, attempt.sketches, attempt.mean_sketch())

    def broadcast(self, vote: say.HarmVote) -> None:
        """Send this member's accusations to all other members, and count them here."""
        for peer in self._node.view.ids:
            if peer != self._node.me:
                self._node.links.post(peer, vote)
        self.on_vote(self._node.me, vote)

    def on_vote(self, voter: str, vote: say.HarmVote) -> None:
        """Record a member's accusations, of which the newest vote counts, and count the votes."""
        previous = self._votes.get(voter)
        if previous is None or previous.key < vote.key:
            self._votes = {
                peer: newest for peer, newest in self._votes.items() if self._node.view.member(peer) is not None
            }
            self._votes[voter] = vote
        if (plan := self._plans.get(vote.key)) is not None:
            self._count(plan)

    def _count(self, plan: RoundPlan) -> None:
        """Count the votes on an attempt; if they exclude peers, reject the attempt and exclude them."""
        votes = {
            voter: Judgement(harms=None, accused=vote.accused)
            for voter, vote in self._votes.items()
            if vote.key == plan.key
        }
        excluded = Ballots(voters=frozenset(plan.weights), votes=votes).excluded
        if excluded:
            self._node.rounds.reject(plan.key)
        for peer, reason in excluded.items():
            self._node.exclude(peer, reason, round_number=plan.round_number)
