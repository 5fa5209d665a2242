"""`phalanx cancel ID`: end a launched job."""

from __future__ import annotations

import argparse

import phalanx
from phalanx.cli.output import show
from phalanx.cli.parser import add_json


def configure_parser(parser: argparse.ArgumentParser) -> None:
    """Add the options of `phalanx cancel`."""
    parser.add_argument("id", metavar="ID", help="the id that phalanx launch printed, or a run folder")
    add_json(parser)


def run_command(args: argparse.Namespace) -> int:
    """Cancel the job and print what was cancelled."""
    return show(phalanx.cancel(args.id), as_json=args.json)
