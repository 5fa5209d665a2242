"""Whose link is measured before a round begins: one member at a time, while nobody sends values."""

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

LEAST_VALUES = 2**16  # of a vector whose shares are worth measuring for: 256 KiB in fp32, 0.2 s at 10 Mbit/s
LATE_FACTOR, LATE_S = 2.0, 1.0  # a round that takes so much longer than its shares say: a link has changed
AGAIN_S, MOST_AGAIN_S = 60.0, 3600.0  # between two measurements of everybody; twice as long after each


class SpeedTurns:
    """What the leader knows of who was measured."""

    def __init__(self, node: PeerNode) -> None:
        self._node = node
        self.measured: set[str] = set()  # members whose speed was measured, not stated
        self._had: set[str] = set()  # instances that have had their turn
        self._turn = ""  # whose it is
        self._ends = 0.0
        self._again_at = 0.0
        self._again_s = AGAIN_S

    def wait_s(self, ready: Mapping[str, Ready], now: float) -> float:
        """Seconds that a round waits for a turn, given who is ready for it; 0 where nobody is to be measured.

        Two peers move the whole vector both ways, whatever their shares are, and of a gathered codec shares are equal.
        """
        view = self._node.view
        values = max(0 if one.codec in GATHERED_CODECS else one.values for one in ready.values())
        if len(view.members) < 3 or values < LEAST_VALUES:
            return 0.0
        if self._turn and now < self._ends:
            return self._ends - now
        self._turn = ""
        for member in view.members:
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
        """Whoever had the turn may be gone."""
        self._turn = ""

    def on_measured(self, peer: str) -> None:
        """Its turn is over."""
        self.measured.add(peer)
        if peer == self._turn:
            self._turn = ""

    def on_committed(self, plan: RoundPlan, seconds: float) -> None:
        """A round took so long: where the measured speeds say much less, everybody is measured again."""
        members = [self._node.view.member(peer) for peer in plan.weights]
        speeds = [one.bandwidth.slower_mbps * MBIT for one in members if one is not None and one.bandwidth is not None]
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
