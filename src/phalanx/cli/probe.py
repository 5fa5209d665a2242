"""`phalanx probe`: measure this machine and store a profile that later plans of `local` use."""

from __future__ import annotations

import argparse
from pathlib import Path

import phalanx
from phalanx.cli.output import note, show
from phalanx.cli.parser import add_json


def configure_parser(parser: argparse.ArgumentParser) -> None:
    """Add the options of `phalanx probe`."""
    add_json(parser)
    parser.add_argument("--out", type=Path, metavar="FILE", help="file for the profile")
    parser.add_argument("--seconds", type=float, default=30.0, metavar="S", help="time limit (default: 30)")
    parser.add_argument("--disk", type=Path, default=Path(), metavar="DIR", help="measure the disk of this folder")
    parser.add_argument(
        "--engine",
        choices=("auto", "torch", "numpy"),
        default="auto",
        help="auto uses torch if installed (default: auto)",
    )


def run_command(args: argparse.Namespace) -> int:
    """Measure this machine, store the profile and print it."""
    profile = phalanx.probe(out=args.out, seconds=args.seconds, disk=args.disk, engine=args.engine, progress=note)
    note(f"profile stored in {profile.path}; {profile.note}")
    return show(profile, as_json=args.json)
