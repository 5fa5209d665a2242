"""Many simulated runs as one answer: means with their confidence, a ledger, money, and the formula beside it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from phalanx.plan.plan import Plan
from phalanx.sim.causes import Cause
from phalanx.sim.ledger import PHASES, Outcome
from phalanx.sim.months import simulate
from phalanx.sim.policy import Policy, failures_per_unit_day
from phalanx.units import DAY_S, HOUR_S

CONFIDENCE = 0.90


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """A number over all runs: its mean with a 90 % confidence interval, and the range that 90 % of runs fall in."""

    mean: float
    low: float
    high: float
    run_low: float
    run_high: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Rate:
    """How often one cause strikes, expected."""

    cause: str
    unit: str
    per_unit_day: float
    per_day: float


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
    effective: Spread
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
    lost_usd: tuple[float, float, float] | None  # at the low, middle and high price
    spares_usd: tuple[float, float, float] | None
    failures: int  # of all runs
    events: int


def runs(policy: Policy, *, days: float, count: int, seed: int) -> Iterator[Outcome]:
    """Runs that differ by their random numbers only; run `i` is the same however many are asked for."""
    for index in range(count):
        yield simulate(policy, days=days, random=np.random.default_rng([seed, index]))


def forecast(plan: Plan, policy: Policy, outcomes: Sequence[Outcome], *, seed: int) -> Forecast:
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
        effective=effective,
        formula=plan.reliability.effective_time,
        phases=_phases(plan, policy, lost),
        lost=lost,
        rates=tuple(_rate(plan, cause) for cause in policy.mix),
        interruptions=spread([one.unexpected for one in outcomes]),
        by_cause={cause.name: _mean(outcomes, _count_of(cause.name)) for cause in policy.mix},
        planned=_mean(outcomes, _count_of("planned")),
        borne=_mean(outcomes, lambda one: one.borne),
        spares=policy.spares,
        spares_used=spread([one.spares_used for one in outcomes]),
        spares_short=_mean(outcomes, lambda one: one.most_spares >= policy.spares) if policy.spares else 0.0,
        longest_gap_s=spread([one.longest_gap_s for one in outcomes]),
        gave_up=_mean(outcomes, lambda one: one.gave_up),
        lost_usd=_usd(plan, rented * days * (1.0 - effective.mean)),
        spares_usd=_usd(plan, policy.spares * plan.cluster.host_devices * days),
        failures=sum(one.failures for one in outcomes),
        events=sum(one.events for one in outcomes),
    )


def spread(values: Sequence[float], *, most: float = math.inf) -> Spread:
    """Student's interval of the mean, within 0 and `most`, and the middle 90 % of the values.

    >>> one = spread([1.0, 2.0, 3.0])
    >>> one.mean, round(one.high - one.mean, 2), round(one.run_low, 2)
    (2.0, 1.69, 1.1)
    """
    numbers = np.asarray(values, dtype=float)
    mean, half = float(numbers.mean()), 0.0
    if len(numbers) > 1:
        from scipy.special import stdtrit  # Student's quantile; scipy.stats would take a second to import

        half = float(stdtrit(len(numbers) - 1, (1 + CONFIDENCE) / 2) * numbers.std(ddof=1) / math.sqrt(len(numbers)))
    run_low, run_high = np.quantile(numbers, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    low, high = max(0.0, mean - half), min(most, mean + half)
    return Spread(mean=mean, low=low, high=high, run_low=float(run_low), run_high=float(run_high))


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
    formula = formula_shares(plan.reliability.effective_time, policy)
    simulated = {phase: sum(row.get(phase, 0.0) for row in lost.values()) for phase in PHASES}
    return tuple(
        PhaseShare(phase=phase, formula=formula.get(phase, 0.0), simulated=simulated[phase])
        for phase in PHASES
        if formula.get(phase) or simulated[phase]
    )


def formula_shares(effective: float, policy: Policy) -> dict[str, float]:
    """What E[ETTR] of plan.reliability counts, taken apart; with `effective` the shares add up to 1."""
    s, mtbf_s = policy.saving, policy.mtbf_s
    redone_s = s.lag_s + s.interval_s / 2 if math.isfinite(mtbf_s) else 0.0
    return {
        "checkpoint": effective * s.blocking_s / s.interval_s,
        "detect": policy.detect_s / mtbf_s,
        "restart": policy.restart_s / mtbf_s,
        "redone": redone_s / mtbf_s,
    }


def _rate(plan: Plan, cause: Cause) -> Rate:
    return Rate(
        cause=cause.name,
        unit=cause.unit,
        per_unit_day=failures_per_unit_day(plan, cause),
        per_day=cause.share * plan.reliability.failures_per_day,
    )


def _usd(plan: Plan, device_days: float) -> tuple[float, float, float] | None:
    price = plan.bill.usd_per_device_hour
    if price is None:
        return None
    hours = device_days * DAY_S / HOUR_S
    return price[0] * hours, price[1] * hours, price[2] * hours
