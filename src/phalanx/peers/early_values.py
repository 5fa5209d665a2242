"""Values sent before the leader has announced the round's plan, which saves two peers a round trip (decision 0045).

Two peers that did the last round alone will most likely do the next one in the same way. Each sends its values to the
other as soon as it is ready, as an attempt with the key and layout that the leader will most likely choose; the other
does not use them before the leader's plan has arrived. If the plan differs, they are dropped and sent again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from phalanx.peers.attempt import Attempt, PendingAverage
from phalanx.peers.couriers import AttemptSending
from phalanx.peers.messages import RoundPlan

if TYPE_CHECKING:
    from phalanx.peers.peer_node import PeerNode


class StaleValues(Exception):
    """The other member may hold values under the plan's key that do not belong to the plan."""


class EarlyValues:
    """One member's values sent early: at most one attempt that is being sent and has not begun."""

    def __init__(self, node: PeerNode, sending: AttemptSending) -> None:
        self._node, self._sending = node, sending
        # Plan of the last round committed in this view.
        self._last_plan: RoundPlan | None = None
        self._attempt: Attempt | None = None
        self._call = -1  # number of the call of `average` that the values belong to
        self._trouble = ""  # reason why some of the values may not have arrived

    def forget(self) -> None:
        """Forget the last plan at a new view, whose first round may be done differently."""
        self._last_plan = self._attempt = None

    def on_committed(self, plan: RoundPlan) -> None:
        """Expect the next round to be like this one."""
        self._last_plan = plan

    def send(self, pending: PendingAverage, newest: tuple[int, int, int]) -> None:
        """Send the values of a waiting call early, if the view has two members and the last round suggests a plan.

        `newest` is the key of the last attempt that has begun.
        """
        last, node = self._last_plan, self._node
        other_peers = [peer for peer in node.view.ids if peer != node.me]
        if last is None or len(other_peers) != 1 or set(last.weights) != set(node.view.ids) or pending.weight <= 0.0:
            return
        plan = msgspec.structs.replace(last, round_number=pending.round_number, attempt=last.attempt + 1)
        form = (pending.outgoing.size, pending.sender.codec, pending.sender.top_share)
        was_sent = self._attempt is not None and self._attempt.plan.key >= plan.key
        if was_sent or plan.key <= newest or form != (last.values, last.codec, last.top_share):
            return
        attempt = Attempt(plan, node.me, outgoing=pending.outgoing, sender=pending.sender, screen=node.settings.screen)
        if attempt.is_direct(other_peers[0]):
            self._attempt, self._call, self._trouble = attempt, pending.call, ""
            self._sending.start(attempt, self._on_failed, after_others=True)

    def adopt(self, plan: RoundPlan, call: int | None) -> Attempt | None:
        """Return the attempt for a plan whose values were sent early, or None; raises StaleValues.

        `call` is the number of the call that waits here, None if the plan does not count this member.
        """
        attempt, self._attempt = self._attempt, None
        if attempt is None or attempt.plan.key != plan.key:
            return None
        if self._call != call or self._trouble or not attempt.adopt(plan):
            raise StaleValues(self._trouble or "values went out early that are not those of the round")
        return attempt

    def on_link_lost(self, peer: str) -> None:
        """Record that values may be lost with a broken connection."""
        self._trouble = self._trouble or f"the connection to {self._node.name_of(peer)} broke"

    def _on_failed(self, peer: str, why: str) -> None:
        """Record a failed early send; if the attempt has begun meanwhile, report it as the attempt's failure."""
        attempt, reason = self._attempt, f"{self._node.name_of(peer)} was not reached: {why}"
        if attempt is not None:
            self._trouble = reason
        else:
            self._node.rounds.report_trouble(peer, reason)
