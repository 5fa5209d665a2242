"""`phalanx scale predict`: compare a run's loss with the prediction interval of a fitted scaling law."""

from __future__ import annotations

import argparse

import phalanx
from phalanx.cli.output import show
from phalanx.cli.parser import add_json


def configure_parser(parser: argparse.ArgumentParser) -> None:
    """Add the options of `phalanx scale predict`."""
    parser.add_argument("fit", metavar="FIT", help="a fit, written by phalanx scale fit --out")
    parser.add_argument("--run", metavar="RUN", required=True, help="a run folder, or a CSV table of one run")
    parser.add_argument(
        "--allowance",
        metavar="X",
        type=float,
        default=0.08,
        help="how far above the interval a run may be until its learning rate decays (default: 0.08)",
    )
    parser.add_argument("--tokens", metavar="D", help="tokens after which the run of a table ends, e.g. 2e12")
    add_json(parser)


def run_command(args: argparse.Namespace) -> int:
    """Compare the run with the law; exit code 1 if its loss is outside the interval."""
    comparison = phalanx.scale.predict(args.fit, args.run, allowance=args.allowance, planned_tokens=args.tokens)
    return show(comparison, as_json=args.json)
