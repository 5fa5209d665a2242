"""The hosts of a run as the coordinator sees them, and which rank the others wait for when none moves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from phalanx.elastic.membership import HostSlot, Membership

Message = dict[str, Any]


@dataclass(kw_only=True, slots=True)
class Host:
    """An agent, as the council sees it."""

    name: str
    address: str
    heard_s: float
    told: bool = False  # what its slots hold
    gone_s: float | None = None  # when it hung up
    alive: dict[int, int] = field(default_factory=dict)  # slot -> process
    progress: dict[int, tuple[int, int, float]] = field(default_factory=dict)  # slot -> step, phase, age in seconds
    problems: tuple[str, ...] = ()  # what its preflight found; it takes no part
    ready: Message | None = None
    where: dict[int, tuple[bool, str]] | None = None  # slot -> waits for others, place


def seated(hosts: Mapping[str, Host], formation: Membership) -> Iterator[tuple[Host, int]]:
    """Host and slot of every rank whose host is there."""
    for seat in formation.seats:
        if seat.host in hosts:
            yield hosts[seat.host], seat.slot


def is_still(hosts: Mapping[str, Host], formation: Membership, patience_s: Callable[[int], float]) -> bool:
    """Whether every rank has told of itself, and none has got anywhere for longer than its phase may take."""
    ages = [host.progress[slot] for host, slot in seated(hosts, formation) if slot in host.progress]
    return len(ages) == formation.world and all(age > patience_s(phase) for _, phase, age in ages)


def culprit(
    hosts: Mapping[str, Host], formation: Membership, among: set[tuple[str, int]]
) -> tuple[Host, int, str] | None:
    """The one of some seats that waits for nobody and came least far; its host, slot and place."""
    found = [
        (host.progress[slot][0], formation.seats.index(HostSlot(host.name, slot)), host, slot, host.where[slot][1])
        for host, slot in seated(hosts, formation)
        if (host.name, slot) in among and slot in host.progress and host.where and slot in host.where
        if not host.where[slot][0]
    ]
    _, _, host, slot, place = min(found, key=lambda one: one[:2], default=(0, 0, None, 0, ""))
    return (host, slot, place) if host is not None else None
