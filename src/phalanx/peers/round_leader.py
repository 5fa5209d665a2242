"""The leader's side of rounds: it collects ready members, plans attempts, and commits or discards rounds."""

from __future__ import annotations

import asyncio
import math
import statistics
import time
from collections.abc import Container
from typing import TYPE_CHECKING

from phalanx.network.slow_codecs import GATHERED_CODECS, cut_shares, encoded_bytes
from phalanx.network.slow_shares import water_filling
from phalanx.peers import messages as say
from phalanx.peers.aggregation import choose_aggregation
from phalanx.peers.attempt import NORM_TOLERANCE, segment_values
from phalanx.peers.facts import Member
from phalanx.peers.harm_votes import AuditSchedule, Ballots, Judgement
from phalanx.peers.messages import PeerMessage, Ready, RoundPlan
from phalanx.peers.screening import UsualUpdate, limit_paces, screen_ready
from phalanx.peers.speed_turns import SpeedTurns
from phalanx.peers.view_agreement import is_majority

if TYPE_CHECKING:
    from phalanx.peers.peer_node import PeerNode

# Higher measured speeds reflect how busy the machines are: 220 and 400 were measured on one loopback.
FAST_MBPS = 200.0
# A link that takes this share of the others' combined speed is not the limit: with three others of 10 Mbit/s, 27 to
# 29 Mbit/s were measured for a faster one.
TAKES_ALL = 0.8


