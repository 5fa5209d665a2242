"""A formation: which slot of which host is which rank, in which layout. Every change of members is a new epoch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from phalanx.plan.layout import Layout
from phalanx.units import plural


@dataclass(frozen=True, order=True, slots=True)
class Seat:
    """A place for a rank: a slot of a host."""

    host: str
    slot: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Formation:
    """One membership of the job; `seats[r]` is where rank r sits."""

    epoch: int
    layout: Layout
    seats: tuple[Seat, ...]

    def __post_init__(self) -> None:
        if len(self.seats) != self.layout.devices:
            raise ValueError(f"{len(self.seats)} seats for {plural(self.layout.devices, 'rank')}")

    @property
    def world(self) -> int:
        """Ranks."""
        return len(self.seats)

    def rank(self, seat: Seat) -> int | None:
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
    def from_json(cls, body: Mapping[str, Any]) -> Formation:
        """The reverse of `to_json`; raises ValueError, TypeError or KeyError on anything else."""
        return cls(
            epoch=int(body["epoch"]),
            layout=Layout(**body["layout"]),
            seats=tuple(Seat(str(host), int(slot)) for host, slot in body["seats"]),
        )
