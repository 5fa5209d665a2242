"""`phalanx check`: the training specification against a job file, a plan, a run, or another trainer's configuration."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from phalanx.cli.options import add_json, add_set
from phalanx.cli.output import note, warn
from phalanx.errors import PhalanxError, mistake
from phalanx.io.visible import visible
from phalanx.units import MB, plural

TYPE_CHECKING = False
if TYPE_CHECKING:
    from phalanx.rules.fixes import JobFix
    from phalanx.rules.gather import Request
    from phalanx.rules.judge import CheckReport

FORMATS = ("text", "json", "sarif", "github", "junit", "html")
TOLD_EVERY_S = 2.0  # a log that is read faster needs no progress


def configure(parser: argparse.ArgumentParser) -> None:
    """Options of `phalanx check`."""
    parser.add_argument(
        "targets",
        metavar="TARGET",
        nargs="+",
        help="a job file, a plan, the folder of a run, or a configuration of torchtitan, Megatron-LM, DeepSpeed, "
        "Accelerate or NeMo",
    )
    add_set(parser)
    add_sight(parser)
    parser.add_argument("--select", metavar="RULES", default="", help="only these rules or groups, as CKP,FLT001")
    parser.add_argument("--ignore", metavar="RULES", default="", help="all but these rules or groups")
    mending = parser.add_mutually_exclusive_group()
    mending.add_argument("--fix", action="store_true", help="write safe edits into the job file")
    mending.add_argument("--unsafe-fixes", action="store_true", help="write also edits that change the training")
    parser.add_argument("--diff", action="store_true", help="show the edits as a unified diff and write nothing")
    parser.add_argument("--format", choices=FORMATS, help="text (the default), json, sarif, github, junit or html")
    parser.add_argument("--out", metavar="FILE", help="write the report here, whole or not at all")
    parser.add_argument("--require-evidence", action="store_true", help="what nobody knows counts as a finding")
    parser.add_argument("-v", "--verbose", action="store_true", help="show also what is met, with its values")
    add_json(parser)


def add_sight(parser: argparse.ArgumentParser) -> None:
    """What is looked at beside the target; `phalanx explain` has the same options."""
    parser.add_argument("--profile", metavar="NAME", help="hardware profile instead of the cluster's, as nvidia-h100")
    parser.add_argument("--cluster", metavar="SPEC", help="check for this cluster instead of the job's, as 8xH100:16")
    parser.add_argument("--plan", metavar="FILE", help="the job's plan, as phalanx plan --out wrote it")
    parser.add_argument(
        "--drills", metavar="DIR", action="append", default=[], help="folder with records of drills; may be repeated"
    )
    parser.add_argument(
        "--parity",
        metavar="RUN",
        nargs=2,
        help="two runs of one training, in fp8 or fp4 and in a wider format, whose losses are compared",
    )
    parser.add_argument(
        "--from", dest="source", metavar="TRAINER", default="", help="whose configuration the target is, as megatron"
    )
    parser.add_argument(
        "--waivers", metavar="FILE", help="TOML with [[waiver]] tables, beside those of the job: for any target"
    )


def request_of(args: argparse.Namespace) -> Request:
    """The options of `add_sight` and --set."""
    from phalanx.rules.gather import Request

    if args.plan and args.cluster:
        raise mistake(
            "phalanx check", "--plan and --cluster exclude each other", fix="a plan has its cluster: give one"
        )
    return Request(
        overrides=tuple(args.overrides),
        cluster=args.cluster,
        profile=args.profile,
        plan=Path(args.plan) if args.plan else None,
        drills=tuple(_folder(name) for name in args.drills),
        parity=(Path(args.parity[0]), Path(args.parity[1])) if args.parity else None,
        source=args.source,
        waivers=Path(args.waivers) if args.waivers else None,
    )


def _folder(name: str) -> Path:
    path = Path(name)
    if not path.is_dir():
        raise mistake(f"--drills {name[:200]}", "is not a folder", fix="name the folder that phalanx drill wrote into")
    return path


def run(args: argparse.Namespace) -> int:
    """0 clean, 1 findings, 2 a target that cannot be checked; the others are checked all the same."""
    form = _form(args)
    _require_folder(args.out)
    request = request_of(args)
    reports: list[CheckReport] = []
    failures: list[PhalanxError] = []
    for target in args.targets:
        try:
            _tell_inputs(target, request)
            reports.append(_mended(target, request, args) if _mends(args) else _checked(target, request, args))
        except PhalanxError as error:
            failures.append(error)
            note(str(error))
    if reports and not (args.diff and form == "text"):
        _put(form, reports, args)
    return max([*(one.exit_code for one in reports), *(error.exit_code for error in failures)])


def _tell_inputs(target: str, request: Request) -> None:
    """Whether the data, tokenizer, weights and code that a job names fit it; no rule reads files of that size."""
    from phalanx.cli.inputs import told_inputs
    from phalanx.job.load import load
    from phalanx.rules.foreign.detect import trainer_of_file
    from phalanx.rules.gather import is_plan

    path = Path(target)
    if path.is_file() and not is_plan(path) and not (request.source or trainer_of_file(path)):
        warn(told_inputs(load(path, overrides=request.overrides)).warnings)


def _require_folder(out: str | None) -> None:
    """Before anything is read: a report of a long log should not be lost to a misspelt name."""
    if out and not Path(out).parent.is_dir():
        raise mistake(f"--out {out[:200]}", "its folder does not exist", fix="make the folder, or name another --out")


def _form(args: argparse.Namespace) -> str:
    if args.json and args.format not in (None, "json"):
        raise mistake("phalanx check", f"--json and --format {args.format} exclude each other", fix="give one of them")
    elsewhere = {"--set": args.overrides, "--cluster": args.cluster, "--profile": args.profile, "--plan": args.plan}
    for option, value in elsewhere.items():
        if _mends(args) and value:
            raise mistake(
                "phalanx check",
                f"{option} and --fix exclude each other",
                why="the file would be mended for a job that it does not describe",
                fix="mend by what the file says: write the setting into it first, or leave the option out",
            )
    return "json" if args.json else args.format or "text"


def _mends(args: argparse.Namespace) -> bool:
    return bool(args.fix or args.unsafe_fixes or args.diff)


def _checked(target: str, request: Request, args: argparse.Namespace) -> CheckReport:
    from phalanx.rules.api import check

    progress = Progress(target)
    try:
        return check(
            target,
            request=request,
            select=args.select,
            ignore=args.ignore,
            require_evidence=args.require_evidence,
            progress=progress,
        )
    except KeyboardInterrupt:
        if progress.read:
            note(progress.read)
        raise


class Progress:
    """How far a log is read: a line on stderr every two seconds, for logs that take longer."""

    def __init__(self, target: str) -> None:
        self.read = ""
        self._target = target
        self._told_s = time.monotonic()

    def __call__(self, done_bytes: int, whole_bytes: int) -> None:
        """Called while the log is read."""
        self.read = f"{self._target}: read {done_bytes / MB:,.0f} of {whole_bytes / MB:,.0f} MB"
        now_s = time.monotonic()
        if now_s - self._told_s >= TOLD_EVERY_S:
            self._told_s = now_s
            note(self.read)


def _mended(target: str, request: Request, args: argparse.Namespace) -> CheckReport:
    """The report of what is left after the edits; with --diff of what there is, since nothing is written."""
    from dataclasses import replace

    from phalanx.rules.fixes import edited_text, find_fix, read_exactly, unified_difference, write_exactly

    path = Path(target)
    _refuse_unmendable(path, request)
    before = read_exactly(path)
    cure = find_fix(lambda sets: _checked(target, replace(request, overrides=sets), args), unsafe=args.unsafe_fixes)
    after = edited_text(before, cure.edits, where=target)
    if args.diff:
        patch = unified_difference(before, after, name=target)
        sys.stdout.write(visible(patch) if sys.stdout.isatty() else patch)  # a pipe may end in `patch`
    elif after != before:
        write_exactly(path, before, after)
    _tell(target, cure, written=not args.diff)
    return _checked(target, request, args)


def _tell(target: str, cure: JobFix, *, written: bool) -> None:
    from phalanx.rules.formats.text import shown_setting

    for line in cure.left:
        note(f"{target}: left alone: {line}")
    if written:
        for remedy in cure.remedies:
            note(f"{target}: {remedy.rule}: {', '.join(shown_setting(edit) for edit in remedy.edits)}")
    count = cure.cured
    word = "mended" if written else "would be mended"
    note(f"{target}: {plural(count, 'finding')} {word}")


def _refuse_unmendable(path: Path, request: Request) -> None:
    from phalanx.record.run import EVENTS
    from phalanx.rules.foreign.detect import trainer_of_file
    from phalanx.rules.gather import is_plan

    def refuse(what: str, fix: str) -> None:
        raise mistake(str(path), f"{what}, and only job files are mended", fix=fix)

    if path.is_dir():
        refuse("is a run", "mend the job file that it was started from, and start it again")
    if is_plan(path):
        refuse("is a plan", "mend its job file, and plan again")
    if path.is_file() and (request.source or trainer_of_file(path)):
        refuse("is a configuration of another trainer", "phalanx import writes it as a job file")
    folder = path.resolve().parent
    if folder.is_dir() and any(EVENTS.fullmatch(name) for name in os.listdir(folder)):
        refuse("belongs to a run and says how it was started", "mend the job file that it was started from")


def _put(form: str, reports: Sequence[CheckReport], args: argparse.Namespace) -> None:
    from phalanx.cli.output import own_version
    from phalanx.rules.formats.render import render_reports

    if form == "text" and not args.out and sys.stdout.isatty() and not os.environ.get("NO_COLOR"):
        _paint(reports, verbose=args.verbose)
        return
    version = own_version() if form == "sarif" else ""
    text = render_reports(form, reports, root=os.getcwd(), version=version, verbose=args.verbose)
    if not args.out:
        sys.stdout.write(text)
        return
    from phalanx.io.files import write_text

    write_text(Path(args.out), text, fix="name another --out")
    note(f"wrote {args.out}")


def _paint(reports: Sequence[CheckReport], *, verbose: bool) -> None:
    from rich.console import Console
    from rich.text import Text

    from phalanx.rules.formats.text import STYLES, report_lines

    console = Console(highlight=False, soft_wrap=True)
    for style, line in report_lines(reports, verbose=verbose):
        console.print(Text(line, style=STYLES[style]))
