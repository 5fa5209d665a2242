"""Sending of an attempt's bytes: to each member its segments and the means of this member's share."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from phalanx.peers.attempt import Attempt
from phalanx.peers.links import PeerLinks
from phalanx.peers.messages import MeanChunk, UpdateChunk

if TYPE_CHECKING:
    from phalanx.peers.peer_node import PeerNode


class Courier:
    """Sends one member all that it gets from this one in an attempt; means go first, because others wait for them."""

    def __init__(
        self, attempt: Attempt, peer: str, links: PeerLinks, *, wait_s: float, failed: Callable[[str, str], None]
    ) -> None:
        self._attempt, self._peer, self._links, self._wait_s, self._failed = attempt, peer, links, wait_s, failed
        self._is_direct = attempt.is_direct(peer)
        self._means: deque[int] = deque(attempt.segments_of(attempt.me) if self._is_direct else ())
        self._means_left = len(attempt.segments_of(attempt.me))
        self._changed = asyncio.Event()

    def add_mean(self, start: int) -> None:
        """Queue the mean of a segment of this member's share."""
        if not self._is_direct:
            self._means.append(start)
            self._changed.set()

    async def run(self) -> None:
        """Send until nothing is left; calls `failed` with the peer and the reason if the link breaks."""
        attempt, link = self._attempt, None
        pieces = deque(attempt.segments_of(self._peer) if attempt.outgoing is not None else ())
        try:
            while pieces or self._means_left:
                if not self._means and not pieces:
                    self._changed.clear()
                    await self._changed.wait()
                    continue
                current_link = await self._links.data_link(self._peer, self._wait_s)
                if link is not None and current_link is not link:
                    raise ConnectionResetError("the connection was made anew, and something was lost with the old one")
                link = current_link
                # In a direct exchange segments for the peer's share go first, so that it can begin to sum.
                # Bytes count when they are handed over: the round may be committed before `send` returns.
                if self._means and not (self._is_direct and pieces):
                    start = self._means.popleft()
                    data = attempt.encode_piece(start) if self._is_direct else attempt.mean_for(self._peer, start)
                    self._means_left -= 1
                    attempt.bytes_sent += len(data)
                    await link.send(MeanChunk(key=attempt.plan.key, start=start), data)
                else:
                    start = pieces.popleft()
                    data = attempt.encode_piece(start)
                    attempt.bytes_sent += len(data)
                    await link.send(UpdateChunk(key=attempt.plan.key, start=start), data)
        except (OSError, TimeoutError) as error:
            self._failed(self._peer, str(error) or "no connection in time")


class AttemptSending:
    """The senders of this member's newest attempt, one for each other member."""

    def __init__(self, node: PeerNode) -> None:
        self._node = node
        self._couriers: list[Courier] = []
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, attempt: Attempt, failed: Callable[[str, str], None], *, after_others: bool = False) -> None:
        """Send an attempt; with `after_others`, only once all earlier sends are done.

        Another member may still need the earlier round.
        """
        node = self._node
        before = [task for task in self._tasks if not task.done()] if after_others else []
        self._tasks, self._couriers = list(before), []
        for peer in node.view.ids:
            if peer != node.me:
                courier = Courier(attempt, peer, node.links, wait_s=node.settings.dead_after_s, failed=failed)
                self._couriers.append(courier)
                self._tasks.append(node.spawn(_run_after(before, courier)))

    def add_mean(self, start: int) -> None:
        """Queue the mean of a segment of this member's share for all members."""
        for courier in self._couriers:
            courier.add_mean(start)

    def stop(self) -> None:
        """Cancel all sends."""
        for task in self._tasks:
            task.cancel()
        self._tasks, self._couriers = [], []


async def _run_after(before: list[asyncio.Task[None]], courier: Courier) -> None:
    if before:
        await asyncio.wait(before)
    await courier.run()
