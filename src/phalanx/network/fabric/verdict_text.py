"""The choice among designs as a paragraph and a small table."""

from __future__ import annotations

from phalanx.network.fabric.findings import show_hours
from phalanx.network.fabric.recovery import CONVERGE_S, LINK_BACK_S, REMAP_S, SHIELD_S, ports_move, sprays
from phalanx.network.fabric.tables import table, wrapped
from phalanx.network.fabric.text import money, percent
from phalanx.network.fabric.types import Fabric
from phalanx.network.fabric.verdict import OTHER_KIND, Economics, Option, Verdict
from phalanx.units import format_money, format_seconds, plural

_HEAD = ("   choice", "switch", "planes", "tiers", "up", "rails", "to buy", "per GPU", "MW", "GPU-hours lost a day")


def show_verdict(one: Verdict, *, width: int | None = None) -> str:
    """What to take and why, then the options side by side."""
    prices = one.prices
    notes = (
        f"to buy: the middle of the range. lost: network failures bypassed after {format_seconds(prices.recovery_s)}, "
        f"of a NIC's port after {format_seconds(max(prices.recovery_s, REMAP_S))}; a failed cable takes one plane of a "
        f"NIC for {format_seconds(LINK_BACK_S)} on average, and a step waits for the network {percent(prices.waits)} "
        f"of its time; a NIC of one plane or on InfiniBand (Quantum) restarts the job. all: with {prices.years:g} "
        f"years of power at {format_money(prices.kwh_usd)} a kWh and of lost GPU-hours at "
        f"{format_money(prices.gpu_hour_usd)} (--kwh-usd, --gpu-hour-usd, --years)"
    )
    job = one.pick.economics.step_s is not None
    head = (*_HEAD, *(("step", "slower, a day") if job else ()), f"all, {prices.years:g} years")
    rows = [_row(option, job=job) for option in one.options]
    said = wrapped(" ".join(_sentences(one)), width)
    return "\n".join([*said, "", table([head, *rows], left=2, width=width), *wrapped(notes, width)])


def _row(option: Option, *, job: bool) -> tuple[str, ...]:
    fabric, costs, parts = option.design.fabric, option.economics, option.design.bill
    step = (format_seconds(costs.step_s or 0.0), format_money(costs.slower_usd_per_day)) if job else ()
    return (
        f"   {option.role}",
        fabric.switch.name,
        str(fabric.planes),
        str(fabric.tiers),
        "full" if fabric.oversubscription <= 1 else f"{fabric.oversubscription:.2g}:1",
        "-" if fabric.rails == 1 else str(fabric.rails),
        format_money(costs.usd),
        format_money(costs.usd_per_gpu),
        f"{(parts.watts or 0.0) / 1e6:.3g}",
        f"{show_hours(costs.lost_gpu_hours_per_day)} ({format_money(costs.lost_usd_per_day)})",
        *step,
        format_money(costs.total_usd),
    )


def _sentences(one: Verdict) -> list[str]:
    pick = one.pick
    fabric, costs, parts = pick.design.fabric, pick.economics, pick.design.bill
    said = [
        f"Take {_what(fabric)}: {fabric.switches:,} switch{'es' if fabric.switches != 1 else ''}, {money(parts.usd)} "
        f"({format_money(costs.usd_per_gpu)} a GPU), {(parts.watts or 0.0) / 1e6:.3g} MW.",
        _lost(fabric, costs),
    ]
    if costs.step_s is not None:
        said.append(f"The job's step takes {format_seconds(costs.step_s)} on it{_slower(one)}.")
    told = [_against(pick, option) for option in one.options[1:] if option.role in _TOLD]
    return [*said, *told, _ends(one)]


