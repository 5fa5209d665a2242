"""The choice of the rank of another machine that takes the replica of a rank's state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from phalanx.elastic.membership import Membership

# The address of a host, and by slot its ports: of rank 0's store, and for replicas.
Listening = tuple[str, Mapping[str, Any]]


class ReplicaPeer(NamedTuple):
    """A rank of another machine that takes a replica. `slot` is the sender's place among the guests of that machine."""

    rank: int
    slot: int


class ReplicaRing:
    """The machines in a ring, in the order of their lowest ranks; each takes the replicas of another.

    The replicas of a machine are dealt in turn to the ranks of the next machine, or, where `rack_hosts` machines fail
    together and there are two such racks or more, of the machine one rack further. A rank's place is its place among
    its own machine's ranks, so no two ranks share one.
    """

    def __init__(self, ranks: Mapping[str, Sequence[int]], *, rack_hosts: int = 1) -> None:
        """`ranks` are those of each machine, in the order of their lowest."""
        self._ranks = {machine: sorted(machine_ranks) for machine, machine_ranks in ranks.items()}
        order = list(self._ranks)
        distance = rack_hosts if len(order) >= 2 * rack_hosts else 1
        self._following = {machine: order[(place + distance) % len(order)] for place, machine in enumerate(order)}

    def following(self, machine: str) -> str | None:
        """Return the machine that takes the replicas of another one; itself where there is no other."""
        return self._following.get(machine)

    def takers_of(self, machine: str) -> dict[int, ReplicaPeer]:
        """Return the peers of all ranks of a machine, by rank; empty when there is no other machine.

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
    """The peers that take the replicas of each host's ranks, by host and slot: place among guests, address, port.

    Each host is sent its own entries only. Of 131,072 ranks a lost one changes eight entries, and a lost host sixteen:
    unchanged entries are copied from the table before.
    """

    membership: Membership
    ring: ReplicaRing
    listening: Mapping[str, Listening]
    # Empty where there is only one machine.
    peers: Mapping[str, dict[str, Any]]

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
        """Build the table of a membership; `machines`: hosts that share one, `rack_hosts`: hosts that fail together."""
        if before is not None and before.membership.has_same_ranks(membership):
            ring = before.ring
        else:
            ranks: dict[str, list[int]] = {}
            # In the order of their lowest ranks.
            for name in membership.hosts:
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
            entries: dict[str, Any] = {}
            for slot, rank in membership.ranks_on(name).items() if takers else ():
                taker_rank, place = takers[rank]
                host, taker_slot = membership.slots[taker_rank]
                address, ports = listening[host]
                entries[str(slot)] = [place, address, int(ports[str(taker_slot)][1])]
            if entries:
                peers[name] = entries
        return cls(membership=membership, ring=ring, listening=listening, peers=peers)

    def _changed_hosts(self, membership: Membership, listening: Mapping[str, Listening]) -> set[str]:
        """Return hosts that were added or removed, listen elsewhere, or have other ranks than in this table."""
        old, before = self.listening, self.membership
        is_same = before.has_same_ranks(membership)
        changed = {name for name in old if name not in listening}
        changed.update(
            name
            for name, where in listening.items()
            if old.get(name) != where or not (is_same or before.has_same_ranks_on(name, membership))
        )
        return changed
