"""Fabrics, designs and failure budgets as text, folded to the width of the page or terminal."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from phalanx.io.tables import folded_table
from phalanx.network.fabric.design import Design, nominal_ratio
from phalanx.network.fabric.fabric_bill import Loss, fabric_bill, failure_loss
from phalanx.network.fabric.fabric_types import MOST_LIDS, Fabric, needs_routers, plane_addresses
from phalanx.network.fabric.failure_budget import (
    CONVERGE_S,
    SHIELD_S,
    FailureBudget,
    FailureCost,
    can_spray,
    failure_budget,
    ports_move,
)
from phalanx.units import format_money, format_seconds, plural

if TYPE_CHECKING:
    from phalanx.network.fabric.decisions import Decisions, PlaneRow

PAGE = 119  # columns of prose where the caller gives no width
LEAST = 20  # narrower than any terminal; the smallest width in use


def wrap_paragraph(words: str, width: int | None = None) -> list[str]:
    """Wrap a paragraph to the page, or to `width` if that is narrower."""
    narrow = PAGE if width is None else max(LEAST, min(PAGE, width))
    return textwrap.wrap(words, narrow, break_long_words=False, break_on_hyphens=False)


def fold_lines(text: str, width: int | None) -> str:
    """Wrap lines that exceed `width`; continuation lines start under the second column, or two spaces further in."""
    if width is None:
        return text
    return "\n".join(line for long_line in text.split("\n") for line in _fold_line(long_line, max(LEAST, width)))


def _fold_line(line: str, width: int) -> list[str]:
    """Wrap one line; its continuation starts under the second column if that is in the left half of the page."""
    if len(line) <= width:
        return [line]
    first_cell = re.match(r" *(?:\S+(?: \S+)*  +)?", line)
    start = first_cell.end() if first_cell is not None else 0
    inner = len(line) - len(line.lstrip())
    hang = start if inner < start <= width // 2 else inner if inner > width // 4 else inner + 2
    return textwrap.wrap(
        line, width, subsequent_indent=" " * hang, break_long_words=False, break_on_hyphens=False, drop_whitespace=True
    )


# The findings of the three decisions, one sentence each: headings of the picture and first lines of the page.


def decision_findings(one: Decisions) -> tuple[str, str, str]:
    """Return one finding per decision, in the order of the decisions."""
    return _scale_text(one), _balance_text(one), _recovery_text(one)


def formula_basis(one: Decisions) -> str:
    """Return the basis of the formula's ratios: the same box with its widest ports, in three tiers."""
    return f"{_planes_text(one.planes[0])} in 3 tiers"


def formula_ratios(one: Decisions) -> str:
    """Return the ratios of switches and optics per host of full fabrics, counted as in arXiv:2605.04333 section 2.

    Empty where the fabric is the basis itself.
    """
    own = f"{_planes_text(one.own)} in {plural(one.own.tiers, 'tier')}"
    if own == formula_basis(one):
        return ""
    have = "has" if one.own.planes == 1 else "have"
    if one.switch_ratio == one.optics_ratio == "1":
        return f"{own} {have} as many switches and optics per host as {formula_basis(one)}"
    return (
        f"{own} {have} {one.switch_ratio} of the switches and {one.optics_ratio} of the optics of {formula_basis(one)}"
    )


def counted_ratios(one: Decisions) -> str:
    """Return the ratios counted on the fabrics that join these hosts, with the tiers they need and the ports in use."""
    flat = one.planes[0]
    if one.own == flat or one.counted_switch_ratio is None:
        return ""
    return (
        f"{one.own.switches:,} switches are {one.counted_switch_ratio:.3g} of the {flat.switches:,} of "
        f"{_planes_text(flat)} "
        f"in {plural(flat.tiers, 'tier')} at full bisection, and the optics {one.counted_optics_ratio:.3g}"
    )


def _scale_text(one: Decisions) -> str:
    """Return the finding on planes: the hosts that this split joins, compared with the widest ports."""
    flat, own = one.planes[0], one.own
    most = own.most_hosts[own.tiers - 2]
    reach = "reaches" if own.planes == 1 else "reach"
    ratio = "" if own.oversubscription == 1 else f" at {own.oversubscription:.3g}:1"
    depth = plural(own.tiers, "tier")
    reach_text = f"{_planes_text(own)} of {own.radix} ports {reach} {most:,} hosts in {depth}{ratio}".capitalize()
    if flat.planes == own.planes:
        return reach_text
    full = " at full bisection" if ratio else ""
    if not flat.tiers:
        return f"{reach_text}; {_planes_text(flat)} of {flat.radix} cannot reach {one.gpus:,}{full}"
    if flat.tiers == own.tiers:
        return f"{reach_text}, {_planes_text(flat)} of {flat.radix} only {flat.most_hosts[flat.tiers - 2]:,}{full}"
    needs = "needs" if flat.planes == 1 else "need"
    return f"{reach_text}; {_planes_text(flat)} of {flat.radix} {needs} {flat.tiers} for {one.gpus:,}{full}"


