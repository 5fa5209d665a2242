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
    said = f"{_planes(chosen)} of {chosen.radix} ports reach {most:,} hosts in {chosen.tiers} tiers"
    if flat.planes == chosen.planes:
        return said
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
        f"{_hours(chosen.lost_gpu_hours_per_day)} GPU-hours lost a day, "
        f"not {_hours(restart.lost_gpu_hours_per_day)} as when each failure restarts the job"
    )


def _hours(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def _planes(row: PlaneRow) -> str:
    return "one plane" if row.planes == 1 else f"{row.planes} planes"
