"""Design a fabric for N GPUs: every fabric of the switch catalogue that joins them, counted and compared.

The search covers planes, tiers, oversubscription and rails. Designs are written as TOML and CSV.
"""

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
RATIOS = (1.0, 2.0, 4.0)  # full bisection, and the ratios of storage and inference networks
RAILS = (1, 8)  # no rails, and one per GPU of a common server


@dataclass(frozen=True, kw_only=True, slots=True)
class DesignRequest:
    """The requirements of a fabric; None leaves a choice open."""

    gpus: int
    nic_gbps: float
    switch: str | None = None
    tiers: int | None = None
    planes: int | None = None
    oversubscription: float | None = None
    rails: int | None = None
    catalogue: tuple[Switch, ...] = ()  # used instead of the shipped one


@dataclass(frozen=True, kw_only=True, slots=True)
class Design:
    """One fabric with its bill of parts, its bandwidth losses and its failures per day."""

    fabric: Fabric
    bill: FabricBill
    loss: Loss
    cable_failures_per_day: float  # at Alibaba HPN's rate
    switch_failures_per_day: float  # Singh et al., first three months
    interruptions_per_day: float  # at Llama 3's rate per GPU
    # No other design is at least as good in cost, hops, power, oversubscription and NIC-link loss, and better in
    # one.
    pareto: bool

    @property
    def usd_middle(self) -> float:
        """The middle of the low and the high price in dollars; infinite where the box has no price."""
        return sum(self.bill.usd) / 2 if self.bill.usd else float("inf")


def design_fabrics(request: DesignRequest) -> tuple[Design, ...]:
    """Return all designs that meet the request, sorted by oversubscription, cost, hops and NIC-link loss; never empty.

    Each configuration is built with the fewest tiers that reach the hosts, unless the request sets the tiers: with
    the same boxes, more tiers need more of every part. Raises UserError with the nearest workable choices where
    nothing fits.
    """
    _check_request(request)
    designs = [_make_design(fabric) for fabric in _fitting_fabrics(request)]
    if not designs:
        raise _nothing_reaches(request)
    best = _on_front(designs)
    marked = [replace(design, pareto=flag) for design, flag in zip(designs, best, strict=True)]
    return tuple(sorted(marked, key=_design_order))


def _check_request(request: DesignRequest) -> None:
    """Raise UserError for a request that no switch can meet."""
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
    """Return the switches whose ports split the NIC into whole planes, with the number of planes."""
    switches = _allowed_switches(request)
    split = [(switch, request.nic_gbps / switch.port_gbps) for switch in switches]
    whole_splits = [
        (switch, int(planes)) for switch, planes in split if 1 <= planes <= MOST_PLANES and planes == int(planes)
    ]
    return [(switch, planes) for switch, planes in whole_splits if request.planes in (None, planes)]


def _fitting_fabrics(request: DesignRequest) -> Iterator[Fabric]:
    """Yield the fabrics that fit, without those whose planes exceed the addresses of an InfiniBand subnet."""
    return (fabric for fabric in _clos_fabrics(request) if not needs_routers(fabric))


def _clos_fabrics(request: DesignRequest) -> Iterator[Fabric]:
    """Yield the smallest fabric of every combination of switch, planes, oversubscription and rails."""
    ratios = RATIOS if request.oversubscription is None else (request.oversubscription,)
    for switch, planes in _port_configurations(request):
        for ratio in ratios:
            for rails in (
                (request.rails,)
                if request.rails is not None
                else [count for count in RAILS if request.gpus % count == 0]
            ):
                fabric = _smallest_fabric(
                    request, switch, ClosShape(planes=planes, tiers=1, oversubscription=ratio, rails=rails)
                )
                if fabric is not None:
                    yield fabric


def _smallest_fabric(request: DesignRequest, switch: Switch, shape: ClosShape) -> Fabric | None:
    """Return the fabric with the fewest tiers that join the GPUs.

    None where no number of tiers does, or where one switch per plane makes rails or oversubscription pointless.
    """
    tiers = range(1, MOST_TIERS + 1) if request.tiers is None else (request.tiers,)
    for count in tiers:
        if most_hosts(switch.radix, replace(shape, tiers=count)) >= request.gpus:
            if count == 1 and (shape.rails > 1 or shape.oversubscription > 1):
                return None
            return size_fabric(request.gpus, request.nic_gbps, switch, replace(shape, tiers=count), where=WHERE)
    return None


