"""`phalanx calibrate`: fit up to five factors of the cost model to a few measured steps of your own system."""

from __future__ import annotations

import argparse

import phalanx
from phalanx.cli.output import note, show
from phalanx.cli.parser import add_json


def configure_parser(parser: argparse.ArgumentParser) -> None:
    """Add the options of `phalanx calibrate`."""
    parser.add_argument(
        "measured",
        metavar="RUN_OR_CSV",
        help="a run folder, or a table with the columns of throughput_public.csv and step_s filled in",
    )
    parser.add_argument(
        "--out", metavar="FILE", default="calibration.json", help="file to write (default: calibration.json)"
    )
    add_json(parser)


def run_command(args: argparse.Namespace) -> int:
    """Fit the factors, write them to --out and print them."""
    calibration = phalanx.calibrate(args.measured)
    calibration.write(args.out)
    note(f"wrote {args.out}; use it with: phalanx plan JOB --calibration {args.out}")
    return show(calibration, as_json=args.json)
