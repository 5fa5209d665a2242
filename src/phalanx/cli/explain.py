"""`phalanx explain`: print a rule's page, filled in with the numbers of a job."""

from __future__ import annotations

import argparse

import phalanx
from phalanx.cli.check import add_evidence, evidence_options
from phalanx.cli.output import note, print_json, say_page
from phalanx.cli.parser import add_json, add_set


def configure_parser(parser: argparse.ArgumentParser) -> None:
    """Add the options of `phalanx explain`."""
    parser.add_argument("rule", metavar="RULE", help="id or name of a rule, e.g. CKP001 or interval-daly")
    parser.add_argument("target", metavar="TARGET", nargs="?", help="a job file, a plan or a run whose numbers to show")
    add_set(parser)
    add_evidence(parser)
    add_json(parser)


def run_command(args: argparse.Namespace) -> int:
    """Print the page. The exit code is 0 whether the job satisfies the rule or not; `phalanx check` judges jobs."""
    page = phalanx.explain(args.rule, args.target, overrides=args.overrides, progress=note, **evidence_options(args))
    if args.json:
        print_json(page.to_dict())
    else:
        say_page(str(page), is_heading="#")
    return 0
