"""`phalanx sim JOB --days N`: months of running with failures."""

from __future__ import annotations

import argparse
import math
import time
from typing import TYPE_CHECKING

from phalanx.cli.fabric_files import named_fabric
from phalanx.cli.output import note, print_json, say, warn
from phalanx.errors import Problem, UserError, mistake
from phalanx.units import plural

if TYPE_CHECKING:
    from phalanx.plan.plan import Plan
    from phalanx.sim.months.causes import NetworkCauses
    from phalanx.sim.months.forecast import Lever, SiteRange
    from phalanx.sim.months.policy import MonthsPolicy
    from phalanx.sim.months.recovery_table import RecoveryTableRow
    from phalanx.sim.months.simulate_run import RunOutcome

WHERE = "phalanx sim"
LEAST_DAYS, MOST_DAYS, MOST_RUNS = 0.01, 3653.0, 10_000  # ten years at most
# About 50,000 failures a second on a busy core (docs/simulation/months.md): a minute and a half.
MOST_FAILURES, FAILURES_PER_S = 5_000_000, 50_000
MOST_LEVERS = 7  # changes that --levers tries
MOST_CASES = 6  # rows of --compare
TELL_S = 5.0  # between lines of progress, and the length of a run that is announced
INTERRUPTED = 130  # 128 + SIGINT, as shells count
# Options of months, for the step to refuse; with what they are when nobody gives them.
OPTIONS = {
    "--runs": ("runs", 20),
    "--seed": ("seed", 0),
    "--edge-recovery": ("edge_recovery", False),
    "--planes": ("planes", None),
    "--compare": ("compare", False),
    "--weibull": ("weibull", 1.0),
    "--planned-per-day": ("planned_per_day", None),
    "--repair-hours": ("repair_hours", 24.0),
    "--levers": ("levers", False),
}


def configure(parser: argparse.ArgumentParser) -> None:
    """Options of months."""
    months = parser.add_argument_group("months of running (with --days)")
    months.add_argument("--days", metavar="N", type=float, help="simulate so many days with failures")
    months.add_argument("--runs", metavar="N", type=int, default=20, help="runs with other random numbers (20)")
    months.add_argument("--seed", metavar="N", type=int, default=0, help="of the random numbers (0)")
    months.add_argument(
        "--edge-recovery", action="store_true", help="a lost link or switch costs bandwidth, not a restart"
    )
    months.add_argument("--planes", metavar="N", type=int, help="ports of a NIC, where no --fabric says (8)")
    months.add_argument(
        "--compare", action="store_true", help="one table: both networks, with recovery in 600 s, 90 s and the job's"
    )
    months.add_argument(
        "--weibull", metavar="SHAPE", type=float, default=1.0, help="failures in bursts: 0.7, say; 1 is Poisson (1)"
    )
    months.add_argument(
        "--planned-per-day", metavar="X", type=float, help="planned interruptions (as Llama 3: 47 in 54 days)"
    )
    months.add_argument("--repair-hours", metavar="H", type=float, default=24.0, help="until a host is back (24)")
    months.add_argument("--levers", action="store_true", help="also what would help: one change at a time")


def check(args: argparse.Namespace) -> None:
    """All wrong options at once; raises UserError."""
    found = [
        _outside("--days", args.days, LEAST_DAYS, MOST_DAYS),
        _outside("--runs", args.runs, 1, MOST_RUNS),
        _outside("--seed", args.seed, 0, 1e9),
        _outside("--weibull", args.weibull, 0.3, 5),
        _outside("--planned-per-day", args.planned_per_day or 0.0, 0, 100),
        _outside("--repair-hours", args.repair_hours, 0, 8760),
        *_of_the_step(args),
        *_together(args),
    ]
    problems = [one for one in found if one]
    if problems:
        raise UserError(problems)


def _outside(option: str, value: float, least: float, most: float) -> Problem | None:
    if least <= value <= most:
        return None
    return Problem(where=WHERE, what=f"{option} {value:g} is out of range", fix=f"use {least:g} to {most:g}")