def _balance_text(one: Decisions) -> str:
    flow, _, paths, packets = one.loads
    return (
        f"A flow per port puts {flow.worst_of_fabric:.1f} times the mean on the worst link, {one.paths} random paths "
        f"{paths.worst_of_fabric:.1f}, packets {packets.worst_of_fabric:.2f}"
    )


def _recovery_text(one: Decisions) -> str:
    chosen = next(row for row in one.recoveries if row.recovery_s == one.recovery_s)
    # The same failures, none of them bypassed in time.
    restart = one.recoveries[-1]
    if chosen.restarts:
        return f"A bypass this late restarts the job: {chosen.lost_gpu_hours_per_day:,.0f} GPU-hours lost a day"
    return (
        f"{show_hours(chosen.lost_gpu_hours_per_day).capitalize()} GPU-hours lost a day, "
        f"{show_hours(restart.lost_gpu_hours_per_day)} if each failure restarts the job"
    )


def show_hours(value: float) -> str:
    """Format hours: whole from 10, one decimal below."""
    return f"{value:,.0f}" if value >= 10 else f"{value:.1f}" if value >= 0.1 else "under 0.1"


def _planes_text(row: PlaneRow) -> str:
    return "one plane" if row.planes == 1 else plural(row.planes, "plane")


# Tables of fabrics and designs.


_HEAD = (
    "   switch", "planes", "tiers", "rails", "T0", "T1", "T2+T3", "switches", "cables", "800G optics", "hops", "paths",
    "near", "NIC link", "T0-T1", "T1", "MW", "cost", "fail/day",
)  # fmt: skip


def show_designs(found: Sequence[Design], *, top: int, width: int | None = None) -> str:
    """Format the `top` designs of each oversubscription; those on the Pareto front are marked with a star."""
    first = found[0].fabric
    fit = f"{plural(len(found), 'fabric')} {'fits' if len(found) == 1 else 'fit'}"
    summary = (
        f"{first.hosts:,} GPUs with a {first.nic_gbps:g} Gb/s NIC each: {fit}. "
        f"Network interruptions at Llama 3's rate per GPU: {found[0].interruptions_per_day:.2g} a day"
    )
    sections = [fold_lines(summary, width)]
    for ratio, group in groupby(found, key=lambda design: nominal_ratio(design.fabric)):
        lines = _merged_rows(list(group))
        name = "full bisection" if ratio == 1 else f"{ratio:g}:1 oversubscribed at T0"
        more = f", {len(lines) - top} more with --top {len(lines)}" if len(lines) > top else ""
        sections.append(f"\n{name}{more}\n" + folded_table([_HEAD, *lines[:top]], width=width))
    sections.append("\n".join(["", *wrap_paragraph(STAR, width), *wrap_paragraph(LEGEND, width)]))
    return "\n".join(sections)


STAR = (
    "* on the Pareto front of cost, hops, power, oversubscription and NIC-link loss: no other design is as good in all "
    "of them and better in one"
)
LEGEND = (
    "T0 to T3: switches of all planes. cables: as wide as a NIC. near: hosts one switch away. NIC link, T0-T1, T1: "
    "bandwidth that one failure takes from the NIC, from its T0's uplinks in that plane, from what the hosts of its "
    "pod send beyond their T0; a lost T0 takes the NIC-link share from all hosts near. Quantum is InfiniBand. "
    "cost: switches, optics and trunks, low to high list prices. fail/day: cables at Alibaba HPN's 0.057 % a month, "
    "and switches at 2 % in three months. All links count as optical. Sources: fabric show --json"
)


def _merged_rows(group: Sequence[Design]) -> list[tuple[str, ...]]:
    """Merge designs that differ only in their rails into one table row."""
    lines: dict[tuple[str, ...], list[str]] = {}
    for design in group:
        cells = _design_cells(design)
        lines.setdefault(cells, []).append("none" if design.fabric.rails == 1 else str(design.fabric.rails))
    return [(*cells[:3], "/".join(rails), *cells[3:]) for cells, rails in lines.items()]


