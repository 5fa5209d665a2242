"""Forecast of many simulated runs: means with confidence intervals, a ledger, money, and the planner's formula.

Also: changes that would help, both ways of handling a lost rank, and the same plan at other sites.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from phalanx.hardware.failures import SiteSpread, known_rate, middle_range, repair_spread, sample_sites
from phalanx.plan.plan import Plan
from phalanx.plan.reliability import REPAIR_S, site_rates, site_recoveries
from phalanx.sim.months.causes import Cause, job_causes
from phalanx.sim.months.policy import MonthsPolicy, expected_failures, failing_units, failures_per_day, leaving_out
from phalanx.sim.months.simulate_run import PHASES, SAVING, RunOutcome, simulate_run, simulate_runs
from phalanx.units import DAY_S, HOUR_S, plural


@dataclass(frozen=True, kw_only=True, slots=True)
class Rate:
    """The expected rate of one cause of failures."""

    cause: str
    unit: str
    units: float
    per_unit_day: float
    per_day: float
    source: str


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseShare:
    """The share of time that a phase takes: by the planner's formula, and simulated."""

    phase: str
    formula: float
    simulated: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Forecast:
    """The forecast of months of a plan.

    Shares are of wall-clock time. `lost` is by cause, then phase. Unknown amounts of money are None.
    """

    days: float
    runs: int
    seed: int
    devices: int
    fabric: str | None  # the fabric whose links and switches fail at their own rates
    planes: int
    edge: bool  # recovery at the edge of the network
    # At the expected rates: the remaining spread is variation between runs.
    effective: ForecastSpread
    # The same plan at other sites; None where the user set every rate and time.
    sites: SiteRange | None
    formula: float  # plan.reliability.effective_time
    phases: tuple[PhaseShare, ...]
    lost: Mapping[str, Mapping[str, float]]
    rates: tuple[Rate, ...]
    interruptions: ForecastSpread
    by_cause: Mapping[str, float]  # interruptions per run
    planned: float
    borne: float
    spares: int
    spares_used: ForecastSpread
    spares_short: float  # share of runs in which all spares were in use at once
    longest_gap_s: ForecastSpread
    gave_up: float  # incidents per run that fault.restarts would end
    # For all days, spares included, at the low, middle and high price.
    rent_usd: tuple[float, float, float] | None
    # The part of the rent for time without training progress.
    lost_usd: tuple[float, float, float] | None
    spares_usd: tuple[float, float, float] | None
    failures: int  # of all runs
    events: int
    levers: tuple[Lever, ...] = ()
    # Both responses to a lost rank; empty with one model replica.
    losses: tuple[LossWay, ...] = ()


def forecast_months(
    plan: Plan,
    policy: MonthsPolicy,
    outcomes: Sequence[RunOutcome],
    *,
    seed: int,
    sites: SiteRange | None = None,
    levers: tuple[Lever, ...] = (),
    losses: tuple[LossWay, ...] = (),
) -> Forecast:
    """Return the forecast of at least one run."""
    lost = _lost_by_cause(outcomes)
    effective = forecast_spread([outcome.effective for outcome in outcomes], most=1.0)
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
        phases=_phase_shares(plan, policy, lost),
        lost=lost,
        rates=tuple(_cause_rate(plan, policy, cause) for cause in policy.mix),
        interruptions=forecast_spread([outcome.unexpected for outcome in outcomes]),
        by_cause={cause.name: _mean_outcome(outcomes, _count_of(cause.name)) for cause in policy.mix},
        planned=_mean_outcome(outcomes, _count_of("planned")),
        borne=_mean_outcome(outcomes, lambda outcome: outcome.borne),
        spares=policy.spares,
        spares_used=forecast_spread([outcome.spares_used for outcome in outcomes]),
        spares_short=_mean_outcome(outcomes, lambda outcome: outcome.most_spares >= policy.spares)
        if policy.spares
        else 0.0,
        longest_gap_s=forecast_spread([outcome.longest_gap_s for outcome in outcomes]),
        gave_up=_mean_outcome(outcomes, lambda outcome: outcome.gave_up),
        rent_usd=_usd_range(plan, rented * days),
        lost_usd=_usd_range(plan, rented * days * (1.0 - effective.mean)),
        spares_usd=_usd_range(plan, policy.spares * plan.cluster.host_devices * days),
        failures=sum(outcome.failures for outcome in outcomes),
        events=sum(outcome.events for outcome in outcomes),
        levers=levers,
        losses=losses,
    )


