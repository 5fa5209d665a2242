"""The positions of a run's ranks on the axes of its layout, and their hosts."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from phalanx.io.values import at, integer, printable
from phalanx.record.events import Event

AXES = ("tensor", "context", "data", "pipeline")  # fastest-varying axis first
# Ranks of one entry of a membership: no host has more.
MOST_SLOTS = 4096


def rank_place(rank: int, layout: Mapping[str, Any]) -> str:
    """Return the coordinates of a rank on the axes that are split; tensor-parallel ranks are neighbours.

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
    """The layout and hosts of the ranks of the newest membership."""

    layout: Mapping[str, Any]
    hosts: Mapping[int, str]

    def place(self, rank: int) -> str:
        """Return the coordinates of a rank, such as "data 1, tensor 0"; empty if no axis is split."""
        return rank_place(rank, self.layout)

    def host(self, rank: int) -> str:
        """Return the name of a rank's host; empty if unknown."""
        return self.hosts.get(rank, "")

    def same_work(self, ranks: Iterable[int]) -> list[list[int]]:
        """Group ranks that do the same work, those of a pipeline stage, in ascending order."""
        size = math.prod(max(1, integer(self.layout, axis) or 1) for axis in AXES[:3])  # ranks of a pipeline stage
        sorted_ranks, begin = sorted(ranks), 0
        groups = []
        # Not rank by rank: there may be 131,072, and a report calls this five times.
        while begin < len(sorted_ranks):
            stop = bisect_left(sorted_ranks, (sorted_ranks[begin] // size + 1) * size, begin)
            groups.append(sorted_ranks[begin:stop])
            begin = stop
        return groups


def rank_places(plan: Mapping[str, Any], supervisor: Sequence[Event]) -> RankPlaces:
    """Build the places from the newest `epoch` event, or from the plan before there is one."""
    hosts: dict[int, str] = {}
    # The members of many hosts are spread over several events; later `members` events list ranks that moved.
    for event in reversed(supervisor):
        if event.get("event") in ("epoch", "members"):
            hosts = _rank_hosts(event.get("members")) | hosts
        if event.get("event") == "epoch":
            return RankPlaces(layout=at(event, "layout") or at(plan, "layout"), hosts=hosts)
    return RankPlaces(layout=at(plan, "layout"), hosts={})


def _rank_hosts(members: Any) -> dict[int, str]:
    hosts = {}
    for member in members if isinstance(members, list) else ():
        rank = integer(member, "rank") if isinstance(member, Mapping) else None
        if rank is not None and isinstance(member.get("host"), str):
            host, count = printable(member["host"], most=100), integer(member, "count") or 1
            hosts.update(dict.fromkeys(range(rank, rank + min(max(count, 1), MOST_SLOTS)), host))
    return hosts
