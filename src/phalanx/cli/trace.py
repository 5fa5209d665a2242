"""`phalanx trace`: trace one rank's step on fake tensors, for a job of any size."""

from __future__ import annotations

import argparse
from pathlib import Path

import phalanx
from phalanx.cli.output import note, show
from phalanx.cli.parser import add_job, add_json
from phalanx.io.files import write_text

MOST_RANKS = 64  # of --all-ranks (phalanx.api.proofs)


def configure_parser(parser: argparse.ArgumentParser) -> None:
    """Add the options of `phalanx trace`."""
    add_job(parser)
    parser.add_argument("--cluster", metavar="SPEC", help="trace on this cluster instead of the job's, e.g. 8xH100:16")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--rank", metavar="R", type=int, default=None, help="the rank to trace (default: 0)")
    which.add_argument(
        "--all-stages",
        action="store_true",
        help="trace one rank per pipeline stage, and report whether they would hang",
    )
    which.add_argument("--all-ranks", action="store_true", help=f"trace every rank of a job with up to {MOST_RANKS}")
    parser.add_argument(
        "--against-plan",
        action="store_true",
        help="compare all stages with the plan; exit code 1 if they differ or do not fit",
    )
    parser.add_argument(
        "--workers", metavar="N", type=int, default=0, help="ranks traced in parallel (default: one per core)"
    )
    parser.add_argument(
        "--allow-code", action="store_true", help="allow code named in the job file: your own model or plug-ins"
    )
    parser.add_argument(
        "--log", metavar="FILE", help="write every operation of every traced rank, one JSON object per line"
    )
    add_json(parser)


def run_command(args: argparse.Namespace) -> int:
    """Print the trace; exit code 1 if ranks would hang, the plan differs or the step does not fit in memory."""
    result = phalanx.trace(
        args.job,
        args.cluster,
        overrides=args.overrides,
        rank=args.rank,
        ranks="all" if args.all_ranks else "stages" if args.all_stages else "one",
        against_plan=args.against_plan,
        workers=args.workers,
        allow_code=args.allow_code,
        progress=note,
    )
    if args.log:
        write_text(Path(args.log), "".join(result.log_lines()), fix="name another --log")
    return show(result, as_json=args.json)
