"""Which rank of another machine takes the copy of a rank's state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerTable:
    """Who takes the copies of each host's ranks, by host and slot: our place among its guests, and where it listens.

    Each host is told of its own; nobody needs to know everybody's addresses. Of 131,072 ranks a lost one changes eight
    entries: where ranks and slots stay, the rest is taken over from the table before.
    """

    membership: Membership
    ring: ReplicaRing
    listening: Mapping[str, Listening]
    givers: Mapping[str, Sequence[str]]  # hosts whose copies a host takes
    peers: Mapping[str, dict[str, Any]]  # empty where there is only one machine

    @classmethod
    def build(
        cls,
        membership: Membership,
        listening: Mapping[str, Listening],
        *,
        machines: Mapping[str, str],
        rack_hosts: int,
        before: PeerTable | None = None,
    ) -> PeerTable:
        """The table of a membership; `machines` of hosts that share one, `rack_hosts` that fail together."""
        wanted: Iterable[str] = membership.hosts
        if before is not None and before.membership.has_same_ranks(membership):
            moved = [name for name, told in listening.items() if before.listening[name] != told]
            wanted = dict.fromkeys(giver for name in moved for giver in before.givers.get(name, ()))
            ring, peers = before.ring, dict(before.peers)
        else:
            before = None
            ring = ReplicaRing([machines.get(host, host) for host, _ in membership.slots], rack_hosts=rack_hosts)
            peers = {}
        givers: dict[str, list[str]] = {}
        for name in wanted:
            takers = ring.takers_of(machines.get(name, name))
            mine: dict[str, Any] = {}
            for slot, rank in membership.ranks_on(name).items() if takers else ():
                host, other = membership.slots[takers[rank].rank]
                address, ports = listening[host]
                mine[str(slot)] = [takers[rank].slot, address, int(ports[str(other)][1])]
                if before is None and name not in givers.setdefault(host, [])[-1:]:
                    givers[host].append(name)
            if mine:
                peers[name] = mine
        known = givers if before is None else before.givers
        return cls(membership=membership, ring=ring, listening=listening, givers=known, peers=peers)
