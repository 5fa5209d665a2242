"""The three decisions about a fabric as text: tables of planes, loads and recovery times."""

from __future__ import annotations

from phalanx.io.tables import folded_table
from phalanx.network.fabric.decisions import Decisions, PlaneRow
from phalanx.network.fabric.fabric_text import (
    counted_ratios,
    decision_findings,
    fold_lines,
    format_percent,
    format_whole,
    formula_ratios,
    show_budget,
)
from phalanx.network.fabric.fabric_types import Fabric
from phalanx.network.fabric.failure_budget import SHIELD_S, can_spray
from phalanx.units import format_seconds


def show_decisions(one: Decisions, *, width: int | None = None) -> str:
    """Format the findings, then the tables of the three decisions."""
    findings = "\n".join(f"{number}. {words}" for number, words in enumerate(decision_findings(one), 1))
    return fold_lines(
        "\n\n".join([findings, _planes_text(one, width), _loads_text(one, width), _latency_text(one, width)]), width
    )


def _planes_text(one: Decisions, width: int | None) -> str:
    """Format the table of planes and radix, and the ratios to the conventional three tiers."""
    head = (
        "planes", "switch", "uplinks", "2 tiers", "3 tiers", "4 tiers", "tiers", "hops", "switches", "per host", "full",
        "optics per host", "near", "NIC link", "T0-T1",
    )  # fmt: skip
    rows = [_plane_row(row, f"  {row.planes}") for row in one.planes]
    if one.own not in one.planes:
        rows.append(_plane_row(one.own, "  this"))
    ratios = {"full, per host": formula_ratios(one), "as counted": counted_ratios(one)}
    return "\n".join(
        [
            f"1. Planes and radix: L tiers of k ports join 2·(k/2)^L hosts; {one.gpus:,} GPUs, {one.nic_gbps:g} Gb/s:",
            folded_table([head, *rows], left=2, width=width),
            *([f"  this: {one.fabric.name}, as it stands"] if one.own not in one.planes else []),
            *(f"  {name}: {words}" for name, words in ratios.items() if words),
        ]
    )


def _plane_row(row: PlaneRow, name: str) -> tuple[str, ...]:
    reachable = bool(row.tiers)
    return (
        name,
        row.switch,
        "full" if row.oversubscription == 1 else f"{row.oversubscription:.3g}:1",
        *(f"{hosts:,}" for hosts in row.most_hosts),
        str(row.tiers or "-"),
        str(row.hops or "-"),
        format_whole(row.switches),
        f"{row.switches_per_host:.6f}" if reachable else "-",
        f"{row.full_switches_per_host:.6f}" if row.oversubscription == 1 else "-",
        f"{row.optics_per_host:.3g}" if reachable else "-",
        f"{row.hosts_one_switch_away:,}",
        format_percent(row.lost_per_nic_link),
        format_percent(row.lost_per_t0_t1_link),
    )


def _loads_text(one: Decisions, width: int | None) -> str:
    """Format the table of uplink loads."""
    head = (
        "each unit takes a random uplink",
        "units per link",
        "idle links",
        "max/mean of a T0",
        "worst of the fabric",
    )
    rows = [
        (
            f"  {row.what}",
            f"{row.units_per_link:g}",
            format_percent(row.idle_share),
            f"{row.max_to_mean:.2f}",
            f"{row.worst_of_fabric:.2f}",
        )
        for row in one.loads
    ]
    return "\n".join(
        [
            f"2. Packets instead of flows: {one.fabric.t0_up} uplinks, {one.fabric.planes * one.fabric.t0:,} T0s",
            folded_table([head, *rows], width=width),
            "  random paths alone leave the worst link above line rate: skipping marked paths is what removes that",
        ]
    )


def _latency_text(one: Decisions, width: int | None) -> str:
    """Format the table of recovery times, and the failure budget."""
    late = ", ".join(f"1 in {1 / row.transfer:,.0f}: {format_percent(row.step)}" for row in one.late)
    head = ("recovery after", "s per failure", "cluster lost", "GPU-hours a day", "to flaps, at most")
    rows = [
        (
            f"  {format_seconds(row.recovery_s)}",
            f"{row.seconds_per_event:.3g}",
            format_percent(row.lost_share),
            f"{row.lost_gpu_hours_per_day:,.0f}",
            "restarts" if row.flap_share is None else format_percent(row.flap_share),
        )
        for row in one.recoveries
    ]
    remarks = [
        ("  chosen" if row.recovery_s == one.recovery_s else "")
        + ("  connections give up, the job restarts" if row.restarts else "")
        for row in one.recoveries
    ]
    lines = [line + end for line, end in zip(folded_table([head, *rows]).splitlines(), ["", *remarks], strict=True)]
    if width is not None and max(map(len, lines)) > width:
        noted = [(*row, remark.strip()) for row, remark in zip(rows, remarks, strict=True)]
        lines = folded_table([(*head, ""), *noted], width=width).splitlines()
    return "\n".join(
        [
            f"3. Recovery at the edge: a step waits for the slowest of {one.gpus:,} transfers, "
            f"{one.slowest_to_mean:.1f} times the mean of an exponential delay",
            f"  transfers late, and so steps: {late}",
            *lines,
            *_infiniband_limits(one.fabric),
            show_budget(one.fabric, one.budget),
        ]
    )


def _infiniband_limits(fabric: Fabric) -> list[str]:
    """Return the remark that the table's recovery times cannot be reached on InfiniBand; empty for other fabrics."""
    if can_spray(fabric):
        return []
    return [
        f"  InfiniBand: above T0 no sooner than {format_seconds(SHIELD_S)} (SHIELD), and a lost NIC link or T0 "
        "restarts the job; both are in the table",
    ]
