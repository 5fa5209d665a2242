"""`phalanx sim`: what becomes of a plan: one step on a fabric or, with --days, months of running with failures."""

from __future__ import annotations

import argparse
import math
import time
from typing import TYPE_CHECKING

from phalanx.cli import sim_step
from phalanx.cli.options import add_job, add_json
from phalanx.cli.output import note, print_json, warn
from phalanx.errors import Problem, UserError, mistake

if TYPE_CHECKING:
    from phalanx.plan.plan import Plan
    from phalanx.sim.months.ledger import Outcome
    from phalanx.sim.months.levers import Lever
    from phalanx.sim.months.policy import Policy

WHERE = "phalanx sim"
LEAST_DAYS, MOST_DAYS, MOST_RUNS = 0.01, 3653.0, 10_000  # ten years at most
# About 50,000 failures a second on a busy core (docs/simulation/months.md): a minute and a half.
MOST_FAILURES = 5_000_000
MOST_LEVERS = 7  # changes that --levers tries
TELL_S = 5.0  # between lines of progress
INTERRUPTED = 130  # 128 + SIGINT, as shells count


def configure(parser: argparse.ArgumentParser) -> None:
    """Options of `phalanx sim`."""
    add_job(parser)
    parser.add_argument("--cluster", metavar="SPEC", help="on this cluster instead of the job's, as 8xH100:16")
    sim_step.configure(parser)
    months = parser.add_argument_group("months of running")
    months.add_argument("--days", metavar="N", type=float, help="simulate so many days with failures")
    months.add_argument("--runs", metavar="N", type=int, default=20, help="runs with other random numbers (20)")
    months.add_argument("--seed", metavar="N", type=int, default=0, help="of the random numbers (0)")
    months.add_argument(
        "--edge-recovery", action="store_true", help="a lost link or switch costs bandwidth, not a restart"
    )
    months.add_argument("--planes", metavar="N", type=int, default=8, help="ports of a NIC, for --edge-recovery (8)")
    months.add_argument(
        "--weibull", metavar="SHAPE", type=float, default=1.0, help="failures in bursts: 0.7, say; 1 is Poisson (1)"
    )
    months.add_argument(
        "--planned-per-day", metavar="X", type=float, help="planned interruptions (as Llama 3: 47 in 54 days)"
    )
    months.add_argument("--repair-hours", metavar="H", type=float, default=24.0, help="until a host is back (24)")
    months.add_argument("--levers", action="store_true", help="also what would help: one change at a time")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Simulate what was asked for."""
    if args.days is None:
        return sim_step.run_step(_plan(args), args)
    sim_step.check_days(args, WHERE)
    _check(args)
    return _months(args)


def _months(args: argparse.Namespace) -> int:
    from phalanx.sim.months.forecast import forecast
    from phalanx.sim.months.text import render

    plan = _plan(args)
    policy = _policy(plan, args)
    _check_size(policy, args)
    outcomes, code = _run_all(policy, args)
    made = forecast(plan, policy, outcomes, seed=args.seed, levers=_levers(plan, policy, outcomes, args))
    if args.json:
        print_json(made)
    else:
        print(render(plan, policy, made))
    return code


def _plan(args: argparse.Namespace) -> Plan:
    from phalanx.hardware.cluster import resolve
    from phalanx.job.load import load
    from phalanx.plan.make import plan as make_plan

    cluster = resolve(args.cluster) if args.cluster is not None else None
    made = make_plan(load(args.job, overrides=args.overrides), cluster, hopeless=True)
    warn(Problem(where="", what=line) for line in made.warnings)
    return made


def _policy(plan: Plan, args: argparse.Namespace) -> Policy:
    from phalanx.sim.months.policy import Edge, policy
    from phalanx.units import HOUR_S

    return policy(
        plan,
        edge=Edge(planes=args.planes) if args.edge_recovery else None,
        shape=args.weibull,
        planned_per_day=args.planned_per_day,
        repair_s=args.repair_hours * HOUR_S,
    )


def _run_all(policy: Policy, args: argparse.Namespace) -> tuple[list[Outcome], int]:
    """All runs, or those that Ctrl-C left finished, with the exit code that tells which."""
    from phalanx.sim.months.run import runs

    outcomes: list[Outcome] = []  # those before Ctrl-C are kept
    started = told = time.perf_counter()
    try:
        for one in runs(policy, days=args.days, count=args.runs, seed=args.seed):
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
    note(f"{failures:,} failures in {seconds:.2f} s ({failures / seconds:,.0f} per second)")
    return outcomes, 0


def _levers(plan: Plan, policy: Policy, outcomes: list[Outcome], args: argparse.Namespace) -> tuple[Lever, ...]:
    """What would help, if asked for and if all runs were finished."""
    from phalanx.sim.months.levers import levers

    if not args.levers or len(outcomes) < args.runs:
        return ()
    return levers(plan, policy, outcomes, days=args.days, seed=args.seed)


def _check(args: argparse.Namespace) -> None:
    """All wrong options at once."""
    found = [
        _outside("--days", args.days, LEAST_DAYS, MOST_DAYS),
        _outside("--runs", args.runs, 1, MOST_RUNS),
        _outside("--seed", args.seed, 0, 1e9),
        _outside("--weibull", args.weibull, 0.3, 5),
        _outside("--planned-per-day", args.planned_per_day or 0.0, 0, 100),
        _outside("--repair-hours", args.repair_hours, 0, 8760),
    ]
    problems = [one for one in found if one]
    if args.edge_recovery and not 2 <= args.planes <= 1024:
        problems.append(_planes(args.planes))
    if problems:
        raise UserError(problems)


def _outside(option: str, value: float, least: float, most: float) -> Problem | None:
    if least <= value <= most:
        return None
    return Problem(where=WHERE, what=f"{option} {value:g} is out of range", fix=f"use {least:g} to {most:g}")


def _planes(planes: int) -> Problem:
    return Problem(
        where=WHERE,
        what=f"--planes {planes} with --edge-recovery",
        why="a NIC of one plane loses everything with its link, which no route at the edge can mend",
        fix="use 2 to 1024 planes; 8 is 800 Gb/s as 8 × 100",
    )


def _check_size(policy: Policy, args: argparse.Namespace) -> None:
    from phalanx.sim.months.policy import expected_failures

    each = expected_failures(policy, args.days) * (1 + MOST_LEVERS * args.levers)
    if each * args.runs <= MOST_FAILURES:
        return
    fewer = math.floor(MOST_FAILURES / each)
    raise mistake(
        WHERE,
        f"{args.runs:,} runs of {args.days:g} days would see {each * args.runs:,.0f} failures",
        why=f"more than {MOST_FAILURES:,} take minutes",
        fix=f"use --runs {fewer:,}" if fewer else f"use --runs 1 --days {MOST_FAILURES / each * args.days:.3g}",
    )
