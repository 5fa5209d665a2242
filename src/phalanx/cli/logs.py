"""`phalanx logs ID`: print the log of a launched job, or of one of its ranks."""

from __future__ import annotations

import argparse

import phalanx
from phalanx.cli.output import show
from phalanx.cli.parser import add_json


def configure_parser(parser: argparse.ArgumentParser) -> None:
    """Add the options of `phalanx logs`."""
    parser.add_argument("id", metavar="ID", help="the id that phalanx launch printed, or a run folder")
    parser.add_argument("--rank", metavar="N", type=int, help="show the log of rank N (default: the log of the launch)")
    parser.add_argument(
        "--lines", metavar="N", type=int, default=50, help="number of lines, from the end (default: 50)"
    )
    add_json(parser)


def run_command(args: argparse.Namespace) -> int:
    """Print the last lines of the log."""
    return show(phalanx.logs(args.id, rank=args.rank, lines=args.lines), as_json=args.json)
