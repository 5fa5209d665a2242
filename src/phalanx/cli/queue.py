"""`phalanx queue`: list launched jobs and their states."""

from __future__ import annotations

import argparse

import phalanx
from phalanx.cli.output import show
from phalanx.cli.parser import add_json


def configure_parser(parser: argparse.ArgumentParser) -> None:
    """Add the options of `phalanx queue`."""
    parser.add_argument("--group", metavar="NAME", default="", help="only jobs that were launched with --group NAME")
    parser.add_argument("--on", metavar="SYSTEM", help="only jobs on local, slurm or k8s")
    add_json(parser)


def run_command(args: argparse.Namespace) -> int:
    """Query the launch systems and print a table of jobs."""
    return show(phalanx.queue(group=args.group, on=args.on), as_json=args.json)
