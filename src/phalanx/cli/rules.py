"""`phalanx rules`: list the rules of the training specification, as text, as JSON, or as the pages of docs/rules."""

from __future__ import annotations

import argparse
import sys

import phalanx
from phalanx.cli.output import note, show
from phalanx.cli.parser import add_json
from phalanx.errors import mistake
from phalanx.units import plural


def configure_parser(parser: argparse.ArgumentParser) -> None:
    """Add the options of `phalanx rules`."""
    parser.add_argument("--select", metavar="RULES", default="", help="only these rules or groups, e.g. CKP,FLT001")
    parser.add_argument("--profile", metavar="NAME", help="only the rules of a hardware profile, with its limits")
    parser.add_argument("--format", choices=("text", "json", "md"), help="text (the default), json or md")
    parser.add_argument("--write", metavar="DIR", help="write an index and a page per rule to this folder")
    parser.add_argument(
        "--rules", metavar="FILE.py:NAME", action="append", default=[], help="also list a rule of your own"
    )
    add_json(parser)


def run_command(args: argparse.Namespace) -> int:
    """List the rules, or write their pages."""
    if args.json and args.format not in (None, "json"):
        raise mistake("phalanx rules", f"--json and --format {args.format} exclude each other", fix="give one of them")
    if args.write and (args.select or args.profile):
        raise mistake("phalanx rules", "--write is for all rules", fix="leave --select and --profile out")
    listing = phalanx.rules(args.select, profile=args.profile, own=args.rules)
    if args.write:
        note(f"wrote {plural(listing.write(args.write), 'page')} to {args.write}")
        return 0
    if args.format == "md":
        sys.stdout.write(listing.to_markdown())
        return 0
    return show(listing, as_json=args.json or args.format == "json")
