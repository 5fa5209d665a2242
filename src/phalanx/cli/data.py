"""`phalanx data`: build a dataset from text, show what one holds, and check its files."""

from __future__ import annotations

import argparse
from pathlib import Path

import phalanx
from phalanx.cli.output import note, show
from phalanx.cli.parser import add_json


def configure_parser(parser: argparse.ArgumentParser) -> None:
    """Add the options of `phalanx data`."""
    verbs = parser.add_subparsers(dest="what", required=True, metavar="WHAT")
    _configure_build(verbs.add_parser("build", help="build a dataset folder from text, .jsonl or .parquet files"))
    for verb, text in (
        ("show", "what a dataset holds"),
        ("checksum", "compare every file of a dataset with its manifest"),
    ):
        _add_path(verbs.add_parser(verb, help=text))
    # The name of checksum until 0.7; without help it is not listed.
    _add_path(verbs.add_parser("verify"))


def _add_path(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", type=Path, metavar="PATH", help="a folder made by phalanx data build")
    add_json(parser)


def _configure_build(parser: argparse.ArgumentParser) -> None:
    """Add the options of `phalanx data build`."""
    parser.add_argument("out", type=Path, metavar="OUT", help="the folder to create")
    parser.add_argument(
        "sources",
        nargs="*",
        metavar="SOURCE[=WEIGHT]",
        help="a file or folder; with weight 2 it is sampled twice as often",
    )
    parser.add_argument("--corpus", metavar="NAME", help="fetch English text instead: offline-english[-large]")
    parser.add_argument("--tokenizer", type=Path, metavar="FILE", help="a tokenizer.json (default: train a tokenizer)")
    parser.add_argument("--vocab", metavar="N", help="vocabulary size of the trained tokenizer (default: 8192)")
    parser.add_argument(
        "--heldout",
        type=float,
        default=0.01,
        metavar="SHARE",
        help="share of the text held out for evaluation (default: 0.01)",
    )
    parser.add_argument(
        "--field",
        default="text",
        metavar="NAME",
        help="field of .jsonl and .parquet files with the text (default: text)",
    )
    parser.add_argument(
        "--split-on",
        default="file",
        metavar="WHAT",
        help="what ends a document in a text file: file, blank, line or formfeed (default: file)",
    )
    parser.add_argument(
        "--end-of-text",
        default="",
        metavar="TOKEN",
        help="end-of-text token of the given tokenizer, if its name is unusual",
    )
    parser.add_argument("--shard-tokens", metavar="N", help="tokens per shard (default: 134M)")
    add_json(parser)


def run_command(args: argparse.Namespace) -> int:
    """Build, show or verify a dataset."""
    if args.what == "verify":
        note("note: phalanx data verify is now called phalanx data checksum")
    if args.what == "build":
        return show(
            phalanx.data.build(
                args.out,
                args.sources,
                corpus=args.corpus,
                tokenizer=args.tokenizer,
                vocab=args.vocab,
                heldout=args.heldout,
                field=args.field,
                split_on=args.split_on,
                end_of_text=args.end_of_text,
                shard_tokens=args.shard_tokens,
                progress=note,
            ),
            as_json=args.json,
        )
    if args.what == "show":
        return show(phalanx.data.show(args.path), as_json=args.json)
    return show(phalanx.data.checksum(args.path), as_json=args.json)