def _of_the_step(args: argparse.Namespace) -> list[Problem]:
    given = {"--break": args.broken, "--outage": args.outage, "--trace": args.trace, "--routing": args.routing}
    fix = {"--routing": "use --edge-recovery for spraying with recovery at the edge, or leave --routing out"}
    return [
        Problem(
            where=WHERE,
            what=f"{option} belongs to one step, --days to months",
            fix=fix.get(option, "leave one of them out"),
        )
        for option, value in given.items()
        if value is not None
    ]


def _together(args: argparse.Namespace) -> list[Problem]:
    """Options that exclude each other."""
    found = []
    if args.planes is not None and not 1 <= args.planes <= 1024:
        found.append(_outside("--planes", args.planes, 1, 1024))
    elif args.planes == 1 and (args.edge_recovery or args.compare) and args.fabric is None:
        found.append(_one_plane())
    if args.compare and args.edge_recovery:
        fix = "--compare runs both networks: leave --edge-recovery out"
        found.append(Problem(where=WHERE, what="--compare with --edge-recovery", fix=fix))
    if args.compare and args.levers:
        fix = "leave one of them out"
        found.append(Problem(where=WHERE, what="--compare and --levers are two tables", fix=fix))
    return [one for one in found if one]


def _one_plane() -> Problem:
    return Problem(
        where=WHERE,
        what="--planes 1 with --edge-recovery",
        why="a NIC of one plane loses everything with its link, which no route at the edge can mend",
        fix="use 2 to 1024 planes; 8 is 800 Gb/s as 8 × 100",
    )


def run_months(plan: Plan, args: argparse.Namespace) -> int:
    """Simulate, and tell."""
    network = _network(plan, args)
    if args.compare:
        return _compare(plan, network, args)
    from phalanx.sim.months.forecast import forecast_months
    from phalanx.sim.months.text import forecast_text

    policy = _policy(plan, network, args)
    _check_size(policy, args, times=1 + MOST_LEVERS * args.levers)
    outcomes, code = _run_all(policy, args)
    sites, code = _sites(plan, policy, args, code)
    made = forecast_months(
        plan, policy, outcomes, seed=args.seed, sites=sites, levers=_levers(plan, policy, outcomes, args)
    )
    if args.json:
        print_json(made)
    else:
        say(forecast_text(plan, policy, made))
    return code


def _network(plan: Plan, args: argparse.Namespace) -> NetworkCauses:
    from phalanx.sim.months.causes import DEFAULT_PLANES, NetworkCauses

    if args.fabric is None:
        if args.planes is not None and not (args.edge_recovery or args.compare or args.levers):
            warn([Problem(where=WHERE, what="--planes has no effect: only --edge-recovery and --compare use it")])
        return NetworkCauses(edge=args.edge_recovery, planes=args.planes or DEFAULT_PLANES)
    from phalanx.network.fabric.failure_budget import sprays
    from phalanx.sim.step.paths import check_size

    fabric = named_fabric(args.fabric)
    check_size(fabric, plan.layout.devices)
    if args.planes not in (None, fabric.planes):
        raise mistake(
            WHERE,
            f"--planes {args.planes}, and {fabric.name} has {fabric.planes}",
            fix="leave --planes out: the fabric says it",
        )
    if (args.edge_recovery or args.compare) and not sprays(fabric):
        what = f"{fabric.name} is InfiniBand: for recovery at the edge stands what its switches do (SHIELD)"
        warn([Problem(where=WHERE, what=what, why="a NIC's lost port or T0 restarts the job under both")])
    return NetworkCauses(edge=args.edge_recovery, planes=fabric.planes, fabric=fabric)


def _policy(plan: Plan, network: NetworkCauses, args: argparse.Namespace) -> MonthsPolicy:
    from phalanx.sim.months.policy import months_policy
    from phalanx.units import HOUR_S

    return months_policy(
        plan,
        network=network,
        shape=args.weibull,
        planned_per_day=args.planned_per_day,
        repair_s=args.repair_hours * HOUR_S,
    )


