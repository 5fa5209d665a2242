"""`phalanx export`: the weights of a run as a Hugging Face folder."""

from __future__ import annotations

import argparse

import phalanx
from phalanx.cli.output import note, show
from phalanx.cli.parser import add_json


def configure_parser(parser: argparse.ArgumentParser) -> None:
    """Add the options of `phalanx export`."""
    parser.add_argument("run", metavar="RUN", help="a run folder, made by phalanx train")
    parser.add_argument("out", metavar="OUT", help="the folder to write: safetensors, config.json, tokenizer.json")
    parser.add_argument("--step", metavar="N", type=int, help="use the checkpoint of this step instead of the newest")
    parser.add_argument(
        "--dtype", choices=("fp32", "bf16", "fp16"), default="bf16", help="format of the weights (default: bf16)"
    )
    add_json(parser)


def run_command(args: argparse.Namespace) -> int:
    """Export one checkpoint as a Hugging Face folder."""
    exported = phalanx.export(args.run, args.out, step=args.step, dtype=args.dtype, progress=note)
    if not args.json:
        note(f"exported step {exported.step:,} of {args.run}")
    return show(exported, as_json=args.json)
