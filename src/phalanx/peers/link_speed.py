"""How fast a member's link is, measured with the others while nobody sends values: shares of a round follow from it.

The leader gives one member a turn before a round begins. That member sends bytes to all others and has them send it as
many, at once and over the connections that carry values, as in a round. It begins with few bytes and takes four times
as many until they take long enough to be timed. The sum over the others is what its link carries in this group: more
than the others can take is of no use to it. A speed that the owner of a peer stated is not measured.
"""

from __future__ import annotations

import asyncio
import math
import time
from bisect import bisect_right
from dataclasses import replace
from typing import TYPE_CHECKING

from phalanx.peers import messages as say
from phalanx.peers.facts import Bandwidth
from phalanx.peers.messages import PeerMessage

if TYPE_CHECKING:
    from phalanx.peers.peer_node import PeerNode

BLOCK_BYTES = 16 * 1024
FIRST_BYTES, MOST_BYTES = 64 * 1024, 2**20  # for each of the others: 1 MiB takes 0.1 s at 80 Mbit/s
LONG_ENOUGH_S = 0.4
REPEATS = 2  # with the last size; the best of them counts, for a busy machine only makes a link look slower
LONG_ENOUGH_TRIPS = 5  # round trips: TCP begins slowly
MOST_S = 6.0  # of one turn; whoever has not answered by then is left out
BETWEEN_S = 6.0  # a member that asks for more than one turn in that time is not answered
MOST_OTHERS = 8
MBIT = 125_000.0  # bytes


