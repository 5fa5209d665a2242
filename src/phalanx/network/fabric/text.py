"""Fabrics as a person reads them: tables of plain text."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from phalanx.network.fabric.bill import Loss, bill, loss
from phalanx.network.fabric.budget import Budget, budget
from phalanx.network.fabric.decisions import Decisions, RecoveryRow
from phalanx.network.fabric.design import Design, nominal_ratio
from phalanx.network.fabric.findings import against, findings
from phalanx.network.fabric.types import Fabric
from phalanx.units import format_money, format_seconds

_HEAD = (
    "   switch", "planes", "tiers", "rails", "T0", "T1", "T2+T3", "switches", "cables", "800G optics", "hops", "paths",
    "near", "NIC link", "T0-T1", "T1", "MW", "cost", "fail/day",
)  # fmt: skip


def table(rows: Sequence[Sequence[str]], *, left: int = 1) -> str:
    """Columns as wide as their widest cell; the first `left` to the left, the others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = (
        "  ".join(
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)


def show_designs(found: Sequence[Design], *, top: int) -> str:
    """The `top` designs of each oversubscription, those that nothing beats marked with a star."""
    first = found[0].fabric
    parts = [
        f"{first.hosts:,} GPUs with a {first.nic_gbps:g} Gb/s NIC each: {len(found)} fabrics fit. "
        f"Network interruptions at Llama 3's rate per GPU: {found[0].interruptions_per_day:.2g} a day"
    ]
    for ratio, group in groupby(found, key=lambda one: nominal_ratio(one.fabric)):
        lines = _merged(list(group))
        name = "full bisection" if ratio == 1 else f"{ratio:g}:1 oversubscribed at T0"
        more = f", {len(lines) - top} more with --top {len(lines)}" if len(lines) > top else ""
        parts.append(f"\n{name}{more}\n" + table([_HEAD, *lines[:top]]))
    parts.append("\n" + LEGEND)
    return "\n".join(parts)


LEGEND = """\
* nothing is as good in cost, hops, power, oversubscription and NIC-link loss, and better in one of them
T0 to T3: switches of all planes. cables: as wide as a NIC. near: hosts one switch away. NIC link, T0-T1, T1: bandwidth
that one failure takes from the NIC, from its T0's uplinks in that plane, from what the hosts of its pod send beyond
their T0; a lost T0 takes the NIC-link share from all hosts near. cost: switches, optics and trunks, low to high list
prices. fail/day: cables at Alibaba HPN's 0.057 % a month, and switches at 2 % in three months. All links count as
optical. Sources: fabric show --json"""


def _merged(group: Sequence[Design]) -> list[tuple[str, ...]]:
    """One line for designs that differ only in their rails."""
    lines: dict[tuple[str, ...], list[str]] = {}
    for one in group:
        cells = _cells(one)
        lines.setdefault(cells, []).append("none" if one.fabric.rails == 1 else str(one.fabric.rails))
    return [(*cells[:3], "/".join(rails), *cells[3:]) for cells, rails in lines.items()]


def _cells(one: Design) -> tuple[str, ...]:
    fabric, parts, lost = one.fabric, one.bill, one.loss
    return (
        f"{'* ' if one.pareto else '  '} {fabric.switch.name}",
        str(fabric.planes),
        str(fabric.tiers),
        *(_count(fabric.planes * number) for number in (fabric.t0, fabric.t1, fabric.t2 + fabric.t3)),
        _count(fabric.switches),
        _count(parts.cables),
        f"{parts.optics_800g:,.0f}",
        str(fabric.hops),
        _count(fabric.paths),
        _count(lost.t0_hosts),
        percent(lost.nic_link),
        percent(lost.t0_t1_link),
        percent(lost.t1),
        "?" if parts.watts is None else f"{parts.watts / 1e6:.3g}",
        money(parts.usd),
        f"{one.cable_failures_per_day:.2g}+{one.switch_failures_per_day:.2g}",
    )


def show_fabric(fabric: Fabric) -> str:
    """One fabric on a page."""
    parts, lost = bill(fabric), loss(fabric)
    tiers = ("NIC-T0", "T0-T1", "T1-T2", "T2-T3")
    boxes = [f"{fabric.planes * n:,} T{i}" for i, n in enumerate((fabric.t0, fabric.t1, fabric.t2, fabric.t3)) if n]
    rows = [
        ("hosts", f"{fabric.hosts:,} NICs of {fabric.nic_gbps:g} Gb/s"),
        ("planes", f"{fabric.planes} of {fabric.port_gbps:g} Gb/s, each {fabric.tiers} tiers of {fabric.switch.name}"),
        ("switches", f"{fabric.switches:,}: {' + '.join(boxes)}"),
        ("T0 ports", f"{fabric.t0_down} down, {fabric.t0_up} up ({fabric.oversubscription:.3g}:1), {_rails(fabric)}"),
        ("links", ", ".join(f"{n:,} {tiers[i]}" for i, n in enumerate(parts.links))),
        ("optics", f"{parts.optics_800g:,.0f} 800G modules ({parts.optics:,} link ends), {parts.cables:,} cables"),
        ("paths", f"{fabric.paths:,} between hosts of different T0s, {fabric.hops} switches at most"),
        ("near", f"{lost.t0_hosts:,} hosts one switch away{_by_rail(fabric)}"),
        (
            "one failure takes",
            f"NIC link {percent(lost.nic_link)} of the NIC, T0-T1 link {percent(lost.t0_t1_link)} of",
        ),
        ("", f"its T0's uplinks in a plane, T0 {percent(lost.t0)} of {lost.t0_hosts:,} hosts,"),
        ("", f"T1 {percent(lost.t1)} of what its pod's hosts send beyond their T0{_t2(lost)}"),
        ("power", "unknown" if parts.watts is None else f"{parts.watts / 1e6:.3g} MW with optics"),
        ("cost", money(parts.usd)),
        ("spare ports", f"{parts.spare_ports:,}"),
    ]
    page = table([(f"  {name}", value) for name, value in rows], left=2)
    return f"{fabric.name}\n{page}\n\n{show_budget(budget(fabric))}"


def show_budget(one: Budget) -> str:
    """Failures by part and what they cost."""
    head = ("failures per day", "parts", "per day")
    rows = [(f"  {part.part}", f"{part.count:,}", f"{part.failures_per_day:.3g}") for part in one.parts]
    low, high = one.interruptions_interval
    quick, slow = one.restart
    times = f"{format_seconds(quick.seconds_per_event)} to {format_seconds(slow.seconds_per_event)}"
    hours = f"{quick.lost_gpu_hours_per_day:,.0f} to {slow.lost_gpu_hours_per_day:,.0f} GPU-hours a day"
    return "\n".join(
        [
            table([head, *rows]),
            f"  network interruptions at Llama 3's rate: {one.interruptions_per_day:.3g} a day "
            f"(95 %: {low:.2g} to {high:.2g}; most days {one.day_spread[0]} to {one.day_spread[1]})",
            f"  each restarts the job in {times}: "
            f"{percent(quick.lost_share)} to {percent(slow.lost_share)} of the cluster, {hours}",
            f"  with recovery at the edge: {percent(one.edge.lost_share)}, "
            f"{one.edge.lost_gpu_hours_per_day:,.0f} GPU-hours a day",
        ]
    )


def show_decisions(one: Decisions) -> str:
    """What they come to, then the three decisions, one after the other."""
    said = "\n".join(f"{number}. {words}" for number, words in enumerate(findings(one), 1))
    return "\n\n".join([said, _planes(one), _loads(one), _latency(one)])


def _planes(one: Decisions) -> str:
    head = (
        "planes", "switch", "2 tiers", "3 tiers", "4 tiers", "tiers", "hops", "switches", "per host", "optics per host",
        "near", "NIC link", "T0-T1",
    )  # fmt: skip
    rows = [
        (
            f"  {row.planes}",
            row.switch,
            *(f"{hosts:,}" for hosts in row.most_hosts),
            str(row.tiers or "-"),
            str(row.hops or "-"),
            _count(row.switches),
            f"{row.switches_per_host:.6f}",
            str(row.optics_per_host),
            str(row.hosts_one_switch_away),
            percent(row.lost_per_nic_link),
            percent(row.lost_per_t0_t1_link),
        )
        for row in one.planes
    ]
    return "\n".join(
        [
            f"1. Planes and radix: L tiers of k ports join 2·(k/2)^L hosts; {one.gpus:,} GPUs, {one.nic_gbps:g} Gb/s:",
            table([head, *rows], left=2),
            f"  {one.fabric.planes} planes in {one.fabric.tiers} tiers, against {against(one)}: "
            f"{one.switch_ratio} of the switches and {one.optics_ratio} of the optics per host",
        ]
    )


def _loads(one: Decisions) -> str:
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
            percent(row.idle_share),
            f"{row.max_to_mean:.2f}",
            f"{row.worst_of_fabric:.2f}",
        )
        for row in one.loads
    ]
    return "\n".join(
        [
            f"2. Packets instead of flows: {one.fabric.t0_up} uplinks, {one.fabric.planes * one.fabric.t0:,} T0s",
            table([head, *rows]),
            "  random paths alone leave the worst link above line rate: skipping marked paths is what removes that",
        ]
    )