def _compare(plan: Plan, network: NetworkCauses, args: argparse.Namespace) -> int:
    """Row by row; those before Ctrl-C are kept."""
    from dataclasses import replace

    from phalanx.sim.months.forecast import site_range
    from phalanx.sim.months.recovery_table import recovery_cases, recovery_row, recovery_table_text
    from phalanx.sim.months.simulate_run import simulate_runs

    both = [_policy(plan, replace(network, edge=edge), args) for edge in (False, True)]
    _check_size(both[0], args, times=MOST_CASES)
    rows: list[RecoveryTableRow] = []
    code, asked = 0, list(recovery_cases(*both))
    try:
        for one in asked:
            outcomes = list(simulate_runs(one, days=args.days, count=args.runs, seed=args.seed))
            rows.append(recovery_row(plan, one, outcomes, site_range(plan, one, days=args.days, seed=args.seed)))
    except KeyboardInterrupt:
        if not rows:
            raise
        note(f"stopped by Ctrl-C: {len(rows)} of {len(asked)} rows are finished, and shown")
        code = INTERRUPTED
    if args.json:
        print_json(
            {"days": args.days, "runs": args.runs, "seed": args.seed, "devices": plan.layout.devices, "rows": rows}
        )
    else:
        named = (
            network.fabric.name
            if network.fabric
            else f"without a name, Llama 3's rate, {plural(network.planes, 'plane')}"
        )
        say(recovery_table_text(plan, rows, days=args.days, runs=args.runs, seed=args.seed, network=named))
    return code


def _run_all(policy: MonthsPolicy, args: argparse.Namespace) -> tuple[list[RunOutcome], int]:
    """All runs, or those that Ctrl-C left finished, with the exit code that tells which."""
    from phalanx.sim.months.simulate_run import simulate_runs

    outcomes: list[RunOutcome] = []  # those before Ctrl-C are kept
    started = told = time.perf_counter()
    try:
        for one in simulate_runs(policy, days=args.days, count=args.runs, seed=args.seed):
            outcomes.append(one)
            if time.perf_counter() - told > TELL_S:
                told = time.perf_counter()
                note(f"{len(outcomes):,} of {args.runs:,} runs")
    except KeyboardInterrupt:
        if not outcomes:
            raise
        note(f"stopped by Ctrl-C: {len(outcomes):,} of {args.runs:,} runs are finished, and shown")
        return outcomes, INTERRUPTED
    seconds = time.perf_counter() - started
    failures = sum(one.failures for one in outcomes)
    note(f"{plural(failures, 'failure')} in {seconds:.2f} s ({failures / seconds:,.0f} per second)")
    return outcomes, 0


def _sites(plan: Plan, policy: MonthsPolicy, args: argparse.Namespace, code: int) -> tuple[SiteRange | None, int]:
    """The plan at other sites; Ctrl-C leaves the runs at this one."""
    from phalanx.sim.months.forecast import site_range

    if code:
        return None, code
    try:
        return site_range(plan, policy, days=args.days, seed=args.seed), 0
    except KeyboardInterrupt:
        note("stopped by Ctrl-C: the runs are finished, and shown; other sites are not")
        return None, INTERRUPTED


def _levers(
    plan: Plan, policy: MonthsPolicy, outcomes: list[RunOutcome], args: argparse.Namespace
) -> tuple[Lever, ...]:
    """What would help, if asked for and if all runs were finished."""
    from phalanx.sim.months.forecast import try_levers

    if not args.levers or len(outcomes) < args.runs:
        return ()
    return try_levers(plan, policy, outcomes, days=args.days, seed=args.seed)


def _check_size(policy: MonthsPolicy, args: argparse.Namespace, *, times: int) -> None:
    """Refuses what would take minutes, and says how long the rest takes when that is long."""
    from phalanx.sim.months.policy import expected_failures

    each = expected_failures(policy, args.days) * times
    seconds = each * args.runs / FAILURES_PER_S
    if each * args.runs <= MOST_FAILURES:
        if seconds > TELL_S:
            note(f"about {each * args.runs:,.0f} failures: {seconds:.0f} s")
        return
    fewer = math.floor(MOST_FAILURES / each)
    raise mistake(
        WHERE,
        f"{plural(args.runs, 'run')} of {plural(args.days, 'day')} would see {each * args.runs:,.0f} failures",
        why=f"more than {MOST_FAILURES:,} take minutes",
        fix=f"use --runs {fewer:,}" if fewer else f"use --runs 1 --days {MOST_FAILURES / each * args.days:.3g}",
    )
