"""`phalanx plan`: find the best layout of a job on a cluster, with its reasons and its cost."""

from __future__ import annotations

import argparse
from pathlib import Path

import phalanx
from phalanx.cli.output import note, print_json, say_page, show, warn
from phalanx.cli.parser import add_json, add_no_probe, add_set
from phalanx.errors import Problem, mistake
from phalanx.io.files import write_text
from phalanx.io.limits import MAX_SHOWN_ROWS
from phalanx.units import number_text, plural

MOST_COMPARED = 8  # columns that fit side by side on a page


def configure_parser(parser: argparse.ArgumentParser) -> None:
    """Add the options of `phalanx plan`."""
    parser.add_argument("job", metavar="JOB", nargs="?", help="the job file, such as job.toml")
    add_set(parser)
    parser.add_argument("--cluster", metavar="SPEC", help="plan for this cluster instead of the job's, e.g. 8xH100:16")
    parser.add_argument(
        "--calibration", metavar="FILE", help="factors measured on your system, written by phalanx calibrate"
    )
    parser.add_argument("--out", metavar="FILE", help="write the plan as JSON")
    parser.add_argument(
        "--top", metavar="N", type=int, default=6, help="number of runners-up and Pareto points to show (default: 6)"
    )
    parser.add_argument("--compare", metavar="JOB", nargs="+", default=[], help="plan several jobs, side by side")
    add_no_probe(parser)
    add_json(parser)


def run_command(args: argparse.Namespace) -> int:
    """Plan one job and print the plan, or plan several jobs and print them side by side."""
    jobs = [*([args.job] if args.job else []), *args.compare]
    if not jobs:
        raise mistake("phalanx plan", "no job file is named", fix="phalanx plan job.toml; phalanx init writes one")
    if args.top < 0:
        raise mistake("phalanx plan", f"--top {args.top} is below 0", fix="use 0 or more")
    if args.top > MAX_SHOWN_ROWS:
        what = f"--top {number_text(args.top)} is above {MAX_SHOWN_ROWS:,}"
        raise mistake("phalanx plan", what, fix="use 100; --json prints every layout of the front")
    if args.compare and args.out:
        raise mistake("phalanx plan", "--out writes one plan, not a comparison", fix="use --json > file")
    # Checked before anything is planned.
    if args.compare and not 2 <= len(jobs) <= MOST_COMPARED:
        what = f"{plural(len(jobs), 'job file')} named"
        raise mistake("phalanx plan --compare", what, fix=f"name 2 to {MOST_COMPARED}, e.g. --compare a.toml b.toml")
    plans = [
        phalanx.plan(
            job,
            args.cluster,
            overrides=args.overrides,
            calibration=args.calibration,
            measure=not args.no_probe,
            progress=note,
        )
        for job in jobs
    ]
    if args.compare:
        code = show(phalanx.compare_plans(plans, jobs), as_json=args.json)
        if not args.json:
            for job, plan in zip(jobs, plans, strict=True):
                warn(Problem(where=job, what=line) for line in plan.warnings)
        return code
    if args.out:
        write_text(Path(args.out), plans[0].to_json(), fix="name another --out")
        note(f"wrote {args.out}")
    if args.json:
        print_json(plans[0].to_dict())
    else:
        say_page(plans[0].page(top=args.top), is_heading="A")
    return 0