def _latency(one: Decisions) -> str:
    late = ", ".join(f"1 in {1 / row.transfer:,.0f}: {percent(row.step)}" for row in one.late)
    head = ("recovery after", "s per failure", "cluster lost", "GPU-hours a day", "to flaps, at most")
    rows = [
        (
            f"  {format_seconds(row.recovery_s)}",
            f"{row.seconds_per_event:.3g}",
            percent(row.lost_share),
            f"{row.lost_gpu_hours_per_day:,.0f}",
            percent(row.flap_share),
        )
        for row in one.recoveries
    ]
    lines = table([head, *rows]).splitlines()
    remarks = [""] + [_remark(one, row) for row in one.recoveries]
    return "\n".join(
        [
            f"3. Recovery at the edge: a step waits for the slowest of {one.gpus:,} transfers, "
            f"{one.slowest_to_mean:.1f} times the mean of an exponential delay",
            f"  transfers late, and so steps: {late}",
            *(line + remark for line, remark in zip(lines, remarks, strict=True)),
            show_budget(one.budget),
        ]
    )


def _remark(one: Decisions, row: RecoveryRow) -> str:
    chosen = "  chosen" if row.recovery_s == one.recovery_s else ""
    return chosen + ("  connections give up, the job restarts" if row.restarts else "")


