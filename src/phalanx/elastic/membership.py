"""A membership: which slot of which host is which rank, in which layout; and which one comes next.

Every change of members is a new generation. In messages, in coordinator.json and in event files the number is called
`epoch`, as it has been since 0.1, so that records of older runs can be read.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from phalanx.plan.layout import Layout
from phalanx.plan.shrink_layout import shrink_layout
from phalanx.units import plural


@dataclass(frozen=True, order=True, slots=True)
class HostSlot:
    """A place for one rank: a slot of a host."""

    host: str
    slot: int


@dataclass(frozen=True, kw_only=True, slots=True)
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
        for rank, one in enumerate(self.slots):
            ranks.setdefault(one.host, {})[one.slot] = rank
        object.__setattr__(self, "_ranks", ranks)

    @property
    def world(self) -> int:
        """The number of ranks."""
        return len(self.slots)

    @property
    def hosts(self) -> tuple[str, ...]:
        """Hosts with a rank, in the order of their first rank."""
        return tuple(self._ranks)

    def rank_at(self, place: HostSlot) -> int | None:
        """The rank in a slot; None when the slot has none."""
        return self._ranks.get(place.host, {}).get(place.slot)

    def ranks_on(self, host: str) -> Mapping[int, int]:
        """Slot -> rank of one host."""
        return self._ranks.get(host, {})

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "epoch": self.generation,
            "layout": asdict(self.layout),
            "seats": [[one.host, one.slot] for one in self.slots],
        }

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Membership:
        """The reverse of `to_json`; raises ValueError, TypeError or KeyError on anything else."""
        return cls(
            generation=int(body["epoch"]),
            layout=Layout(**body["layout"]),
            slots=tuple(HostSlot(str(host), int(slot)) for host, slot in body["seats"]),
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
) -> Membership | None:
    """The membership that comes closest to the plan, or None when the policy or the layout allows none.

    `alive` are the slots with a living process, idle or a survivor of `before`, host by host; in those of `fallen` it
    is a new one. Under "shrink" only survivors count; under "replace" the layout never becomes smaller.
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
    return Membership(generation=generation, layout=layout, slots=_assign_ranks(layout.devices, before, slots))


def _assign_ranks(world: int, before: Membership | None, slots: Sequence[HostSlot]) -> tuple[HostSlot, ...]:
    """Survivors keep their ranks where the world size stays, and come first where it does not."""
    survivors = {one for one in slots if before is not None and before.rank_at(one) is not None}
    others = [one for one in slots if one not in survivors]
    if before is None or before.world != world:
        chosen = set([*(one for one in slots if one in survivors), *others][:world])
        return tuple(one for one in slots if one in chosen)
    result = []
    for one in before.slots:
        if one in survivors:
            result.append(one)
        else:
            # On the host of the lost rank if possible: its replica is there, and the links are as planned.
            near = next((other for other in others if other.host == one.host), others[0])
            others.remove(near)
            result.append(near)
    return tuple(result)