def _lost(fabric: Fabric, costs: Economics) -> str:
    """What failures cost with the quickest recovery these boxes have; MRC's edge is Ethernet's."""
    lost, usual = (show_hours(one) for one in (costs.lost_gpu_hours_per_day, costs.conventional_gpu_hours_per_day))
    dollars = format_money(costs.lost_usd_per_day)
    if not sprays(fabric):
        return (
            f"Network failures cost it {lost} GPU-hours a day ({dollars}): InfiniBand's switches bypass a dead link "
            f"above T0 in {format_seconds(SHIELD_S)} (SHIELD), but a lost NIC link or T0 restarts the job."
        )
    whole = f", {show_hours(costs.whole_gpu_hours_per_day)} if a failed cable takes all planes of its NIC"
    return (
        f"Network failures cost it {lost} GPU-hours a day where the edge bypasses them "
        f"({dollars}{whole if ports_move(fabric) else ''}), {usual} where routing converges in "
        f"{format_seconds(CONVERGE_S)} and a lost NIC link or T0 restarts the job "
        f"({format_money(costs.conventional_usd_per_day)})."
    )


def _ends(one: Verdict) -> str:
    """Whether the choice stands at both ends of the price ranges."""
    pick = one.pick.design.fabric
    other = {"low": one.at_low, "high": one.at_high}
    moved = [f"{_what(fabric)} at the {end} end" for end, fabric in other.items() if _kind(fabric) != _kind(pick)]
    if moved:
        return f"Prices decide: it would be {' and '.join(moved)} of all price ranges."
    return "The choice is the same at the low and at the high end of all price ranges."


def _kind(fabric: Fabric) -> tuple[object, ...]:
    return fabric.planes, fabric.tiers, fabric.switch.name, fabric.rails, round(fabric.oversubscription, 3)


def _slower(one: Verdict) -> str:
    """Beside the quickest design that was simulated."""
    quickest = one.role("quickest step")
    mine, best = one.pick.economics.step_s, quickest.economics.step_s if quickest is not None else None
    return f", {percent(mine / best - 1)} more than on the quickest" if mine and best else ", the quickest of all"


_TOLD = (*OTHER_KIND.values(), "best of another box", "one plane", "full bisection", "2:1", "4:1", "quickest step")


def _against(pick: Option, other: Option) -> str:
    """One sentence: what another option saves or costs beside the pick."""
    more = other.economics.total_usd - pick.economics.total_usd
    name = f"{_role(other)} ({_what(other.design.fabric, role=other.role)})"
    if other.economics.step_s is None and other.role in ("2:1", "4:1"):
        saved = pick.economics.usd - other.economics.usd
        return f"{name} saves {format_money(saved)} if the job can bear it: --job JOB tells."
    if abs(more) < 0.005 * pick.economics.total_usd:
        return f"{name} comes to the same within 0.5%: let quotes decide."
    return f"{name} comes to {format_money(abs(more))} {'more' if more > 0 else 'less'}{_why(pick, other)}."


def _why(pick: Option, other: Option) -> str:
    parts = {
        "price": other.economics.usd - pick.economics.usd,
        "GPU-hours lost to failures": other.economics.lost_usd_per_day - pick.economics.lost_usd_per_day,
        "slower steps": other.economics.slower_usd_per_day - pick.economics.slower_usd_per_day,
    }
    told = [
        f"{name} {'+' if usd > 0 else '-'}{format_money(abs(usd))}{'' if name == 'price' else ' a day'}"
        for name, usd in parts.items()
        if abs(usd) >= 1.0
    ]
    return f" ({', '.join(told)})" if told else ""


def _role(option: Option) -> str:
    names = {"one plane": "One plane", "best of another box": "Another box", "quickest step": "The quickest step"}
    return names.get(option.role, option.role[0].upper() + option.role[1:])


def _what(fabric: Fabric, *, role: str = "") -> str:
    """In words, without what the role says already."""
    planes = "one plane" if fabric.planes == 1 else plural(fabric.planes, "plane")
    tiers = "one tier" if fabric.tiers == 1 else plural(fabric.tiers, "tier")
    rails = "" if fabric.rails == 1 else f", {fabric.rails} rails"
    full = "" if fabric.oversubscription <= 1 or role in ("2:1", "4:1") else f", {fabric.oversubscription:.2g}:1"
    where = tiers if role == "one plane" else f"{planes} in {tiers}"
    return f"{where} of {fabric.switch.name}{full}{rails}"
