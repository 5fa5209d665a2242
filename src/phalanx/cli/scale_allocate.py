"""`phalanx scale allocate`: choose model size, tokens and layout for a compute budget, by a fitted scaling law."""

from __future__ import annotations

import argparse

import phalanx
from phalanx.cli.output import note, show
from phalanx.cli.parser import add_json


def configure_parser(parser: argparse.ArgumentParser) -> None:
    """Add the options of `phalanx scale allocate`."""
    parser.add_argument("fit", metavar="FIT", help="a fit, written by phalanx scale fit --out")
    parser.add_argument("--budget", metavar="C", help="training FLOPs, e.g. 1e24")
    parser.add_argument("--gpu-hours", metavar="H", help="device-hours on --cluster instead, e.g. 2e6")
    parser.add_argument("--cluster", metavar="SPEC", help="plan on this cluster, e.g. 8xH100:512")
    parser.add_argument(
        "--inference-tokens",
        metavar="T",
        help="tokens the model will serve: trains a smaller model for longer, to save on inference",
    )
    parser.add_argument(
        "--extrapolate",
        action="store_true",
        help="allow a budget more than 100 times that of the largest run in the fit",
    )
    job = parser.add_argument_group("the job")
    job.add_argument("--vocab", metavar="V", type=int, default=128_256, help="vocabulary size (default: 128256)")
    job.add_argument("--sequence", metavar="S", type=int, default=4096, help="tokens per sequence (default: 4096)")
    job.add_argument("--data", metavar="DIR", default="data/tokens", help="dataset folder (default: data/tokens)")
    job.add_argument("--name", metavar="NAME", default="scaled", help="name of the job (default: scaled)")
    job.add_argument("--out", metavar="JOB.toml", help="write a job file for the run")
    add_json(parser)


def run_command(args: argparse.Namespace) -> int:
    """Size the run, write its job file if asked to, and print the allocation."""
    names = ("budget", "gpu_hours", "cluster", "inference_tokens", "extrapolate")
    job_names = ("vocab", "sequence", "data", "name")
    allocation = phalanx.scale.allocate(args.fit, **{name: getattr(args, name) for name in (*names, *job_names)})
    if args.out:
        allocation.write_job(args.out)
        note(f"wrote {args.out}: phalanx plan {args.out}, then phalanx train {args.out}")
    return show(allocation, as_json=args.json)
