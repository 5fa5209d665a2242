"""`phalanx explain`: a rule's page, with the numbers of a job in it."""

from __future__ import annotations

import argparse
import os
import sys

from phalanx.cli.check import Progress, add_sight, request_of
from phalanx.cli.options import add_json, add_set
from phalanx.cli.output import print_json


def configure(parser: argparse.ArgumentParser) -> None:
    """Options of `phalanx explain`."""
    parser.add_argument("rule", metavar="RULE", help="id or name of a rule, as CKP001 or interval-daly")
    parser.add_argument("target", metavar="TARGET", nargs="?", help="a job file, a plan or a run, for its numbers")
    add_set(parser)
    add_sight(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Print the page. The exit code says nothing about the job: that is what check is for."""
    from phalanx.rules.edition import find_rule
    from phalanx.rules.rule_page import rule_page, rule_sections

    rule = find_rule(args.rule)
    if args.target is None:
        if args.json:
            print_json({"rule": rule.id, "slug": rule.slug, "sections": rule_sections(rule)})
        else:
            _show(rule_page(rule))
        return 0
    from phalanx.rules.api import this_day
    from phalanx.rules.explain import answer, here
    from phalanx.rules.formats.text import finding_dict
    from phalanx.rules.gather import gather_evidence

    evidence = gather_evidence(args.target, request_of(args), today=this_day(), progress=Progress(args.target))
    found = answer(rule, evidence)
    if args.json:
        told = {"limits": dict(found.limits.values), "findings": [finding_dict(one) for one in found.findings]}
        print_json({"rule": rule.id, "slug": rule.slug, **told, "sections": rule_sections(rule)})
    else:
        _show(f"{here(found)}\n{rule_page(rule)}")
    return 0


def _show(text: str) -> None:
    """Markdown as it is; on a terminal the headings stand out."""
    if not sys.stdout.isatty() or os.environ.get("NO_COLOR"):
        sys.stdout.write(text)
        return
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
    for line in text.splitlines():
        console.print(Text(line, style="bold" if line.startswith("#") else ""))
