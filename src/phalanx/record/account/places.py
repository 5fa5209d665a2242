"""Where ranks stand: on which axes, on which host, and who does the same work."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from phalanx.io.values import at, integer, printable
from phalanx.record.events import Event

AXES = ("tensor", "context", "data", "pipeline")  # neighbours first


def place(rank: int, layout: Mapping[str, Any]) -> str:
    """Where a rank stands on the axes that are split; tensor peers are neighbours.

    >>> place(5, {"pipeline": 2, "data": 2, "context": 1, "tensor": 2})
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
class Places:
    """The ranks of the newest formation."""

    layout: Mapping[str, Any]
    hosts: Mapping[int, str]

    def place(self, rank: int) -> str:
        """Such as "data 1, tensor 0"; empty where nothing is split."""
        return place(rank, self.layout)

    def host(self, rank: int) -> str:
        """The host's name; empty when it is not known."""
        return self.hosts.get(rank, "")

    def stage(self, rank: int) -> int:
        """The pipeline stage: ranks of one stage do the same work."""
        size = 1
        for axis in AXES[:3]:
            size *= max(1, integer(self.layout, axis) or 1)
        return rank // size

    def alike(self, ranks: Iterable[int]) -> list[list[int]]:
        """Ranks in groups that do the same work."""
        groups: dict[int, list[int]] = {}
        for rank in ranks:
            groups.setdefault(self.stage(rank), []).append(rank)
        return list(groups.values())


def places(plan: Mapping[str, Any], supervisor: Sequence[Event]) -> Places:
    """From the newest `epoch` event; before there is one, from the plan."""
    newest = next((event for event in reversed(supervisor) if event.get("event") == "epoch"), {})
    layout = at(newest, "layout") or at(plan, "layout")
    return Places(layout=layout, hosts=_hosts(newest.get("members")))


def _hosts(members: Any) -> dict[int, str]:
    found = {}
    for one in members if isinstance(members, list) else ():
        rank = integer(one, "rank") if isinstance(one, Mapping) else None
        if rank is not None and isinstance(one.get("host"), str):
            found[rank] = printable(one["host"], most=100)
    return found
