"""A table that compares recovery in the network, conventional or at the edge, and restart times of the job."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from phalanx.io.tables import text_table
from phalanx.plan.plan import Plan
from phalanx.sim.months.causes import ALL_NETWORK
from phalanx.sim.months.forecast import ForecastSpread, SiteRange, forecast_months
from phalanx.sim.months.policy import MonthsPolicy
from phalanx.sim.months.simulate_run import RunOutcome
from phalanx.units import DAY_S, HOUR_S, format_money, plural

# Seconds from a failure to the next step: a slow restart of tens of thousands of devices (ten minutes: the planning
# figure of frontier labs, shared by FT-HSDP, arXiv 2602.00277) and one with warm spares (ByteRobust, arXiv
# 2509.16293: 65 s).
RECOVERIES_S = (600.0, 90.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class RecoveryTableRow:
    """The result of one policy. `network_lost` is the share of the time lost to links and switches."""

    recovery_s: float
    edge: bool
    effective: ForecastSpread
    sites: SiteRange | None  # the same at other sites; None where the user set the rates
    interruptions_per_day: float
    network_lost: float
    lost_device_hours_per_day: float
    lost_usd_per_day: float | None  # at the middle price


def compared_recoveries(own_s: float) -> tuple[float, ...]:
    """Return the recovery times to compare, in seconds: the job's own and the two of RECOVERIES_S."""
    return tuple(sorted({*RECOVERIES_S, own_s}, reverse=True))


def with_recovery(policy: MonthsPolicy, seconds: float) -> MonthsPolicy:
    """Return the policy with a recovery time of `seconds`; detection takes the same time, and the restart the rest."""
    detect_s = min(policy.detect_s, seconds)
    return replace(policy, detect_s=detect_s, restart_s=seconds - detect_s)


def recovery_cases(conventional: MonthsPolicy, edge: MonthsPolicy) -> Iterator[MonthsPolicy]:
    """Yield a policy for every recovery time on both networks."""
    for seconds in compared_recoveries(conventional.detect_s + conventional.restart_s):
        for policy in (conventional, edge):
            yield with_recovery(policy, seconds)


def recovery_row(
    plan: Plan, policy: MonthsPolicy, outcomes: Sequence[RunOutcome], sites: SiteRange | None = None
) -> RecoveryTableRow:
    """Return the table row of one policy from its simulated runs."""
    forecast = forecast_months(plan, policy, outcomes, seed=0)
    rented = plan.layout.devices + policy.spares * plan.cluster.host_devices
    return RecoveryTableRow(
        recovery_s=policy.detect_s + policy.restart_s,
        edge=policy.network.edge,
        effective=forecast.effective,
        sites=sites,
        interruptions_per_day=forecast.interruptions.mean / forecast.days,
        network_lost=sum(sum(forecast.lost.get(cause, {}).values()) for cause in ALL_NETWORK),
        lost_device_hours_per_day=rented * DAY_S / HOUR_S * (1.0 - forecast.effective.mean),
        lost_usd_per_day=forecast.lost_usd[1] / forecast.days if forecast.lost_usd else None,
    )


def recovery_table_text(
    plan: Plan, rows: Sequence[RecoveryTableRow], *, days: float, runs: int, seed: int, network: str
) -> str:
    """Format the table."""
    head = f"{plan.job.name}: {plural(days, 'day')} on {plan.cluster.name} ({plural(plan.layout.devices, 'device')})"
    heads = (
        "recovery",
        "network",
        "effective",
        "80% of runs",
        "80% of sites",
        "interruptions/day",
        "lost to network",
        "device-h lost/day",
    )
    lines = [(*heads, "lost/day"), *(_row_cells(row) for row in rows)]
    body = text_table(lines, right=(0, 2, 3, 4, 5, 6, 7, 8))
    notes = [
        f"network: {network}",
        f"the same failures in every row ({runs:,} runs each, seed {seed}); recovery includes detection and restart",
        "differences between rows are due to the policies; sites differ in their failure rates",
    ]
    return "\n".join([head, *(f"  {line}" for line in (*body, *notes))])


def _row_cells(one: RecoveryTableRow) -> tuple[str, ...]:
    e, usd = one.effective, one.lost_usd_per_day
    return (
        f"{one.recovery_s:g} s",
        "edge" if one.edge else "conventional",
        f"{e.mean:.1%}",
        "-" if e.low != e.low else f"{e.run_low:.1%} to {e.run_high:.1%}",
        f"{one.sites.effective[0]:.1%} to {one.sites.effective[1]:.1%}" if one.sites else "-",
        f"{one.interruptions_per_day:.3g}",
        f"{one.network_lost:.2%}",
        f"{one.lost_device_hours_per_day:,.0f}",
        format_money(usd) if usd is not None else "-",
    )
