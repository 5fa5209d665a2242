"""The choice among designs by lifetime cost: purchase, electricity, and GPU-hours lost to failures.

The pick is the design with the smallest sum of the three. Without a job only full bisection is considered, since the
cost of slower uplinks depends on the job. With the step seconds of a job on each design, the GPU-hours of slower
steps are added. Prices are inputs; the defaults are assumptions, and the text lists those in use.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from phalanx.errors import mistake
from phalanx.io.limits import MAX_SECONDS
from phalanx.io.tables import folded_table
from phalanx.network.fabric.design import Design, nominal_ratio
from phalanx.network.fabric.fabric_text import format_percent, money_range, show_hours, wrap_paragraph
from phalanx.network.fabric.fabric_types import ETHERNET, INFINIBAND, Fabric
from phalanx.network.fabric.failure_budget import (
    CONVERGE_S,
    EDGE_RECOVERY_S,
    LINK_BACK_S,
    REMAP_S,
    RESTART_S,
    SHIELD_S,
    WAITS,
    FailureAnswer,
    bypass_cost,
    can_spray,
    cost_of,
    ports_move,
)
from phalanx.units import DAY_S, HOUR_S, format_money, format_seconds, plural

# Assumptions. A GPU-hour: the middle of the offers for an H100 in hardware/data/price_power.csv. Electricity: about
# the price that US industry pays. Four years: the write-off period of such a cluster.
GPU_HOUR_USD, KWH_USD, LIFE_YEARS = 3.25, 0.08, 4.0
YEAR_DAYS = 365.25
# Role of the best design of the other kind, by the kind of the pick.
OTHER_KIND = {ETHERNET: "best on InfiniBand", INFINIBAND: "best on Ethernet"}
MOST_USD = 1e6  # for a GPU-hour or a kWh; more is taken for a typing error


@dataclass(frozen=True, kw_only=True, slots=True)
class Prices:
    """Prices of a GPU-hour and a kWh, the years of use, and the assumptions about failures."""

    gpu_hour_usd: float = GPU_HOUR_USD
    kwh_usd: float = KWH_USD
    years: float = LIFE_YEARS
    recovery_s: float = EDGE_RECOVERY_S  # from a failure to its bypass
    waits: float = WAITS  # share of a step that waits for the network


@dataclass(frozen=True, kw_only=True, slots=True)
class Economics:
    """The costs of one design in dollars: the middle of its price range, power without cooling, and GPU-hours lost."""

    usd: float
    usd_per_gpu: float
    power_usd_per_year: float
    # Lost to network failures that are bypassed; a NIC of one plane restarts the job.
    lost_gpu_hours_per_day: float
    lost_usd_per_day: float
    whole_gpu_hours_per_day: float  # the same if a failed cable takes all planes of its NIC
    whole_usd_per_day: float
    # The same failures where switches route around and a NIC link restarts.
    conventional_gpu_hours_per_day: float
    conventional_usd_per_day: float
    restart_gpu_hours_per_day: float  # at Llama 3's rate of interruptions instead, each a restart
    restart_usd_per_day: float
    step_s: float | None  # of the job on this design
    slower_usd_per_day: float  # GPU-hours of steps that are slower than on the fastest design
    total_usd: float  # purchase, power and lost GPU-hours over the years


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """A design with its role in the comparison, such as "pick" or "least power"."""

    role: str
    design: Design
    economics: Economics


@dataclass(frozen=True, kw_only=True, slots=True)
class DesignVerdict:
    """The chosen design and the options it is compared with."""

    prices: Prices
    options: tuple[Option, ...]
    at_low: Fabric  # the pick if every price were at the low end of its range
    at_high: Fabric

    @property
    def pick(self) -> Option:
        """The recommended option."""
        return self.options[0]

    def role(self, name: str) -> Option | None:
        """Return the option with the role `name`, or None."""
        return next((option for option in self.options if option.role == name), None)


_Priced = tuple[Design, Economics]


def check_prices(prices: Prices, *, where: str) -> None:
    """Raise UserError if a price, the years or the recovery time is out of range."""
    for option, value, most in (
        ("--gpu-hour-usd", prices.gpu_hour_usd, MOST_USD),
        ("--kwh-usd", prices.kwh_usd, MOST_USD),
        ("--years", prices.years, 100.0),
    ):
        if not (math.isfinite(value) and 0 < value <= most):
            raise mistake(
                where, f"{option} {value:g} is out of range", fix=f"use a number above 0, at most {most:,.0f}"
            )
    if not 0 <= prices.recovery_s <= MAX_SECONDS:
        problem = f"--recovery-s {prices.recovery_s:g} is out of range"
        raise mistake(where, problem, fix=f"use seconds from 0 to {MAX_SECONDS:g}")


def choose_design(
    found: Sequence[Design], prices: Prices | None = None, *, steps_s: Mapping[Fabric, float] | None = None
) -> DesignVerdict | None:
    """Return the choice among the designs that have a price; None where none has.

    `steps_s` maps fabrics to the seconds of the job's step on them. If given, designs without an entry are left out.
    """
    prices = prices or Prices()
    candidates = [design for design in found if design.bill.usd is not None and design.bill.watts is not None]
    if steps_s:
        candidates = [design for design in candidates if design.fabric in steps_s]
    priced = [(design, _make_economics(design, prices, steps_s or {})) for design in candidates]
    full = priced if steps_s else [entry for entry in priced if nominal_ratio(entry[0].fabric) == 1] or priced
    if not full:
        return None
    roles = _role_choices(full, priced, steps_s)
    options: list[Option] = []
    for name, choice in roles:
        if choice is not None and all(choice[0] is not option.design for option in options):
            options.append(Option(role=name, design=choice[0], economics=choice[1]))
    low, high = (_at_end(full, end) for end in (0, 1))
    return DesignVerdict(prices=prices, options=tuple(options), at_low=low, at_high=high)


def _at_end(choices: Sequence[_Priced], end: int) -> Fabric:
    """Return the pick when every price is at the low (0) or the high (1) end of its range."""

    def total(one: _Priced) -> float:
        return one[1].total_usd - one[1].usd + (one[0].bill.usd or (math.inf, math.inf))[end]

    return min(choices, key=total)[0].fabric


def _role_choices(
    full: Sequence[_Priced], priced: Sequence[_Priced], steps_s: Mapping[Fabric, float] | None
) -> list[tuple[str, _Priced | None]]:
    """Return the best design of each role by total cost; None for roles without a candidate."""
    pick = _least_of(full, _total_usd)
    assert pick is not None
    box, kind = pick[0].fabric.switch.box, pick[0].fabric.switch.kind

    def of(ratio: float) -> _Priced | None:
        return _least_of([entry for entry in priced if nominal_ratio(entry[0].fabric) == ratio], _total_usd)

    # A design that has several roles is listed under the first.
    quickest = _least_of(full, lambda entry: entry[1].step_s or math.inf) if steps_s else None
    return [
        ("pick", pick),
        ("quickest step", quickest),
        ("full bisection", of(1.0)),
        ("2:1", of(2.0)),
        ("4:1", of(4.0)),
        (OTHER_KIND[kind], _least_of([entry for entry in full if entry[0].fabric.switch.kind != kind], _total_usd)),
        ("best of another box", _least_of([entry for entry in full if entry[0].fabric.switch.box != box], _total_usd)),
        ("one plane", _least_of([entry for entry in full if entry[0].fabric.planes == 1], _total_usd)),
        ("least to buy", _least_of(full, lambda entry: entry[1].usd)),
        ("least power", _least_of(full, lambda entry: entry[1].power_usd_per_year)),
    ]


def _total_usd(one: _Priced) -> float:
    return one[1].total_usd


def _least_of(choices: Sequence[_Priced], key: Callable[[_Priced], float]) -> _Priced | None:
    # Of equal designs the first: design_fabrics() returns them sorted.
    return min(choices, key=key, default=None)


def _make_economics(one: Design, prices: Prices, steps_s: Mapping[Fabric, float]) -> Economics:
    """Compute the costs of one design: purchase, power, failures under each assumption, and slower steps."""
    fabric = one.fabric
    answer = FailureAnswer(recovery_s=prices.recovery_s, waits=prices.waits)
    lost = bypass_cost(fabric, answer).lost_gpu_hours_per_day
    whole_cable = bypass_cost(fabric, replace(answer, cable="whole")).lost_gpu_hours_per_day
    usual = bypass_cost(fabric, replace(answer, recovery_s=CONVERGE_S, edge=False)).lost_gpu_hours_per_day
    restart = cost_of(fabric, RESTART_S[0]).lost_gpu_hours_per_day
    power = (one.bill.watts or 0.0) / 1e3 * YEAR_DAYS * DAY_S / HOUR_S * prices.kwh_usd
    step_s = steps_s.get(fabric)
    slower = 1 - min(steps_s.values()) / step_s if step_s else 0.0
    slower_usd = slower * fabric.hosts * DAY_S / HOUR_S * prices.gpu_hour_usd
    per_day = lost * prices.gpu_hour_usd + slower_usd
    return Economics(
        usd=one.usd_middle,
        usd_per_gpu=one.usd_middle / fabric.hosts,
        power_usd_per_year=power,
        lost_gpu_hours_per_day=lost,
        lost_usd_per_day=lost * prices.gpu_hour_usd,
        whole_gpu_hours_per_day=whole_cable,
        whole_usd_per_day=whole_cable * prices.gpu_hour_usd,
        conventional_gpu_hours_per_day=usual,
        conventional_usd_per_day=usual * prices.gpu_hour_usd,
        restart_gpu_hours_per_day=restart,
        restart_usd_per_day=restart * prices.gpu_hour_usd,
        step_s=step_s,
        slower_usd_per_day=slower_usd,
        total_usd=one.usd_middle + prices.years * (power + YEAR_DAYS * per_day),
    )


# The choice among designs as a paragraph and a small table.


_HEAD = (
    "   choice",
    "switch",
    "planes",
    "tiers",
    "uplinks",
    "rails",
    "to buy",
    "per GPU",
    "MW",
    "GPU-hours lost a day",
)


def show_verdict(one: DesignVerdict, *, width: int | None = None) -> str:
    """Format the recommendation with its reasons, then a table of the options."""
    prices = one.prices
    notes = (
        f"to buy: the middle of the range. lost: network failures bypassed after {format_seconds(prices.recovery_s)}, "
        f"of a NIC's port after {format_seconds(max(prices.recovery_s, REMAP_S))}; a failed cable takes one plane of a "
        f"NIC for {format_seconds(LINK_BACK_S)} on average, and a step waits for the network "
        f"{format_percent(prices.waits)} of its time; a NIC of one plane or on InfiniBand (Quantum) restarts the job. "
        f"all: with {prices.years:g} years of power at {format_money(prices.kwh_usd)} a kWh and of lost GPU-hours at "
        f"{format_money(prices.gpu_hour_usd)} (--kwh-usd, --gpu-hour-usd, --years)"
    )
    job = one.pick.economics.step_s is not None
    head = (*_HEAD, *(("step", "slower, a day") if job else ()), f"all, {prices.years:g} years")
    rows = [_option_row(option, job=job) for option in one.options]
    sentences = wrap_paragraph(" ".join(_verdict_sentences(one)), width)
    return "\n".join([*sentences, "", folded_table([head, *rows], left=2, width=width), *wrap_paragraph(notes, width)])


def _option_row(option: Option, *, job: bool) -> tuple[str, ...]:
    fabric, costs, bill = option.design.fabric, option.economics, option.design.bill
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
        f"{(bill.watts or 0.0) / 1e6:.3g}",
        f"{show_hours(costs.lost_gpu_hours_per_day)} ({format_money(costs.lost_usd_per_day)})",
        *step,
        format_money(costs.total_usd),
    )


def _verdict_sentences(one: DesignVerdict) -> list[str]:
    """Return the sentences of the recommendation: the pick, its losses, its step, and each described alternative."""
    pick = one.pick
    fabric, costs, bill = pick.design.fabric, pick.economics, pick.design.bill
    sentences = [
        f"Take {_fabric_words(fabric)}: {plural(fabric.switches, 'switch')}, "
        f"{money_range(bill.usd)} "
        f"({format_money(costs.usd_per_gpu)} a GPU), {(bill.watts or 0.0) / 1e6:.3g} MW.",
        _lost_text(fabric, costs),
    ]
    if costs.step_s is not None:
        # Compared with the fastest design that was simulated.
        quickest = one.role("quickest step")
        pick_s, best_s = one.pick.economics.step_s, quickest.economics.step_s if quickest is not None else None
        slower_text = (
            f", {format_percent(pick_s / best_s - 1)} more than on the quickest"
            if pick_s and best_s
            else ", the quickest of all"
        )
        sentences.append(f"The job's step takes {format_seconds(costs.step_s)} on it{slower_text}.")
    described = [_against_pick(pick, option) for option in one.options[1:] if option.role in _DESCRIBED]
    return [*sentences, *described, _price_range_text(one)]


def _lost_text(fabric: Fabric, costs: Economics) -> str:
    """Return a sentence on the cost of failures with the fastest recovery of these boxes; MRC needs Ethernet."""
    lost, usual = (show_hours(hours) for hours in (costs.lost_gpu_hours_per_day, costs.conventional_gpu_hours_per_day))
    dollars = format_money(costs.lost_usd_per_day)
    if not can_spray(fabric):
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


def _price_range_text(one: DesignVerdict) -> str:
    """Return a sentence that states whether the choice is the same at both ends of the price ranges."""
    pick = one.pick.design.fabric
    by_end = {"low": one.at_low, "high": one.at_high}
    moved = [
        f"{_fabric_words(fabric)} at the {end} end"
        for end, fabric in by_end.items()
        if _fabric_kind(fabric) != _fabric_kind(pick)
    ]
    if moved:
        return f"Prices decide: it would be {' and '.join(moved)} of all price ranges."
    return "The choice is the same at the low and at the high end of all price ranges."


def _fabric_kind(fabric: Fabric) -> tuple[object, ...]:
    return fabric.planes, fabric.tiers, fabric.switch.name, fabric.rails, round(fabric.oversubscription, 3)


_DESCRIBED = (*OTHER_KIND.values(), "best of another box", "one plane", "full bisection", "2:1", "4:1", "quickest step")


def _against_pick(pick: Option, other: Option) -> str:
    """Return a sentence on the savings or extra cost of another option compared with the pick."""
    more = other.economics.total_usd - pick.economics.total_usd
    names = {"one plane": "One plane", "best of another box": "Another switch", "quickest step": "The quickest step"}
    role_text = names.get(other.role, other.role[0].upper() + other.role[1:])
    name = f"{role_text} ({_fabric_words(other.design.fabric, role=other.role)})"
    if other.economics.step_s is None and other.role in ("2:1", "4:1"):
        saved = pick.economics.usd - other.economics.usd
        return f"{name} saves {format_money(saved)}; --job JOB shows what it costs in step time."
    if abs(more) < 0.005 * pick.economics.total_usd:
        return f"{name} comes to the same within 0.5%: the quotes decide."
    return f"{name} comes to {format_money(abs(more))} {'more' if more > 0 else 'less'}{_why_cheaper(pick, other)}."


def _why_cheaper(pick: Option, other: Option) -> str:
    """Return the components of the difference in cost, in parentheses; empty if all are below a dollar."""
    differences = {
        "price": other.economics.usd - pick.economics.usd,
        "GPU-hours lost to failures": other.economics.lost_usd_per_day - pick.economics.lost_usd_per_day,
        "slower steps": other.economics.slower_usd_per_day - pick.economics.slower_usd_per_day,
    }
    described = [
        f"{name} {'+' if usd > 0 else '-'}{format_money(abs(usd))}{'' if name == 'price' else ' a day'}"
        for name, usd in differences.items()
        if abs(usd) >= 1.0
    ]
    return f" ({', '.join(described)})" if described else ""


def _fabric_words(fabric: Fabric, *, role: str = "") -> str:
    """Describe a fabric in words, without what its role already states."""
    planes = "one plane" if fabric.planes == 1 else plural(fabric.planes, "plane")
    tiers = "one tier" if fabric.tiers == 1 else plural(fabric.tiers, "tier")
    rails = "" if fabric.rails == 1 else f", {fabric.rails} rails"
    full = "" if fabric.oversubscription <= 1 or role in ("2:1", "4:1") else f", {fabric.oversubscription:.2g}:1"
    where = tiers if role == "one plane" else f"{planes} in {tiers}"
    return f"{where} of {fabric.switch.name}{full}{rails}"
