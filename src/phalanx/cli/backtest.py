"""`phalanx backtest`: predict a table of published measurements, and report the error."""

from __future__ import annotations

import argparse

import phalanx
from phalanx.cli.output import note, show
from phalanx.cli.parser import add_json
from phalanx.errors import mistake
from phalanx.units import plural


def configure_parser(parser: argparse.ArgumentParser) -> None:
    """Add the options of `phalanx backtest`."""
    parser.add_argument(
        "table",
        metavar="TABLE.csv",
        help="training runs (columns of throughput_public.csv) or network claims (source,quantity,value,unit,"
        "conditions)",
    )
    parser.add_argument("--predictions", metavar="OUT.csv", help="write id,step_s,step_s_lo,step_s_hi,mem_gb,fits")
    parser.add_argument(
        "--calibrate", metavar="KNOWN.csv", help="first fit up to five factors per source to these measurements"
    )
    parser.add_argument(
        "--draw",
        metavar="N",
        type=int,
        default=0,
        help="calibrate on N random rows of each source in TABLE, and predict the others",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of --draw (default: 0)")
    parser.add_argument(
        "--simulate",
        action="store_true",
        help="network claims: also simulate those that take more than a minute of CPU time",
    )
    add_json(parser)


def run_command(args: argparse.Namespace) -> int:
    """Predict the table's rows, write the predictions if asked to, and print their error."""
    result = phalanx.backtest(
        args.table, calibration=args.calibrate, draw=args.draw, seed=args.seed, simulate=args.simulate, progress=note
    )
    if args.predictions:
        from phalanx.api.planning import Backtest

        if not isinstance(result, Backtest):
            fix = "leave --predictions, --calibrate and --draw out"
            raise mistake(args.table, "is a table of network claims", fix=fix)
        result.write(args.predictions)
        note(f"wrote {plural(len(result.predictions), 'row')} to {args.predictions}")
    return show(result, as_json=args.json)
