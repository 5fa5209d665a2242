"""`phalanx init`: write a job file that can be trained without further edits."""

from __future__ import annotations

import argparse

import phalanx
from phalanx.cli.output import note, show
from phalanx.cli.parser import add_json
from phalanx.job.template import TINY

LOCAL = "local"


def configure_parser(parser: argparse.ArgumentParser) -> None:
    """Add the options of `phalanx init`."""
    parser.add_argument("path", metavar="PATH", nargs="?", default="job.toml", help="file to write (default: job.toml)")
    parser.add_argument("--model", metavar="PRESET", default=TINY, help=f"a model preset (default: {TINY})")
    parser.add_argument(
        "--cluster", metavar="SPEC", default=LOCAL, help='the cluster, e.g. "8xH100:16" (default: local, this machine)'
    )
    parser.add_argument("--force", action="store_true", help="overwrite an existing file")
    add_json(parser)


def run_command(args: argparse.Namespace) -> int:
    """Write the file and print the next steps."""
    template = phalanx.init(args.path, model=args.model, cluster=args.cluster, force=args.force)
    code = show(template, as_json=args.json)
    for number, line in enumerate(template.next_steps):
        note(f"{'next: ' if not number else '      '}{line}")
    return code
