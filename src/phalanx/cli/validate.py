"""`phalanx validate`: predict every run of a published table and hold the predictions against what was measured.

A table of network claims (source, quantity, value, unit, conditions) goes to sim/validate instead.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from phalanx.cli.options import add_json
from phalanx.cli.output import note, print_json


def configure(parser: argparse.ArgumentParser) -> None:
    """Options of `phalanx validate`."""
    parser.add_argument(
        "table",
        metavar="TABLE.csv",
        help="runs (columns of throughput_public.csv) or network claims (source,quantity,value,unit,conditions)",
    )
    parser.add_argument("--predictions", metavar="OUT.csv", help="write id,step_s,step_s_lo,step_s_hi,mem_gb,fits")
    parser.add_argument(
        "--calibrate", metavar="KNOWN.csv", help="fit at most five scalars per source from these measured rows first"
    )
    parser.add_argument(
        "--draw",
        metavar="N",
        type=int,
        default=0,
        help="calibrate on N rows of each source drawn from TABLE itself, and predict the others",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of --draw (default 0)")
    parser.add_argument("--simulate", action="store_true", help="of network claims: also those that need packets")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Predict, write, score, print."""
    from phalanx.errors import mistake
    from phalanx.plan.published import read_table
    from phalanx.plan.scorecard import text, write_predictions
    from phalanx.plan.validate import draw_known, predict_table, score
    from phalanx.sim.validate.table import is_network_table

    if is_network_table(Path(args.table)):
        return _network(args)
    if args.simulate:
        raise mistake("--simulate", "is for tables of network claims", fix="leave it out")
    if args.draw < 0 or (args.draw and args.calibrate):
        raise mistake("--draw", "needs a positive number and excludes --calibrate", fix="use one of the two")
    rows = read_table(Path(args.table)).rows
    known = read_table(Path(args.calibrate)).rows if args.calibrate else ()
    if args.draw:
        known, rows = draw_known(rows, per_source=args.draw, seed=args.seed)
    predictions = predict_table(rows, known=known)
    card = score(rows, predictions)
    if args.predictions:
        write_predictions(Path(args.predictions), predictions)
        note(f"wrote {len(predictions):,} rows to {args.predictions}")
    if args.json:
        print_json({"scorecard": card, "calibrated_on_rows": len(known), "predictions": predictions})
    else:
        print(text(card, calibrated_on=len(known)))
    return 0


def _network(args: argparse.Namespace) -> int:
    """Network claims: nothing is fitted but the two ends of a series, so the options of runs do not apply."""
    from phalanx.errors import mistake
    from phalanx.sim.validate.run import validate
    from phalanx.sim.validate.table import read_rows
    from phalanx.sim.validate.text import text

    if args.predictions or args.calibrate or args.draw:
        raise mistake(args.table, "is a table of network claims", fix="leave --predictions, --calibrate and --draw out")
    if args.simulate:
        note("simulating packets: about a minute of CPU for 50 rows; Ctrl-C keeps what is finished")
    card = validate(read_rows(Path(args.table)), simulate=args.simulate)
    if args.json:
        print_json(card)
    else:
        print(text(card))
    return 0
