"""`phalanx checkpoints`: list the checkpoints of a run, and verify that they are intact."""

from __future__ import annotations

import argparse

import phalanx
from phalanx.cli.output import note, show
from phalanx.cli.parser import add_json


def configure_parser(parser: argparse.ArgumentParser) -> None:
    """Add the options of `phalanx checkpoints`."""
    parser.add_argument("run", metavar="RUN", help="a run folder, or a folder that phalanx export wrote")
    parser.add_argument("--checksum", action="store_true", help="read every byte and compare it with its digest")
    parser.add_argument("--verify", dest="checksum", action="store_true", help=argparse.SUPPRESS)  # its first name
    add_json(parser)


def run_command(args: argparse.Namespace) -> int:
    """List the checkpoints; exit code 1 if one is damaged or missing."""
    return show(phalanx.checkpoints(args.run, checksum=args.checksum, progress=note), as_json=args.json)
