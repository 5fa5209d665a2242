"""Which rank of another machine takes the copy of a rank's state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class ReplicaPeer(NamedTuple):
    """A rank of another machine that takes our copy. `slot` is our place among its host's guests."""

    rank: int
    slot: int


class ReplicaRing:
    """The machines in a ring, in the order of their lowest ranks; each keeps the copies of another.

    The copies are dealt to its ranks in turn: of the machine before it, or, where `rack_hosts` machines fail together
    and there are two such racks or more, of the one a rack before it. Our place is our place among our own machine's
    ranks, so no two ranks share one.
    """

    def __init__(self, machines: Sequence[str], *, rack_hosts: int = 1) -> None:
        self._machines = machines
        self._ranks: dict[str, list[int]] = {}
        for rank, machine in enumerate(machines):
            self._ranks.setdefault(machine, []).append(rank)
        order = list(self._ranks)
        away = rack_hosts if len(order) >= 2 * rack_hosts else 1
        self._following = {machine: order[(place + away) % len(order)] for place, machine in enumerate(order)}

    def peer_of(self, rank: int) -> ReplicaPeer | None:
        """The peer of a rank; None when all are on one machine.

        >>> ReplicaRing("aabb").peer_of(1), ReplicaRing("aab").peer_of(1)
        (ReplicaPeer(rank=3, slot=1), ReplicaPeer(rank=2, slot=1))
        >>> [ReplicaRing("abcd", rack_hosts=2).peer_of(rank).rank for rank in range(4)]
        [2, 3, 0, 1]
        """
        return self.takers_of(self._machines[rank]).get(rank)

    def takers_of(self, machine: str) -> dict[int, ReplicaPeer]:
        """The peers of all ranks of a machine, by rank; empty when there is no other machine."""
        if len(self._ranks) == 1:
            return {}
        takers = self._ranks[self._following[machine]]
        return {
            rank: ReplicaPeer(rank=takers[place % len(takers)], slot=place)
            for place, rank in enumerate(self._ranks[machine])
        }
