"""`phalanx train`: train a job, or continue a run, and print its report."""

from __future__ import annotations

import argparse

import phalanx
from phalanx.cli.output import note, print_json, say
from phalanx.cli.parser import add_hosts, add_json, add_no_probe, add_ranks_per_gpu, add_set
from phalanx.errors import mistake
from phalanx.units import plural

TYPE_CHECKING = False
if TYPE_CHECKING:
    from phalanx.record.run import Run


def configure_parser(parser: argparse.ArgumentParser) -> None:
    """Add the options of `phalanx train`."""
    parser.add_argument("job", metavar="JOB", nargs="?", help="the job file, such as job.toml")
    add_set(parser)
    parser.add_argument("--cluster", metavar="SPEC", help="run on this cluster instead of the job's, e.g. local:4")
    parser.add_argument("--steps", metavar="N", type=int, help="train N steps instead of data.tokens")
    parser.add_argument("--runs", metavar="DIR", default="runs", help="where to create run folders (default: runs)")
    parser.add_argument("--name", metavar="NAME", help="first part of the run folder's name (default: the job's name)")
    parser.add_argument("--resume", metavar="RUN", help="continue a run from its newest checkpoint")
    parser.add_argument("--report", metavar="RUN", help="print the report of a run; trains nothing")
    parser.add_argument("--plan", metavar="FILE", help="use this plan, written by phalanx plan --out")
    add_no_probe(parser)
    parser.add_argument("--dry-run", action="store_true", help="plan and check only; start nothing")
    parser.add_argument(
        "--no-check", action="store_true", help="start in spite of errors against the training specification"
    )
    add_hosts(parser)
    parser.add_argument(
        "--join",
        metavar="N",
        type=int,
        default=0,
        help="start as the first of N hosts; the others run phalanx agent RUN",
    )
    parser.add_argument("--address", metavar="IP", help="with --join: address of this host (default: fault.interface)")
    add_ranks_per_gpu(parser)
    parser.add_argument(
        "--allow-code", action="store_true", help="allow code named in the job file: your own model or plug-ins"
    )
    add_json(parser)


def run_command(args: argparse.Namespace) -> int:
    """Train, resume, plan only (--dry-run), or print the report of a run."""
    if args.report:
        excluded = [name for name, value in (("JOB", args.job), ("--resume", args.resume)) if value]
        if excluded:
            what = f"{' and '.join([*excluded, '--report'])} exclude each other"
            raise mistake("phalanx train", what, fix="give one of them")
        return _print_report(phalanx.run(args.report), as_json=args.json)
    names = ("job", "plan", "resume", "cluster", "steps", "runs", "name", "hosts", "spares", "join", "address")
    options = {name: getattr(args, name) for name in (*names, "ranks_per_gpu", "allow_code", "overrides")}
    options |= {"measure": not args.no_probe, "check": not args.no_check}
    if args.dry_run:
        plan = phalanx.dry_run(**options)
        if args.json:
            print_json(plan.to_dict())
        else:
            ranks, steps = plural(plan.layout.devices, "rank"), plural(plan.duration.steps, "step")
            say(f"{ranks} would train {steps}: {plan.layout.name}")
        return 0
    run = phalanx.train(**options)
    _print_report(run, as_json=args.json)
    note(f"check this run: phalanx check {run.path}")
    status = run.status()
    if status.get("message"):
        note(str(status["message"]))
    return int(status.get("exit_code", 0))


def _print_report(made: Run, *, as_json: bool) -> int:
    if as_json:
        print_json(made.summary())
    else:
        say(made)
    return 0
