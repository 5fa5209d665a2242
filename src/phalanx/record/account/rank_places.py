"""Where the ranks of a run stand: on the axes of its layout, and on which host."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from phalanx.io.values import at, integer, printable
from phalanx.record.events import Event

AXES = ("tensor", "context", "data", "pipeline")  # neighbours first
MOST_SLOTS = 4096  # ranks of one entry of a membership: no host has more


def rank_place(rank: int, layout: Mapping[str, Any]) -> str:
    """Where a rank stands on the axes that are split; tensor peers are neighbours.

    >>> rank_place(5, {"pipeline": 2, "data": 2, "context": 1, "tensor": 2})
    'pipeline 1, data 0, tensor 1'
    """
    words = []
    for axis in AXES:
        size = max(1, integer(layout, axis) or 1)
        if size > 1:
            words.append(f"{axis} {rank % size}")
        rank //= size
    return ", ".join(reversed(words))


@dataclass(frozen=True, kw_only=True, slots=True)
class RankPlaces:
    """The ranks of the newest membership."""

    layout: Mapping[str, Any]
    hosts: Mapping[int, str]

    def place(self, rank: int) -> str:
        """Such as "data 1, tensor 0"; empty where nothing is split."""
        return rank_place(rank, self.layout)

    def host(self, rank: int) -> str:
        """The host's name; empty when it is not known."""
        return self.hosts.get(rank, "")

    def same_work(self, ranks: Iterable[int]) -> list[list[int]]:
        """Ranks in groups that do the same work, in ascending order: those of a pipeline stage."""
        size = math.prod(max(1, integer(self.layout, axis) or 1) for axis in AXES[:3])  # of a pipeline stage
        known, begin = sorted(ranks), 0
        groups = []
        while begin < len(known):  # not rank by rank: there may be 131,072, and a report asks five times
            stop = bisect_left(known, (known[begin] // size + 1) * size, begin)
            groups.append(known[begin:stop])
            begin = stop
        return groups


def rank_places(plan: Mapping[str, Any], supervisor: Sequence[Event]) -> RankPlaces:
    """From the newest `epoch` event; before there is one, from the plan."""
    hosts: dict[int, str] = {}
    for event in reversed(supervisor):  # members of many hosts follow the event in others, and later who has moved
        if event.get("event") in ("epoch", "members"):
            hosts = _rank_hosts(event.get("members")) | hosts
        if event.get("event") == "epoch":
            return RankPlaces(layout=at(event, "layout") or at(plan, "layout"), hosts=hosts)
    return RankPlaces(layout=at(plan, "layout"), hosts={})


def _rank_hosts(members: Any) -> dict[int, str]:
    found = {}
    for one in members if isinstance(members, list) else ():
        rank = integer(one, "rank") if isinstance(one, Mapping) else None
        if rank is not None and isinstance(one.get("host"), str):
            host, count = printable(one["host"], most=100), integer(one, "count") or 1
            found.update(dict.fromkeys(range(rank, rank + min(max(count, 1), MOST_SLOTS)), host))
    return found
