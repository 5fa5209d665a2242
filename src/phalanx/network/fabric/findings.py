"""What the three decisions come to, one sentence each: the picture's headings and the first lines of the page."""

from __future__ import annotations

from phalanx.network.fabric.decisions import Decisions, PlaneRow


def findings(one: Decisions) -> tuple[str, str, str]:
    """In the order of the decisions."""
    return _scale(one), _balance(one), _recovery(one)


def against(one: Decisions) -> str:
    """What the ratios are measured against: the same box with its widest ports, in three tiers."""
    return f"{_planes(one.planes[0])} in 3 tiers"


def _scale(one: Decisions) -> str:
    flat, chosen = one.planes[0], next(row for row in one.planes if row.planes == one.fabric.planes)
    most = chosen.most_hosts[max(chosen.tiers, 2) - 2]
    reach = "reaches" if chosen.planes == 1 else "reach"
    said = f"{_planes(chosen)} of {chosen.radix} ports {reach} {most:,} hosts in {chosen.tiers} tiers".capitalize()
    if flat.planes == chosen.planes:
        return said
    if flat.tiers == chosen.tiers:
        return f"{said}, {_planes(flat)} of {flat.radix} only {flat.most_hosts[flat.tiers - 2]:,}"
    if not flat.tiers:
        return f"{said}; {_planes(flat)} of {flat.radix} cannot reach {one.gpus:,}"
    needs = "needs" if flat.planes == 1 else "need"
    return f"{said}; {_planes(flat)} of {flat.radix} {needs} {flat.tiers} for {one.gpus:,}"


def _balance(one: Decisions) -> str:
    flow, _, paths, packets = one.loads
    return (
        f"A flow per port puts {flow.worst_of_fabric:.1f} times the mean on the worst link, {one.paths} random paths "
        f"{paths.worst_of_fabric:.1f}, packets {packets.worst_of_fabric:.2f}"
    )


def _recovery(one: Decisions) -> str:
    chosen = next(row for row in one.recoveries if row.recovery_s == one.recovery_s)
    restart = one.budget.restart[0]
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
    return "one plane" if row.planes == 1 else f"{row.planes} planes"
