"""`phalanx sim`: what becomes of a plan: one step on a fabric or, with --days, months of running with failures."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from phalanx.cli import sim_months, sim_step
from phalanx.cli.options import add_job, add_json
from phalanx.cli.output import warn
from phalanx.errors import Problem

if TYPE_CHECKING:
    from phalanx.plan.plan import Plan


def configure(parser: argparse.ArgumentParser) -> None:
    """Options of `phalanx sim`."""
    add_job(parser)
    parser.add_argument("--cluster", metavar="SPEC", help="on this cluster instead of the job's, as 8xH100:16")
    parser.add_argument("--fabric", metavar="F", help="as clos2:131072x800G/8p/512, a .toml or .topo file, or a name")
    sim_step.configure(parser)
    sim_months.configure(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Simulate what was asked for."""
    if args.days is None:
        sim_step.check(args)
        return sim_step.run_step(_plan(args), args)
    sim_months.check(args)
    return sim_months.run_months(_plan(args), args)


def _plan(args: argparse.Namespace) -> Plan:
    from phalanx.hardware.cluster import resolve
    from phalanx.job.load import load
    from phalanx.plan.make import plan as make_plan

    cluster = resolve(args.cluster) if args.cluster is not None else None
    made = make_plan(load(args.job, overrides=args.overrides), cluster, hopeless=True)
    warn(Problem(where="", what=line) for line in made.warnings)
    return made
