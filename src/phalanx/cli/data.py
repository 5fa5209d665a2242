"""`phalanx data`: build a dataset from text, show what one holds, and verify that it is as it was written."""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.cli.options import add_json
from phalanx.cli.output import note, print_json, say
from phalanx.errors import mistake
from phalanx.units import format_bytes, format_count, format_seconds, parse_count, plural

if TYPE_CHECKING:
    from phalanx.job.dataset import Manifest, Source
    from phalanx.train.data.build import Origin, Recipe


def configure(parser: argparse.ArgumentParser) -> None:
    """Options of `phalanx data`."""
    verbs = parser.add_subparsers(dest="what", required=True, metavar="WHAT")
    _configure_build(verbs.add_parser("build", help="make a dataset folder from text, .jsonl or .parquet"))
    for verb, text in (("show", "what a dataset holds"), ("verify", "check every digest of a dataset")):
        other = verbs.add_parser(verb, help=text)
        other.add_argument("path", type=Path, metavar="PATH", help="a folder that phalanx data build made")
        add_json(other)


def _configure_build(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("out", type=Path, metavar="OUT", help="the folder to make")
    parser.add_argument(
        "sources", nargs="*", metavar="SOURCE[=WEIGHT]", help="file or folder; weight 2: seen twice as often"
    )
    parser.add_argument("--corpus", metavar="NAME", help="fetch real English instead: offline-english[-large]")
    parser.add_argument("--tokenizer", type=Path, metavar="FILE", help="a tokenizer.json; else one is trained")
    parser.add_argument("--vocab", metavar="N", help="tokens of the trained tokenizer (default 8192)")
    parser.add_argument(
        "--heldout", type=float, default=0.01, metavar="SHARE", help="kept from training (default 0.01)"
    )
    parser.add_argument("--field", default="text", metavar="NAME", help="where .jsonl and .parquet hold the text")
    parser.add_argument(
        "--split-on",
        default="file",
        metavar="WHAT",
        help="what ends a document of a text file: file (default), blank, line, formfeed",
    )
    parser.add_argument(
        "--end-of-text", default="", metavar="TOKEN", help="of the given tokenizer, if its name is rare"
    )
    parser.add_argument("--shard-tokens", metavar="N", help="tokens per shard (default 134M)")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Build, show or verify."""
    return {"build": _build, "show": _show, "verify": _verify}[args.what](args)


def _build(args: argparse.Namespace) -> int:
    from phalanx.train.data.build import build_dataset
    from phalanx.train.data.progress import on_stderr

    manifest = build_dataset(_recipe(args), args.out, on_stderr)
    if not manifest.total("tokens", "heldout") and args.heldout:
        note("warning: no document fell into the held-out split, so nothing can be evaluated")
        note("  use a larger --heldout, or --split-on blank to cut long texts in paragraphs")
    _print(manifest, args.out, as_json=args.json)
    return 0


def _recipe(args: argparse.Namespace) -> Recipe:
    from phalanx.job.dataset import VOCAB, cache_folder
    from phalanx.train.data.build import SHARD_TOKENS, Recipe
    from phalanx.train.data.corpus import corpus
    from phalanx.train.data.documents import Reading

    if args.corpus and args.sources:
        what = "--corpus and SOURCE are both given"
        raise mistake("phalanx data build", what, fix="build them one by one with the same --tokenizer")
    if args.tokenizer and args.vocab:
        why = "a given tokenizer has its own size"
        raise mistake("--vocab", "has no effect with --tokenizer", why=why, fix="leave one of the two out")
    origins = corpus(args.corpus, cache_folder(os.environ), note) if args.corpus else tuple(map(_origin, args.sources))
    return Recipe(
        origins=origins,
        tokenizer=args.tokenizer,
        vocab=_count("--vocab", args.vocab, VOCAB),
        heldout=args.heldout,
        reading=Reading(field=args.field, split_on=args.split_on),
        end_of_text=args.end_of_text,
        shard_tokens=_count("--shard-tokens", args.shard_tokens, SHARD_TOKENS),
    )


def _origin(text: str) -> Origin:
    """SOURCE or SOURCE=WEIGHT; a file whose own name ends like that is taken as it is."""
    from phalanx.train.data.build import Origin

    head, equals, tail = text.rpartition("=")
    if not equals or Path(text).exists():
        return Origin(path=Path(text))
    try:
        return Origin(path=Path(head), weight=float(tail))
    except ValueError:
        fix = "write SOURCE=2, or SOURCE alone for 1"
        raise mistake(text, f'"{tail}" is not a weight', fix=fix) from None


def _count(option: str, text: str | None, default: int) -> int:
    if text is None:
        return default
    try:
        value = parse_count(text)
    except ValueError as error:
        raise mistake(option, str(error)) from None
    return int(value) if math.isfinite(value) else 0


def _show(args: argparse.Namespace) -> int:
    from phalanx.job.dataset import check_dataset_files, read_manifest

    manifest = read_manifest(args.path)
    check_dataset_files(args.path, manifest)
    _print(manifest, args.path, as_json=args.json)
    return 0


def _verify(args: argparse.Namespace) -> int:
    import time

    from phalanx.job.dataset import verify_dataset

    start = time.monotonic()
    manifest = verify_dataset(args.path)
    files = 2 * len(manifest.shards) + 1
    if args.json:
        print_json({"path": args.path, "files": files, "digest": manifest.digest})
    else:
        say(f"{args.path}: all {files:,} files are as they were written ({format_seconds(time.monotonic() - start)})")
    return 0


def _print(manifest: Manifest, path: Path, *, as_json: bool) -> None:
    if as_json:
        print_json({"path": path, "digest": manifest.digest, **summary(manifest), "manifest": manifest})
    else:
        say(table(manifest, path))


def summary(manifest: Manifest) -> dict[str, dict[str, float]]:
    """Sizes by split."""
    found = {}
    for split in ("train", "heldout"):
        tokens, text = manifest.total("tokens", split), manifest.total("text_bytes", split)
        documents = manifest.total("documents", split)
        per = text / tokens if tokens else math.nan
        found[split] = {"tokens": tokens, "documents": documents, "text_bytes": text, "bytes_per_token": per}
    return found


def table(manifest: Manifest, path: Path) -> str:
    """A dataset as a person reads it."""
    lines = [
        f"{path}: vocabulary {manifest.vocab:,}, {manifest.dtype}, {plural(len(manifest.shards), 'shard')},"
        f" digest {manifest.digest[:12]}, phalanx {manifest.phalanx}"
    ]
    for split, sizes in summary(manifest).items():
        lines.append(
            f"  {split:<8} {format_count(sizes['tokens'])} tokens, {plural(sizes['documents'], 'document')},"
            f" {format_bytes(sizes['text_bytes'])}"
            + (f", {sizes['bytes_per_token']:.2f} bytes per token" if sizes["tokens"] else "")
        )
    for source in manifest.sources:
        lines += _source_lines(source)
    return "\n".join(lines)


def _source_lines(source: Source) -> list[str]:
    tokens = sum(shard.tokens for shard in source.shards)
    lines = [f"  source   {source.name}: {format_count(tokens)} tokens, weight {source.weight:g}"]
    tally = source.tally
    odd = {
        "empty documents left out": tally.empty,
        "records without text left out": tally.missing,
        "undecodable sequences replaced": tally.bad_utf8,
        "pieces of documents too long to hold": tally.cut,
    }
    lines += [f"           {count:,} {what}" for what, count in odd.items() if count]
    return [*lines, f"           licence: {source.licence}"] if source.licence else lines
