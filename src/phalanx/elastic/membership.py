"""A membership: which slot of which host has which rank, in which layout; and the choice of the next membership.

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
    """The ranks that train together; rank r runs in `slots[r]`."""

    generation: int
    layout: Layout
    slots: tuple[HostSlot, ...]
    # Every heartbeat looks up the ranks of its host, without a search through all of them.
    _ranks: dict[str, dict[int, int]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if len(self.slots) != self.layout.devices:
            raise ValueError(f"{plural(len(self.slots), 'slot')} for {plural(self.layout.devices, 'rank')}")
        ranks: dict[str, dict[int, int]] = {}
        for rank, (host, slot) in enumerate(self.slots):
            ranks.setdefault(host, {})[slot] = rank
        object.__setattr__(self, "_ranks", ranks)

    def renumbered(self, generation: int) -> Membership:
        """Return the same ranks in the same slots as another generation; nothing is computed again."""
        copy = object.__new__(Membership)
        copy.__dict__.update(self.__dict__)
        copy.__dict__["generation"] = generation
        return copy

    def with_moved(self, generation: int, moved: Mapping[int, HostSlot]) -> Membership:
        """Return another generation with these ranks in other slots; hosts whose ranks stay the same are not visited.

        Of 131,072 ranks a lost host moves eight.
        """
        slots = list(self.slots)
        for rank, place in moved.items():
            slots[rank] = place
        touched = {self.slots[rank].host for rank in moved} | {place.host for place in moved.values()}
        changed_ranks: dict[str, dict[int, int]] = {host: {} for host in touched}
        members = {rank for host in touched for rank in self.ranks_on(host).values()} | set(moved)
        for rank in sorted(members):
            host, slot = slots[rank]
            changed_ranks[host][slot] = rank
        ranks = {**self._ranks, **changed_ranks}
        ordered = sorted((next(iter(host_ranks.values())), host) for host, host_ranks in ranks.items() if host_ranks)
        moved_membership = object.__new__(Membership)
        moved_membership.__dict__.update(generation=generation, layout=self.layout, slots=tuple(slots))
        moved_membership.__dict__["_ranks"] = {host: ranks[host] for _, host in ordered}
        return moved_membership

    def has_same_ranks(self, other: Membership) -> bool:
        """True when every rank is in the same slot as in another generation."""
        return self.slots is other.slots or self.slots == other.slots

    def has_same_ranks_on(self, host: str, other: Membership) -> bool:
        """True when a host has the same ranks in the same slots in another generation."""
        ranks, other_ranks = self._ranks.get(host), other._ranks.get(host)
        # For most hosts it is the same dictionary.
        return ranks is other_ranks or ranks == other_ranks

    @property
    def world(self) -> int:
        """The number of ranks."""
        return len(self.slots)

    @property
    def hosts(self) -> tuple[str, ...]:
        """The hosts with a rank, in the order of their first rank."""
        return tuple(self._ranks)

    @property
    def num_hosts(self) -> int:
        """The number of hosts with a rank."""
        return len(self._ranks)

    def has_host(self, host: str) -> bool:
        """True when a host has a rank."""
        return host in self._ranks

    def rank_at(self, place: HostSlot) -> int | None:
        """Return the rank in a slot; None when the slot has none."""
        return self._ranks.get(place.host, {}).get(place.slot)

    def ranks_on(self, host: str) -> Mapping[int, int]:
        """Return the ranks of one host by slot."""
        return self._ranks.get(host, {})

    @cached_property
    def runs(self) -> list[tuple[int, str, int, int]]:
        """The slots in short: first rank, host, first slot, and the number of ranks that follow slot by slot."""
        runs: list[tuple[int, str, int, int]] = []
        first, host, slot, count = 0, "", 0, 0
        for rank, place in enumerate(self.slots):
            if count and place.host == host and place.slot == slot + count:
                count += 1
                continue
            if count:
                runs.append((first, host, slot, count))
            first, (host, slot), count = rank, place, 1
        return [*runs, (first, host, slot, count)]

    @cached_property
    def digest(self) -> str:
        """Digest of the assignment of ranks: hosts are sent changes only, and this is what they must add up to."""
        text = orjson.dumps([asdict(self.layout), self.runs], option=orjson.OPT_SORT_KEYS)
        return hashlib.blake2b(text, digest_size=16).hexdigest()

    def to_json(self) -> dict[str, Any]:
        """Return the membership as JSON values."""
        return {
            "epoch": self.generation,
            "layout": asdict(self.layout),
            "runs": [[host, slot, count] for _, host, slot, count in self.runs],
        }

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Membership:
        """Read what `to_json` returned; raises ValueError, TypeError or KeyError on anything else."""
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
        """Return the part that every host is sent."""
        return {"epoch": self.generation, "layout": asdict(self.layout), "digest": self.digest}

    def share_of(self, host: str) -> dict[str, Any]:
        """Return the part that only one host is sent: the ranks in its slots."""
        return {"ranks": {str(slot): rank for slot, rank in self.ranks_on(host).items()}}


@dataclass(frozen=True, kw_only=True, slots=True)
class HostMembership:
    """The part of a membership that one host knows: its own ranks, from a message."""

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
        """Read `summary` and `share_of`; raises ValueError, TypeError or KeyError on anything else."""
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
    """Return the membership that comes closest to the plan, or None when the policy or the layout allows none.

    `alive` are the slots with a living process, idle or a survivor of `before`, host by host; in those of `fallen` the
    process is a new one. Spare slots are used when the others are not enough. Under "shrink" only survivors count;
    under "replace" the layout never becomes smaller.
    """
    slots = list(alive)
    if policy == "shrink" and before is not None:
        slots = [place for place in alive if before.rank_at(place) is not None and place not in fallen]
    layout: Layout | None = planned
    if len(slots) < planned.devices:
        may_shrink = policy in ("auto", "shrink")
        layout = (
            shrink_layout(planned, ranks=len(slots), sequences=sequences, reproducible=reproducible)
            if may_shrink
            else None
        )
    if layout is None:
        return None
    return Membership(
        generation=generation, layout=layout, slots=_assign_ranks(layout.devices, before, slots, is_spare)
    )


def _assign_ranks(
    world: int, before: Membership | None, slots: Sequence[HostSlot], is_spare: Callable[[HostSlot], bool]
) -> tuple[HostSlot, ...]:
    """Assign ranks to slots: survivors keep theirs where the world size stays, and come first where it does not."""
    members = set(before.slots) if before is not None else set[HostSlot]()
    other_slots = sorted((place for place in slots if place not in members), key=is_spare)
    if before is None or before.world != world:
        chosen = set([*(place for place in slots if place in members), *other_slots][:world])
        return tuple(place for place in slots if place in chosen)
    survivors, result = set(slots), list(before.slots)
    lost = [rank for rank, place in enumerate(before.slots) if place not in survivors]
    for rank, place in replace_slots(before, lost, other_slots).items():
        result[rank] = place
    return tuple(result)


def replace_slots(before: Membership, lost: Sequence[int], others: Sequence[HostSlot]) -> dict[int, HostSlot]:
    """Return another slot for each lost rank, in order, from `others`: at least as many slots without a rank."""
    spare: dict[str, list[HostSlot]] = {}
    for place in reversed(others):
        spare.setdefault(place.host, []).append(place)
    replacements: dict[int, HostSlot] = {}
    used, remaining = set[HostSlot](), iter(others)
    for rank in lost:
        # On the host of the lost rank if possible: its replica is there, and the links are as planned.
        near = spare.get(before.slots[rank].host, [])
        while near and near[-1] in used:
            near.pop()
        replacements[rank] = near.pop() if near else next(place for place in remaining if place not in used)
        used.add(replacements[rank])
    return replacements
