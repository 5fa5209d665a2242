"""Who takes part next: from the seats that are alive, the formation that comes closest to what was planned."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from phalanx.plan.layout import Layout
from phalanx.plan.shrink import shrink
from phalanx.units import plural


def next_membership(
    *,
    epoch: int,
    planned: Layout,
    sequences: int,
    reproducible: bool,
    policy: str,
    before: Membership | None,
    alive: Sequence[HostSlot],
    fallen: Collection[HostSlot] = (),
) -> Membership | None:
    """The next formation, or None when the policy or the layout allows none.

    `alive` are the seats with a living process, idle or a survivor of `before`, host by host; in those of `fallen` it
    is a new one. Under "shrink" only survivors count; under "replace" the layout never becomes smaller.
    """
    seats = list(alive)
    if policy == "shrink" and before is not None:
        seats = [seat for seat in alive if seat in before.seats and seat not in fallen]
    layout: Layout | None = planned
    if len(seats) < planned.devices:
        fewer = policy in ("auto", "shrink")
        layout = shrink(planned, ranks=len(seats), sequences=sequences, reproducible=reproducible) if fewer else None
    if layout is None:
        return None
    return Membership(epoch=epoch, layout=layout, seats=_seated(layout.devices, before, seats))


def _seated(world: int, before: Membership | None, seats: Sequence[HostSlot]) -> tuple[HostSlot, ...]:
    """Survivors keep their ranks where the world keeps its size, and come first where it does not."""
    survivors = [seat for seat in seats if before is not None and seat in before.seats]
    others = [seat for seat in seats if seat not in survivors]
    if before is None or before.world != world:
        chosen = set([*survivors, *others][:world])
        return tuple(seat for seat in seats if seat in chosen)
    result: list[HostSlot | None] = [seat if seat in survivors else None for seat in before.seats]
    for rank, seat in enumerate(result):
        if seat is None:
            # On the host of the lost one if it can be: its copy is there, and the links are as planned.
            near = next((one for one in others if one.host == before.seats[rank].host), others[0])
            others.remove(near)
            result[rank] = near
    return tuple(seat for seat in result if seat is not None)


# A formation: which slot of which host is which rank, in which layout. Every change of members is a new epoch.


@dataclass(frozen=True, order=True, slots=True)
class HostSlot:
    """A place for a rank: a slot of a host."""

    host: str
    slot: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Membership:
    """One membership of the job; `seats[r]` is where rank r sits."""

    epoch: int
    layout: Layout
    seats: tuple[HostSlot, ...]

    def __post_init__(self) -> None:
        if len(self.seats) != self.layout.devices:
            raise ValueError(f"{len(self.seats)} seats for {plural(self.layout.devices, 'rank')}")

    @property
    def world(self) -> int:
        """Ranks."""
        return len(self.seats)

    def rank(self, seat: HostSlot) -> int | None:
        """The rank of a seat; None when it has none."""
        return self.seats.index(seat) if seat in self.seats else None

    def of_host(self, host: str) -> dict[int, int]:
        """Slot -> rank of one host."""
        return {seat.slot: rank for rank, seat in enumerate(self.seats) if seat.host == host}

    @property
    def hosts(self) -> tuple[str, ...]:
        """Hosts with a rank, in the order of their first rank."""
        return tuple(dict.fromkeys(seat.host for seat in self.seats))

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "epoch": self.epoch,
            "layout": asdict(self.layout),
            "seats": [[seat.host, seat.slot] for seat in self.seats],
        }

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Membership:
        """The reverse of `to_json`; raises ValueError, TypeError or KeyError on anything else."""
        return cls(
            epoch=int(body["epoch"]),
            layout=Layout(**body["layout"]),
            seats=tuple(HostSlot(str(host), int(slot)) for host, slot in body["seats"]),
        )
