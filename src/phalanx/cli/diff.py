"""`phalanx diff`: what differs between two runs, plans or jobs."""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path

from phalanx.cli.options import add_json
from phalanx.cli.output import print_json, say, warn
from phalanx.errors import mistake

TYPE_CHECKING = False
if TYPE_CHECKING:
    from phalanx.record.report.diff import Side


def configure(parser: argparse.ArgumentParser) -> None:
    """Options of `phalanx diff`."""
    what = "a run folder, a plan (JSON) or a job file (TOML)"
    parser.add_argument("a", metavar="A", help=what)
    parser.add_argument("b", metavar="B", help=what)
    parser.add_argument(
        "--within", metavar="SHARE", type=float, default=0.0, help="measured numbers this close count as equal, as 0.05"
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Print the differences; exit 0 when there are none, 1 when there are."""
    if not 0.0 <= args.within < 1.0:
        raise mistake("phalanx diff", f"--within {args.within} is no share", fix="use a number from 0 to 1, as 0.05")
    from phalanx.record.report.diff import compare_sides, render_difference

    a, b = _sides(args.a, args.b)
    found = compare_sides(a, b, within=args.within)
    if args.json:
        kinds = {"a": {"name": a.name, "kind": a.kind}, "b": {"name": b.name, "kind": b.kind}}
        listed = [
            {item.name: getattr(one, item.name) for item in fields(one)} | {"change": one.change} for one in found
        ]
        print_json({**kinds, "same": not found, "differences": listed})
    else:
        say(render_difference(a, b, found))
    return 1 if found else 0


def _sides(a: str, b: str) -> tuple[Side, Side]:
    from phalanx.record.report.diff import of_runs
    from phalanx.record.run import open_run

    if Path(a).is_dir() and Path(b).is_dir():
        return of_runs(open_run(a), open_run(b))
    return _side(a), _side(b)


def _side(name: str) -> Side:
    from phalanx.record.report.diff import of_job, of_plan, of_run
    from phalanx.record.run import open_run

    path = Path(name)
    if path.is_dir():
        return of_run(open_run(path))
    if path.suffix == ".toml":
        from phalanx.job.load import job_to_dict, load

        resolved = load(name)
        warn(resolved.warnings)
        return of_job(name, job_to_dict(resolved.job))
    if not path.is_file():
        raise mistake(name, "there is no such run, plan or job", fix="name a run folder, a plan.json or a job.toml")
    return of_plan(name, _plan(path))


def _plan(path: Path) -> dict[str, object]:
    from phalanx.errors import UserError
    from phalanx.record.run import read_json

    fix = "phalanx plan job.toml --out plan.json writes a plan; a job file ends in .toml"
    try:
        data = read_json(path)
    except UserError as error:
        raise mistake(str(path), "is no plan: it is not a JSON object", fix=fix) from error
    if not str(data.get("schema", "")).startswith("phalanx.plan/"):
        raise mistake(str(path), 'is no plan: it has no "schema": "phalanx.plan/…"', fix=fix)
    return data
