"""`phalanx web`: serve a dashboard over a folder of runs, live and afterwards; read-only, on this machine only."""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import asdict

import phalanx
from phalanx.cli.output import note, print_json, say
from phalanx.cli.parser import add_json
from phalanx.units import plural

TYPE_CHECKING = False
if TYPE_CHECKING:
    from phalanx.api.serving import WebAddress


def configure_parser(parser: argparse.ArgumentParser) -> None:
    """Add the options of `phalanx web`."""
    parser.add_argument("runs", metavar="RUNS", help="a folder of runs such as runs/, or one run")
    parser.add_argument(
        "--listen", metavar="HOST:PORT", default="127.0.0.1:8337", help="address to serve on (default: %(default)s)"
    )
    parser.add_argument("--token", metavar="FILE|auto", help="require the token in FILE; auto creates and prints one")
    parser.add_argument("--open", action="store_true", help="open the dashboard in a browser")
    add_json(parser)


def run_command(args: argparse.Namespace) -> int:
    """Serve the dashboard until Ctrl-C."""

    def serving(address: WebAddress) -> None:
        if args.json:
            fields = asdict(address)
            print_json({**{name: fields[name] for name in ("url", "token", "open", "runs")}, "pid": os.getpid()})
        else:
            say(address.open)
        # A program that started this one through a pipe waits for the address.
        sys.stdout.flush()
        note(f"{plural(address.runs, 'run')} in {args.runs}; stop with Ctrl-C")
        if args.open:
            import webbrowser

            if not webbrowser.open(address.open):
                note("no browser could be opened; open the address yourself")

    phalanx.web(args.runs, listen=args.listen, token=args.token, serving=serving, progress=note)
    return 0
