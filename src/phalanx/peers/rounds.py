"""A member's side of rounds: its attempts, the results it holds, and the call of `average` that waits."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from phalanx.errors import mistake
from phalanx.peers import messages as say
from phalanx.peers.aggregation import choose_aggregation
from phalanx.peers.attempt import Attempt, BadUpdate, PendingAverage, check_derived, check_plan, sum_of_squares
from phalanx.peers.codecs import BadBytes, Sender
from phalanx.peers.couriers import AttemptSending
from phalanx.peers.early_values import EarlyValues, StaleValues
from phalanx.peers.facts import RoundResult, Vector
from phalanx.peers.frames import PeerConnection
from phalanx.peers.harm_votes import ABSTAINED, Judgement
from phalanx.peers.messages import Accepted, NextView, PeerMessage, RoundPlan
from phalanx.peers.round_judging import RoundJudging

if TYPE_CHECKING:
    from phalanx.peers.peer_node import PeerNode

KEPT_ROUNDS = 3  # results kept for members that were late, or have just fetched the state
Key = tuple[int, int, int]


class RoundKeeper:
    """A member's attempts, results, and the call of `average` that waits for a round."""

    def __init__(self, node: PeerNode) -> None:
        self._node = node
        # The newest attempt whose result this member has complete, and has reported to the leader.
        self.accepted: Accepted | None = None
        self.pending: PendingAverage | None = None
        self._attempts: dict[Key, Attempt] = {}
        self._sending = AttemptSending(node)
        self._early = EarlyValues(node, self._sending)
        self._results: dict[int, Attempt] = {}
        self._newest: Key = (0, 0, 0)
        # By peer and round, the attempt whose result that peer is sending.
        self._handed: dict[tuple[str, int], Key] = {}
        # Rounds to fetch, and the members that may have them, the next one to ask first.
        self._wanted: dict[int, list[str]] = {}
        self._moved_at = time.monotonic()
        self._begun = asyncio.Event()
        self._calls = 0
        self._fallback = ""  # reason for an aggregation other than the configured one
        self.judging = RoundJudging(node)
        self.must_fetch = ""  # reason to fetch the state before the next round; "" for none

    @property
    def committed(self) -> int:
        """Number of the last round that this member knows to be committed."""
        return self._node.view.next_round - 1

    async def average(
        self,
        round_number: int,
        vector: Vector,
        weight: float,
        sender: Sender,
        *,
        timeout_s: float,
        quorum: int,
        grace_s: float,
        weight_limits: Mapping[str, float] | None = None,
    ) -> RoundResult:
        """See `PeerGroup.average`."""
        if self.pending is not None:
            raise mistake("average", f"round {self.pending.round_number} is not over", fix="one call at a time")
        pending = self.pending = PendingAverage(
            round_number=round_number,
            outgoing=sender.outgoing(vector),
            kind=vector.dtype,
            weight=weight,
            sender=sender,
            timeout_s=timeout_s,
            quorum=quorum,
            grace_s=grace_s,
            future=asyncio.get_running_loop().create_future(),
            began=time.monotonic(),
            call=self._calls,
            weight_limits=weight_limits,
        )
        self._calls += 1
        if self.must_fetch:
            self.pending = None
            return self._failure(pending, self.must_fetch, behind=True)
        self._node.set_syncing(False)
        try:
            self._look_at_pending()
            async with asyncio.timeout(timeout_s):
                return await pending.future
        except TimeoutError:
            self._give_up(pending)
            why = "too few peers are reachable" if self._node.views.is_stuck else "not everybody was ready"
            return self._failure(pending, f"no result within {timeout_s:g} s: {why}")
        finally:
            self.pending = None

    def say_ready(self) -> None:
        """Report to the leader that this member is ready for its round; repeated in every view."""
        pending, view = self.pending, self._node.view
        if pending is None or pending.round_number != view.next_round or view.member(self._node.me) is None:
            return
        square, pace = sum_of_squares(pending.outgoing), self._node.progress[self._node.me].samples_per_s
        # First the early values: the leader may be this member, and would begin the attempt at once.
        self._early.send(pending, self._newest)
        self._to_leader(
            say.Ready(
                view_number=view.number,
                round_number=pending.round_number,
                weight=pending.weight,
                norm=math.sqrt(square) if square <= say.MOST_NORM**2 else None,
                values=pending.outgoing.size,
                codec=pending.sender.codec,
                top_share=pending.sender.top_share,
                quorum=pending.quorum,
                grace_s=pending.grace_s,
                timeout_s=pending.timeout_s,
                call=pending.call,
                pace=pace if math.isfinite(pace) and pace > 0.0 else 0.0,
            )
        )

    def fail_pending(self, why: str, *, behind: bool = False) -> None:
        """Answer the waiting call of `average`, if there is one, with a failed round."""
        pending = self.pending
        if pending is not None and not pending.future.done():
            pending.future.set_result(self._failure(pending, why, behind=behind))

    def fetch_first(self, why: str) -> None:
        """Refuse rounds until this member has fetched the state."""
        self.must_fetch = why
        self.fail_pending(why, behind=True)
        self._node.set_syncing(True)

    def tick(self) -> None:
        """Request a committed result again if nothing has arrived for `dead_after_s`."""
        stalled = time.monotonic() - self._moved_at > self._node.settings.dead_after_s
        incomplete = [
            attempt.plan.round_number
            for attempt in self._attempts.values()
            if attempt.commit_digest and not attempt.is_whole
        ]
        if stalled and (incomplete or self._wanted):
            self._moved_at = time.monotonic()
            for number in {*incomplete, *self._wanted}:
                self._ask(number)

    # ---- one attempt ------------------------------------------------------------------------------------------------

    def on_message(self, peer: str, message: PeerMessage) -> None:
        """Handle a control message from the leader, or from a member that this one asked."""
        view = self._node.view
        if isinstance(message, say.Begin) and peer == view.leader and message.plan.view_number == view.number:
            self._begin(message.plan)
        elif isinstance(message, say.Commit) and peer == view.leader and message.key[0] == view.number:
            self._learn_commit(message.key, message.digest)
        elif isinstance(message, say.Discard) and peer == view.leader and message.view_number == view.number:
            # A Discard sent before this member called again refers to the earlier call, which has ended.
            if self.pending is not None and self.pending.call == message.call:
                self._node.tell("discarded", message.reason, round_number=message.round_number)
                self.fail_pending(message.reason)
        elif isinstance(message, say.HarmVote):
            self.judging.on_vote(peer, message)
        elif isinstance(message, say.ResultRequest):
            self._node.spawn(self._hand_out(peer, message.round_number))
        elif isinstance(message, say.ResultForgotten) and peer in self._wanted.get(message.round_number, ()):
            self._wanted[message.round_number].remove(peer)
            self._ask(message.round_number)

    def _begin(self, plan: RoundPlan) -> None:
        """Begin an attempt by the leader's plan, after checking the plan, and send this member's values."""
        node = self._node
        if plan.key <= self._newest or node.views.acceptor.is_frozen or plan.round_number != node.view.next_round:
            return
        if objection := check_plan(plan, node.view, most_values=node.settings.limits.values):
            node.tell("refused", f"a plan of round {plan.round_number} was refused: {objection}", peer=node.view.leader)
            return
        pending = self.pending
        aggregation, reason = choose_aggregation(node.settings.aggregation, codec=plan.codec, counted=len(plan.weights))
        is_same = pending is not None and pending.round_number == plan.round_number
        limits = pending.weight_limits if pending is not None and is_same else None
        if objection := check_derived(plan, aggregation=aggregation, weight_limits=limits):
            node.tell("refused", f"a plan of round {plan.round_number} was refused: {objection}", peer=node.view.leader)
            return
        if len(plan.weights) > 1 and reason != self._fallback:
            self._fallback = reason
            node.tell("aggregation", reason or f'updates are aggregated by "{aggregation}" again')
        is_counted = node.me in plan.weights
        fits = pending is not None and (pending.round_number, pending.outgoing.size) == (plan.round_number, plan.values)
        if is_counted and not fits:
            self._to_leader(say.Withdraw(view_number=plan.view_number, round_number=plan.round_number))
            return
        counted_call = pending if is_counted else None
        try:
            early = self._early.adopt(plan, counted_call.call if counted_call else None)
        except StaleValues as error:
            # The leader begins again with the next attempt, whose key differs from that of the stale values.
            self._sending.stop()
            self._newest = plan.key
            self._to_leader(say.AttemptFailed(key=plan.key, peer=node.me, reason=str(error)[:400], drop=False))
            return
        attempt = early or Attempt(
            plan,
            node.me,
            outgoing=counted_call.outgoing if counted_call else None,
            sender=counted_call.sender if counted_call else None,
            screen=node.settings.screen,
        )
        self._drop_attempts()
        self._attempts[plan.key] = attempt
        self.accepted = None  # the leader has given up all earlier attempts of this view
        if plan.judged:
            self.judging.begin(plan)
        self._newest = plan.key
        if early is None:
            self._sending.stop()
            key = plan.key

            def failed(peer: str, why: str) -> None:
                self._trouble(key, peer, f"{node.name_of(peer)} was not reached: {why}", drop=False)

            self._sending.start(attempt, failed)
        self._wake()
        self._take(attempt, attempt.take_own_pieces())
        self._progressed(attempt)  # an attempt without values is complete from the beginning

    async def on_data(self, connection: PeerConnection, message: PeerMessage, data: bytes) -> None:
        """Handle values of an attempt.

        Values of an attempt that has not begun here are held back until it does, and block their connection meanwhile.
        """
        if isinstance(message, say.ResultPlan):
            self._on_whole(connection.peer, message.result)
            return
        if not isinstance(message, say.UpdateChunk | say.MeanChunk):
            raise ValueError("only values travel on a data connection")
        deadline = time.monotonic() + 2 * self._node.settings.dead_after_s
        while message.key not in self._attempts and message.key > self._newest and time.monotonic() < deadline:
            if not connection.is_open:
                return
            self._begun.clear()
            try:
                await asyncio.wait_for(self._begun.wait(), self._node.settings.heartbeat_s)
            except TimeoutError:
                continue
        attempt = self._attempts.get(message.key)
        if attempt is None:
            return
        # Values prove that a peer is alive, as a heartbeat does, which may wait behind them on a slow link.
        if (control := self._node.links.control.get(connection.peer)) is not None:
            control.heard_at = time.monotonic()
        self._moved_at = time.monotonic()
        if isinstance(message, say.MeanChunk):
            attempt.take_mean(connection.peer, message.start, data)
            self._progressed(attempt)
        else:
            attempt.bytes_received += len(data)
            means: Iterable[tuple[int, bytes]] = attempt.take_piece(connection.peer, message.start, data)
            # On a thread, so that heartbeats continue, and under a lock, so that one piece is taken at a time.
            if attempt.has_screen:
                try:
                    async with attempt.screening:
                        means = await asyncio.to_thread(list, means)
                except BadUpdate as error:
                    self._trouble(message.key, error.peer, error.reason, drop=True)
                    return
            self._take(attempt, means)

    def _take(self, attempt: Attempt, means: Iterable[tuple[int, bytes]]) -> None:
        """Send each mean that is complete now to all members; report an update that cannot be summed."""
        key, has_means = attempt.plan.key, False
        if self._attempts.get(key) is not attempt:
            return  # given up in the meantime
        try:
            for start, _ in means:
                has_means = True
                self._sending.add_mean(start)
        except BadUpdate as error:
            self._trouble(key, error.peer, error.reason, drop=True)
            return
        if has_means and attempt.has_summed_its_share:
            self._to_leader(say.UpdateNorms(key=key, squares=attempt.squares))
            self._progressed(attempt)

    def _progressed(self, attempt: Attempt) -> None:
        """Report a complete result to the leader, after judging it if the plan requires it.

        From the report on this member holds the result for the group.
        """
        if not attempt.is_whole:
            return
        self._finish()
        self._finish_old(attempt)
        plan = attempt.plan
        frozen = self._node.views.acceptor.is_frozen
        is_next = plan.key == self._newest and plan.round_number == self._node.view.next_round
        if attempt.commit_digest or frozen or not is_next or attempt.is_judging:
            return
        if self._node.settings.judge is not None and plan.judged:
            attempt.is_judging = True
            self._node.spawn(self._judge(attempt))
        else:
            self._accept(attempt, ABSTAINED)

    async def _judge(self, attempt: Attempt) -> None:
        """Judge an attempt on a thread, then report it, unless it was given up in the meantime."""
        judgement = await self.judging.judge(attempt)
        plan, node = attempt.plan, self._node
        is_next = plan.key == self._newest and plan.round_number == node.view.next_round
        if self._attempts.get(plan.key) is attempt and is_next and not node.views.acceptor.is_frozen:
            self._accept(attempt, judgement)

    def _accept(self, attempt: Attempt, judgement: Judgement) -> None:
        """Report a result with this member's vote to the leader; hold it for the group unless the member objects."""
        plan, digest = attempt.plan, attempt.digest()
        if not judgement.objects(gathered=plan.gathered):
            self.accepted = Accepted(plan=plan, digest=digest)
        self._to_leader(
            say.ResultDigest(
                key=plan.key,
                digest=digest,
                parts=attempt.part_digests(),
                harms=judgement.harms,
                accused=dict(judgement.accused),
            )
        )
        if judgement.accused:
            self.judging.broadcast(say.HarmVote(key=plan.key, accused=dict(judgement.accused)))

    def reject(self, key: Key) -> None:
        """Drop an attempt that a vote has discarded; this member no longer holds its result for the group."""
        if self.accepted is not None and self.accepted.plan.key == key:
            self.accepted = None
        attempt = self._attempts.get(key)
        if attempt is not None and not attempt.commit_digest:
            self._drop_attempts()

    def _trouble(self, key: Key, peer: str, reason: str, *, drop: bool) -> None:
        """Report to the leader that an attempt failed because of a peer; with `drop`, its update is to be left out."""
        attempt = self._attempts.get(key)
        if attempt is not None and not attempt.commit_digest:
            self._to_leader(say.AttemptFailed(key=key, peer=peer, reason=reason[:400], drop=drop))

    def report_trouble(self, peer: str, reason: str) -> None:
        """Report to the leader that values of the newest attempt could not be sent to a member."""
        self._trouble(self._newest, peer, reason, drop=False)

    def data_link_lost(self, peer: str) -> None:
        """Request the result again, or report the failure: bytes may be lost with the data connection."""
        self._early.on_link_lost(peer)
        attempt = self._attempts.get(self._newest)
        if attempt is None or self._node.view.member(peer) is None:
            return
        if attempt.commit_digest and not attempt.is_whole:
            self._ask(attempt.plan.round_number)
        elif not attempt.is_whole:
            self._trouble(self._newest, peer, f"the connection to {self._node.name_of(peer)} broke", drop=False)

    # ---- committing -------------------------------------------------------------------------------------------------

    def _learn_commit(self, key: Key, digest: str) -> None:
        """Note that the leader committed an attempt; request the result if this member does not have the attempt."""
        if key[1] < self._node.view.next_round:
            return
        attempt = self._attempts.get(key)
        if attempt is None:
            self._ask(key[1])
            return
        attempt.commit_digest = digest
        self._finish()

    def _finish(self) -> None:
        """Commit, in order, all attempts that are complete here and known to be committed."""
        while True:
            number = self._node.view.next_round
            ready = [
                attempt
                for attempt in self._attempts.values()
                if attempt.plan.round_number == number and attempt.commit_digest and attempt.is_whole
            ]
            if not ready:
                return
            attempt = ready[0]
            if attempt.digest() != attempt.commit_digest:
                self._node.tell("refused", "the result differs from the committed one: it is fetched again")
                attempt.forget_means()
                self._ask(number)
                return
            self._commit(attempt)

    def _commit(self, attempt: Attempt) -> None:
        """Enter a committed attempt: advance the view to the next round, keep the result, and record events."""
        node, plan = self._node, attempt.plan
        number = plan.round_number
        del self._attempts[plan.key]
        node.view = replace(node.view, next_round=number + 1)
        self._results[number] = attempt
        self._results = {
            kept_number: result for kept_number, result in self._results.items() if kept_number > number - KEPT_ROUNDS
        }
        self.accepted = None
        self._wanted.pop(number, None)
        self._early.on_committed(plan)
        attempt.settle()
        self.judging.on_committed(attempt)
        for peer, reason in plan.dropped.items():
            node.tell("dropped", reason, peer=peer, round_number=number)
        for peer, reason in plan.capped.items():
            node.tell("capped", reason, peer=peer, round_number=number)
        text = f"round {number} is committed with {len(plan.weights)} of {len(node.view.members)} members"
        node.tell("committed", text, round_number=number, members=float(len(plan.weights)))
        node.leader.on_committed()
        self._look_at_pending()

    def _look_at_pending(self) -> None:
        """Advance the waiting call: report ready, request the result of its round, or answer it."""
        pending, view = self.pending, self._node.view
        if pending is None or pending.future.done():
            return
        if pending.round_number == view.next_round:
            self.say_ready()
        elif pending.round_number < view.next_round:
            attempt = self._results.get(pending.round_number)
            if attempt is None:
                # A result in `_wanted` is requested already, and `tick` repeats that.
                if pending.round_number not in self._wanted:
                    self._ask(pending.round_number)
            else:
                pending.future.set_result(self._success(pending, attempt))

    def on_view(self, proposal: NextView) -> None:
        """Apply a new view: commit the round it carries, drop other attempts, and advance the waiting call."""
        self._sending.stop()
        self._early.forget()
        target, outcome = self._node.view.next_round, proposal.outcome
        self._newest = max(self._newest, (proposal.view.number, 0, 0))
        if outcome is not None and (carried := self._attempts.get(outcome.plan.key)) is not None:
            carried.commit_digest = outcome.digest
            if carried.is_whole:
                self._node.view = replace(self._node.view, next_round=outcome.plan.round_number)
                self._finish()
        # Rounds committed without this member are over for the group; `average` still requests their results.
        self._node.view = replace(self._node.view, next_round=max(target, self._node.view.next_round))
        self._drop_attempts()
        self.accepted = None
        self._wake()
        self._look_at_pending()

    # ---- results held by other members ------------------------------------------------------------------------------

    def _ask(self, number: int) -> None:
        """Request a committed result from the next member that may have it; if none is left, this member is behind."""
        node = self._node
        if number not in self._wanted:
            holders = self._node.views.installed.holders if self._node.views.installed else []
            candidates = [peer for peer in node.view.ids if peer != node.me]
            self._wanted[number] = sorted(candidates, key=lambda peer: (peer not in holders, peer != node.view.leader))
        remaining = self._wanted[number] = [peer for peer in self._wanted[number] if node.view.member(peer) is not None]
        if remaining:
            self._moved_at = time.monotonic()  # the member has the usual time to answer
            # A member that does not answer is asked again after the others.
            remaining.append(remaining.pop(0))
            node.links.post(remaining[-1], say.ResultRequest(round_number=number))
            return
        del self._wanted[number]
        if self.pending is not None and self.pending.round_number == number:
            text = f"round {number} was committed without this peer, and nobody has its result any more"
            node.set_syncing(True)
            self.fail_pending(text, behind=True)

    async def _hand_out(self, peer: str, number: int) -> None:
        """Send a committed result, or the accepted one, to a member that requested it."""
        attempt = self._results.get(number)
        if attempt is None and self.accepted is not None and self.accepted.plan.round_number == number:
            attempt = self._attempts.get(self.accepted.plan.key)
        if attempt is None:
            self._node.links.post(peer, say.ResultForgotten(round_number=number))
            return
        try:
            link = await self._node.links.data_link(peer, self._node.settings.dead_after_s)
            await link.send(say.ResultPlan(result=Accepted(plan=attempt.plan, digest=attempt.digest())))
            for start, data in attempt.means():
                await link.send(say.MeanChunk(key=attempt.plan.key, start=start), data)
        except (OSError, TimeoutError):
            return  # the peer requests it again

    def _on_whole(self, peer: str, result: Accepted) -> None:
        """Begin to receive a requested result from a member."""
        number = result.plan.round_number
        if number not in self._wanted and not any(
            candidate.commit_digest and candidate.plan.round_number == number for candidate in self._attempts.values()
        ):
            return
        if objection := check_plan(result.plan, None, most_values=self._node.settings.limits.values):
            self._node.tell("refused", f"a result of round {number} was refused: {objection}")
            return
        attempt = self._attempts.get(result.plan.key)
        if attempt is None:
            # At most one result per peer and round, as incomplete ones are kept until they are complete.
            self._handed = {place: key for place, key in self._handed.items() if key in self._attempts}
            self._attempts.pop(self._handed.get((peer, number), result.plan.key), None)
            self._handed[peer, number] = result.plan.key
            attempt = self._attempts[result.plan.key] = Attempt(result.plan, self._node.me)
        attempt.commit_digest = attempt.commit_digest or result.digest
        self._finish_old(attempt)
        self._wake()

    def _finish_old(self, attempt: Attempt) -> None:
        """Answer the waiting call with a complete result of a round that the group has already passed."""
        plan = attempt.plan
        if not attempt.is_whole or plan.round_number >= self._node.view.next_round:
            return
        self._attempts.pop(plan.key, None)
        if attempt.digest() == attempt.commit_digest:
            self._results[plan.round_number] = attempt
            self._wanted.pop(plan.round_number, None)
            self._look_at_pending()

    # ---- helpers ----------------------------------------------------------------------------------------------------

    def _give_up(self, pending: PendingAverage) -> None:
        """Withdraw a call that has timed out; results held here stay, as their round may still be committed."""
        node, view = self._node, self._node.view
        node.leader.on_timeout(pending.round_number)
        if view.leader != node.me:
            self._to_leader(say.Withdraw(view_number=view.number, round_number=pending.round_number))
        self._wanted.pop(pending.round_number, None)

    def _to_leader(self, message: PeerMessage) -> None:
        leader = self._node.view.leader
        if leader == self._node.me:
            self._node.leader.on_message(leader, message)
        else:
            self._node.links.post(leader, message)

    def _drop_attempts(self) -> None:
        """Drop attempts unless they are committed and incomplete; their traffic is added to the waiting call."""
        for attempt in self._attempts.values():
            if not attempt.commit_digest and self.pending is not None:
                self.pending.bytes_sent += attempt.bytes_sent
                self.pending.bytes_received += attempt.bytes_received
        self._attempts = {
            key: attempt for key, attempt in self._attempts.items() if attempt.commit_digest and not attempt.is_whole
        }

    def _wake(self) -> None:
        self._moved_at = time.monotonic()
        self._begun.set()

    def _success(self, pending: PendingAverage, attempt: Attempt) -> RoundResult:
        """Return the committed result for the waiting call, or a failure if it cannot be used."""
        plan = attempt.plan
        if plan.weights and plan.values != pending.outgoing.size:
            why = f"the committed result has {plan.values:,} values, this peer's update {pending.outgoing.size:,}"
            return self._failure(pending, why, behind=True)
        try:
            vector = attempt.result().astype(pending.kind, copy=False) if plan.weights else None
        except BadBytes as error:
            return self._failure(pending, f"the committed result cannot be decoded: {error}", behind=True)
        return RoundResult(
            round_number=plan.round_number,
            committed=True,
            vector=vector,
            members_counted=tuple(sorted(plan.weights)),
            weights=dict(sorted(plan.weights.items())),
            bytes_sent=pending.bytes_sent + attempt.bytes_sent,
            bytes_received=pending.bytes_received + attempt.bytes_received,
            seconds=time.monotonic() - pending.began,
            dropped=plan.dropped,
            view_number=plan.view_number,
            paces=plan.paces,
            aggregation=plan.aggregation,
            present=tuple(sorted(plan.present)),
            capped=plan.capped,
            shares={peer: (end - begin) / max(1, plan.values) for peer, (begin, end) in plan.owners.items()},
        )

    def _failure(self, pending: PendingAverage, why: str, *, behind: bool = False) -> RoundResult:
        return RoundResult(
            round_number=pending.round_number,
            committed=False,
            reason=why,
            behind=behind,
            seconds=time.monotonic() - pending.began,
            bytes_sent=pending.bytes_sent,
            bytes_received=pending.bytes_received,
            view_number=self._node.view.number,
        )
