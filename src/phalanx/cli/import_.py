"""`phalanx import`: convert another trainer's configuration to a job file.

Every setting that is not mapped is listed.
"""

from __future__ import annotations

import argparse
import sys

import phalanx
from phalanx.cli.output import note, show
from phalanx.cli.parser import add_json, add_set
from phalanx.io.values import printable
from phalanx.rules.foreign.readers import TRAINERS
from phalanx.units import plural

TYPE_CHECKING = False
if TYPE_CHECKING:
    from phalanx.api.jobs import ImportedJob

MOST_LISTED = 12


def configure_parser(parser: argparse.ArgumentParser) -> None:
    """Add the options of `phalanx import`."""
    parser.add_argument("file", metavar="FILE", help="a configuration file of torchtitan, Megatron-LM, DeepSpeed, …")
    parser.add_argument(
        "--from",
        dest="trainer",
        metavar="TRAINER",
        default="",
        help=f"the trainer: {', '.join(TRAINERS)} (default: detected from the file)",
    )
    parser.add_argument("--cluster", metavar="SPEC", help="the cluster it runs on, e.g. 8xH100:16")
    parser.add_argument("--out", metavar="FILE", help="the job file to write (default: standard output)")
    parser.add_argument("--force", action="store_true", help="overwrite an existing file")
    add_set(parser)
    add_json(parser)


def run_command(args: argparse.Namespace) -> int:
    """Convert the configuration, write the job file, and print on stderr which settings were not mapped."""
    imported = phalanx.import_job(
        args.file,
        trainer=args.trainer,
        cluster=args.cluster,
        out=args.out,
        force=args.force,
        overrides=args.overrides,
    )
    code = show(imported, as_json=args.json)
    _note_unmapped(imported)
    return code


def _note_unmapped(made: ImportedJob) -> None:
    """Print on stderr how many settings were mapped, those that were not, and what is missing."""
    converted = made.converted
    total = len(converted.mapped) + len(converted.irrelevant) + len(converted.unmapped)
    note(
        f"{converted.trainer}: {plural(total, 'setting')}, {len(converted.mapped)} mapped, "
        f"{len(converted.irrelevant)} outside the specification, {len(converted.unmapped)} not mapped"
    )
    for setting in converted.unmapped[:MOST_LISTED]:
        note(f"  not mapped: {printable(setting.key)} = {printable(setting.value)}: {printable(setting.why)}")
    if len(converted.unmapped) > MOST_LISTED:
        note(f"  … and {len(converted.unmapped) - MOST_LISTED} more, listed at the end of the job file")
    for problem in converted.missing:
        note(f"missing: {printable(problem.what)}; {problem.fix}")
    if made.path is not None and not converted.missing and sys.stderr.isatty():
        note(f"next: phalanx check {made.path}")
