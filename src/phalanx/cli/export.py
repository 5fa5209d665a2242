"""`phalanx export`: the weights of a run as a Hugging Face folder."""

from __future__ import annotations

import argparse
from pathlib import Path

from phalanx.cli.options import add_json
from phalanx.cli.output import note, print_json, say
from phalanx.errors import mistake


def configure(parser: argparse.ArgumentParser) -> None:
    """Options of `phalanx export`."""
    parser.add_argument("run", metavar="RUN", help="a run folder, as phalanx train made it")
    parser.add_argument("out", metavar="OUT", help="the folder to write: safetensors, config.json, tokenizer.json")
    parser.add_argument("--step", metavar="N", type=int, help="the checkpoint of this step instead of the newest")
    parser.add_argument(
        "--dtype", choices=("fp32", "bf16", "fp16"), default="bf16", help="format of the weights (bf16)"
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Export one checkpoint."""
    from phalanx.train.prepare import need_torch

    need_torch()
    from phalanx.train.export import export_weights

    out = Path(args.out)
    if out.exists() and any(out.iterdir() if out.is_dir() else [out]):
        raise mistake(args.out, "exists already and is not empty", fix="name a folder that does not exist yet")
    made = export_weights(args.run, out, step=args.step, dtype=args.dtype)
    if args.json:
        print_json({"out": str(out), "step": made.step, "files": list(made.files), "bytes": made.bytes})
    else:
        note(f"step {made.step:,} of {args.run}")
        say(f"wrote {out}: {', '.join(made.files)}")
    return 0