def _mean_outcome(outcomes: Sequence[RunOutcome], of: Callable[[RunOutcome], float]) -> float:
    return sum(of(outcome) for outcome in outcomes) / len(outcomes)


def _count_of(cause: str) -> Callable[[RunOutcome], float]:
    return lambda outcome: outcome.interruptions.get(cause, 0)


def _lost_by_cause(outcomes: Sequence[RunOutcome]) -> dict[str, dict[str, float]]:
    wall_s = sum(outcome.wall_s for outcome in outcomes)
    shares: dict[str, dict[str, float]] = {}
    for outcome in outcomes:
        for (cause, phase), seconds in outcome.lost_s.items():
            row = shares.setdefault(cause, {})
            row[phase] = row.get(phase, 0.0) + seconds / wall_s
    return dict(sorted(shares.items(), key=lambda item: -sum(item[1].values())))


def _phase_shares(plan: Plan, policy: MonthsPolicy, lost: Mapping[str, Mapping[str, float]]) -> tuple[PhaseShare, ...]:
    formula = formula_shares(plan.reliability.effective_time, policy, plan.reliability.mtbf_s)
    simulated = {phase: sum(row.get(phase, 0.0) for row in lost.values()) for phase in PHASES}
    return tuple(
        PhaseShare(phase=phase, formula=formula.get(phase, 0.0), simulated=simulated[phase])
        for phase in PHASES
        if formula.get(phase) or simulated[phase]
    )


def formula_shares(effective: float, policy: MonthsPolicy, mtbf_s: float) -> dict[str, float]:
    """Return the terms of E[ETTR] of plan.reliability by phase; with `effective` the shares add up to 1."""
    s = policy.saving
    redone_s = s.lag_s + s.interval_s / 2 if math.isfinite(mtbf_s) else 0.0
    return {
        "checkpoint": effective * s.blocking_s / s.interval_s,
        "detect": policy.detect_s / mtbf_s,
        "restart": policy.restart_s / mtbf_s,
        "redone": redone_s / mtbf_s,
    }


def _cause_rate(plan: Plan, policy: MonthsPolicy, cause: Cause) -> Rate:
    per_day, count = failures_per_day(policy, cause), failing_units(plan, cause)
    is_fabric_part = bool(cause.units)  # of a named fabric
    return Rate(
        cause=cause.name,
        unit=cause.unit,
        units=count,
        per_unit_day=per_day / count,
        per_day=per_day,
        source=cause.source if is_fabric_part else f"{cause.source}, at the rate of {plan.reliability.rate_source}",
    )


def _usd_range(plan: Plan, device_days: float) -> tuple[float, float, float] | None:
    price = plan.bill.usd_per_device_hour
    if price is None:
        return None
    hours = device_days * DAY_S / HOUR_S
    return price[0] * hours, price[1] * hours, price[2] * hours


# A number over many runs: the confidence of its mean, and the range of the runs.


CONFIDENCE = 0.90  # confidence of a mean's interval
# Share of runs that their range holds: the same as of sites (hardware.failures.COVERAGE).
RUNS = 0.80


@dataclass(frozen=True, kw_only=True, slots=True)
class ForecastSpread:
    """A number over all runs: its mean with a 90 % confidence interval, and the range that holds 80 % of runs."""

    mean: float
    low: float
    high: float
    run_low: float
    run_high: float


def forecast_spread(values: Sequence[float], *, least: float = 0.0, most: float = math.inf) -> ForecastSpread:
    """Return Student's interval of the mean, within `least` and `most`, and the middle 80 % of the values.

    With a single value the interval is NaN.

    >>> spread = forecast_spread([1.0, 2.0, 3.0])
    >>> spread.mean, round(spread.high - spread.mean, 2), round(spread.run_low, 2)
    (2.0, 1.69, 1.2)
    """
    numbers = np.asarray(values, dtype=float)
    mean, low, high = float(numbers.mean()), math.nan, math.nan
    if len(numbers) > 1:
        # Student's quantile; importing scipy.stats would take a second.
        from scipy.special import stdtrit

        half_width = float(
            stdtrit(len(numbers) - 1, (1 + CONFIDENCE) / 2) * numbers.std(ddof=1) / math.sqrt(len(numbers))
        )
        low, high = max(least, mean - half_width), min(most, mean + half_width)
    run_low, run_high = np.quantile(numbers, [(1 - RUNS) / 2, (1 + RUNS) / 2])
    return ForecastSpread(mean=mean, low=low, high=high, run_low=float(run_low), run_high=float(run_high))


