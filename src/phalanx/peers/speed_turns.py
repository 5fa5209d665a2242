"""The leader's schedule of link measurements: before a round begins, one member at a time measures its link."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from phalanx.network.slow_codecs import GATHERED_CODECS, encoded_bytes
from phalanx.network.slow_shares import round_seconds
from phalanx.peers import messages as say
from phalanx.peers.link_speed import MBIT, MOST_S
from phalanx.peers.messages import Ready, RoundPlan

if TYPE_CHECKING:
    from phalanx.peers.peer_node import PeerNode

# Shares of a shorter vector are not worth a measurement: 256 KiB in fp32, 0.2 s at 10 Mbit/s.
LEAST_VALUES = 2**16
# A round that takes more than LATE_FACTOR times its predicted time plus LATE_S: a link has probably changed.
LATE_FACTOR, LATE_S = 2.0, 1.0
# Shortest time between two measurements of all members, first and at most; it doubles with each repetition.
AGAIN_S, MOST_AGAIN_S = 60.0, 3600.0


class SpeedTurns:
    """The leader's record of measured members, and of the member whose turn it is to measure."""

    def __init__(self, node: PeerNode) -> None:
        self._node = node
        self.measured: set[str] = set()  # members whose speed was measured, not stated
        self._had: set[str] = set()  # instances (processes of members) that have had their turn
        self._turn = ""  # id of the member that measures now
        self._ends = 0.0
        self._again_at = 0.0
        self._again_s = AGAIN_S

    def wait_s(self, ready: Mapping[str, Ready], now: float) -> float:
        """Return the seconds that a round waits for a measurement, 0 if none is needed; may start a member's turn.

        `ready` holds the members that are ready for the round; only they are measured. Nothing is measured where
        shares do not depend on speed: with two members, who both move the whole vector each way, and with a gathered
        codec, whose shares are equal.
        """
        view = self._node.view
        values = max(0 if message.codec in GATHERED_CODECS else message.values for message in ready.values())
        if len(view.members) < 3 or values < LEAST_VALUES:
            return 0.0
        if self._turn and now < self._ends:
            return self._ends - now
        self._turn = ""
        for member in view.members:
            # A bandwidth that was not measured is one that the member's owner stated.
            is_known = member.bandwidth is not None and member.id not in self.measured
            if is_known or member.instance in self._had or member.id not in ready:
                continue
            self._had.add(member.instance)
            self._turn, self._ends = member.id, now + MOST_S + 1.0
            self._again_at = max(self._again_at, now + self._again_s)
            if member.id == self._node.me:
                self._node.speed.take_turn()
            else:
                self._node.links.post(member.id, say.SpeedTurn())
            return self._ends - now
        return 0.0

    def on_view(self) -> None:
        """End the current turn: its member may have left the view."""
        self._turn = ""

    def on_measured(self, peer: str) -> None:
        """Record that a member's link was measured, and end its turn."""
        self.measured.add(peer)
        if peer == self._turn:
            self._turn = ""

    def on_committed(self, plan: RoundPlan, seconds: float) -> None:
        """Schedule new measurements of all members if a round took much longer than the known speeds predict."""
        members = [self._node.view.member(peer) for peer in plan.weights]
        speeds = [
            member.bandwidth.slower_mbps * MBIT
            for member in members
            if member is not None and member.bandwidth is not None
        ]
        now = time.monotonic()
        if plan.values < LEAST_VALUES or len(speeds) != len(plan.weights) or len(speeds) < 3 or now < self._again_at:
            return
        shares = [
            (end - begin) / plan.values for begin, end in (plan.owners.get(peer, (0, 0)) for peer in plan.weights)
        ]
        size = encoded_bytes(plan.codec, plan.values, plan.top_share)
        if seconds > LATE_FACTOR * round_seconds(size, speeds, shares) + LATE_S:
            self._had.clear()
            self._again_s = min(MOST_AGAIN_S, 2 * self._again_s)
            self._again_at = now + self._again_s
