"""`phalanx report`: write the report of a run as one HTML file and one Markdown file."""

from __future__ import annotations

import argparse
import sys

import phalanx
from phalanx.cli.output import print_json, say
from phalanx.cli.parser import add_json
from phalanx.errors import mistake


def configure_parser(parser: argparse.ArgumentParser) -> None:
    """Add the options of `phalanx report`."""
    parser.add_argument("run", metavar="RUN", help="a run folder, made by phalanx train")
    parser.add_argument(
        "--html", metavar="FILE", help="where to write the HTML; - for stdout (default: RUN/report.html)"
    )
    parser.add_argument(
        "--markdown", metavar="FILE", help="where to write the Markdown; - for stdout (default: RUN/report.md)"
    )
    add_json(parser)


def run_command(args: argparse.Namespace) -> int:
    """Write the report to the named files and print their paths; without names, both files into the run folder."""
    if [args.html, args.markdown].count("-") + args.json > 1:
        raise mistake("phalanx report", "two results for one stdout", fix="give one of them a file")
    report = phalanx.report(args.run)
    if args.json:
        print_json(report.to_dict())
    elif not (args.html or args.markdown):
        for path in report.write():
            say(path)
        return 0
    for kind, name, make in (("html", args.html, report.to_html), ("markdown", args.markdown, report.to_markdown)):
        if name == "-":
            sys.stdout.write(make())
        elif name:
            (path,) = report.write(**{kind: name})
            if not args.json:
                say(path)
    return 0