def _design_cells(one: Design) -> tuple[str, ...]:
    fabric, bill, lost = one.fabric, one.bill, one.loss
    return (
        f"{'* ' if one.pareto else '  '} {fabric.switch.name}",
        str(fabric.planes),
        str(fabric.tiers),
        *(format_whole(fabric.planes * number) for number in (fabric.t0, fabric.t1, fabric.t2 + fabric.t3)),
        format_whole(fabric.switches),
        format_whole(bill.cables),
        f"{bill.optics_800g:,.0f}",
        str(fabric.hops),
        format_whole(fabric.paths),
        format_whole(lost.t0_hosts),
        format_percent(lost.nic_link),
        format_percent(lost.t0_t1_link),
        format_percent(lost.t1),
        "?" if bill.watts is None else f"{bill.watts / 1e6:.3g}",
        money_range(bill.usd),
        f"{one.cable_failures_per_day:.2g}+{one.switch_failures_per_day:.2g}",
    )


def show_fabric(fabric: Fabric, *, width: int | None = None) -> str:
    """Format one fabric with its parts, losses and failure budget."""
    bill, lost = fabric_bill(fabric), failure_loss(fabric)
    tiers = ("NIC-T0", "T0-T1", "T1-T2", "T2-T3")
    deep = "one tier" if fabric.tiers == 1 else plural(fabric.tiers, "tier")
    boxes = [f"{fabric.planes * n:,} T{i}" for i, n in enumerate((fabric.t0, fabric.t1, fabric.t2, fabric.t3)) if n]
    # With rails, a GPU reaches the other rails of these servers over NVLink and one switch.
    reached = min(fabric.hosts, fabric.rails * fabric.hosts_per_t0)
    by_rail = "" if fabric.rails == 1 else f", {reached:,} with a step over NVLink first"
    rows = [
        ("hosts", f"{fabric.hosts:,} NICs of {fabric.nic_gbps:g} Gb/s"),
        ("planes", f"{fabric.planes} of {fabric.port_gbps:g} Gb/s, each {deep} of {fabric.switch.name}"),
        *_subnet_rows(fabric),
        ("switches", f"{fabric.switches:,}: {' + '.join(boxes)}"),
        ("T0 ports", _ports_text(fabric)),
        ("links", ", ".join(f"{n:,} {tiers[i]}" for i, n in enumerate(bill.links))),
        (
            "optics",
            f"{bill.optics_800g:,.0f} 800G modules ({bill.optics:,} link ends), {plural(bill.cables, 'cable')}",
        ),
        ("paths", _paths_text(fabric)),
        ("near", f"{plural(lost.t0_hosts, 'host')} one switch away{by_rail}"),
        *_failure_rows(fabric, lost),
        ("power", "unknown" if bill.watts is None else f"{bill.watts / 1e6:.3g} MW with optics"),
        ("cost", money_range(bill.usd)),
        ("spare ports", f"{bill.spare_ports:,}"),
    ]
    page = folded_table([(f"  {name}", value) for name, value in rows], left=2)
    return fold_lines(f"{fabric.name}\n{page}\n\n{show_budget(fabric, failure_budget(fabric))}", width)


def _subnet_rows(fabric: Fabric) -> list[tuple[str, str]]:
    if can_spray(fabric):
        return []
    addresses = f"{plane_addresses(fabric):,} addresses a plane, of {MOST_LIDS:,} in a subnet"
    more = ": it needs routers between subnets, which are not counted" if needs_routers(fabric) else ""
    return [("InfiniBand", f"{addresses}{more}")]


def _ports_text(fabric: Fabric) -> str:
    if fabric.tiers == 1:
        return f"{fabric.t0_down} down, none up"
    rails_text = "no rails" if fabric.rails == 1 else f"{fabric.rails} rails"
    return f"{fabric.t0_down} down, {fabric.t0_up} up ({fabric.oversubscription:.3g}:1), {rails_text}"


def _paths_text(fabric: Fabric) -> str:
    if fabric.tiers == 1:
        return "one switch between any two hosts" + (", in each plane" if fabric.planes > 1 else "")
    return f"{fabric.paths:,} between hosts of different T0s, {plural(fabric.hops, 'switch')} at most"