# Possible improvements: the same failures with one change at a time.


# Seconds from noticing a failure to the next new step: ByteRobust's warm spares on 16k GPUs (arXiv 2509.16293, table
# 7: in place 65 s).
QUICK_RESTART_S = 65.0
QUICK_DETECT_S = 10.0  # GPU lost or driver hung, by inspection (ByteRobust, table 3)


@dataclass(frozen=True, kw_only=True, slots=True)
class Lever:
    """One change, and the share of effective training time that it adds, with its confidence interval."""

    name: str
    gain: ForecastSpread


def possible_changes(plan: Plan, policy: MonthsPolicy) -> Iterator[tuple[str, MonthsPolicy]]:
    """Yield changes that the policy does not have yet, by name."""
    saving = policy.saving
    if policy.restart_s > QUICK_RESTART_S:
        yield f"restart in {QUICK_RESTART_S:g} s", dataclasses.replace(policy, restart_s=QUICK_RESTART_S)
    if policy.detect_s > QUICK_DETECT_S:
        yield f"detect in {QUICK_DETECT_S:g} s", dataclasses.replace(policy, detect_s=QUICK_DETECT_S)
    if not policy.network.edge and plan.reliability.hosts > 1:
        network = dataclasses.replace(policy.network, edge=True)
        mix, mtbf_s = job_causes(plan, network)
        name = f"edge recovery, {plural(network.planes, 'plane')}"
        yield name, dataclasses.replace(policy, mix=mix, mtbf_s=mtbf_s, network=network)
    if not math.isfinite(saving.copy_every_s):
        copied = dataclasses.replace(saving, copy_every_s=plan.prediction.step_s)
        yield "an in-memory checkpoint every step, at no cost", dataclasses.replace(policy, saving=copied)
    yield "twice the spare hosts (rent not counted)", dataclasses.replace(policy, spares=2 * policy.spares or 1)
    if policy.planned_per_day:
        yield "no planned restarts", dataclasses.replace(policy, planned_per_day=0.0)
    yield "half the failures", dataclasses.replace(policy, mtbf_s=2 * policy.mtbf_s)


def try_levers(
    plan: Plan, policy: MonthsPolicy, outcomes: Sequence[RunOutcome], *, days: float, seed: int
) -> tuple[Lever, ...]:
    """Simulate every change on its own, with the failures of the given runs; the largest gain comes first."""
    levers = []
    for name, changed in possible_changes(plan, policy):
        changed_outcomes = simulate_runs(changed, days=days, count=len(outcomes), seed=seed)
        gains = [new.effective - old.effective for new, old in zip(changed_outcomes, outcomes, strict=True)]
        levers.append(Lever(name=name, gain=forecast_spread(gains, least=-1.0)))
    return tuple(sorted(levers, key=lambda lever: -lever.gain.mean))


# Two responses to a lost rank: the same failures where all ranks rebuild, and where its model replica is left out.


@dataclass(frozen=True, kw_only=True, slots=True)
class LossWay:
    """One value of `fault.on_loss`, and its result for the same failures."""

    on_loss: str
    is_chosen: bool
    effective: ForecastSpread
    lost_s: float  # per unexpected interruption, of the job's time
    lost_tokens: float  # the same in tokens


def compare_losses(
    plan: Plan, policy: MonthsPolicy, outcomes: Sequence[RunOutcome], *, days: float, seed: int
) -> tuple[LossWay, ...]:
    """Simulate both responses with the same failures; empty where only one is possible."""
    leaving = leaving_out(plan)
    if leaving is None or not math.isfinite(policy.mtbf_s):
        return ()
    results = []
    for name, changed in (("rebuild", replace(policy, leaving=None)), ("leave-out", replace(policy, leaving=leaving))):
        is_chosen = changed == policy
        same_failures = (
            outcomes if is_chosen else list(simulate_runs(changed, days=days, count=len(outcomes), seed=seed))
        )
        results.append(_loss_way(plan, name, same_failures, is_chosen=is_chosen))
    return tuple(results)


def _loss_way(plan: Plan, name: str, outcomes: Sequence[RunOutcome], *, is_chosen: bool) -> LossWay:
    stops = sum(outcome.unexpected for outcome in outcomes)
    saving_s = sum(
        outcome.lost_s.get(key, 0.0) for outcome in outcomes for key in ((SAVING, "checkpoint"), (SAVING, "copies"))
    )
    lost_s = sum(outcome.wall_s - outcome.done_s for outcome in outcomes) - saving_s
    each_s = lost_s / stops if stops else 0.0
    return LossWay(
        on_loss=name,
        is_chosen=is_chosen,
        effective=forecast_spread([outcome.effective for outcome in outcomes], most=1.0),
        lost_s=each_s,
        lost_tokens=each_s * plan.prediction.tokens_per_s,
    )


