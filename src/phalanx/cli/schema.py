"""`phalanx schema`: print the JSON Schema of the job file, for editors."""

from __future__ import annotations

import argparse

import phalanx
from phalanx.cli.output import show
from phalanx.cli.parser import add_json


def configure_parser(parser: argparse.ArgumentParser) -> None:
    """Add the options of `phalanx schema`."""
    parser.add_argument("--out", metavar="FILE", help="write it to this file, e.g. job.schema.json")
    add_json(parser)


def run_command(args: argparse.Namespace) -> int:
    """Print or write the schema."""
    return show(phalanx.job_schema(args.out), as_json=args.json)
