"""A membership: which slot of which host is which rank, in which layout; and which one comes next.

Every change of members is a new generation. In messages, in coordinator.json and in event files the number is called
`epoch`, as it has been since 0.1, so that records of older runs can be read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import orjson

from phalanx.plan.layout import Layout
from phalanx.plan.shrink_layout import shrink_layout
from phalanx.units import plural


class HostSlot(NamedTuple):
    """A place for one rank: a slot of a host."""

    host: str
    slot: int


@dataclass(frozen=True, kw_only=True)
class Membership:
    """The ranks that train together; `slots[r]` is where rank r runs."""

    generation: int
    layout: Layout
    slots: tuple[HostSlot, ...]
    # Every heartbeat asks for the ranks of its host: no search through all of them.
    _ranks: dict[str, dict[int, int]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if len(self.slots) != self.layout.devices:
            raise ValueError(f"{plural(len(self.slots), 'slot')} for {plural(self.layout.devices, 'rank')}")
        ranks: dict[str, dict[int, int]] = {}
        for rank, (host, slot) in enumerate(self.slots):
            ranks.setdefault(host, {})[slot] = rank
        object.__setattr__(self, "_ranks", ranks)

    def renumbered(self, generation: int) -> Membership:
        """The same ranks in the same slots, as another generation; nothing is worked out again."""
        made = object.__new__(Membership)
        made.__dict__.update(self.__dict__)
        made.__dict__["generation"] = generation
        return made

    def with_moved(self, generation: int, moved: Mapping[int, HostSlot]) -> Membership:
        """Another generation with these ranks in other slots; hosts that nobody came to or left are not gone through.

        Of 131,072 ranks a lost host moves eight.
        """
        slots = list(self.slots)
        for rank, place in moved.items():
            slots[rank] = place
        touched = {self.slots[rank].host for rank in moved} | {place.host for place in moved.values()}
        there: dict[str, dict[int, int]] = {host: {} for host in touched}
        members = {rank for host in touched for rank in self.ranks_on(host).values()} | set(moved)
        for rank in sorted(members):
            host, slot = slots[rank]
            there[host][slot] = rank
        ranks = {**self._ranks, **there}
        ordered = sorted((next(iter(mine.values())), host) for host, mine in ranks.items() if mine)
        made = object.__new__(Membership)
        made.__dict__.update(generation=generation, layout=self.layout, slots=tuple(slots))
        made.__dict__["_ranks"] = {host: ranks[host] for _, host in ordered}
        return made

    def has_same_ranks(self, other: Membership) -> bool:
        """Whether every rank is in the same slot as in another generation."""
        return self.slots is other.slots or self.slots == other.slots

    def has_same_ranks_on(self, host: str, other: Membership) -> bool:
        """Whether a host has the same ranks in the same slots in another generation."""
        mine, theirs = self._ranks.get(host), other._ranks.get(host)
        return mine is theirs or mine == theirs  # of most hosts it is the same dictionary

    @property
    def world(self) -> int:
        """The number of ranks."""
        return len(self.slots)

    @property
    def hosts(self) -> tuple[str, ...]:
        """Hosts with a rank, in the order of their first rank."""
        return tuple(self._ranks)

    @property
    def num_hosts(self) -> int:
        """How many hosts have a rank."""
        return len(self._ranks)

    def has_host(self, host: str) -> bool:
        """Whether a host has a rank."""
        return host in self._ranks

    def rank_at(self, place: HostSlot) -> int | None:
        """The rank in a slot; None when the slot has none."""
        return self._ranks.get(place.host, {}).get(place.slot)

    def ranks_on(self, host: str) -> Mapping[int, int]:
        """Slot -> rank of one host."""
        return self._ranks.get(host, {})

    @cached_property
    def runs(self) -> list[tuple[int, str, int, int]]:
        """The slots in short: first rank, host, first slot, and how many ranks follow each other slot by slot."""
        runs: list[tuple[int, str, int, int]] = []
        first, host, slot, count = 0, "", 0, 0
        for rank, one in enumerate(self.slots):
            if count and one.host == host and one.slot == slot + count:
                count += 1
                continue
            if count:
                runs.append((first, host, slot, count))
            first, (host, slot), count = rank, one, 1
        return [*runs, (first, host, slot, count)]

    @cached_property
    def digest(self) -> str:
        """Of who is which rank: hosts are told of changes only, and this is what they must add up to."""
        text = orjson.dumps([asdict(self.layout), self.runs], option=orjson.OPT_SORT_KEYS)
        return hashlib.blake2b(text, digest_size=16).hexdigest()

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "epoch": self.generation,
            "layout": asdict(self.layout),
            "runs": [[host, slot, count] for _, host, slot, count in self.runs],
        }

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Membership:
        """The reverse of `to_json`; raises ValueError, TypeError or KeyError on anything else."""
        return cls(
            generation=int(body["epoch"]),
            layout=Layout(**body["layout"]),
            slots=tuple(
                HostSlot(str(host), number)
                for host, slot, count in body["runs"]
                for number in range(int(slot), int(slot) + int(count))
            ),
        )

    def summary(self) -> dict[str, Any]:
        """What every host is told of it."""
        return {"epoch": self.generation, "layout": asdict(self.layout), "digest": self.digest}

    def share_of(self, host: str) -> dict[str, Any]:
        """What only one host is told of it: the ranks in its slots."""
        return {"ranks": {str(slot): rank for slot, rank in self.ranks_on(host).items()}}


@dataclass(frozen=True, kw_only=True, slots=True)
class HostMembership:
    """What one host knows of a membership: its own ranks, as a message tells them."""

    generation: int
    layout: Layout
    digest: str
    ranks: Mapping[int, int]  # slot -> rank

    @property
    def world(self) -> int:
        """The number of ranks on all hosts."""
        return self.layout.devices

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> HostMembership:
        """From `summary` and `share_of`; raises ValueError, TypeError or KeyError on anything else."""
        return cls(
            generation=int(body["epoch"]),
            layout=Layout(**body["layout"]),
            digest=str(body["digest"]),
            ranks={int(slot): int(rank) for slot, rank in body["ranks"].items()},
        )


def next_membership(
    *,
    generation: int,
    planned: Layout,
    sequences: int,
    reproducible: bool,
    policy: str,
    before: Membership | None,
    alive: Sequence[HostSlot],
    fallen: Collection[HostSlot] = (),
    is_spare: Callable[[HostSlot], bool] = lambda place: False,
) -> Membership | None:
    """The membership that comes closest to the plan, or None when the policy or the layout allows none.

    `alive` are the slots with a living process, idle or a survivor of `before`, host by host; in those of `fallen` it
    is a new one. Spare ones are taken when the others are not enough. Under "shrink" only survivors
    count; under "replace" the layout never becomes smaller.
    """
    slots = list(alive)
    if policy == "shrink" and before is not None:
        slots = [one for one in alive if before.rank_at(one) is not None and one not in fallen]
    layout: Layout | None = planned
    if len(slots) < planned.devices:
        fewer = policy in ("auto", "shrink")
        layout = (
            shrink_layout(planned, ranks=len(slots), sequences=sequences, reproducible=reproducible) if fewer else None
        )
    if layout is None:
        return None
    return Membership(
        generation=generation, layout=layout, slots=_assign_ranks(layout.devices, before, slots, is_spare)
    )


def _assign_ranks(
    world: int, before: Membership | None, slots: Sequence[HostSlot], is_spare: Callable[[HostSlot], bool]
) -> tuple[HostSlot, ...]:
    """Survivors keep their ranks where the world size stays, and come first where it does not."""
    members = set(before.slots) if before is not None else set[HostSlot]()
    others = sorted((one for one in slots if one not in members), key=is_spare)
    if before is None or before.world != world:
        chosen = set([*(one for one in slots if one in members), *others][:world])
        return tuple(one for one in slots if one in chosen)
    survivors, result = set(slots), list(before.slots)
    lost = [rank for rank, one in enumerate(before.slots) if one not in survivors]
    for rank, place in replace_slots(before, lost, others).items():
        result[rank] = place
    return tuple(result)


def replace_slots(before: Membership, lost: Sequence[int], others: Sequence[HostSlot]) -> dict[int, HostSlot]:
    """Another slot for each lost rank, in their order, out of `others`: as many or more that no rank has."""
    spare: dict[str, list[HostSlot]] = {}
    for one in reversed(others):
        spare.setdefault(one.host, []).append(one)
    found: dict[int, HostSlot] = {}
    used, left = set[HostSlot](), iter(others)
    for rank in lost:
        # On the host of the lost rank if possible: its replica is there, and the links are as planned.
        near = spare.get(before.slots[rank].host, [])
        while near and near[-1] in used:
            near.pop()
        found[rank] = near.pop() if near else next(other for other in left if other not in used)
        used.add(found[rank])
    return found
