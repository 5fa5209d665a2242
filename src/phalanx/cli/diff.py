"""`phalanx diff`: compare two runs, plans or jobs."""

from __future__ import annotations

import argparse

import phalanx
from phalanx.cli.output import note, show
from phalanx.cli.parser import add_json


def configure_parser(parser: argparse.ArgumentParser) -> None:
    """Add the options of `phalanx diff`."""
    what = "a run folder, a plan (JSON) or a job file (TOML)"
    parser.add_argument("a", metavar="A", help=what)
    parser.add_argument("b", metavar="B", help=what)
    parser.add_argument(
        "--within",
        metavar="SHARE",
        type=float,
        default=0.0,
        help="relative difference up to which measurements count as equal, e.g. 0.05",
    )
    add_json(parser)


def run_command(args: argparse.Namespace) -> int:
    """Print the differences; exit code 0 if there are none, else 1."""
    return show(phalanx.diff(args.a, args.b, within=args.within, progress=note), as_json=args.json)