def _make_design(fabric: Fabric) -> Design:
    bill = fabric_bill(fabric)
    return Design(
        fabric=fabric,
        bill=bill,
        loss=failure_loss(fabric),
        cable_failures_per_day=bill.cables * CABLE_PER_DAY,
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
    """Return the nominal oversubscription, a multiple of 0.5: 42 ports down and 22 up count as 2:1."""
    return round(2 * fabric.oversubscription) / 2


def _design_goals(one: Design) -> tuple[float, ...]:
    watts = one.bill.watts if one.bill.watts is not None else float("inf")
    return one.usd_middle, one.fabric.hops, watts, nominal_ratio(one.fabric), one.loss.nic_link


def _on_front(found: Sequence[Design]) -> list[bool]:
    """Return for each design whether it is on the Pareto front of _design_goals."""
    goals = [_design_goals(design) for design in found]
    distinct = sorted(set(goals))
    front = {
        candidate
        for candidate in distinct
        if not any(
            rival != candidate and all(rival_goal <= goal for rival_goal, goal in zip(rival, candidate, strict=True))
            for rival in distinct
        )
    }
    return [design_goals in front for design_goals in goals]


def _no_speed(request: DesignRequest) -> UserError:
    """Return the error for a NIC speed or number of planes that no allowed switch supports."""
    switches = _allowed_switches(request)
    name = (
        "the catalogue" if request.switch is None else switches[0].box if switches[0].box != "any" else switches[0].name
    )
    speeds = ", ".join(f"{speed:g}" for speed in sorted({switch.port_gbps for switch in switches}))
    planes = sorted({count for _, count in _port_configurations(replace(request, planes=None))})
    if request.planes is not None and planes:
        port_gbps = request.nic_gbps / request.planes
        problem = f"{request.planes} planes make ports of {port_gbps:g} Gb/s of a {request.nic_gbps:g} Gb/s NIC"
        fix = f"use {' or '.join(map(str, planes))} planes"
    else:
        problem = f"a NIC of {request.nic_gbps:g} Gb/s is not a whole number of ports of {name}"
        near = min((switch.port_gbps for switch in switches), key=lambda speed: abs(speed - request.nic_gbps))
        fix = f"use --nic-gbps {near:g}, or another --switch"
    return mistake(WHERE, problem, why=f"the port speeds of {name} are {speeds} Gb/s", fix=fix)


def _nothing_reaches(request: DesignRequest) -> UserError:
    """Return the error for a request that no design meets.

    It names the hosts that the largest allowed configuration joins, and the nearest workable choices.
    """
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
    _, _, switch, shape = max(reach, key=lambda entry: entry[:2])
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
    """Yield the options that work if one demand is dropped: tiers, planes, switch, then oversubscription."""
    relaxed = {
        "tiers": replace(request, tiers=None),
        "planes": replace(request, planes=None),
        "switch": replace(request, switch=None),
        "oversubscription": replace(request, oversubscription=None),
    }
    for name, relaxed_request in relaxed.items():
        designs = (
            sorted(map(_make_design, _fitting_fabrics(relaxed_request)), key=_design_order)
            if relaxed_request != request
            else []
        )
        if not designs:
            continue
        fabric = designs[0].fabric
        if name == "tiers":
            yield f"--tiers {fabric.tiers} ({fabric.switch.name})"
        elif name == "planes":
            yield f"--planes {fabric.planes} ({fabric.switch.name})"
        elif name == "switch":
            planes = "plane" if fabric.planes == 1 else "planes"
            yield f'--switch "{fabric.switch.name}" ({fabric.planes} {planes}, {plural(fabric.tiers, "tier")})'
        else:
            yield f"--oversubscription {fabric.oversubscription:g}"


# Designs as files: TOML that `fabric show`, `fabric simulate` and `sim --fabric` read, and a CSV of all designs.


def fabric_toml(fabric: Fabric) -> str:
    """Return the TOML text from which parse_fabric builds the same fabric, except for its name."""
    switch = fabric.switch
    shipped = switch in known_switches()
    # Write the nominal ratio where it splits a T0's ports in the same way.
    nominal = nominal_ratio(fabric)
    same = split_t0(fabric.switch.radix, fabric.tiers, nominal) == (fabric.t0_down, fabric.t0_up)
    values: dict[str, object] = {
        "hosts": fabric.hosts,
        "nic_gbps": fabric.nic_gbps,
        "planes": fabric.planes,
        "tiers": fabric.tiers,
        **({"switch": switch.name} if shipped else {"radix": switch.radix, "box": switch.box}),
        **({"watts": switch.watts} if switch.watts and not shipped else {}),
        **({"usd": list(switch.usd)} if switch.usd and not shipped else {}),
        **({"kind": switch.kind} if switch.kind != KINDS[0] and not shipped else {}),
        "oversubscription": nominal if same else fabric.oversubscription,
        "rails": fabric.rails,
    }
    lines = [f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in values.items()]
    return "\n".join([f"# {fabric.switches:,} switches: {fabric.name}", *lines]) + "\n"


def designs_csv(found: Sequence[Design]) -> str:
    """Format one CSV line per design, with units in the column names, in the order of the table."""
    out = io.StringIO()
    rows = [_design_row(design) for design in found]
    writer = csv.DictWriter(out, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def _design_row(one: Design) -> dict[str, object]:
    fabric, bill, lost = one.fabric, one.bill, one.loss
    low, high = bill.usd or ("", "")
    return {
        "fabric": fabric.name,
        "switch": fabric.switch.name,
        "planes": fabric.planes,
        "tiers": fabric.tiers,
        "oversubscription": round(fabric.oversubscription, 4),
        "rails": fabric.rails,
        **{f"t{tier}": fabric.planes * n for tier, n in enumerate((fabric.t0, fabric.t1, fabric.t2, fabric.t3))},
        "switches": fabric.switches,
        "cables": bill.cables,
        "optics_800g": bill.optics_800g,
        "hops": fabric.hops,
        "paths": fabric.paths,
        "hosts_one_switch_away": fabric.hosts_per_t0,
        "lost_nic_link": lost.nic_link,
        "lost_t0_t1_link": lost.t0_t1_link,
        "lost_t0": lost.t0,
        "lost_t1": lost.t1,
        "lost_t2": "" if lost.t2 is None else lost.t2,
        "watts": "" if bill.watts is None else bill.watts,
        "usd_low": low,
        "usd_high": high,
        "cable_failures_per_day": one.cable_failures_per_day,
        "switch_failures_per_day": one.switch_failures_per_day,
        "interruptions_per_day": one.interruptions_per_day,
        "pareto": one.pareto,
    }
