"""`phalanx calibrate`: refit five scalars from a few measured steps of the user's own system."""

from __future__ import annotations

import argparse
from pathlib import Path

from phalanx.cli.options import add_json
from phalanx.cli.output import note, print_json, say


def configure(parser: argparse.ArgumentParser) -> None:
    """Options of `phalanx calibrate`."""
    parser.add_argument(
        "measured",
        metavar="RUN_OR_CSV",
        help="a table with the columns of throughput_public.csv and step_s filled in, or a run folder "
        "(plan.json and events*.jsonl with step durations)",
    )
    parser.add_argument("--out", metavar="FILE", default="calibration.json", help="default: calibration.json")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Fit, write, print."""
    from phalanx.validate.calibration_report import calibrate_run, calibrate_table, calibration_text, write_calibration

    source = Path(args.measured)
    report = calibrate_run(source) if source.is_dir() else calibrate_table(source)
    write_calibration(Path(args.out), report)
    note(f"wrote {args.out}; use it with: phalanx plan JOB --calibration {args.out}")
    if args.json:
        print_json(report)
    else:
        say(calibration_text(report))
    return 0
