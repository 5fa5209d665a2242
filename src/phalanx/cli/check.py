"""`phalanx check`: check jobs, plans and runs against the training specification.

A target may also be another trainer's configuration.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import phalanx
from phalanx.cli.output import note, on_colour_terminal
from phalanx.cli.parser import add_json, add_set
from phalanx.errors import PhalanxError, mistake
from phalanx.io.path_probes import is_folder
from phalanx.io.visible import visible

TYPE_CHECKING = False
if TYPE_CHECKING:
    from phalanx.rules.run_rules import CheckReport

FORMATS = ("text", "json", "sarif", "github", "junit", "html")


def configure_parser(parser: argparse.ArgumentParser) -> None:
    """Add the options of `phalanx check`."""
    parser.add_argument(
        "targets",
        metavar="TARGET",
        nargs="+",
        help="a job file, a plan, a run folder, a configuration of torchtitan, Megatron-LM, DeepSpeed, Accelerate "
        "or NeMo, or a folder with any of them",
    )
    add_set(parser)
    add_evidence(parser)
    parser.add_argument("--select", metavar="RULES", default="", help="only these rules or groups, e.g. CKP,FLT001")
    parser.add_argument("--ignore", metavar="RULES", default="", help="all except these rules or groups")
    fix_group = parser.add_mutually_exclusive_group()
    fix_group.add_argument("--fix", action="store_true", help="write safe edits into the job file")
    fix_group.add_argument("--unsafe-fixes", action="store_true", help="also write edits that change the training")
    parser.add_argument("--diff", action="store_true", help="show the edits as a unified diff and write nothing")
    parser.add_argument("--format", choices=FORMATS, help="text (the default), json, sarif, github, junit or html")
    parser.add_argument("--out", metavar="FILE", help="write the report to this file")
    parser.add_argument("--config", metavar="FILE", help="project file instead of the nearest .phalanx.toml")
    parser.add_argument("--baseline", metavar="FILE", help="findings that are known: they are counted and do not fail")
    parser.add_argument("--write-baseline", action="store_true", help="write what is found now as the baseline")
    parser.add_argument("--skip-others", action="store_true", help="leave out files that are no configuration")
    parser.add_argument("--require-evidence", action="store_true", help="missing evidence counts as a finding")
    parser.add_argument(
        "-v", "--verbose", action="store_true", help="also show the rules that passed, with their values"
    )
    add_json(parser)


def add_evidence(parser: argparse.ArgumentParser) -> None:
    """Add the options that name further evidence for the rules: cluster, plan, drill records, waivers.

    `phalanx explain` has the same options.
    """
    parser.add_argument("--profile", metavar="NAME", help="hardware profile instead of the cluster's, e.g. nvidia-h100")
    parser.add_argument("--cluster", metavar="SPEC", help="check for this cluster instead of the job's, e.g. 8xH100:16")
    parser.add_argument("--plan", metavar="FILE", help="the job's plan, written by phalanx plan --out")
    parser.add_argument(
        "--drills", metavar="DIR", action="append", default=[], help="folder with drill records; may be repeated"
    )
    parser.add_argument(
        "--parity",
        metavar="RUN",
        nargs=2,
        help="compare the losses of two runs of the same job, one in fp8 or fp4 and one in a wider format",
    )
    parser.add_argument(
        "--from",
        dest="source",
        metavar="TRAINER",
        default="",
        help="the trainer whose configuration the target is, e.g. megatron",
    )
    parser.add_argument(
        "--waivers", metavar="FILE", help="TOML file with [[waiver]] tables, in addition to those of the job"
    )
    parser.add_argument(
        "--rules",
        metavar="FILE.py:NAME",
        action="append",
        default=[],
        help="add a rule of your own; may be repeated (docs/own-rules.md)",
    )
    parser.add_argument("--allow-code", action="store_true", help="allow code named in the job file: your own rules")


def evidence_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options of `add_evidence` as keyword arguments of `phalanx.check` and `phalanx.explain`."""
    names = ("profile", "cluster", "plan", "drills", "parity", "source", "waivers", "rules", "allow_code")
    return {name: getattr(args, name) for name in names}