def _failure_rows(fabric: Fabric, lost: Loss) -> list[tuple[str, str]]:
    nic, t0 = (
        f"NIC link {format_percent(lost.nic_link)} of the NIC",
        f"T0 {format_percent(lost.t0)} of {plural(lost.t0_hosts, 'host')}",
    )
    if fabric.tiers == 1:
        return [("one failure takes", f"{nic}, {t0}")]
    t2_text = "" if lost.t2 is None else f", T2 {format_percent(lost.t2)} of what a pod sends beyond it"
    return [
        ("one failure takes", f"{nic}, T0-T1 link {format_percent(lost.t0_t1_link)} of"),
        ("", f"its T0's uplinks in a plane, {t0},"),
        ("", f"T1 {format_percent(lost.t1)} of what its pod's hosts send beyond their T0{t2_text}"),
    ]


def show_budget(fabric: Fabric, one: FailureBudget) -> str:
    """Format the failures per day by part, and what they cost under each way of recovery."""
    head = ("failures per day", "parts", "per day")
    rows = [(f"  {row.part}", f"{row.count:,}", f"{row.failures_per_day:.3g}") for row in one.parts]
    low, high = one.interruptions_interval
    quick, slow = one.restart
    times = f"{format_seconds(quick.seconds_per_event)} to {format_seconds(slow.seconds_per_event)}"
    hours = f"{show_hours(quick.lost_gpu_hours_per_day)} to {show_hours(slow.lost_gpu_hours_per_day)} GPU-hours a day"
    usual = one.conventional
    return "\n".join(
        [
            folded_table([head, *rows]),
            f"  lost at these rates ({one.failures_per_day:.3g} a day), of the cluster:",
            f"    conventional: {_lost_text(usual)} (routing converges in {format_seconds(CONVERGE_S)}; a lost "
            f"NIC link "
            "or T0 restarts the job)",
            *(f"    {line}" for line in _edge_lines(fabric, one)),
            f"  in addition, network interruptions at Llama 3's rate per GPU, on any fabric: "
            f"{one.interruptions_per_day:.3g} a day",
            f"    (95 %: {low:.2g} to {high:.2g}; most days {one.day_spread[0]} to {one.day_spread[1]}); "
            f"each restarts the job in {times}:",
            f"    {format_percent(quick.lost_share)} to {format_percent(slow.lost_share)} of the cluster, {hours}",
        ]
    )


def _edge_lines(fabric: Fabric, one: FailureBudget) -> list[str]:
    """Format the cost with the fastest recovery of these boxes, and with other assumptions about failed cables."""
    if not can_spray(fabric):
        return [
            f"InfiniBand: {_lost_text(one.edge)} (above T0 switches leave a dead link in {format_seconds(SHIELD_S)}, "
            "SHIELD;",
            "  a lost NIC link or T0 restarts the job; recovery at the edge, MRC, is Ethernet's)",
        ]
    cost_text = f"with recovery at the edge: {_lost_text(one.edge)}"
    if not ports_move(fabric):
        return [f"{cost_text} (a NIC of one plane is cut off by its link, and the job restarts)"]
    if one.edge == one.edge_whole:
        # Recovery is so slow that each failure restarts the job anyway.
        return [cost_text]
    return [
        f"{cost_text} (a failed cable takes one plane of its NIC,",
        f"  and steps wait for the network {format_percent(one.waits)} of their time). What a cable takes, nobody has "
        "published:",
        f"  {format_percent(one.edge_lanes.lost_share)} if every lane fails as often as a cable, "
        f"{format_percent(one.edge_whole.lost_share)} if a cable takes all planes and so the job",
    ]


def _lost_text(cost: FailureCost) -> str:
    return f"{format_percent(cost.lost_share)}, {show_hours(cost.lost_gpu_hours_per_day)} GPU-hours a day"


def format_percent(share: float) -> str:
    """Format a share in percent, with two significant digits below 1 %.

    >>> format_percent(0.125), format_percent(1 / 256), format_percent(1.0), format_percent(0.0)
    ('12.5%', '0.39%', '100%', '0%')
    """
    if share == 0 or share == 1:
        return f"{share:.0%}"
    if share > 0.995:
        return ">99%"
    return f"{100 * share:.1f}%" if share >= 0.01 else f"{100 * share:.2g}%" if share >= 1e-6 else "~0%"


def money_range(usd: tuple[float, float] | None) -> str:
    """Format a range of dollars, or "unknown"."""
    return "unknown" if usd is None else f"{format_money(usd[0])}-{format_money(usd[1])[1:]}"


def format_whole(number: int) -> str:
    """Format a count; a dash for zero."""
    return f"{number:,}" if number else "-"
