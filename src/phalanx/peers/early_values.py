"""Values that go out before the leader has said how a round is done: it saves two peers a round trip.

Two peers that were alone in the last round most likely do the next one alike. Each sends the other its values as soon
as it is ready, as an attempt of the key and layout that the leader will most likely choose; the other side does not
look at them before the leader's plan is there. Where the plan is another one, they are dropped and sent again.
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
    """The other side holds values under the key of a plan that are not the plan's."""


class EarlyValues:
    """Of one member: at most one attempt that is sent and not begun."""

    def __init__(self, node: PeerNode, sending: AttemptSending) -> None:
        self._node, self._sending = node, sending
        self._last_plan: RoundPlan | None = None  # of the last round that was committed in this view
        self._attempt: Attempt | None = None
        self._call = -1  # whose values they are
        self._trouble = ""  # why they did not all go out

    def forget(self) -> None:
        """A new view: the next round may be done in any way."""
        self._last_plan = self._attempt = None

    def on_committed(self, plan: RoundPlan) -> None:
        """The next round is taken to be like this one."""
        self._last_plan = plan

    def send(self, pending: PendingAverage, newest: tuple[int, int, int]) -> None:
        """This member is ready for a round; `newest` is the key of the last attempt that has begun."""
        last, node = self._last_plan, self._node
        others = [peer for peer in node.view.ids if peer != node.me]
        if last is None or len(others) != 1 or set(last.weights) != set(node.view.ids) or pending.weight <= 0.0:
            return
        plan = msgspec.structs.replace(last, round_number=pending.round_number, attempt=last.attempt + 1)
        form = (pending.outgoing.size, pending.sender.codec, pending.sender.top_share)
        was_sent = self._attempt is not None and self._attempt.plan.key >= plan.key
        if was_sent or plan.key <= newest or form != (last.values, last.codec, last.top_share):
            return
        attempt = Attempt(plan, node.me, outgoing=pending.outgoing, sender=pending.sender, screen=node.settings.screen)
        if attempt.is_direct(others[0]):
            self._attempt, self._call, self._trouble = attempt, pending.call, ""
            self._sending.start(attempt, self._on_failed, after_others=True)

    def adopt(self, plan: RoundPlan, call: int | None) -> Attempt | None:
        """The attempt of a plan whose values are on their way already, if there is one; raises StaleValues.

        `call` is the one that waits here, None where the plan does not count this member.
        """
        attempt, self._attempt = self._attempt, None
        if attempt is None or attempt.plan.key != plan.key:
            return None
        if self._call != call or self._trouble or not attempt.adopt(plan):
            raise StaleValues(self._trouble or "values went out early that are not those of the round")
        return attempt

    def on_link_lost(self, peer: str) -> None:
        """What was on its way may be lost."""
        self._trouble = self._trouble or f"the connection to {self._node.name_of(peer)} broke"

    def _on_failed(self, peer: str, why: str) -> None:
        attempt, reason = self._attempt, f"{self._node.name_of(peer)} was not reached: {why}"
        if attempt is not None:
            self._trouble = reason
        else:
            self._node.rounds.report_trouble(peer, reason)