def run_command(args: argparse.Namespace) -> int:
    """Check every target and print the findings; return the exit code.

    0: no findings, 1: findings, 2: some target could not be checked (the remaining targets are checked all the same).
    """
    form = _output_form(args)
    # Before the check: the report of a check that took minutes must not be lost to a misspelt name.
    if args.out and not is_folder(Path(args.out).parent):
        what, fix = "its folder does not exist", "make the folder, or name another --out"
        raise mistake(f"--out {args.out[:200]}", what, fix=fix)
    options = {
        **evidence_options(args),
        **{name: getattr(args, name) for name in ("select", "ignore", "require_evidence")},
    }
    if not _edits_file(args):
        return _check_targets(args, form, options)
    reports: list[CheckReport] = []
    failures: list[PhalanxError] = []
    for target in args.targets:
        try:
            fixed = phalanx.fix(target, unsafe=args.unsafe_fixes, write=not args.diff, progress=note, **options)
        except PhalanxError as error:
            failures.append(error)
            note(str(error))
            continue
        if args.diff:  # into a pipe exactly as it is: it may end in `patch`
            sys.stdout.write(visible(fixed.diff) if sys.stdout.isatty() else fixed.diff)
        for line in fixed.notes:
            note(line)
        reports.append(fixed.report)
    if reports and not (args.diff and form == "text"):
        _print_reports(form, reports, args)
    return max([*(report.exit_code for report in reports), *(error.exit_code for error in failures)])


def _check_targets(args: argparse.Namespace, form: str, options: dict[str, Any]) -> int:
    """Check all targets as one project, without edits, and print reports and summary table."""
    project = phalanx.check_project(
        *args.targets,
        overrides=args.overrides,
        config=args.config,
        baseline=args.baseline,
        write_baseline=args.write_baseline,
        skip_others=args.skip_others,
        progress=note,
        **options,
    )
    shown = [
        report
        for report in project.reports
        if report.problems or not project.searched or form != "text" or args.verbose
    ]
    if shown or (project.failures and form != "text"):
        _print_reports(form, shown, args, failures=project.failures)
    if form == "text" and project.searched and not args.out:
        for line in project.table_lines():
            print(visible(line))
    return project.exit_code


def _output_form(args: argparse.Namespace) -> str:
    """Return the output format; raise UserError for options that exclude each other."""
    if args.json and args.format not in (None, "json"):
        raise mistake("phalanx check", f"--json and --format {args.format} exclude each other", fix="give one of them")
    job_options = {"--set": args.overrides, "--cluster": args.cluster, "--profile": args.profile, "--plan": args.plan}
    for option, value in job_options.items():
        if _edits_file(args) and value:
            raise mistake(
                "phalanx check",
                f"{option} and --fix exclude each other",
                why="the file would be edited for a job that it does not describe",
                fix="edit what the file says: write the setting into it first, or leave the option out",
            )
    return "json" if args.json else args.format or "text"


def _edits_file(args: argparse.Namespace) -> bool:
    return bool(args.fix or args.unsafe_fixes or args.diff)


def _print_reports(
    form: str, reports: Sequence[CheckReport], args: argparse.Namespace, *, failures: Sequence[PhalanxError] = ()
) -> None:
    """Print the reports in the given format, or write them to --out."""
    from phalanx.rules.formats.registry import render_reports

    if form == "text" and not args.out and on_colour_terminal():
        _paint_reports(reports, verbose=args.verbose)
        return
    version = phalanx.__version__ if form == "sarif" else ""
    text = render_reports(form, reports, root=os.getcwd(), version=version, verbose=args.verbose, failures=failures)
    if not args.out:
        sys.stdout.write(text)
        return
    from phalanx.io.files import write_text

    write_text(Path(args.out), text, fix="name another --out")
    note(f"wrote {args.out}")


def _paint_reports(reports: Sequence[CheckReport], *, verbose: bool) -> None:
    from rich.console import Console
    from rich.text import Text

    from phalanx.rules.formats.text import STYLES, report_lines

    console = Console(highlight=False, soft_wrap=True)
    for style, line in report_lines(reports, verbose=verbose):
        console.print(Text(line, style=STYLES[style]))
