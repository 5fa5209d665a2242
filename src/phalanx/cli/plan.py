"""`phalanx plan`: the best layout of a job on a cluster, its reasons and its bill."""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import replace
from pathlib import Path

from phalanx.cli.inputs import told_inputs
from phalanx.cli.options import add_json, add_no_probe, add_set
from phalanx.cli.output import note, print_json, say, warn
from phalanx.errors import Problem, mistake
from phalanx.hardware.cluster import resolve
from phalanx.io.files import write_text
from phalanx.io.visible import visible
from phalanx.job.load import load
from phalanx.plan import text
from phalanx.plan.make import plan as make_plan
from phalanx.plan.make import plan_here
from phalanx.plan.plan import CalibrationNote, Plan
from phalanx.units import plural

MOST_COMPARED = 8


def configure(parser: argparse.ArgumentParser) -> None:
    """Options of `phalanx plan`."""
    parser.add_argument("job", metavar="JOB", nargs="?", help="the job file, such as job.toml")
    add_set(parser)
    parser.add_argument("--cluster", metavar="SPEC", help="plan for this cluster instead of the job's, as 8xH100:16")
    parser.add_argument(
        "--calibration", metavar="FILE", help="scalars measured on your system, as phalanx calibrate writes them"
    )
    parser.add_argument("--out", metavar="FILE", help="write the plan as JSON, whole or not at all")
    parser.add_argument("--top", metavar="N", type=int, default=6, help="runners-up and Pareto points shown (6)")
    parser.add_argument("--compare", metavar="JOB", nargs="+", default=[], help="plan several jobs, side by side")
    add_no_probe(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Plan one job, or compare several."""
    jobs = [*([args.job] if args.job else []), *args.compare]
    if not jobs:
        raise mistake("phalanx plan", "no job file is named", fix="phalanx plan job.toml; phalanx init writes one")
    if args.top < 0:
        raise mistake("phalanx plan", f"--top {args.top} is below 0", fix="use 0 or more")
    if args.compare:
        return _compare(args, jobs)
    made = _plan(jobs[0], args)
    if args.out:
        write_text(Path(args.out), made.to_json(), fix="name another --out")
        note(f"wrote {args.out}")
    if args.json:
        print_json(made.to_dict())
    else:
        _show(text.plan_text(made, top=args.top))
    return 0


def _plan(job: str, args: argparse.Namespace) -> Plan:
    resolved = load(job, overrides=args.overrides)
    calibration, found = _calibration(args.calibration), told_inputs(resolved)

    def make() -> Plan:
        cluster = resolve(args.cluster) if args.cluster is not None else None
        return make_plan(resolved, cluster, calibration=calibration)

    if args.cluster is not None:
        resolve(args.cluster)  # what is wrong with it is said before the machine is measured, which takes 20 s
    target = str(args.cluster or resolved.job.cluster.target)
    made = make() if args.no_probe else plan_here(make, target, environ=os.environ, tell=note)
    return replace(made, warnings=(*made.warnings, *(problem.render() for problem in found.warnings)))


def _calibration(name: str | None) -> CalibrationNote | None:
    if name is None:
        return None
    from phalanx.plan.calibrate import read_calibration  # imports scipy: only when asked for

    return read_calibration(Path(name))


def _compare(args: argparse.Namespace, jobs: list[str]) -> int:
    if not 2 <= len(jobs) <= MOST_COMPARED:
        raise mistake(
            "phalanx plan --compare",
            f"{plural(len(jobs), 'job file')} named",
            fix=f"name 2 to {MOST_COMPARED}, as --compare a.toml b.toml",
        )
    if args.out:
        raise mistake("phalanx plan", "--out writes one plan, not a comparison", fix="use --json > file")
    plans = [_plan(job, args) for job in jobs]
    differences = text.compare_plans(plans, jobs)
    if args.json:
        print_json({"differences": differences, "plans": [one.to_dict() for one in plans]})
        return 0
    say(text.comparison_text(differences))
    for job, one in zip(jobs, plans, strict=True):
        warn(Problem(where=job, what=line) for line in one.warnings)
    return 0


def _show(page: str) -> None:
    """The page as it is; on a terminal the headings stand out."""
    if not sys.stdout.isatty() or os.environ.get("NO_COLOR"):
        say(page)
        return
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
    for number, line in enumerate(visible(page).splitlines()):
        heading = number < 2 or (line and not line.startswith(" "))
        console.print(Text(line, style="bold" if heading else ""))
