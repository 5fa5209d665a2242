"""Simulation of a plan: one step on a fabric, or months of running with failures."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.api.fabric_inputs import named_fabric
from phalanx.api.jobs import AnyJob, read_job
from phalanx.api.peer_simulating import PeersSimulation, simulate_peers
from phalanx.api.results import INTERRUPTED, Overrides, PublicResult, Tell, teller, warn
from phalanx.errors import Problem, UserError, mistake
from phalanx.hardware.types import Cluster
from phalanx.io.codec import json_values
from phalanx.plan.make import make_plan
from phalanx.plan.plan import Plan
from phalanx.units import HOUR_S, number_text, plural

if TYPE_CHECKING:
    from phalanx.network.fabric.fabric_types import Fabric
    from phalanx.sim.months.causes import NetworkCauses
    from phalanx.sim.months.forecast import Forecast, Lever, SiteRange
    from phalanx.sim.months.policy import MonthsPolicy
    from phalanx.sim.months.recovery_table import RecoveryTableRow
    from phalanx.sim.months.simulate_run import RunOutcome
    from phalanx.sim.step.breaks import Aftermath
    from phalanx.sim.step.step_report import SimulatedStep

WHERE = "phalanx sim"
# sim.step.breaks.PARTS, without numpy for --help.
BREAKS = ("link", "t1", "t0", "nic", "transceiver", "grey")
ROUTINGS = ("spray", "ecmp")
MOST_OUTAGE_S = 86400.0
# Devices per second on one busy core, for a step on a fabric (docs/simulation/step.md).
DEVICES_PER_S = 30_000
LEAST_DAYS, MOST_DAYS, MOST_RUNS = 0.01, 3653.0, 10_000  # ten years at most
# About 50,000 failures a second on a busy core (docs/simulation/months.md): a minute and a half.
MOST_FAILURES, FAILURES_PER_S = 5_000_000, 50_000
MOST_LEVERS = 7  # changes that `levers` tries
MOST_CASES = 6  # rows of `compare`
# Seconds between lines of progress; a longer simulation is announced.
PROGRESS_S = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class MonthsCall:
    """Options of months; the defaults mean "not given", so that a step simulation can refuse the others."""

    runs: int = 20
    seed: int = 0
    edge_recovery: bool = False
    planes: int | None = None
    compare: bool = False
    weibull: float = 1.0
    planned_per_day: float | None = None
    repair_hours: float = 24.0
    levers: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCall:
    """Options of one step."""

    routing: str | None = None
    broken: str | None = None
    outage: float | None = None


def simulate(
    plan: Plan | AnyJob,
    cluster: str | Path | Cluster | None = None,
    *,
    overrides: Overrides = (),
    fabric: str | Path | Fabric | None = None,
    days: float | None = None,
    routing: str | None = None,
    broken: str | None = None,
    outage_s: float | None = None,
    runs: int = 20,
    seed: int = 0,
    edge_recovery: bool = False,
    planes: int | None = None,
    compare: bool = False,
    weibull: float = 1.0,
    planned_per_day: float | None = None,
    repair_hours: float = 24.0,
    levers: bool = False,
    progress: bool | Tell = False,
) -> StepSimulation | MonthsForecast | MonthsComparison | PeersSimulation:
    """Simulate one step of a plan on a fabric or, with `days`, months of running with failures.

    `plan` is a Plan, or a job that is planned first. For a step: `routing` is spray (packets over 256 paths) or ecmp
    (16 hashed QPs), `broken` a part that fails for `outage_s` seconds. For months: `runs` with different random
    numbers, `edge_recovery` for a network in which a lost link costs bandwidth and no restart, `compare` for both
    networks with three recovery times, `levers` for the changes that would help most. On a cluster of sites, months
    simulate peers that come and go, and only `runs` and `seed` apply. Ctrl-C keeps what is finished.

    >>> forecast = simulate("examples/llama-3-8b-64xH100.toml", days=30, runs=2)
    >>> 0 < forecast.forecast.effective.mean <= 1
    True
    """
    tell = teller(progress)
    months = MonthsCall(
        runs=runs,
        seed=seed,
        edge_recovery=edge_recovery,
        planes=planes,
        compare=compare,
        weibull=weibull,
        planned_per_day=planned_per_day,
        repair_hours=repair_hours,
        levers=levers,
    )
    step = StepCall(routing=routing, broken=broken, outage=outage_s)
    problems = (
        _step_problems(step, months) if days is None else _months_problems(days, months, step, has_fabric=bool(fabric))
    )
    if problems:
        raise UserError(problems)
    if isinstance(plan, Plan):
        plan_ = plan
    else:
        plan_ = make_plan(read_job(plan, overrides, where="phalanx.simulate"), cluster, allow_unfinishable=True)
        warn((Problem(where="", what=line) for line in plan_.warnings), tell)
    simulated_fabric = named_fabric(str(fabric), tell) if isinstance(fabric, str | Path) else fabric
    if days is None:
        return _simulate_step(plan_, simulated_fabric, step, tell)
    if plan_.sites is not None:
        if peer_problems := _no_effect_on_peers(months, has_fabric=simulated_fabric is not None):
            raise UserError(peer_problems)
        return simulate_peers(plan_, days=days, runs=runs, seed=seed, tell=tell)
    network = _network_causes(plan_, simulated_fabric, months, tell)
    if compare:
        return _compare_recoveries(plan_, network, days, months, tell)
    return _make_forecast(plan_, network, days, months, tell)


# ---- one step --------------------------------------------------------------------------------------------------------

# Options of months that a call for one step may not have, by their command line names.
MONTHS_OPTIONS = {f"--{item.name.replace('_', '-')}": item.name for item in fields(MonthsCall)}


def _step_problems(step: StepCall, months: MonthsCall) -> list[Problem]:
    """Return a problem for each option that has no effect on one step."""
    usual = MonthsCall()
    problems = [
        Problem(where=WHERE, what=f"{option} belongs to months, not to one step", fix="add --days 90, or leave it out")
        for option, name in MONTHS_OPTIONS.items()
        if getattr(months, name) != getattr(usual, name)
    ]
    if step.outage is not None and step.broken is None:
        problems.append(Problem(where=WHERE, what="--outage without --break: nothing fails", fix="add --break nic"))
    elif step.outage is not None and not 0 < step.outage <= MOST_OUTAGE_S:
        message = f"--outage {step.outage:g} is out of range"
        problems.append(Problem(where=WHERE, what=message, fix=f"use seconds above 0, up to {MOST_OUTAGE_S:g}"))
    return problems


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class StepSimulation(PublicResult):
    """One simulated step of a plan on a fabric, and the effects of a failed part."""

    plan: Plan
    report: SimulatedStep
    broken: str | None
    aftermath: tuple[Aftermath, ...]
    interrupted: bool

    def __str__(self) -> str:
        from phalanx.sim.step.step_text import break_text, step_text

        page = step_text(self.report)
        if self.broken is not None and self.aftermath:
            page += "\n\n" + break_text(self.broken, list(self.aftermath))
        return page

    def to_dict(self) -> dict[str, Any]:
        """Return everything but the spans, which `write_trace` writes; seconds of every stage by part."""
        report = self.report
        values = {item.name: getattr(report, item.name) for item in fields(report) if item.name != "timeline"}
        values["stages_s"] = report.timeline.device_s
        if self.broken is not None:
            values |= {"break": self.broken, "aftermath": self.aftermath}
        return dict(json_values(values))

    @property
    def exit_code(self) -> int:
        """130 if Ctrl-C left the failure out."""
        return INTERRUPTED if self.interrupted else 0

    def write_trace(self, path: str | Path) -> str:
        """Write the timeline for ui.perfetto.dev; return the number of spans written, in words."""
        from phalanx.io.files import write_text
        from phalanx.sim.step.trace_file import MOST_EVENTS, trace_json

        link = self.plan.cluster.accelerator.link
        write_text(Path(path), trace_json(self.report, link=link), fix="name another --trace")
        spans = len(self.report.timeline.spans)
        cut = f", the first of {spans:,}" if spans > MOST_EVENTS else ""
        return f"{min(spans, MOST_EVENTS):,} spans{cut}"


def _simulate_step(plan: Plan, fabric: Fabric | None, call: StepCall, tell: Tell) -> StepSimulation:
    """Simulate both ways of recovering from a failure, or those finished before Ctrl-C."""
    from phalanx.sim.step.axis_paths import PathTransport, derived_fabric
    from phalanx.sim.step.breaks import broken_parts, failure_aftermath
    from phalanx.sim.step.step_report import step_report

    # Before any simulation: the fabric may lack the part.
    if call.broken is not None:
        broken_parts(fabric or derived_fabric(plan.layout.devices, plan.cluster.nic_bytes_per_s), call.broken)
    seconds = plan.layout.devices / DEVICES_PER_S * (3 if call.broken else 1)
    if seconds > PROGRESS_S and fabric is not None:
        tell(f"{plural(plan.layout.devices, 'device')} on {fabric.name}: about {seconds:.0f} s")
    report = step_report(plan, fabric, PathTransport(edge=call.routing != "ecmp"))
    aftermaths: list[Aftermath] = []
    interrupted = False
    if call.broken is not None:
        try:
            for edge in (False, True):
                healthy = report if report.edge == edge else None
                aftermaths.append(
                    failure_aftermath(
                        plan, report.fabric, call.broken, edge=edge, outage_s=call.outage, healthy=healthy
                    )
                )
        except KeyboardInterrupt:
            tell("stopped by Ctrl-C: the step is finished, and shown; what a failure does to it is not")
            interrupted = True
    return StepSimulation(
        plan=plan, report=report, broken=call.broken, aftermath=tuple(aftermaths), interrupted=interrupted
    )


# ---- months ----------------------------------------------------------------------------------------------------------


def _months_problems(days: float, months: MonthsCall, step: StepCall, *, has_fabric: bool) -> list[Problem]:
    """Return a problem for each wrong option."""
    problems = [
        _outside_range("--days", days, LEAST_DAYS, MOST_DAYS),
        _outside_range("--runs", months.runs, 1, MOST_RUNS),
        _outside_range("--seed", months.seed, 0, 1e9),
        _outside_range("--weibull", months.weibull, 0.3, 5),
        _outside_range("--planned-per-day", months.planned_per_day or 0.0, 0, 100),
        _outside_range("--repair-hours", months.repair_hours, 0, 8760),
    ]
    step_options = {"--break": step.broken, "--outage": step.outage, "--routing": step.routing}
    fix = {"--routing": "use --edge-recovery for spraying with recovery at the edge, or leave --routing out"}
    for option in (name for name, value in step_options.items() if value is not None):
        message = f"{option} belongs to one step, --days to months"
        problems.append(Problem(where=WHERE, what=message, fix=fix.get(option, "leave one of them out")))
    if months.planes is not None and not 1 <= months.planes <= 1024:
        problems.append(_outside_range("--planes", months.planes, 1, 1024))
    elif months.planes == 1 and (months.edge_recovery or months.compare) and not has_fabric:
        problems.append(
            Problem(
                where=WHERE,
                what="--planes 1 with --edge-recovery",
                why="a NIC of one plane loses everything with its link, which no route at the edge can mend",
                fix="use 2 to 1024 planes; 8 is 800 Gb/s as 8 × 100",
            )
        )
    if months.compare and months.edge_recovery:
        remedy = "--compare runs both networks: leave --edge-recovery out"
        problems.append(Problem(where=WHERE, what="--compare with --edge-recovery", fix=remedy))
    if months.compare and months.levers:
        message = "--compare and --levers are two tables"
        problems.append(Problem(where=WHERE, what=message, fix="leave one of them out"))
    return [problem for problem in problems if problem]


def _no_effect_on_peers(months: MonthsCall, *, has_fabric: bool) -> list[Problem]:
    """Return a problem for each option of a cluster-internal network, which has no effect on a cluster of sites."""
    usual = MonthsCall(runs=months.runs, seed=months.seed)
    named_options = [option for option, name in MONTHS_OPTIONS.items() if getattr(months, name) != getattr(usual, name)]
    return [
        Problem(where=WHERE, what=f"{option} has no effect on a cluster of sites", fix="leave it out, or name one site")
        for option in (*named_options, *(["--fabric"] if has_fabric else []))
    ]


def _outside_range(option: str, value: float, least: float, most: float) -> Problem | None:
    if least <= value <= most:
        return None
    return Problem(where=WHERE, what=f"{option} {number_text(value)} is out of range", fix=f"use {least:g} to {most:g}")


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class MonthsForecast(PublicResult):
    """The share of time in which a plan trains over some days, with its interval and the causes of the rest."""

    plan: Plan
    policy: MonthsPolicy
    forecast: Forecast
    interrupted: bool

    def __str__(self) -> str:
        from phalanx.sim.months.months_text import forecast_text

        return forecast_text(self.plan, self.policy, self.forecast)

    def to_dict(self) -> dict[str, Any]:
        """Return the forecast."""
        return dict(json_values(self.forecast))

    @property
    def exit_code(self) -> int:
        """130 if Ctrl-C left runs out."""
        return INTERRUPTED if self.interrupted else 0


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class MonthsComparison(PublicResult):
    """A comparison of a conventional network and recovery at the edge, with three recovery times."""

    plan: Plan
    rows: tuple[RecoveryTableRow, ...]
    days: float
    runs: int
    seed: int
    network: str
    interrupted: bool

    def __str__(self) -> str:
        from phalanx.sim.months.recovery_table import recovery_table_text

        return recovery_table_text(
            self.plan, list(self.rows), days=self.days, runs=self.runs, seed=self.seed, network=self.network
        )

    def to_dict(self) -> dict[str, Any]:
        """Return every row."""
        call = {"days": self.days, "runs": self.runs, "seed": self.seed, "devices": self.plan.layout.devices}
        return {**call, "rows": json_values(self.rows)}

    @property
    def exit_code(self) -> int:
        """130 if Ctrl-C left rows out."""
        return INTERRUPTED if self.interrupted else 0


def _network_causes(plan: Plan, fabric: Fabric | None, call: MonthsCall, tell: Tell) -> NetworkCauses:
    from phalanx.sim.months.causes import DEFAULT_PLANES, NetworkCauses

    if fabric is None:
        if call.planes is not None and not (call.edge_recovery or call.compare or call.levers):
            message = "--planes has no effect: only --edge-recovery and --compare use it"
            warn([Problem(where=WHERE, what=message)], tell)
        return NetworkCauses(edge=call.edge_recovery, planes=call.planes or DEFAULT_PLANES)
    from phalanx.network.fabric.failure_budget import can_spray
    from phalanx.sim.step.axis_paths import check_size

    check_size(fabric, plan.layout.devices)
    if call.planes not in (None, fabric.planes):
        message = f"--planes {call.planes}, and {fabric.name} has {fabric.planes}"
        raise mistake(WHERE, message, fix="leave --planes out: the fabric says it")
    if (call.edge_recovery or call.compare) and not can_spray(fabric):
        message = f"{fabric.name} is InfiniBand: for recovery at the edge stands what its switches do (SHIELD)"
        warn([Problem(where=WHERE, what=message, why="a NIC's lost port or T0 restarts the job under both")], tell)
    return NetworkCauses(edge=call.edge_recovery, planes=fabric.planes, fabric=fabric)


def _months_policy(plan: Plan, network: NetworkCauses, call: MonthsCall) -> MonthsPolicy:
    from phalanx.sim.months.policy import months_policy

    return months_policy(
        plan,
        network=network,
        shape=call.weibull,
        planned_per_day=call.planned_per_day,
        repair_s=call.repair_hours * HOUR_S,
    )


def _make_forecast(plan: Plan, network: NetworkCauses, days: float, call: MonthsCall, tell: Tell) -> MonthsForecast:
    """Simulate all runs, or those finished before Ctrl-C; then the plan at other sites, and the levers."""
    from phalanx.sim.months.forecast import compare_losses, forecast_months, site_range, try_levers

    policy = _months_policy(plan, network, call)
    _check_size(policy, days, call.runs, times=1 + MOST_LEVERS * call.levers, tell=tell)
    outcomes, interrupted = _run_all(policy, days, call, tell)
    sites: SiteRange | None = None
    if not interrupted:
        try:
            sites = site_range(plan, policy, days=days, seed=call.seed)
        except KeyboardInterrupt:
            tell("stopped by Ctrl-C: the runs are finished, and shown; other sites are not")
            interrupted = True
    tried_levers: tuple[Lever, ...] = ()
    if call.levers and len(outcomes) == call.runs:
        tried_levers = try_levers(plan, policy, outcomes, days=days, seed=call.seed)
    losses = () if interrupted else compare_losses(plan, policy, outcomes, days=days, seed=call.seed)
    forecast = forecast_months(plan, policy, outcomes, seed=call.seed, sites=sites, levers=tried_levers, losses=losses)
    return MonthsForecast(plan=plan, policy=policy, forecast=forecast, interrupted=interrupted)


def _run_all(policy: MonthsPolicy, days: float, call: MonthsCall, tell: Tell) -> tuple[list[RunOutcome], bool]:
    from phalanx.sim.months.simulate_run import simulate_runs

    outcomes: list[RunOutcome] = []  # those before Ctrl-C are kept
    started = printed_s = time.perf_counter()
    try:
        for outcome in simulate_runs(policy, days=days, count=call.runs, seed=call.seed):
            outcomes.append(outcome)
            if time.perf_counter() - printed_s > PROGRESS_S:
                printed_s = time.perf_counter()
                tell(f"{len(outcomes):,} of {call.runs:,} runs")
    except KeyboardInterrupt:
        if not outcomes:
            raise
        tell(f"stopped by Ctrl-C: {len(outcomes):,} of {call.runs:,} runs are finished, and shown")
        return outcomes, True
    seconds = time.perf_counter() - started
    failures = sum(outcome.failures for outcome in outcomes)
    tell(f"{plural(failures, 'failure')} in {seconds:.2f} s ({failures / seconds:,.0f} per second)")
    return outcomes, False


def _compare_recoveries(
    plan: Plan, network: NetworkCauses, days: float, call: MonthsCall, tell: Tell
) -> MonthsComparison:
    """Compute the comparison row by row; keep the rows before Ctrl-C."""
    from phalanx.sim.months.forecast import site_range
    from phalanx.sim.months.recovery_table import recovery_cases, recovery_row
    from phalanx.sim.months.simulate_run import simulate_runs

    policies = [_months_policy(plan, replace(network, edge=edge), call) for edge in (False, True)]
    _check_size(policies[0], days, call.runs, times=MOST_CASES, tell=tell)
    rows: list[RecoveryTableRow] = []
    interrupted, cases = False, list(recovery_cases(*policies))
    try:
        for case in cases:
            outcomes = list(simulate_runs(case, days=days, count=call.runs, seed=call.seed))
            rows.append(recovery_row(plan, case, outcomes, site_range(plan, case, days=days, seed=call.seed)))
    except KeyboardInterrupt:
        if not rows:
            raise
        tell(f"stopped by Ctrl-C: {len(rows)} of {len(cases)} rows are finished, and shown")
        interrupted = True
    unnamed = f"without a name, Llama 3's rate, {plural(network.planes, 'plane')}"
    return MonthsComparison(
        plan=plan,
        rows=tuple(rows),
        days=days,
        runs=call.runs,
        seed=call.seed,
        network=network.fabric.name if network.fabric else unnamed,
        interrupted=interrupted,
    )


def _check_size(policy: MonthsPolicy, days: float, runs: int, *, times: int, tell: Callable[[str], None]) -> None:
    """Raise UserError for a simulation that would take minutes, and announce the time of a long one."""
    from phalanx.sim.months.policy import expected_failures

    each = expected_failures(policy, days) * times
    seconds = each * runs / FAILURES_PER_S
    if each * runs <= MOST_FAILURES:
        if seconds > PROGRESS_S:
            tell(f"about {each * runs:,.0f} failures: {seconds:.0f} s")
        return
    fewer = math.floor(MOST_FAILURES / each)
    raise mistake(
        WHERE,
        f"{plural(runs, 'run')} of {plural(days, 'day')} would see {each * runs:,.0f} failures",
        why=f"more than {MOST_FAILURES:,} take minutes",
        fix=f"use --runs {fewer:,}" if fewer else f"use --runs 1 --days {MOST_FAILURES / each * days:.3g}",
    )
