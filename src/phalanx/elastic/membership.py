"""Who takes part next: from the seats that are alive, the formation that comes closest to what was planned."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from phalanx.elastic.membership import HostSlot, Membership
from phalanx.plan.layout import Layout
from phalanx.plan.shrink_layout import shrink_layout


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
        layout = (
            shrink_layout(planned, ranks=len(seats), sequences=sequences, reproducible=reproducible) if fewer else None
        )
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
