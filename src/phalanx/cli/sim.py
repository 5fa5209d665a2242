"""`phalanx sim`: simulate one step of a plan on a fabric, months with failures, or the queue of a cluster."""

from __future__ import annotations

import argparse

import phalanx
from phalanx.cli.output import note, show
from phalanx.cli.parser import add_json, add_set
from phalanx.errors import mistake

BREAKS = ("link", "t1", "t0", "nic", "transceiver", "grey")
ROUTINGS = ("spray", "ecmp")


def configure_parser(parser: argparse.ArgumentParser) -> None:
    """Add the options of `phalanx sim`."""
    parser.add_argument("job", metavar="JOB", nargs="?", help="the job file, such as job.toml; none with --queue")
    add_set(parser)
    parser.add_argument("--cluster", metavar="SPEC", help="use this cluster instead of the job's, e.g. 8xH100:16")
    parser.add_argument(
        "--fabric",
        metavar="F",
        help="the network: a short form such as clos2:131072x800G/8p/512, a .toml or .topo file, or a name",
    )
    step = parser.add_argument_group("one step on a fabric (without --days)")
    step.add_argument(
        "--routing", choices=ROUTINGS, help="spray: packets over 256 paths; ecmp: 16 hashed QPs (default: spray)"
    )
    step.add_argument(
        "--break", dest="broken", choices=BREAKS, help="also simulate the step when a part of this kind fails"
    )
    step.add_argument(
        "--outage", metavar="S", type=float, help="seconds until the part is back (defaults: docs/simulation/step.md)"
    )
    step.add_argument("--trace", metavar="FILE.json", help="write the timeline; ui.perfetto.dev opens it")
    months = parser.add_argument_group("months of running (with --days)")
    months.add_argument(
        "--days", metavar="N", type=float, help="simulate N days with failures, or of sites that come and go"
    )
    months.add_argument(
        "--runs",
        metavar="N",
        type=int,
        default=20,
        help="simulated runs, each with its own random failures (default: 20)",
    )
    months.add_argument("--seed", metavar="N", type=int, default=0, help="seed of the random numbers (default: 0)")
    months.add_argument(
        "--edge-recovery", action="store_true", help="a lost link or switch costs bandwidth, not a restart"
    )
    months.add_argument("--planes", metavar="N", type=int, help="ports per NIC, without --fabric (default: 8)")
    months.add_argument(
        "--compare",
        action="store_true",
        help="compare both networks, with recovery in 600 s, in 90 s and in the job's own time",
    )
    months.add_argument(
        "--weibull",
        metavar="SHAPE",
        type=float,
        default=1.0,
        help="shape of the gaps between failures; below 1, e.g. 0.7, they come in bursts (default: 1)",
    )
    months.add_argument(
        "--planned-per-day",
        metavar="X",
        type=float,
        help="planned interruptions per day (default: as for Llama 3, 47 in 54 days)",
    )
    months.add_argument(
        "--repair-hours", metavar="H", type=float, default=24.0, help="hours until a failed host is back (default: 24)"
    )
    months.add_argument("--levers", action="store_true", help="also show which single change would help most")
    queue = parser.add_argument_group("the queue of a cluster (with --queue, without JOB)")
    queue.add_argument(
        "--queue", metavar="TRACE", help="simulate a cluster that serves these jobs: a .csv or .swf file, or synthetic"
    )
    queue.add_argument(
        "--policy",
        metavar="P",
        help="fifo, easy, conservative or a .toml file (default: easy); --set sets single keys of it",
    )
    queue.add_argument("--jobs", metavar="N", type=int, help="synthetic jobs (default: 50000), in --days (default: 30)")
    queue.add_argument(
        "--load", metavar="X", type=float, help="share of the cluster that synthetic jobs ask for (default: 0.85)"
    )
    add_json(parser)


def run_command(args: argparse.Namespace) -> int:
    """Run the simulation that the options choose, and print its result."""
    from phalanx.api.simulating import StepSimulation

    if args.queue is not None:
        return _simulate_queue(args)
    if args.job is None:
        raise mistake("phalanx sim", "neither JOB nor --queue is given", fix="name a job file, or --queue synthetic")
    for option, value in (("--policy", args.policy), ("--jobs", args.jobs), ("--load", args.load)):
        if value is not None:
            raise mistake("phalanx sim", f"{option} belongs to --queue", fix="add --queue synthetic, or leave it out")
    if args.trace and args.days is not None:
        what = "--trace belongs to one step, --days to months"
        raise mistake("phalanx sim", what, fix="leave one of them out")
    names = ("overrides", "fabric", "days", "routing", "broken", "runs", "seed", "edge_recovery", "planes", "compare")
    options = {name: getattr(args, name) for name in (*names, "weibull", "planned_per_day", "repair_hours", "levers")}
    result = phalanx.simulate(args.job, args.cluster, outage_s=args.outage, progress=note, **options)
    if args.trace and isinstance(result, StepSimulation):
        note(f"wrote {args.trace}: {result.write_trace(args.trace)}; ui.perfetto.dev opens it")
    return show(result, as_json=args.json)


def _simulate_queue(args: argparse.Namespace) -> int:
    """Simulate the queue of a cluster; raise UserError for options of a step or of months, which have no effect."""
    other_options = {
        "JOB": args.job,
        "--fabric": args.fabric,
        "--routing": args.routing,
        "--break": args.broken,
        "--outage": args.outage,
        "--trace": args.trace,
        "--edge-recovery": args.edge_recovery or None,
        "--planes": args.planes,
        "--compare": args.compare or None,
        "--planned-per-day": args.planned_per_day,
        "--levers": args.levers or None,
    }
    for option, value in other_options.items():
        if value is not None:
            raise mistake("phalanx sim", f"{option} has no effect on --queue", fix="leave one of them out")
    result = phalanx.simulate_queue(
        args.queue,
        args.cluster or "8xH100:7500",
        policy=args.policy or "easy",
        overrides=args.overrides,
        jobs=args.jobs,
        days=args.days,
        load=args.load,
        seed=args.seed,
        progress=note,
    )
    return show(result, as_json=args.json)
