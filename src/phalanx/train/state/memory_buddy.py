"""Who keeps a second copy: a rank of another host, of another rack where there are several."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Buddy:
    """The rank that takes our copy, and the place among its host's guests that is ours in this epoch."""

    rank: int
    slot: int


def buddy_of(rank: int, hosts: Mapping[int, str], *, rack_hosts: int = 1) -> Buddy | None:
    """The buddy of a rank, where `hosts` tells the host of every rank; None when all are on one host.

    The hosts form a ring in the order of their lowest ranks, and each keeps the copies of another, dealt to its ranks
    in turn: of the one before it, or, where `rack_hosts` hosts fail together and there are two such racks or more, of
    the one a rack before it. Our place is our place among our own host's ranks, so no two ranks share one.

    >>> buddy_of(1, {0: "a", 1: "a", 2: "b", 3: "b"}), buddy_of(1, {0: "a", 1: "a", 2: "b"})
    (Buddy(rank=3, slot=1), Buddy(rank=2, slot=1))
    >>> [buddy_of(rank, dict(enumerate("abcd")), rack_hosts=2).rank for rank in range(4)]
    [2, 3, 0, 1]
    """
    order = list(dict.fromkeys(hosts[one] for one in sorted(hosts)))
    if len(order) == 1:
        return None
    mine = hosts[rank]
    away = rack_hosts if len(order) >= 2 * rack_hosts else 1
    following = order[(order.index(mine) + away) % len(order)]
    place = _ranks_on(mine, hosts).index(rank)
    takers = _ranks_on(following, hosts)
    return Buddy(rank=takers[place % len(takers)], slot=place)


def _ranks_on(host: str, hosts: Mapping[int, str]) -> list[int]:
    return sorted(rank for rank, where in hosts.items() if where == host)