def percent(share: float) -> str:
    """Two significant digits below 10 %.

    >>> percent(0.125), percent(1 / 256), percent(1.0), percent(0.0)
    ('12.5%', '0.39%', '100%', '0%')
    """
    if share == 0 or share == 1:
        return f"{share:.0%}"
    if share > 0.995:
        return ">99%"
    return f"{100 * share:.1f}%" if share >= 0.01 else f"{100 * share:.2g}%" if share >= 1e-6 else "~0%"


def money(usd: tuple[float, float] | None) -> str:
    """A range of dollars, or a question mark."""
    return "unknown" if usd is None else f"{format_money(usd[0])}-{format_money(usd[1])[1:]}"


def _t2(lost: Loss) -> str:
    return "" if lost.t2 is None else f", T2 {percent(lost.t2)} of what a pod sends beyond it"


def _by_rail(fabric: Fabric) -> str:
    """With rails a GPU reaches the other rails of these servers by NVLink and one switch."""
    reached = min(fabric.hosts, fabric.rails * fabric.hosts_per_t0)
    return "" if fabric.rails == 1 else f", {reached:,} with a step over NVLink first"


def _rails(fabric: Fabric) -> str:
    return "no rails" if fabric.rails == 1 else f"{fabric.rails} rails"


def _count(number: int) -> str:
    return f"{number:,}" if number else "-"