# The same plan at other sites, with the published range of failure rates, recovery times and repair times.


# A site's run may be shorter than the job: with this number of failures random variation is some per cent, while sites
# differ by factors, and in five days hosts are repaired and return.
ENOUGH_FAILURES, ENOUGH_DAYS = 150.0, 5.0
FEWEST_SITES, MOST_SITES = 32, 256
# Of all sites together at the usual rate: a fifth of a second.
ALL_FAILURES = 8_000


@dataclass(frozen=True, kw_only=True, slots=True)
class SiteRange:
    """The range that holds 80 % of sites, variation between runs included. None marks values that the user set."""

    count: int  # number of simulated sites
    effective: tuple[float, float]
    interruptions: tuple[float, float]  # over all days
    failures_per_host_day: tuple[float, float] | None
    recovery_s: tuple[float, float] | None
    repair_s: tuple[float, float] | None


Spreads = tuple[SiteSpread, SiteSpread, SiteSpread]


def site_spreads(plan: Plan, policy: MonthsPolicy) -> Spreads:
    """Return the spreads of failures per host and day, recovery and repair; values set by the user have none."""
    fault = plan.job.fault
    recovery_s = policy.detect_s + policy.restart_s
    # --compare sets its own recovery times.
    is_job_recovery = recovery_s == fault.detect_s + fault.restart_s
    return (
        site_rates(plan.cluster, fault),
        site_recoveries(fault) if is_job_recovery else known_rate(recovery_s),
        repair_spread(policy.repair_s) if policy.repair_s == REPAIR_S else known_rate(policy.repair_s),
    )


def site_range(
    plan: Plan, policy: MonthsPolicy, *, days: float, seed: int, among: Spreads | None = None
) -> SiteRange | None:
    """Simulate the plan once at each of many sites; None where rates and recovery have no spread.

    `among` replaces the usual spreads, for example to leave out a published site. A spread of the repair time alone
    gives None: it has little effect, and a user who set rates and recovery has set what matters.
    """
    rate, recovery, repair = among or site_spreads(plan, policy)
    if not math.isfinite(policy.mtbf_s) or not (rate.log_spread or recovery.log_spread):
        return None
    sites = list(_site_policies(plan, policy, (rate, recovery, repair), days=days))
    window_days = _site_days(policy, days)
    outcomes = [
        simulate_run(site, days=window_days, random=np.random.Generator(np.random.PCG64([seed, index, 1])))
        for index, site in enumerate(sites)
    ]
    return _site_summary(outcomes, (rate, recovery, repair), longer=days / window_days)


def _site_policies(plan: Plan, policy: MonthsPolicy, among: Spreads, *, days: float) -> Iterator[MonthsPolicy]:
    """Yield the policy at each sampled site: its failure rate, recovery time and repair time."""
    usual = plan.reliability.failures_per_host_day
    total_s = policy.detect_s + policy.restart_s
    failures_per_site = expected_failures(policy, _site_days(policy, days))
    count = round(min(MOST_SITES, max(FEWEST_SITES, ALL_FAILURES / max(failures_per_site, 1.0))))
    for rate, recovery_s, repair_s in sample_sites(*among, count=count):
        factor = recovery_s / total_s if total_s > 0 else 1.0
        yield replace(
            policy,
            mtbf_s=policy.mtbf_s * usual / rate,
            detect_s=policy.detect_s * factor,
            restart_s=policy.restart_s * factor,
            repair_s=repair_s,
        )


def _site_days(policy: MonthsPolicy, days: float) -> float:
    """Return the days to simulate at a site."""
    per_day = expected_failures(policy, 1.0)
    return min(days, max(ENOUGH_DAYS, ENOUGH_FAILURES / per_day)) if per_day > 0 else days


def _site_summary(outcomes: Sequence[RunOutcome], among: Spreads, *, longer: float) -> SiteRange:
    rate, recovery, repair = (spread.interval if spread.log_spread else None for spread in among)
    return SiteRange(
        count=len(outcomes),
        effective=middle_range([outcome.effective for outcome in outcomes]),
        interruptions=middle_range([outcome.unexpected * longer for outcome in outcomes]),
        failures_per_host_day=rate,
        recovery_s=recovery,
        repair_s=repair,
    )
