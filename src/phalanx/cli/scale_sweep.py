"""`phalanx scale sweep`: train a grid of small models for a scaling law."""

from __future__ import annotations

import argparse

import phalanx
from phalanx.cli.output import note, show
from phalanx.cli.parser import add_job, add_json


def configure_parser(parser: argparse.ArgumentParser) -> None:
    """Add the options of `phalanx scale sweep`."""
    add_job(parser)
    parser.add_argument(
        "--budgets", metavar="C", required=True, help="FLOPs: 1e15..1e17 (five), 1e15..1e17:7, or 1e15,3e15,1e16"
    )
    parser.add_argument("--sizes", metavar="K", type=int, default=7, help="model sizes per budget (default: 7)")
    parser.add_argument(
        "--method",
        metavar="M",
        default="isoflop",
        help="isoflop: train every run from scratch (default); wsd: runs of one size share their steps at constant "
        "learning rate, and each has its own decay",
    )
    parser.add_argument(
        "--tokens-per-parameter",
        metavar="R",
        type=float,
        default=20.0,
        help="assumed optimum, around which model sizes are chosen (default: 20)",
    )
    parser.add_argument(
        "--spread",
        metavar="X",
        type=float,
        default=4.0,
        help="sizes of a budget reach from the assumed optimum / X to the optimum * X (default: 4)",
    )
    parser.add_argument("--out", metavar="DIR", help="folder for runs, results and table (default: runs/sweep-NAME)")
    parser.add_argument(
        "--parallel", metavar="P", type=int, help="runs at a time (default: one per core, four per GPU)"
    )
    parser.add_argument(
        "--on",
        metavar="SYSTEM",
        help="slurm or k8s: submit the runs as one group; repeat the command to collect (default: this machine)",
    )
    parser.add_argument("--queue", metavar="NAME", help="with --on: Slurm's partition, or Kueue's queue")
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print the grid with predicted time and cost, and what --on would submit; train nothing",
    )
    add_json(parser)


def run_command(args: argparse.Namespace) -> int:
    """Run the sweep and print its table."""
    sweep = phalanx.scale.sweep(
        args.job,
        budgets=args.budgets,
        sizes=args.sizes,
        method=args.method,
        out=args.out,
        tokens_per_parameter=args.tokens_per_parameter,
        spread=args.spread,
        parallel=args.parallel,
        on=args.on,
        queue=args.queue,
        overrides=args.overrides,
        dry_run=args.dry_run,
        progress=note,
    )
    return show(sweep, as_json=args.json)
