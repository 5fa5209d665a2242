"""`phalanx drill`: inject faults into a real run, and prove from its record that nothing was lost."""

from __future__ import annotations

import argparse

import phalanx
from phalanx.cli.output import note, show
from phalanx.cli.parser import FormerName, add_hosts, add_json, add_ranks_per_gpu, add_set
from phalanx.errors import mistake

USUAL_FAULT = "kill:rank=1,step=5,point=collective"
WHERE = "phalanx drill"
SUITES = ("standard", "outside")


def configure_parser(parser: argparse.ArgumentParser) -> None:
    """Add the options of `phalanx drill`."""
    parser.add_argument("job", metavar="JOB", nargs="?", help="the job file, such as examples/drill.toml")
    add_set(parser)
    parser.add_argument(
        "--fault",
        dest="faults",
        metavar="KIND:KEY=VALUE,…",
        action="append",
        default=[],
        help=f"inject this fault, e.g. {USUAL_FAULT}; may be repeated; docs/drills.md lists the kinds",
    )
    parser.add_argument(
        "--suite",
        metavar="NAME",
        nargs="?",
        const="standard",
        help="standard (the default): drills of JOB whose records phalanx check uses as evidence; outside: every fault "
        "of docs/drills.md#the-suite-outside, on a job of its own",
    )
    parser.add_argument(
        "--only", metavar="NAME", action="append", default=[], help="with --suite outside: only this drill; repeatable"
    )
    parser.add_argument("--list", action="store_true", help="with --suite outside: list its drills; runs nothing")
    parser.add_argument("--chaos", action="store_true", help="inject random faults at random times instead")
    parser.add_argument("--rate", metavar="R", type=float, help="with --chaos: faults per minute (default: 6)")
    parser.add_argument(
        "--seed", metavar="N", type=int, help="with --chaos: seed; the same seed gives the same faults (default: 0)"
    )
    parser.add_argument("--minutes", metavar="M", type=float, default=0.0, help="stop the run after M minutes")
    add_hosts(parser)
    parser.add_argument(
        "--peers", metavar="N", type=int, default=0, help="drill N peers of a job with [sync], all on this machine"
    )
    parser.add_argument("--steps", metavar="N", type=int, default=0, help="train N steps instead of data.tokens")
    parser.add_argument("--cluster", metavar="SPEC", help="run on this cluster instead of the job's, e.g. local:4")
    parser.add_argument("--runs", metavar="DIR", default="runs", help="where to create run folders (default: runs)")
    parser.add_argument("--no-replay", action="store_true", help="do not repeat the run without faults to compare bits")
    parser.add_argument(
        "--no-shrink", action="store_true", help="do not search for the smallest fault schedule that still fails"
    )
    add_ranks_per_gpu(parser)
    parser.add_argument(
        "--allow-code", action="store_true", help="allow code named in the job file: your own model or plug-ins"
    )
    parser.add_argument("--out", metavar="FILE", help="write a copy of the drill record to this file")
    parser.add_argument(
        "--read-record",
        metavar="RECORD",
        help="check the signature and evidence of a drill record and print its verdicts; runs nothing",
    )
    parser.add_argument("--check", dest="read_record", action=FormerName, metavar="RECORD", help=argparse.SUPPRESS)
    add_json(parser)


def run_command(args: argparse.Namespace) -> int:
    """Run or read a drill; exit code 0 if every verdict holds, 1 if one does not or could not be judged."""
    # --suite JOB, the form until 0.7.
    if args.suite is not None and args.suite not in SUITES and not args.job:
        args.suite, args.job = "standard", args.suite
    if args.suite == "outside" or args.only or args.list:
        _check_outside(args)
        if args.list:
            return show(phalanx.list_outside_drills(), as_json=args.json)
        return show(phalanx.drill_outside(args.only, runs=args.runs, progress=note), as_json=args.json)
    _check_call(args)
    if args.read_record:
        return show(phalanx.read_drill_record(args.read_record), as_json=args.json)
    names = ("cluster", "overrides", "runs", "ranks_per_gpu", "allow_code")
    options = {name: getattr(args, name) for name in names}
    if args.suite:
        return show(phalanx.drill_suite(args.job, progress=note, **options), as_json=args.json)
    result = phalanx.drill(
        args.job,
        args.faults,
        chaos=args.chaos,
        rate=args.rate,
        seed=args.seed,
        minutes=args.minutes,
        hosts=args.hosts,
        spares=args.spares,
        peers=args.peers,
        steps=args.steps,
        replay=not args.no_replay,
        shrink=not args.no_shrink,
        out=args.out,
        progress=note,
        **options,
    )
    code = show(result, as_json=args.json)
    if result.outcome.message and not args.json:
        note(result.outcome.message)
    return code


def _check_call(args: argparse.Namespace) -> None:
    """Raise UserError for options that would have no effect together, rather than ignore them."""
    if bool(args.job) == bool(args.read_record):
        what = "JOB and --read-record exclude each other" if args.job else "no job file is named"
        raise mistake(WHERE, what, fix="phalanx drill examples/drill.toml, or phalanx drill --read-record RECORD")
    run_options = {
        "--fault": args.faults,
        "--chaos": args.chaos,
        "--minutes": args.minutes,
        "--steps": args.steps,
        "--out": args.out,
    }
    if args.read_record:
        chaos_options = {
            "--rate": args.rate is not None,
            "--seed": args.seed is not None,
            "--no-shrink": args.no_shrink,
        }
        options = {**chaos_options, **run_options, "--suite": args.suite, "--set": args.overrides}
        _refuse_options(options, "--read-record", why="--read-record runs nothing", fix="leave it out")
    if args.suite is not None and args.suite not in SUITES:
        raise mistake(WHERE, f"--suite {args.suite[:60]} is unknown", fix=f"use one of {', '.join(SUITES)}")
    # Its faults and times are fixed, so that drill records of different users can be compared.
    if args.suite:
        _refuse_options(
            {
                **run_options,
                "--hosts": args.hosts != 1,
                "--spares": args.spares,
                "--peers": args.peers,
                "--no-replay": args.no_replay,
            },
            "--suite",
            why="the suite chooses its own faults and times",
            fix="leave it out; --cluster, --set and --runs go with it",
        )


def _check_outside(args: argparse.Namespace) -> None:
    """Raise UserError for options that the suite "outside" ignores: it has its own job, data and faults."""
    if args.suite != "outside":
        idle = "--only" if args.only else "--list"
        raise mistake(WHERE, f"{idle} without --suite outside", fix="phalanx drill --suite outside --list")
    options = {
        "JOB": args.job,
        "--fault": args.faults,
        "--chaos": args.chaos,
        "--rate": args.rate is not None,
        "--seed": args.seed is not None,
        "--minutes": args.minutes,
        "--steps": args.steps,
        "--hosts": args.hosts != 1,
        "--spares": args.spares,
        "--peers": args.peers,
        "--cluster": args.cluster,
        "--set": args.overrides,
        "--out": args.out,
        "--read-record": args.read_record,
        "--ranks-per-gpu": args.ranks_per_gpu is not None,
    }
    why = "it damages files, and so has a job and data of its own"
    _refuse_options(
        options, "--suite outside", why=why, fix="leave it out; --only, --list, --runs and --json go with it"
    )


def _refuse_options(given: dict[str, object], beside: str, *, why: str, fix: str) -> None:
    idle = [name for name, value in given.items() if value]
    if idle:
        raise mistake(WHERE, f"{' and '.join(idle)} with {beside}", why=why, fix=fix)
