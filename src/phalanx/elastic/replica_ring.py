"""Which rank of another machine takes the copy of a rank's state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from phalanx.elastic.membership import Membership

Listening = tuple[str, Mapping[str, Any]]  # the address of a host, and by slot its ports: of rank 0's store, for copies


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

    def __init__(self, ranks: Mapping[str, Sequence[int]], *, rack_hosts: int = 1) -> None:
        """`ranks` of each machine, in the order of their lowest."""
        self._ranks = {machine: sorted(mine) for machine, mine in ranks.items()}
        order = list(self._ranks)
        away = rack_hosts if len(order) >= 2 * rack_hosts else 1
        self._following = {machine: order[(place + away) % len(order)] for place, machine in enumerate(order)}

    def following(self, machine: str) -> str | None:
        """The machine that takes the copies of another; itself where there is no other."""
        return self._following.get(machine)

    def takers_of(self, machine: str) -> dict[int, ReplicaPeer]:
        """The peers of all ranks of a machine, by rank; empty when there is no other machine.

        >>> [ReplicaRing({"a": [0, 1], "b": rest}).takers_of("a")[1] for rest in ([2, 3], [2])]
        [ReplicaPeer(rank=3, slot=1), ReplicaPeer(rank=2, slot=1)]
        >>> ring = ReplicaRing({"a": [0], "b": [1], "c": [2], "d": [3]}, rack_hosts=2)
        >>> [ring.takers_of(machine)[rank].rank for rank, machine in enumerate("abcd")]
        [2, 3, 0, 1]
        """
        if len(self._ranks) == 1:
            return {}
        takers = self._ranks[self._following[machine]]
        return {
            rank: ReplicaPeer(rank=takers[place % len(takers)], slot=place)
            for place, rank in enumerate(self._ranks[machine])
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaTable:
    """Who takes the copies of each host's ranks, by host and slot: our place among its guests, and where it listens.

    Each host is told of its own; nobody needs to know everybody's addresses. Of 131,072 ranks a lost one changes eight
    entries, and a lost host sixteen: what is as it was is taken over from the table before.
    """

    membership: Membership
    ring: ReplicaRing
    listening: Mapping[str, Listening]
    peers: Mapping[str, dict[str, Any]]  # empty where there is only one machine

    @classmethod
    def build(
        cls,
        membership: Membership,
        listening: Mapping[str, Listening],
        *,
        machines: Mapping[str, str],
        rack_hosts: int,
        before: ReplicaTable | None = None,
    ) -> ReplicaTable:
        """The table of a membership; `machines` of hosts that share one, `rack_hosts` that fail together."""
        if before is not None and before.membership.has_same_ranks(membership):
            ring = before.ring
        else:
            ranks: dict[str, list[int]] = {}
            for name in membership.hosts:  # in the order of their lowest ranks
                ranks.setdefault(machines.get(name, name), []).extend(membership.ranks_on(name).values())
            ring = ReplicaRing(ranks, rack_hosts=rack_hosts)
        changed = before._changed_hosts(membership, listening) if before is not None else set[str]()
        touched = {machines.get(name, name) for name in changed}
        peers: dict[str, dict[str, Any]] = {}
        for name in membership.hosts:
            machine = machines.get(name, name)
            if before is not None and machine not in touched:
                taker = ring.following(machine)
                if taker not in touched and taker == before.ring.following(machine):
                    if name in before.peers:
                        peers[name] = before.peers[name]
                    continue
            takers = ring.takers_of(machine)
            mine: dict[str, Any] = {}
            for slot, rank in membership.ranks_on(name).items() if takers else ():
                other_rank, place = takers[rank]
                host, other = membership.slots[other_rank]
                address, ports = listening[host]
                mine[str(slot)] = [place, address, int(ports[str(other)][1])]
            if mine:
                peers[name] = mine
        return cls(membership=membership, ring=ring, listening=listening, peers=peers)

    def _changed_hosts(self, membership: Membership, listening: Mapping[str, Listening]) -> set[str]:
        """Hosts that came, went, listen elsewhere, or have other ranks than in this table."""
        old, before = self.listening, self.membership
        is_same = before.has_same_ranks(membership)
        changed = {name for name in old if name not in listening}
        changed.update(
            name
            for name, where in listening.items()
            if old.get(name) != where or not (is_same or before.has_same_ranks_on(name, membership))
        )
        return changed
