"""Many simulated runs as one answer: means with their confidence, a ledger, money, and the formula beside it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from phalanx.plan.plan import Plan
from phalanx.sim.months.causes import Cause
from phalanx.sim.months.ledger import PHASES, Outcome
from phalanx.sim.months.levers import Lever
from phalanx.sim.months.policy import Policy, failures_per_day, units
from phalanx.sim.months.sites import SiteRange
from phalanx.sim.months.spread import Spread, spread
from phalanx.units import DAY_S, HOUR_S


@dataclass(frozen=True, kw_only=True, slots=True)
class Rate:
    """How often one cause strikes, expected."""

    cause: str
    unit: str
    units: float
    per_unit_day: float
    per_day: float
    source: str


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseShare:
    """Share of the time that a phase takes: by the planner's formula, and simulated."""

    phase: str
    formula: float
    simulated: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Forecast:
    """Months of a plan. Shares are of wall-clock time; `lost` is by cause, then phase; None is unknown money."""

    days: float
    runs: int
    seed: int
    devices: int
    fabric: str | None  # whose links and switches fail at rates of their own
    planes: int
    edge: bool  # recovery at the edge of the network
    effective: Spread  # at the expected rates: what is left is luck
    sites: SiteRange | None  # the same plan at other sites; None where every rate and time is the user's own
    formula: float  # plan.reliability.effective_time
    phases: tuple[PhaseShare, ...]
    lost: Mapping[str, Mapping[str, float]]
    rates: tuple[Rate, ...]
    interruptions: Spread
    by_cause: Mapping[str, float]  # interruptions of a run
    planned: float
    borne: float
    spares: int
    spares_used: Spread
    spares_short: float  # share of runs in which all spares were out at once
    longest_gap_s: Spread
    gave_up: float  # incidents of a run that fault.restarts would end
    rent_usd: tuple[float, float, float] | None  # of all days, spares included, at the low, middle and high price
    lost_usd: tuple[float, float, float] | None  # of that, for time that did not train
    spares_usd: tuple[float, float, float] | None
    failures: int  # of all runs
    events: int
    levers: tuple[Lever, ...] = ()


def forecast(
    plan: Plan,
    policy: Policy,
    outcomes: Sequence[Outcome],
    *,
    seed: int,
    sites: SiteRange | None = None,
    levers: tuple[Lever, ...] = (),
) -> Forecast:
    """What at least one run says."""
    lost = _lost(outcomes)
    effective = spread([one.effective for one in outcomes], most=1.0)
    days = outcomes[0].wall_s / DAY_S
    rented = plan.layout.devices + policy.spares * plan.cluster.host_devices
    return Forecast(
        days=days,
        runs=len(outcomes),
        seed=seed,
        devices=plan.layout.devices,
        fabric=policy.network.fabric.name if policy.network.fabric else None,
        planes=policy.network.planes,
        edge=policy.network.edge,
        effective=effective,
        sites=sites,
        formula=plan.reliability.effective_time,
        phases=_phases(plan, policy, lost),
        lost=lost,
        rates=tuple(_rate(plan, policy, cause) for cause in policy.mix),
        interruptions=spread([one.unexpected for one in outcomes]),
        by_cause={cause.name: _mean(outcomes, _count_of(cause.name)) for cause in policy.mix},
        planned=_mean(outcomes, _count_of("planned")),
        borne=_mean(outcomes, lambda one: one.borne),
        spares=policy.spares,
        spares_used=spread([one.spares_used for one in outcomes]),
        spares_short=_mean(outcomes, lambda one: one.most_spares >= policy.spares) if policy.spares else 0.0,
        longest_gap_s=spread([one.longest_gap_s for one in outcomes]),
        gave_up=_mean(outcomes, lambda one: one.gave_up),
        rent_usd=_usd(plan, rented * days),
        lost_usd=_usd(plan, rented * days * (1.0 - effective.mean)),
        spares_usd=_usd(plan, policy.spares * plan.cluster.host_devices * days),
        failures=sum(one.failures for one in outcomes),
        events=sum(one.events for one in outcomes),
        levers=levers,
    )


def _mean(outcomes: Sequence[Outcome], of: Callable[[Outcome], float]) -> float:
    return sum(of(one) for one in outcomes) / len(outcomes)


def _count_of(cause: str) -> Callable[[Outcome], float]:
    return lambda one: one.interruptions.get(cause, 0)


def _lost(outcomes: Sequence[Outcome]) -> dict[str, dict[str, float]]:
    wall_s = sum(one.wall_s for one in outcomes)
    shares: dict[str, dict[str, float]] = {}
    for one in outcomes:
        for (cause, phase), seconds in one.lost_s.items():
            row = shares.setdefault(cause, {})
            row[phase] = row.get(phase, 0.0) + seconds / wall_s
    return dict(sorted(shares.items(), key=lambda item: -sum(item[1].values())))


def _phases(plan: Plan, policy: Policy, lost: Mapping[str, Mapping[str, float]]) -> tuple[PhaseShare, ...]:
    formula = formula_shares(plan.reliability.effective_time, policy, plan.reliability.mtbf_s)
    simulated = {phase: sum(row.get(phase, 0.0) for row in lost.values()) for phase in PHASES}
    return tuple(
        PhaseShare(phase=phase, formula=formula.get(phase, 0.0), simulated=simulated[phase])
        for phase in PHASES
        if formula.get(phase) or simulated[phase]
    )


def formula_shares(effective: float, policy: Policy, mtbf_s: float) -> dict[str, float]:
    """What E[ETTR] of plan.reliability counts, taken apart; with `effective` the shares add up to 1."""
    s = policy.saving
    redone_s = s.lag_s + s.interval_s / 2 if math.isfinite(mtbf_s) else 0.0
    return {
        "checkpoint": effective * s.blocking_s / s.interval_s,
        "detect": policy.detect_s / mtbf_s,
        "restart": policy.restart_s / mtbf_s,
        "redone": redone_s / mtbf_s,
    }


def _rate(plan: Plan, policy: Policy, cause: Cause) -> Rate:
    per_day, count = failures_per_day(policy, cause), units(plan, cause)
    own = bool(cause.units)  # of a named fabric
    return Rate(
        cause=cause.name,
        unit=cause.unit,
        units=count,
        per_unit_day=per_day / count,
        per_day=per_day,
        source=cause.source if own else f"{cause.source}, at the rate of {plan.reliability.rate_source}",
    )


def _usd(plan: Plan, device_days: float) -> tuple[float, float, float] | None:
    price = plan.bill.usd_per_device_hour
    if price is None:
        return None
    hours = device_days * DAY_S / HOUR_S
    return price[0] * hours, price[1] * hours, price[2] * hours
