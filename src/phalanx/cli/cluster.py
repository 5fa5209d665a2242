"""`phalanx cluster`: what there is to run on, this machine or a named cluster."""

from __future__ import annotations

import argparse
from pathlib import Path

import phalanx
from phalanx.cli.output import note, print_json, say, show
from phalanx.cli.parser import add_json


def configure_parser(parser: argparse.ArgumentParser) -> None:
    """Options of `phalanx cluster`."""
    parser.add_argument(
        "spec",
        nargs="?",
        default="local",
        metavar="SPEC",
        help="8xH100:16, H100:64, a .toml file, or local (default: local)",
    )
    add_json(parser)
    parser.add_argument("--toml", action="store_true", help="print a cluster file to edit")
    parser.add_argument("--list", action="store_true", help="list the accelerators Phalanx knows")
    parser.add_argument("--ranks", type=int, default=0, metavar="N", help="local: number of ranks that share the cores")
    parser.add_argument(
        "--profile", type=Path, metavar="FILE", help="local: use this profile, written by phalanx probe"
    )
    parser.add_argument(
        "--hardware",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="file with more accelerators, .toml or .csv; may be repeated",
    )


def run_command(args: argparse.Namespace) -> int:
    """Print the machine or the cluster."""
    if args.list:
        found = phalanx.accelerators(hardware=args.hardware)
        if args.json:
            print_json(found.accelerators)
        else:
            say(found)
        return 0
    page = phalanx.describe_cluster(args.spec, ranks=args.ranks, profile=args.profile, hardware=args.hardware)
    for text in page.machine.notes if page.machine is not None else ():
        note(f"note: {text}")
    if page.problem is not None:
        if not args.json and not args.toml:
            say(page)
        raise page.problem
    if args.toml:
        print(page.to_toml(), end="")
        return 0
    return show(page, as_json=args.json)
