"""A plan simulated: one step on a fabric, or months with failures. What `phalanx sim` calls, and prints.

Results print as the page of the verb; a notebook or a program reads their fields.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from phalanx.errors import mistake
from phalanx.network.fabric.fabric_file import parse_fabric
from phalanx.network.fabric.fabric_types import Fabric
from phalanx.plan.plan import Plan
from phalanx.sim.months.causes import DEFAULT_PLANES, NetworkCauses
from phalanx.sim.months.forecast import Forecast, compare_losses, forecast_months, site_range, try_levers
from phalanx.sim.months.policy import MonthsPolicy, expected_failures, months_policy
from phalanx.sim.months.simulate_run import RunOutcome, simulate_runs
from phalanx.sim.months.text import forecast_text as forecast_text
from phalanx.sim.step.breaks import Aftermath, aftermath
from phalanx.sim.step.paths import Transport, check_size
from phalanx.sim.step.report import StepReport, step_report
from phalanx.sim.step.step_text import break_text
from phalanx.sim.step.step_text import step_text as step_text
from phalanx.units import HOUR_S, plural

WHERE = "simulate"
# About 50,000 failures a second on a busy core (docs/simulation/months.md): a minute and a half.
MOST_FAILURES = 5_000_000
MOST_LEVERS = 7  # changes that `what_if` tries


@dataclass(frozen=True, kw_only=True, slots=True)
class MonthsSimulation:
    """Simulated months of a plan: `forecast_months` has the numbers, `print` the page."""

    plan: Plan
    policy: MonthsPolicy
    forecast: Forecast

    def __str__(self) -> str:
        """The page that `phalanx sim --days` prints."""
        return forecast_text(self.plan, self.policy, self.forecast)

    def __repr__(self) -> str:
        """One line."""
        share = self.forecast.effective.mean
        return f"<MonthsSimulation {self.plan.job.name}: effective training time {share:.1%}>"


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSimulation:
    """A simulated step of a plan; `aftermath` where a part of the fabric was broken."""

    report: StepReport
    broken: str | None = None
    aftermath: tuple[Aftermath, ...] = ()

    def __str__(self) -> str:
        """The page that `phalanx sim` prints."""
        page = step_text(self.report)
        if self.broken is None or not self.aftermath:
            return page
        return f"{page}\n\n{break_text(self.broken, list(self.aftermath))}"

    def __repr__(self) -> str:
        """One line."""
        return f"<StepSimulation on {self.report.fabric.name}: {self.report.step_s:.4g} s>"


def simulate_months(
    plan: Plan,
    days: float = 90.0,
    *,
    runs_count: int = 20,
    seed: int = 0,
    fabric: Fabric | str | None = None,
    edge_recovery: bool = False,
    planes: int | None = None,
    weibull: float = 1.0,
    planned_per_day: float | None = None,
    repair_hours: float = 24.0,
    what_if: bool = False,
    progress: Callable[[int], None] | None = None,
) -> MonthsSimulation:
    """`runs_count` runs of `days` each, failure by failure; `what_if` also tries one change at a time.

    `progress` is told the number of finished runs. Raises UserError where it would take minutes, or the fabric is too
    small for the plan.
    """
    network = _network_causes(plan, fabric, edge_recovery, planes)
    chosen = months_policy(
        plan, network=network, shape=weibull, planned_per_day=planned_per_day, repair_s=repair_hours * HOUR_S
    )
    each = expected_failures(chosen, days) * (1 + MOST_LEVERS * what_if)
    if each * runs_count > MOST_FAILURES:
        raise mistake(
            WHERE,
            f"{plural(runs_count, 'run')} of {days:g} days would see {each * runs_count:,.0f} failures",
            why=f"more than {MOST_FAILURES:,} take minutes",
            fix="use fewer runs or days",
        )
    outcomes: list[RunOutcome] = []
    for one in simulate_runs(chosen, days=days, count=runs_count, seed=seed):
        outcomes.append(one)
        if progress is not None:
            progress(len(outcomes))
    changed = try_levers(plan, chosen, outcomes, days=days, seed=seed) if what_if else ()
    sites = site_range(plan, chosen, days=days, seed=seed)
    both = compare_losses(plan, chosen, outcomes, days=days, seed=seed)
    made = forecast_months(plan, chosen, outcomes, seed=seed, sites=sites, levers=changed, losses=both)
    return MonthsSimulation(plan=plan, policy=chosen, forecast=made)


def simulate_step(
    plan: Plan,
    *,
    fabric: Fabric | str | None = None,
    routing: str = "spray",
    broken: str | None = None,
    outage_s: float | None = None,
) -> StepSimulation:
    """One step of the plan on a fabric (one that fits the plan by default), with `routing` "spray" or "ecmp".

    `broken` names a part that fails (link, t1, t0, nic, transceiver, grey): the step under both ways of recovering.
    """
    if routing not in ("spray", "ecmp"):
        raise mistake(WHERE, f"there is no routing {str(routing)[:40]!r}", fix='use "spray" or "ecmp"')
    named = parse_fabric(fabric) if isinstance(fabric, str) else fabric
    report = step_report(plan, named, Transport(edge=routing == "spray"))
    if broken is None:
        return StepSimulation(report=report)
    found = [
        aftermath(
            plan, report.fabric, broken, edge=edge, outage_s=outage_s, healthy=report if report.edge == edge else None
        )
        for edge in (False, True)
    ]
    return StepSimulation(report=report, broken=broken, aftermath=tuple(found))


def _network_causes(plan: Plan, fabric: Fabric | str | None, edge: bool, planes: int | None) -> NetworkCauses:
    if fabric is None:
        return NetworkCauses(edge=edge, planes=planes or DEFAULT_PLANES)
    named = parse_fabric(fabric) if isinstance(fabric, str) else fabric
    check_size(named, plan.layout.devices)
    return NetworkCauses(edge=edge, planes=named.planes, fabric=named)