class LinkSpeed:
    """Of one member: what it measured of its own link, and what others measured with it."""

    def __init__(self, node: PeerNode) -> None:
        self._node = node
        self.measured_mbps: tuple[float, float] | None = None  # up and down, of this member
        self.measured: set[str] = set()  # members whose speed in the view was measured, not stated
        self._incoming: dict[str, list[float]] = {}  # when each block came, of those that are coming in
        self._sent: dict[str, list[float]] = {}  # the same of our blocks, as others say
        self._received: dict[str, list[float]] = {}
        self._changed = asyncio.Event()
        self._asked_at: dict[str, list[float]] = {}
        self._is_measuring = False

    def on_heartbeat(self, peer: str, mbps: tuple[float, float] | None) -> None:
        """A member says what it measured; the view has it from then on."""
        if mbps is None or not all(0.0 < one < 1e9 for one in mbps):
            return
        node, link = self._node, Bandwidth(up_mbps=mbps[0], down_mbps=mbps[1])
        member = node.view.member(peer)
        if member is None or member.bandwidth == link or (member.bandwidth is not None and peer not in self.measured):
            return
        self.measured.add(peer)
        members = tuple(replace(one, bandwidth=link) if one.id == peer else one for one in node.view.members)
        node.view = replace(node.view, members=members)
        node.tell("measured", f"its link carries {mbps[0]:g} Mbit/s up and {mbps[1]:g} down", peer=peer)
        node.leader.on_measured(peer)

    def on_message(self, peer: str, message: PeerMessage) -> None:
        """A turn from the leader, or a member whose turn it is."""
        node = self._node
        if isinstance(message, say.SpeedTurn) and peer == node.view.leader:
            self.take_turn()
        elif isinstance(message, say.SpeedRequest) and self._may_ask(peer):
            node.spawn(self._send(peer, message.size))
        elif isinstance(message, say.SpeedReport):
            self._sent[peer] = message.arrivals_s
            self._changed.set()

    def on_block(self, peer: str, size: int, *, is_last: bool) -> None:
        """Some bytes that somebody measures with."""
        arrivals = self._incoming.setdefault(peer, [])
        if not is_last:
            if size == BLOCK_BYTES and len(arrivals) <= MOST_BYTES // BLOCK_BYTES:
                arrivals.append(time.monotonic())
            return
        del self._incoming[peer]
        self._received[peer] = [round(at - arrivals[0], 5) for at in arrivals[1:]]  # the first only starts the clock
        self._node.links.post(peer, say.SpeedReport(arrivals_s=self._received[peer]))
        self._changed.set()

    def take_turn(self) -> None:
        """Measure now, unless the speed was stated or a turn is under way."""
        if self._node.settings.bandwidth is None and not self._is_measuring:
            self._is_measuring = True
            self._node.spawn(self._measure())

    async def _measure(self) -> None:
        node = self._node
        others = [peer for peer in node.view.ids if peer in node.links.data][:MOST_OTHERS]
        trips_s = LONG_ENOUGH_TRIPS * 2 * max((node.latency_s.get(peer, 0.0) for peer in others), default=0.0)
        size, up, down = FIRST_BYTES, 0.0, 0.0
        try:
            async with asyncio.timeout(MOST_S):
                while others:
                    began = time.monotonic()
                    up, down = await self._exchange(others, size)
                    if size >= MOST_BYTES or time.monotonic() - began > max(LONG_ENOUGH_S, trips_s):
                        break
                    size *= 4
                for _ in range(REPEATS if others else 0):
                    again = await self._exchange(others, size)
                    up, down = max(up, again[0]), max(down, again[1])
        except TimeoutError:
            pass  # what was measured with fewer bytes counts
        finally:
            self._is_measuring = False
        if up > 0.0 and down > 0.0:
            self.measured_mbps = (_three_digits(up / MBIT), _three_digits(down / MBIT))
            self.on_heartbeat(node.me, self.measured_mbps)
            node.send_heartbeats()

    async def _exchange(self, others: list[str], size: int) -> tuple[float, float]:
        """So many bytes to each of the others and from each; bytes a second of all together."""
        self._sent, self._received = {}, {}
        for peer in others:
            self._node.links.post(peer, say.SpeedRequest(size=size))
        sending = [self._node.spawn(self._send(peer, size)) for peer in others]
        try:
            while not (set(others) <= set(self._sent) and set(others) <= set(self._received)):
                self._changed.clear()
                await self._changed.wait()
        finally:
            for task in sending:
                task.cancel()
        return rate_together(list(self._sent.values())), rate_together(list(self._received.values()))

    async def _send(self, peer: str, size: int) -> None:
        try:
            link = await self._node.links.data_link(peer, 1.0)
            for _ in range(1 + -(-size // BLOCK_BYTES)):
                await link.send(say.SpeedBlock(is_last=False), bytes(BLOCK_BYTES))
            await link.send(say.SpeedBlock(is_last=True))
        except (OSError, TimeoutError):
            return  # the turn ends without this member

    def _may_ask(self, peer: str) -> bool:
        """One turn is a few requests of growing size; more than that within a while nobody needs."""
        now = time.monotonic()
        recent = [at for at in self._asked_at.get(peer, []) if now - at < BETWEEN_S]
        self._asked_at[peer] = [*recent, now][-8:]
        return len(recent) < 3 + REPEATS


def rate_together(arrivals_s: list[list[float]]) -> float:
    """Bytes a second of several streams while all of them flow: until the first of them ends.

    After that the others have the link for themselves, and their own rates sum to more than it carries.

    >>> round(rate_together([[0.1, 0.2], [0.1, 0.2, 0.3, 0.4]]) / BLOCK_BYTES)
    20
    """
    streams = [one for one in arrivals_s if one and one[-1] > 0.0]
    end = min((one[-1] for one in streams), default=0.0)
    blocks = 0.0
    for one in streams:
        whole = bisect_right(one, end)
        blocks += whole
        if whole < len(one):  # a part of the next block
            before = one[whole - 1] if whole else 0.0
            blocks += (end - before) / (one[whole] - before)
    return BLOCK_BYTES * blocks / max(1e-4, end)


def _three_digits(value: float) -> float:
    return round(value, 2 - math.floor(math.log10(value))) if value > 0.0 else 0.0
