"""`phalanx verify`: prove on this machine that a job's layout computes what one process computes."""

from __future__ import annotations

import argparse

import phalanx
from phalanx.cli.output import note, show
from phalanx.cli.parser import add_job, add_json, add_ranks_per_gpu

PRECISIONS = ("float64", "fp32", "bf16", "fp8")


def configure_parser(parser: argparse.ArgumentParser) -> None:
    """Add the options of `phalanx verify`."""
    add_job(parser)
    parser.add_argument("--cluster", metavar="SPEC", help="verify the layout for this cluster instead of the job's")
    parser.add_argument("--plan", metavar="FILE", help="verify the layout of this plan, written by phalanx plan --out")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="where the ranks run; cuda uses NCCL (default: cpu)"
    )
    add_ranks_per_gpu(parser)
    parser.add_argument(
        "--compile", action="store_true", help="compile the blocks, without and then with a filled compile cache"
    )
    parser.add_argument(
        "--precision",
        choices=PRECISIONS,
        default="float64",
        help="arithmetic of both sides; float64 agrees to 1e-12, the others to their rounding (default: float64)",
    )
    parser.add_argument(
        "--full-size", action="store_true", help="do not scale down the model, its sequences or its layout"
    )
    parser.add_argument("--steps", metavar="N", type=int, default=5, help="optimizer steps to compare (default: 5)")
    parser.add_argument(
        "--timeout",
        metavar="S",
        type=float,
        help="longest wait for a rank, in seconds (default: 120, more on a busy machine; --compile, --full-size: 600)",
    )
    parser.add_argument(
        "--allow-code", action="store_true", help="allow code named in the job file: your own model or plug-ins"
    )
    add_json(parser)


def run_command(args: argparse.Namespace) -> int:
    """Compare layout and single process; exit code 0 if the layout is proven, 1 if a number differs."""
    names = ("cluster", "plan", "device", "ranks_per_gpu", "compile", "precision", "full_size", "steps", "timeout")
    options = {name: getattr(args, name) for name in (*names, "allow_code")}
    return show(phalanx.verify(args.job, overrides=args.overrides, progress=note, **options), as_json=args.json)