class RoundLeader:
    """The leader's state of the next round; empty on all other members."""

    def __init__(self, node: PeerNode) -> None:
        self._node = node
        self._attempt = 0
        self._last_commit: say.Commit | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._turns = SpeedTurns(node)
        self._began = 0.0  # time at which the current attempt began
        # Time at which the previous round was committed here; 0 for the first round of a view.
        self._opened_at = 0.0
        self._usual_update: UsualUpdate | None = None
        self._audit = AuditSchedule()
        self._clear()

    def _clear(self) -> None:
        """Forget everything about the current round."""
        self._ready: dict[str, Ready] = {}
        self._ready_at: dict[str, float] = {}
        self._excluded: dict[str, str] = {}
        self._plan: RoundPlan | None = None
        self._quorum_at: float | None = None
        self._restart_at: float | None = None
        self._haves: dict[str, say.ResultDigest] = {}
        self._squares: dict[str, dict[str, float]] = {}
        # Votes brought no decision: the round is repeated without votes, because a run that never continues is useless.
        self._is_undecided = False
        # An attempt was harmful: the round is repeated with contributions kept apart.
        self._was_harmful = False

    @property
    def _leads(self) -> bool:
        return self._node.view.leader == self._node.me

    def on_view(self) -> None:
        """Start over in a new view, whose members report again that they are ready."""
        self._attempt, self._last_commit, self._opened_at = 0, None, 0.0
        self._turns.on_view()
        self._clear()

    def on_committed(self) -> None:
        """Start the next round, for which no member is ready yet."""
        self._clear()
        self._opened_at = time.monotonic()

    def greet(self, peer: str) -> None:
        """Send a newly connected member the view, commit and plan that it may have missed."""
        if not self._leads:
            return
        installed = self._node.views.installed
        missed = (say.Install(proposal=installed) if installed else None, self._last_commit)
        for message in missed:
            if message is not None:
                self._node.links.post(peer, message)
        if self._plan is not None:
            self._node.links.post(peer, say.Begin(plan=self._plan))

    def tick(self) -> None:
        """Begin an attempt if waiting has made one possible."""
        if self._leads:
            self._consider()

    def on_message(self, peer: str, message: PeerMessage) -> None:
        """Handle a member's message, or this peer's own."""
        node = self._node
        if not self._leads:
            return
        if isinstance(message, Ready):
            # Raises ValueError for an unknown codec, which a plan would take over; that ends the connection.
            encoded_bytes(message.codec, 0, message.top_share)
            node.syncing.discard(peer)
            if message.view_number == node.view.number and message.round_number == node.view.next_round:
                self._ready[peer] = message
                self._ready_at.setdefault(peer, time.monotonic())
                self._consider()
        elif isinstance(message, say.Withdraw):
            current = message.view_number == node.view.number and message.round_number == node.view.next_round
            if current and peer in self._ready:
                del self._ready[peer]
                if self._plan is not None and peer in self._plan.weights:
                    self._restart(0.0)
        elif self._plan is None or getattr(message, "key", None) != self._plan.key:
            return
        elif isinstance(message, say.AttemptFailed):
            self._on_trouble(peer, message)
        elif isinstance(message, say.UpdateNorms):
            self._squares[peer] = message.squares
            self._try_commit()
        elif isinstance(message, say.ResultDigest):
            self._haves[peer] = message
            self._try_commit()

    def on_timeout(self, round_number: int) -> None:
        """Discard the round on all members if the leader's own call has timed out and it is not committed."""
        node = self._node
        if self._leads and round_number == node.view.next_round and not node.views.acceptor.is_frozen:
            ready = {peer: message for peer, message in self._ready.items() if peer != node.me}
            self._clear()
            self._discard(ready, "the leader waited too long for others")

    def _consider(self) -> None:
        """Begin an attempt if all expected members are ready, or a quorum is and the grace period is over."""
        node, now = self._node, time.monotonic()
        if node.views.acceptor.is_frozen or not self._ready:
            return
        if self._plan is not None and (self._restart_at is None or now < self._restart_at):
            return
        expected = set(node.view.ids) - node.syncing - node.leaving
        if not expected <= set(self._ready):
            rule = self._ready[min(self._ready)]
            if rule.quorum == 0 or len(self._ready) < rule.quorum:
                self._quorum_at = None
                return
            self._quorum_at = now if self._quorum_at is None else self._quorum_at
            if now < self._quorum_at + rule.grace_s:
                self._wake_in(self._quorum_at + rule.grace_s - now)
                return
        if wait_s := self._turns.wait_s(self._ready, now):
            self._wake_in(wait_s)
            return
        self._begin()

    def on_measured(self, peer: str) -> None:
        """End a member's turn to measure its link, and continue the round."""
        self._turns.on_measured(peer)
        self.tick()

    def _begin(self) -> None:
        """Screen the updates, and send a plan of an attempt to all members; discard the round if no update counts."""
        node = self._node
        limits = node.rounds.pending.weight_limits if node.rounds.pending is not None else None
        screened = screen_ready(self._ready, node.settings.norm_limit, limits, self._usual_update)
        dropped = screened.dropped | self._excluded
        dropped = {peer: reason for peer, reason in dropped.items() if peer in self._ready}
        counted = {peer: message for peer, message in self._ready.items() if peer not in dropped}
        if not counted:
            self._discard_all(dropped)
            return
        weights = {peer: screened.weights[peer] for peer in sorted(counted) if screened.weights[peer] > 0.0}
        form = counted[min(weights or counted)]
        stated = {peer: counted[peer].pace for peer in weights if counted[peer].pace > 0.0}
        elapsed = {peer: at - self._opened_at for peer, at in self._ready_at.items()} if self._opened_at else {}
        # With two peers neither can show that the other lies; a vector of one value only shows who is present (`meet`).
        is_judged = node.settings.judge is not None and len(weights) > 2 and form.values > 1 and not self._is_undecided
        self._attempt += 1
        self._plan = RoundPlan(
            view_number=node.view.number,
            round_number=node.view.next_round,
            attempt=self._attempt,
            values=form.values if weights else 0,
            codec=form.codec,
            top_share=form.top_share,
            segment=segment_values(form.codec, form.top_share, is_direct=len(weights) == 2),
            weights=weights,
            norms={peer: counted[peer].norm or 0.0 for peer in weights},
            owners=self._owners(form, [peer for peer in sorted(self._ready) if peer not in self._excluded])
            if weights
            else {},
            dropped=dropped,
            paces={peer: float(f"{pace:.3g}") for peer, pace in limit_paces(stated, weights, elapsed).items()},
            aggregation=choose_aggregation(node.settings.aggregation, codec=form.codec, counted=len(weights))[0],
            present=[peer for peer in sorted(counted) if peer not in weights],
            capped={peer: reason for peer, reason in screened.capped.items() if peer in counted},
            gathered=is_judged and (self._was_harmful or self._audit.is_due),
            judged=is_judged,
        )
        self._restart_at, self._haves, self._squares = None, {}, {}
        self._began = time.monotonic()
        self._to_all(say.Begin(plan=self._plan))

    def _owners(self, form: Ready, ready: list[str]) -> dict[str, tuple[int, int]]:
        """Return each owner's range of values, by the bandwidth of the ready members."""
        values = form.values
        owners = [node_member for peer in ready if (node_member := self._node.view.member(peer)) is not None]
        if all(member.client_only for member in owners):
            return {self._node.me: (0, values)}
        shares = plan_shares(owners, form.codec, self._turns.measured)
        cuts = cut_shares(values, shares)
        return {
            member.id: (cuts[place], cuts[place + 1])
            for place, member in enumerate(owners)
            if cuts[place] < cuts[place + 1] or (values == 0 and place == 0)
        }

    def _discard_all(self, dropped: dict[str, str]) -> None:
        """Discard a round of which no update can be counted."""
        node, number = self._node, self._node.view.next_round
        for peer, reason in dropped.items():
            node.tell("dropped", reason, peer=peer, round_number=number)
        reasons = (
            "; ".join(f"{node.name_of(peer)}: {reason}" for peer, reason in dropped.items()) or "every weight is 0"
        )
        ready = self._ready
        self._clear()
        self._discard(ready, f"no update could be counted ({reasons})"[:400])

    def _discard(self, ready: dict[str, Ready], reason: str) -> None:
        """End the calls of `average` that were ready, and no others: a member may have called again in the meantime."""
        node = self._node
        for peer, call in ready.items():
            message = say.Discard(
                view_number=call.view_number, round_number=call.round_number, call=call.call, reason=reason
            )
            if peer == node.me:
                node.rounds.on_message(peer, message)
            else:
                node.links.post(peer, message)

    def _on_trouble(self, reporter: str, message: say.AttemptFailed) -> None:
        """Handle a failed attempt: begin again at once without a bad update, or later if a peer was not reached."""
        node = self._node
        if message.drop:
            # Only an owner may report an update, as only owners sum them.
            assert self._plan is not None
            if reporter in self._plan.owners and message.peer in self._plan.weights:
                self._excluded[message.peer] = message.reason
                self._restart(0.0)
            return
        # The failure detector may find the peer dead in the meantime; then a new view begins the round again.
        if self._restart_at is None:
            node.tell("trouble", message.reason, peer=message.peer, round_number=node.view.next_round)
            self._restart(node.settings.reconnect_s)

    def _restart(self, delay_s: float) -> None:
        """Begin the round again after a delay, or at once."""
        self._restart_at = time.monotonic() + delay_s
        if delay_s:
            self._wake_in(delay_s)
        else:
            self._consider()

    def _wake_in(self, delay_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(delay_s, self.tick)

    def _try_commit(self) -> None:
        """Commit once a majority of the view including the leader holds the same result and all norms are true.

        Begins the round again without a peer whose norm or sums are false.
        """
        node, plan = self._node, self._plan
        if plan is None or node.views.acceptor.is_frozen or not set(plan.owners) <= set(self._squares):
            return
        own_result = self._haves.get(node.me)
        if own_result is None:
            return
        for peer in plan.weights:
            square = math.fsum(owner_squares.get(peer, 0.0) for owner_squares in self._squares.values())
            if square > (NORM_TOLERANCE * plan.norms[peer]) ** 2 + 1e-30:
                self._excluded[peer] = f"its update has a larger norm than the {plan.norms[peer]:.3g} that it stated"
                self._restart(0.0)
                return
        for result in self._haves.values():
            if result.digest != own_result.digest:
                wrong = [owner for owner, digest in own_result.parts.items() if result.parts.get(owner) != digest]
                for owner in wrong[:1]:
                    self._excluded[owner] = "it sent different sums to different peers"
                self._restart(0.0)
                return
        if plan.judged and not self._is_passed(plan):
            return
        if is_majority(node.view.ids, self._haves):
            if plan.weights:
                norm, weight = statistics.median(plan.norms.values()), statistics.median(plan.weights.values())
                self._usual_update = UsualUpdate(norm=norm, weight=weight)
            self._turns.on_committed(plan, time.monotonic() - self._began)
            self._last_commit = say.Commit(key=plan.key, digest=own_result.digest)
            self._to_all(self._last_commit)

    def _is_passed(self, plan: RoundPlan) -> bool:
        """Return True if the members' votes allow to commit a round; otherwise begin it again where needed."""
        node = self._node
        votes = {peer: Judgement(harms=have.harms, accused=have.accused) for peer, have in self._haves.items()}
        ballots = Ballots(voters=frozenset(plan.weights), votes=votes)
        if excluded := ballots.excluded:
            # The next view excludes them and begins the round again: an attempt in this view could be committed by some
            # members while others have already left it.
            node.rounds.reject(plan.key)
            self._audit = AuditSchedule()  # there may be another liar
            for peer, reason in excluded.items():
                node.exclude(peer, reason, round_number=plan.round_number)
            return False
        if ballots.is_harmful and not plan.gathered:
            text = "the round is not committed: it is repeated to find which update raises the held-out loss"
            node.tell("harmful", text, round_number=plan.round_number)
            self._was_harmful = True
            node.rounds.reject(plan.key)
            self._restart(0.0)
            return False
        if not ballots.is_settled(may_discard=not plan.gathered):
            return False
        # The next view commits a result that a member holds, so it is safe only once a majority holds it.
        objectors = {peer for peer, vote in votes.items() if vote.objects(gathered=plan.gathered)}
        if not is_majority(node.view.ids, set(node.view.ids) - objectors):
            self._is_undecided = True
            self._restart(0.0)
            return False
        if not is_majority(node.view.ids, set(votes) - objectors):
            return False
        if any(vote.harms is not None for vote in votes.values()):
            hid = self._was_harmful and not ballots.is_harmful
            self._audit = self._audit.after_round(gathered=plan.gathered, hid=hid)
        if ballots.is_harmful:
            text = "the round raises the held-out loss, and no single peer is its cause: it is committed"
            node.tell("harmful", text, round_number=plan.round_number)
        return True

    def _to_all(self, message: PeerMessage) -> None:
        node = self._node
        for peer in node.view.ids:
            if peer != node.me:
                node.links.post(peer, message)
        node.rounds.on_message(node.me, message)


def plan_shares(members: list[Member], codec: str = "fp32", measured: Container[str] = ()) -> list[float]:
    """Return the members' shares of the vector by bandwidth; an unknown bandwidth counts as the slowest known one.

    A member in `measured` that took about all that the others can send at once is not limited by its own link; the
    speed of that link is unknown and irrelevant. With a gathered codec every member receives n - 1 vectors,
    independent of the shares, and with equal shares all send the same.
    """
    known_speeds = [member.bandwidth.slower_mbps for member in members if member.bandwidth is not None]
    slowest = min(known_speeds, default=1.0)
    speeds = [member.bandwidth.slower_mbps if member.bandwidth is not None else slowest for member in members]
    speeds = [
        min(speed, FAST_MBPS) if member.id in measured else speed for speed, member in zip(speeds, members, strict=True)
    ]
    total = sum(speeds)
    for place, member in enumerate(members):
        if member.id in measured and speeds[place] > TAKES_ALL * (total - speeds[place]) > 0.0:
            # In effect unlimited: the others' shares become smaller than a share can be.
            speeds[place] = 1e4 * total
    if len(set(speeds)) == 1 or codec in GATHERED_CODECS:
        owners = sum(not member.client_only for member in members)
        return [0.0 if member.client_only else 1.0 / owners for member in members]
    return water_filling(speeds, [member.client_only for member in members])
