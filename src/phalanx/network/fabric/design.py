"""Every fabric of the catalogue that joins N GPUs: planes x tiers x oversubscription x rails, counted and compared."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from phalanx.errors import UserError, mistake
from phalanx.network.fabric.fabric_bill import FabricBill, Loss, fabric_bill, failure_loss
from phalanx.network.fabric.fabric_types import KINDS, MOST_LIDS, Fabric, Switch, needs_routers, plane_addresses
from phalanx.network.fabric.failure_budget import CABLE_PER_DAY, SWITCH_PER_DAY, interruptions_per_day
from phalanx.network.fabric.sizing import (
    MOST_PLANES,
    MOST_TIERS,
    ClosShape,
    check_fabric,
    most_hosts,
    size_fabric,
    split_t0,
    too_many,
)
from phalanx.network.fabric.switch_catalogue import find_switches, known_switches
from phalanx.units import plural

WHERE = "phalanx fabric design"
RATIOS = (1.0, 2.0, 4.0)  # full bisection, and what storage and inference networks use
RAILS = (1, 8)  # none, and one per GPU of a common server


@dataclass(frozen=True, kw_only=True, slots=True)
class DesignRequest:
    """What is asked for; None leaves the choice open."""

    gpus: int
    nic_gbps: float
    switch: str | None = None
    tiers: int | None = None
    planes: int | None = None
    oversubscription: float | None = None
    rails: int | None = None
    catalogue: tuple[Switch, ...] = ()  # in place of the shipped one


@dataclass(frozen=True, kw_only=True, slots=True)
class Design:
    """One fabric with its parts, its weak points and its failures per day."""

    fabric: Fabric
    bill: FabricBill
    loss: Loss
    cable_failures_per_day: float  # at Alibaba HPN's rate
    switch_failures_per_day: float  # Singh et al., first three months
    interruptions_per_day: float  # at Llama 3's rate per GPU
    pareto: bool  # no other is as good in cost, hops, power, oversubscription and NIC-link loss, and better in one

    @property
    def usd_middle(self) -> float:
        """Between the low and the high price; infinite where the box has none."""
        return sum(self.bill.usd) / 2 if self.bill.usd else float("inf")


def design_fabrics(request: DesignRequest) -> tuple[Design, ...]:
    """All that fit, full bisection first, then by cost, hops and what a NIC link's failure takes; never empty.

    A configuration is shown with the fewest tiers that reach, unless the tiers are given: more tiers of the same boxes
    are more of everything. Raises UserError with the nearest workable choices where nothing fits.
    """
    _check_request(request)
    found = [_make_design(fabric) for fabric in _fitting_fabrics(request)]
    if not found:
        raise _nothing_reaches(request)
    best = _on_front(found)
    marked = [replace(one, pareto=flag) for one, flag in zip(found, best, strict=True)]
    return tuple(sorted(marked, key=_design_order))


def _check_request(request: DesignRequest) -> None:
    ratio = 1.0 if request.oversubscription is None else request.oversubscription
    tiers = 2 if request.tiers is None else request.tiers
    planes = 1 if request.planes is None else request.planes
    shape = ClosShape(planes=planes, tiers=tiers, oversubscription=ratio, rails=request.rails or 1)
    if request.rails is not None and request.rails < 1:
        shape = replace(shape, rails=request.rails)
    check_fabric(request.gpus, request.nic_gbps, shape, where=WHERE)
    if not _port_configurations(request):
        raise _no_speed(request)


def _allowed_switches(request: DesignRequest) -> tuple[Switch, ...]:
    if request.switch is not None:
        return find_switches(request.switch, where=WHERE, among=request.catalogue)
    return request.catalogue or known_switches()


def _port_configurations(request: DesignRequest) -> list[tuple[Switch, int]]:
    """Switches whose ports split the NIC into whole planes, with the planes."""
    boxes = _allowed_switches(request)
    split = [(one, request.nic_gbps / one.port_gbps) for one in boxes]
    whole = [(one, int(planes)) for one, planes in split if 1 <= planes <= MOST_PLANES and planes == int(planes)]
    return [(one, planes) for one, planes in whole if request.planes in (None, planes)]


def _fitting_fabrics(request: DesignRequest) -> Iterator[Fabric]:
    """What fits, but for planes that are too many hosts for one subnet of InfiniBand."""
    return (one for one in _clos_fabrics(request) if not needs_routers(one))


def _clos_fabrics(request: DesignRequest) -> Iterator[Fabric]:
    ratios = RATIOS if request.oversubscription is None else (request.oversubscription,)
    for switch, planes in _port_configurations(request):
        for ratio in ratios:
            for rails in (
                (request.rails,) if request.rails is not None else [one for one in RAILS if request.gpus % one == 0]
            ):
                fabric = _smallest_fabric(
                    request, switch, ClosShape(planes=planes, tiers=1, oversubscription=ratio, rails=rails)
                )
                if fabric is not None:
                    yield fabric


def _smallest_fabric(request: DesignRequest, switch: Switch, shape: ClosShape) -> Fabric | None:
    """With the fewest tiers that reach; None where none do, or where one switch per plane makes the shape pointless."""
    tiers = range(1, MOST_TIERS + 1) if request.tiers is None else (request.tiers,)
    for count in tiers:
        if most_hosts(switch.radix, replace(shape, tiers=count)) >= request.gpus:
            if count == 1 and (shape.rails > 1 or shape.oversubscription > 1):
                return None
            return size_fabric(request.gpus, request.nic_gbps, switch, replace(shape, tiers=count), where=WHERE)
    return None


def _make_design(fabric: Fabric) -> Design:
    parts = fabric_bill(fabric)
    return Design(
        fabric=fabric,
        bill=parts,
        loss=failure_loss(fabric),
        cable_failures_per_day=parts.cables * CABLE_PER_DAY,
        switch_failures_per_day=fabric.switches * SWITCH_PER_DAY,
        interruptions_per_day=interruptions_per_day(fabric),
        pareto=False,
    )


def _design_order(one: Design) -> tuple[float, float, int, float, bool, str, int]:
    fabric = one.fabric
    weak = fabric.switch.evidence == "weak"
    ratio = nominal_ratio(fabric)
    return ratio, one.usd_middle, fabric.hops, one.loss.nic_link, weak, fabric.switch.name, fabric.rails


def nominal_ratio(fabric: Fabric) -> float:
    """The oversubscription that was asked for: 42 ports down and 22 up are meant as 2:1."""
    return round(2 * fabric.oversubscription) / 2


def _design_goals(one: Design) -> tuple[float, ...]:
    watts = one.bill.watts if one.bill.watts is not None else float("inf")
    return one.usd_middle, one.fabric.hops, watts, nominal_ratio(one.fabric), one.loss.nic_link


def _on_front(found: Sequence[Design]) -> list[bool]:
    goals = [_design_goals(one) for one in found]
    kinds = sorted(set(goals))
    best = {
        mine
        for mine in kinds
        if not any(
            other != mine and all(theirs <= ours for theirs, ours in zip(other, mine, strict=True)) for other in kinds
        )
    }
    return [one in best for one in goals]


def _no_speed(request: DesignRequest) -> UserError:
    boxes = _allowed_switches(request)
    name = "the catalogue" if request.switch is None else boxes[0].box if boxes[0].box != "any" else boxes[0].name
    speeds = ", ".join(f"{speed:g}" for speed in sorted({one.port_gbps for one in boxes}))
    planes = sorted({count for _, count in _port_configurations(replace(request, planes=None))})
    if request.planes is not None and planes:
        port_gbps = request.nic_gbps / request.planes
        what = f"{request.planes} planes make ports of {port_gbps:g} Gb/s of a {request.nic_gbps:g} Gb/s NIC"
        fix = f"use {' or '.join(map(str, planes))} planes"
    else:
        what = f"a NIC of {request.nic_gbps:g} Gb/s is not a whole number of ports of {name}"
        near = min((one.port_gbps for one in boxes), key=lambda speed: abs(speed - request.nic_gbps))
        fix = f"use --nic-gbps {near:g}, or another --switch"
    return mistake(WHERE, what, why=f"the port speeds of {name} are {speeds} Gb/s", fix=fix)


def _nothing_reaches(request: DesignRequest) -> UserError:
    """What the most capable of the allowed configurations reaches, and the nearest choices that do."""
    near = " or ".join(_nearest_requests(request))
    crowded = min(_clos_fabrics(request), key=plane_addresses, default=None)
    if crowded is not None:
        return _too_many_addresses(crowded, near)
    ratio = 1.0 if request.oversubscription is None else request.oversubscription
    tiers = MOST_TIERS if request.tiers is None else request.tiers
    reach = [
        (most_hosts(switch.radix, shape), -order, switch, shape)
        for order, (switch, planes) in enumerate(_port_configurations(request))
        for shape in [ClosShape(planes=planes, tiers=tiers, oversubscription=ratio, rails=request.rails or 1)]
    ]
    _, _, switch, shape = max(reach, key=lambda one: one[:2])
    fix = f"use {near}" if near else f"use at most {most_hosts(switch.radix, shape):,} GPUs"
    return too_many(request.gpus, switch, shape, where=WHERE, fix=fix)


def _too_many_addresses(fabric: Fabric, near: str) -> UserError:
    return mistake(
        WHERE,
        f"{fabric.hosts:,} GPUs and {fabric.switches_per_plane:,} switches do not fit into a subnet of InfiniBand",
        why=f"it has {MOST_LIDS:,} addresses (16-bit LIDs, 0x0001 to 0xBFFF); routers between subnets are not modelled",
        fix=f"use {near}" if near else f"use an Ethernet switch, or fewer than {MOST_LIDS:,} GPUs",
    )


def _nearest_requests(request: DesignRequest) -> Iterator[str]:
    """What would do if one demand were dropped: first more tiers, then other planes, then another switch."""
    relaxed = {
        "tiers": replace(request, tiers=None),
        "planes": replace(request, planes=None),
        "switch": replace(request, switch=None),
        "oversubscription": replace(request, oversubscription=None),
    }
    for name, other in relaxed.items():
        found = sorted(map(_make_design, _fitting_fabrics(other)), key=_design_order) if other != request else []
        if not found:
            continue
        fabric = found[0].fabric
        if name == "tiers":
            yield f"--tiers {fabric.tiers} ({fabric.switch.name})"
        elif name == "planes":
            yield f"--planes {fabric.planes} ({fabric.switch.name})"
        elif name == "switch":
            planes = "plane" if fabric.planes == 1 else "planes"
            yield f'--switch "{fabric.switch.name}" ({fabric.planes} {planes}, {plural(fabric.tiers, "tier")})'
        else:
            yield f"--oversubscription {fabric.oversubscription:g}"


# A design as a file: TOML that `fabric show`, `fabric simulate` and `sim --fabric` read, and all designs as CSV.


def fabric_toml(fabric: Fabric) -> str:
    """The file that parse_fabric reads back as the same fabric, but for its name."""
    switch = fabric.switch
    shipped = switch in known_switches()
    # As it was asked for, where that splits a T0's ports in the same way.
    asked = nominal_ratio(fabric)
    same = split_t0(fabric.switch.radix, fabric.tiers, asked) == (fabric.t0_down, fabric.t0_up)
    values: dict[str, object] = {
        "hosts": fabric.hosts,
        "nic_gbps": fabric.nic_gbps,
        "planes": fabric.planes,
        "tiers": fabric.tiers,
        **({"switch": switch.name} if shipped else {"radix": switch.radix, "box": switch.box}),
        **({"watts": switch.watts} if switch.watts and not shipped else {}),
        **({"usd": list(switch.usd)} if switch.usd and not shipped else {}),
        **({"kind": switch.kind} if switch.kind != KINDS[0] and not shipped else {}),
        "oversubscription": asked if same else fabric.oversubscription,
        "rails": fabric.rails,
    }
    lines = [f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in values.items()]
    return "\n".join([f"# {fabric.switches:,} switches: {fabric.name}", *lines]) + "\n"


def designs_csv(found: Sequence[Design]) -> str:
    """One line per design, units in the names, in the order of the table."""
    out = io.StringIO()
    rows = [_design_row(one) for one in found]
    writer = csv.DictWriter(out, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def _design_row(one: Design) -> dict[str, object]:
    fabric, parts, lost = one.fabric, one.bill, one.loss
    low, high = parts.usd or ("", "")
    return {
        "fabric": fabric.name,
        "switch": fabric.switch.name,
        "planes": fabric.planes,
        "tiers": fabric.tiers,
        "oversubscription": round(fabric.oversubscription, 4),
        "rails": fabric.rails,
        **{f"t{tier}": fabric.planes * n for tier, n in enumerate((fabric.t0, fabric.t1, fabric.t2, fabric.t3))},
        "switches": fabric.switches,
        "cables": parts.cables,
        "optics_800g": parts.optics_800g,
        "hops": fabric.hops,
        "paths": fabric.paths,
        "hosts_one_switch_away": fabric.hosts_per_t0,
        "lost_nic_link": lost.nic_link,
        "lost_t0_t1_link": lost.t0_t1_link,
        "lost_t0": lost.t0,
        "lost_t1": lost.t1,
        "lost_t2": "" if lost.t2 is None else lost.t2,
        "watts": "" if parts.watts is None else parts.watts,
        "usd_low": low,
        "usd_high": high,
        "cable_failures_per_day": one.cable_failures_per_day,
        "switch_failures_per_day": one.switch_failures_per_day,
        "interruptions_per_day": one.interruptions_per_day,
        "pareto": one.pareto,
    }
