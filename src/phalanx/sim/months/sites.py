"""The same plan at other sites: how far published failure rates, recovery and repair times lie apart, simulated."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from phalanx.hardware.failures import SiteSpread, known, middle, repair_spread, sample_sites
from phalanx.plan.plan import Plan
from phalanx.plan.reliability import REPAIR_S, site_rates, site_recoveries
from phalanx.sim.months.ledger import Outcome
from phalanx.sim.months.policy import Policy, expected_failures
from phalanx.sim.months.run import simulate

# A site's run need not be as long as the job: with so many failures luck is some per cent, where sites differ by
# factors, and in five days hosts are repaired and come back.
ENOUGH_FAILURES, ENOUGH_DAYS = 150.0, 5.0
FEWEST_SITES, MOST_SITES = 32, 256
ALL_FAILURES = 8_000  # of all sites together at the usual rate: a fifth of a second


@dataclass(frozen=True, kw_only=True, slots=True)
class SiteRange:
    """What 80 % of sites would see, luck included. None stands for a figure that is the user's own."""

    count: int  # sites that were simulated
    effective: tuple[float, float]
    interruptions: tuple[float, float]  # of all days
    failures_per_host_day: tuple[float, float] | None
    recovery_s: tuple[float, float] | None
    repair_s: tuple[float, float] | None


Spreads = tuple[SiteSpread, SiteSpread, SiteSpread]


def site_spreads(plan: Plan, policy: Policy) -> Spreads:
    """Of failures per host and day, recovery and repair; what the user gave has none."""
    fault = plan.job.fault
    recovery_s = policy.detect_s + policy.restart_s
    asked = recovery_s == fault.detect_s + fault.restart_s  # --compare sets its own recoveries
    return (
        site_rates(plan.cluster, fault),
        site_recoveries(fault) if asked else known(recovery_s),
        repair_spread(policy.repair_s) if policy.repair_s == REPAIR_S else known(policy.repair_s),
    )


def site_range(plan: Plan, policy: Policy, *, days: float, seed: int, among: Spreads | None = None) -> SiteRange | None:
    """The plan simulated once at each of many sites; None where there is nothing to spread.

    `among` are other spreads than the usual, as without one of the published sites. A repair time alone is no reason:
    it moves little, and a user who gave rates and recovery has given what counts.
    """
    rate, recovery, repair = among or site_spreads(plan, policy)
    if not math.isfinite(policy.mtbf_s) or not (rate.log_spread or recovery.log_spread):
        return None
    sites = list(_policies(plan, policy, (rate, recovery, repair), days=days))
    window_days = _window(policy, days)
    outcomes = [
        simulate(site, days=window_days, random=np.random.Generator(np.random.PCG64([seed, index, 1])))
        for index, site in enumerate(sites)
    ]
    return _summary(outcomes, (rate, recovery, repair), longer=days / window_days)


def _policies(plan: Plan, policy: Policy, among: Spreads, *, days: float) -> Iterator[Policy]:
    usual = plan.reliability.failures_per_host_day
    total_s = policy.detect_s + policy.restart_s
    each = expected_failures(policy, _window(policy, days))
    count = round(min(MOST_SITES, max(FEWEST_SITES, ALL_FAILURES / max(each, 1.0))))
    for rate, recovery_s, repair_s in sample_sites(*among, count=count):
        longer = recovery_s / total_s if total_s > 0 else 1.0
        yield replace(
            policy,
            mtbf_s=policy.mtbf_s * usual / rate,
            detect_s=policy.detect_s * longer,
            restart_s=policy.restart_s * longer,
            repair_s=repair_s,
        )


def _window(policy: Policy, days: float) -> float:
    """Days of a site's run."""
    per_day = expected_failures(policy, 1.0)
    return min(days, max(ENOUGH_DAYS, ENOUGH_FAILURES / per_day)) if per_day > 0 else days


def _summary(outcomes: Sequence[Outcome], among: Spreads, *, longer: float) -> SiteRange:
    rate, recovery, repair = (one.interval if one.log_spread else None for one in among)
    return SiteRange(
        count=len(outcomes),
        effective=middle([one.effective for one in outcomes]),
        interruptions=middle([one.unexpected * longer for one in outcomes]),
        failures_per_host_day=rate,
        recovery_s=recovery,
        repair_s=repair,
    )
