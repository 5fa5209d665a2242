"""What the three decisions come to, one sentence each: the picture's headings and the first lines of the page."""

from __future__ import annotations

from phalanx.network.fabric.decisions import Decisions, PlaneRow
from phalanx.units import plural


def findings(one: Decisions) -> tuple[str, str, str]:
    """In the order of the decisions."""
    return _scale(one), _balance(one), _recovery(one)


def against(one: Decisions) -> str:
    """What the formula's ratios are measured against: the same box with its widest ports, in three tiers."""
    return f"{_planes(one.planes[0])} in 3 tiers"


def formula(one: Decisions) -> str:
    """Switches and optics per host of full fabrics, as arXiv:2605.04333 section 2 counts them."""
    mine = f"{_planes(one.own)} in {plural(one.own.tiers, 'tier')}"
    if mine == against(one):
        return ""
    have = "has" if one.own.planes == 1 else "have"
    if one.switch_ratio == one.optics_ratio == "1":
        return f"{mine} {have} as many switches and optics per host as {against(one)}"
    return f"{mine} {have} {one.switch_ratio} of the switches and {one.optics_ratio} of the optics of {against(one)}"


def counted(one: Decisions) -> str:
    """The same of the fabrics that join these hosts: tiers as many as they need, ports as they are filled."""
    flat = one.planes[0]
    if one.own == flat or one.counted_switch_ratio is None:
        return ""
    return (
        f"{one.own.switches:,} switches are {one.counted_switch_ratio:.3g} of the {flat.switches:,} of {_planes(flat)} "
        f"in {plural(flat.tiers, 'tier')} at full bisection, and the optics {one.counted_optics_ratio:.3g}"
    )


def _scale(one: Decisions) -> str:
    flat, own = one.planes[0], one.own
    most = own.most_hosts[own.tiers - 2]
    reach = "reaches" if own.planes == 1 else "reach"
    ratio = "" if own.oversubscription == 1 else f" at {own.oversubscription:.3g}:1"
    said = (
        f"{_planes(own)} of {own.radix} ports {reach} {most:,} hosts in {plural(own.tiers, 'tier')}{ratio}".capitalize()
    )
    if flat.planes == own.planes:
        return said
    full = " at full bisection" if ratio else ""
    if not flat.tiers:
        return f"{said}; {_planes(flat)} of {flat.radix} cannot reach {one.gpus:,}{full}"
    if flat.tiers == own.tiers:
        return f"{said}, {_planes(flat)} of {flat.radix} only {flat.most_hosts[flat.tiers - 2]:,}{full}"
    needs = "needs" if flat.planes == 1 else "need"
    return f"{said}; {_planes(flat)} of {flat.radix} {needs} {flat.tiers} for {one.gpus:,}{full}"


def _balance(one: Decisions) -> str:
    flow, _, paths, packets = one.loads
    return (
        f"A flow per port puts {flow.worst_of_fabric:.1f} times the mean on the worst link, {one.paths} random paths "
        f"{paths.worst_of_fabric:.1f}, packets {packets.worst_of_fabric:.2f}"
    )


def _recovery(one: Decisions) -> str:
    chosen = next(row for row in one.recoveries if row.recovery_s == one.recovery_s)
    restart = one.recoveries[-1]  # the same failures, none of them bypassed in time
    if chosen.restarts:
        return f"So late a bypass restarts the job: {chosen.lost_gpu_hours_per_day:,.0f} GPU-hours lost a day"
    return (
        f"{show_hours(chosen.lost_gpu_hours_per_day).capitalize()} GPU-hours lost a day, "
        f"{show_hours(restart.lost_gpu_hours_per_day)} if each failure restarts the job"
    )


def show_hours(value: float) -> str:
    """Whole hours where there are some."""
    return f"{value:,.0f}" if value >= 10 else f"{value:.1f}" if value >= 0.1 else "under 0.1"


def _planes(row: PlaneRow) -> str:
    return "one plane" if row.planes == 1 else plural(row.planes, "plane")
