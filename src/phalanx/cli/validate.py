"""`phalanx validate`: predict every run of a published table and hold the predictions against what was measured.

A table of network claims (source, quantity, value, unit, conditions) goes to sim/validate instead.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from phalanx.cli.options import add_json
from phalanx.cli.output import note, print_json, say
from phalanx.units import plural

INTERRUPTED = 130  # 128 + SIGINT, as shells count
EVERY_S = 5.0  # between lines of progress


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
    parser.add_argument(
        "--simulate", action="store_true", help="of network claims: also what takes more than a minute of CPU"
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Predict, write, score, print."""
    from phalanx.errors import mistake
    from phalanx.validate.network_claims import is_network_table
    from phalanx.validate.throughput_score import (
        draw_known,
        predict_table,
        score_predictions,
        scorecard_text,
        write_predictions,
    )
    from phalanx.validate.throughput_table import read_table

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
    card = score_predictions(rows, predictions)
    if args.predictions:
        write_predictions(Path(args.predictions), predictions)
        note(f"wrote {plural(len(predictions), 'row')} to {args.predictions}")
    if args.json:
        print_json({"scorecard": card, "calibrated_on_rows": len(known), "predictions": predictions})
    else:
        say(scorecard_text(card, calibrated_on=len(known)))
    return 0


def _network(args: argparse.Namespace) -> int:
    """Network claims: nothing is fitted but the two ends of a series, so the options of runs do not apply."""
    from phalanx.errors import mistake
    from phalanx.validate.network_claims import read_claims
    from phalanx.validate.network_score import network_card_text, plan_simulations, score_claims

    if args.predictions or args.calibrate or args.draw:
        raise mistake(args.table, "is a table of network claims", fix="leave --predictions, --calibrate and --draw out")
    rows = read_claims(Path(args.table))
    planned = plan_simulations(rows, simulate=args.simulate)
    if planned.keys:
        note(f"{len(planned.keys)} simulations, about {planned.cpu_s:.0f} s of CPU; Ctrl-C keeps what is finished")
    if planned.left_out:
        note(f"{planned.left_out} more would take about {planned.left_out_cpu_s:,.0f} s: add --simulate")
    card = score_claims(rows, simulate=args.simulate, planned=planned, progress=_Progress().tell)
    if args.json:
        print_json(card)
    else:
        say(network_card_text(card))
    return INTERRUPTED if card.interrupted else 0


class _Progress:
    """A line now and then, so that a minute does not look like a hang."""

    def __init__(self) -> None:
        self.said_s = time.monotonic()

    def tell(self, done: int, of: int) -> None:
        """Rows that are done."""
        if time.monotonic() - self.said_s > EVERY_S and done < of:
            self.said_s = time.monotonic()
            note(f"  {done:,} of {of:,} rows")
