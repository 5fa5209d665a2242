"""The question of every large cluster in one table: who recovers in the network, and how fast does a job restart."""

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

# From a failure to the next step: a slow restart of tens of thousands of devices (ten minutes: the frontier's
# planning figure, shared by FT-HSDP, arXiv 2602.00277) and one with warm spares (ByteRobust, arXiv 2509.16293: 65 s).
RECOVERIES_S = (600.0, 90.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class RecoveryTableRow:
    """One policy. `network_lost` is the share of the time lost to links and switches."""

    recovery_s: float
    edge: bool
    effective: ForecastSpread
    sites: SiteRange | None  # the same at other sites; None where the rates are the user's own
    interruptions_per_day: float
    network_lost: float
    lost_device_hours_per_day: float
    lost_usd_per_day: float | None  # at the middle price


def compared_recoveries(own_s: float) -> tuple[float, ...]:
    """Seconds of recovery to compare: the job's own beside the usual two."""
    return tuple(sorted({*RECOVERIES_S, own_s}, reverse=True))


def with_recovery(policy: MonthsPolicy, seconds: float) -> MonthsPolicy:
    """The same job back after so many seconds; noticing takes what it took, and the restart the rest."""
    detect_s = min(policy.detect_s, seconds)
    return replace(policy, detect_s=detect_s, restart_s=seconds - detect_s)


def recovery_cases(conventional: MonthsPolicy, edge: MonthsPolicy) -> Iterator[MonthsPolicy]:
    """Every recovery on both networks."""
    for seconds in compared_recoveries(conventional.detect_s + conventional.restart_s):
        for one in (conventional, edge):
            yield with_recovery(one, seconds)


def recovery_row(
    plan: Plan, policy: MonthsPolicy, outcomes: Sequence[RunOutcome], sites: SiteRange | None = None
) -> RecoveryTableRow:
    """What the runs of one policy say."""
    made = forecast_months(plan, policy, outcomes, seed=0)
    rented = plan.layout.devices + policy.spares * plan.cluster.host_devices
    return RecoveryTableRow(
        recovery_s=policy.detect_s + policy.restart_s,
        edge=policy.network.edge,
        effective=made.effective,
        sites=sites,
        interruptions_per_day=made.interruptions.mean / made.days,
        network_lost=sum(sum(made.lost.get(cause, {}).values()) for cause in ALL_NETWORK),
        lost_device_hours_per_day=rented * DAY_S / HOUR_S * (1.0 - made.effective.mean),
        lost_usd_per_day=made.lost_usd[1] / made.days if made.lost_usd else None,
    )


def recovery_table_text(
    plan: Plan, rows: Sequence[RecoveryTableRow], *, days: float, runs: int, seed: int, network: str
) -> str:
    """The table."""
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
    lines = [(*heads, "lost/day"), *(_row_cells(one) for one in rows)]
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
