"""`phalanx show`: print every resolved value of a job and where it came from; for a run also its communicators."""

from __future__ import annotations

import argparse

import phalanx
from phalanx.cli import output
from phalanx.cli.parser import add_json, add_set


def configure_parser(parser: argparse.ArgumentParser) -> None:
    """Add the options of `phalanx show`."""
    parser.add_argument("job", metavar="JOB", help="the job file, such as job.toml, or the folder of a run")
    add_set(parser)
    add_json(parser)


def run_command(args: argparse.Namespace) -> int:
    """Print the table of values, or the same as JSON."""
    page = phalanx.show(args.job, overrides=args.overrides)
    output.warn(page.resolved.warnings)
    return output.show(page, as_json=args.json)
