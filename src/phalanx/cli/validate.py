"""`phalanx validate`: predict every run of a published table and hold the predictions against what was measured."""

from __future__ import annotations

import argparse
from pathlib import Path

from phalanx.cli.options import add_json
from phalanx.cli.output import note, print_json


def configure(parser: argparse.ArgumentParser) -> None:
    """Options of `phalanx validate`."""
    parser.add_argument("table", metavar="TABLE.csv", help="runs with the columns of throughput_public.csv")
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
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Predict, write, score, print."""
    from phalanx.errors import mistake
    from phalanx.plan.published import read_table
    from phalanx.plan.scorecard import text, write_predictions
    from phalanx.plan.validate import draw_known, predict_table, score

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
