"""`phalanx import`: another trainer's configuration as a job file, with nothing dropped silently."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from phalanx.cli.options import add_json, add_set
from phalanx.cli.output import note, print_json, say
from phalanx.errors import UserError, mistake
from phalanx.io.files import write_text
from phalanx.io.values import printable
from phalanx.rules.foreign.convert import TRAINERS, ConvertedConfig, convert_config, find_trainer
from phalanx.rules.foreign.detect import trainer_of_file
from phalanx.units import plural

MOST_LISTED = 12


def configure(parser: argparse.ArgumentParser) -> None:
    """Options of `phalanx import`."""
    parser.add_argument("file", metavar="FILE", help="a configuration of torchtitan, Megatron-LM, DeepSpeed, …")
    parser.add_argument(
        "--from", dest="trainer", metavar="TRAINER", default="", help=f"whose it is: {', '.join(TRAINERS)} (recognised)"
    )
    parser.add_argument("--cluster", metavar="SPEC", help="what it runs on, as 8xH100:16")
    parser.add_argument("--out", metavar="FILE", help="the job file to write (standard output)")
    parser.add_argument("--force", action="store_true", help="overwrite an existing file")
    add_set(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Translate, write, and say what could not be translated."""
    path, out = Path(args.file), Path(args.out) if args.out else None
    if out is not None and out.exists() and not args.force:
        raise mistake(
            str(out),
            "exists already",
            why="import never overwrites on its own",
            fix="name another --out, or add --force",
        )
    kind = args.trainer or _recognised(path)
    found = convert_config(
        path,
        find_trainer(kind).name,
        cluster=args.cluster,
        overrides=args.overrides,
        folder=out.parent if out is not None else None,
    )
    _refuse_missing(found)
    if out is not None:
        write_text(out, found.text, fix="name another --out")
    if args.json:
        print_json(_answer(found, out))
    else:
        say(found.text if out is None else out, end="" if out is None else "\n")
    _notes(found, out)
    return 0


def _recognised(path: Path) -> str:
    from phalanx.io.files import read_text

    if not path.is_file():
        read_text(path, noun="configuration")  # says what is wrong with it
    kind = trainer_of_file(path)
    if not kind:
        raise mistake(
            str(path),
            "is not a configuration that Phalanx recognises",
            fix=f"say whose it is with --from: {', '.join(TRAINERS)}",
        )
    return kind


def _refuse_missing(found: ConvertedConfig) -> None:
    """Without a model or a batch the job file would not load; without a cluster it says so."""
    lacking = [one for one in found.missing if "--cluster" not in one.fix]
    if lacking:
        raise UserError(lacking)


def _answer(found: ConvertedConfig, out: Path | None) -> dict[str, object]:
    return {
        "trainer": found.trainer,
        "path": str(out) if out is not None else None,
        "job": found.text,
        "cluster": found.cluster or None,
        "mapped": [{"key": key, "job_key": ours} for key, ours in found.mapped],
        "irrelevant": [{"key": key, "why": why} for key, why in found.irrelevant],
        "unmapped": [{"key": one.key, "value": one.value, "why": one.why} for one in found.unmapped],
        "missing": [{"what": one.what, "fix": one.fix} for one in found.missing],
    }


def _notes(found: ConvertedConfig, out: Path | None) -> None:
    total = len(found.mapped) + len(found.irrelevant) + len(found.unmapped)
    note(
        f"{found.trainer}: {plural(total, 'setting')}, {len(found.mapped)} mapped, "
        f"{len(found.irrelevant)} beside the specification, {len(found.unmapped)} not mapped"
    )
    for one in found.unmapped[:MOST_LISTED]:
        note(f"  not mapped: {printable(one.key)} = {printable(one.value)}: {printable(one.why)}")
    if len(found.unmapped) > MOST_LISTED:
        note(f"  … and {len(found.unmapped) - MOST_LISTED} more, listed at the end of the job file")
    for problem in found.missing:
        note(f"missing: {printable(problem.what)}; {problem.fix}")
    if out is not None and not found.missing and sys.stderr.isatty():
        note(f"next: phalanx check {out}")
