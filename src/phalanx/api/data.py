"""Datasets: build one from text, show its contents, and compare its files with the digests in its manifest.

>>> dataset = phalanx.data.build("data/tokens", ["texts"], vocab="8k")  # doctest: +SKIP
>>> dataset.sizes()["train"]["tokens"]  # doctest: +SKIP
1200000
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.api.results import PublicResult, Tell, teller
from phalanx.errors import RuleError, mistake
from phalanx.io.codec import json_values
from phalanx.io.path_probes import path_exists
from phalanx.units import format_bytes, format_count, format_seconds, parse_count, plural

if TYPE_CHECKING:
    from phalanx.job.dataset import DatasetManifest, Source
    from phalanx.train.data.build_dataset import TextOrigin

Count = int | str  # 8192 or "8k"


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Dataset(PublicResult):
    """A dataset folder and its manifest.

    >>> dataset = phalanx.data.show("data/tokens")  # doctest: +SKIP
    >>> dataset.manifest.vocab  # doctest: +SKIP
    50257
    """

    path: Path
    manifest: DatasetManifest

    def __str__(self) -> str:
        m = self.manifest
        lines = [
            f"{self.path}: vocabulary {m.vocab:,}, {m.dtype}, {plural(len(m.shards), 'shard')},"
            f" digest {m.digest[:12]}, built by phalanx {m.phalanx}"
        ]
        for split, sizes in self.sizes().items():
            lines.append(
                f"  {split:<8} {format_count(sizes['tokens'])} tokens, {plural(sizes['documents'], 'document')},"
                f" {format_bytes(sizes['text_bytes'])}"
                + (f", {sizes['bytes_per_token']:.2f} bytes per token" if sizes["tokens"] else "")
            )
        for source in m.sources:
            lines += _source_lines(source)
        return "\n".join(lines)

    def sizes(self) -> dict[str, dict[str, float]]:
        """Return tokens, documents and bytes by split."""
        sizes = {}
        for split in ("train", "heldout"):
            tokens, text = self.manifest.total("tokens", split), self.manifest.total("text_bytes", split)
            documents = self.manifest.total("documents", split)
            per = text / tokens if tokens else math.nan
            sizes[split] = {"tokens": tokens, "documents": documents, "text_bytes": text, "bytes_per_token": per}
        return sizes

    def to_dict(self) -> dict[str, Any]:
        """Return path, digest, sizes by split, and the manifest."""
        values = {"path": self.path, "digest": self.manifest.digest, **self.sizes(), "manifest": self.manifest}
        return dict(json_values(values))


def _source_lines(source: Source) -> list[str]:
    tokens = sum(shard.tokens for shard in source.shards)
    lines = [f"  source   {source.name}: {format_count(tokens)} tokens, weight {source.weight:g}"]
    tally = source.tally
    odd = {
        "empty documents left out": tally.empty,
        "records without text left out": tally.missing,
        "invalid UTF-8 sequences replaced": tally.bad_utf8,
        "parts of documents that were too long and were split": tally.cut,
    }
    lines += [f"           {count:,} {label}" for label, count in odd.items() if count]
    return [*lines, f"           licence: {source.licence}"] if source.licence else lines


def build(
    out: str | Path,
    sources: Sequence[str | Path] | Mapping[str, float] = (),
    *,
    corpus: str | None = None,
    tokenizer: str | Path | None = None,
    vocab: Count | None = None,
    heldout: float = 0.01,
    field: str = "text",
    split_on: str = "file",
    end_of_text: str = "",
    shard_tokens: Count | None = None,
    progress: bool | Tell = False,
) -> Dataset:
    """Build a dataset folder from text, .jsonl or .parquet files, or from a corpus that is downloaded.

    `sources` are files and folders; as a mapping, with the weight of each (2: seen twice as often). Without
    `tokenizer` (a tokenizer.json) a tokenizer of `vocab` tokens is trained. `split_on` is the end of a document in a
    text file: file, blank, line or formfeed.

    >>> build("data/tokens", ["texts"], vocab="8k")  # doctest: +SKIP
    """
    from phalanx.job.dataset import cache_folder
    from phalanx.job.model import VOCAB
    from phalanx.train.data.build_dataset import SHARD_TOKENS, Recipe
    from phalanx.train.data.build_dataset import build_dataset as build_dataset
    from phalanx.train.data.corpus import fetch_corpus
    from phalanx.train.data.documents import Reading
    from phalanx.train.data.progress import on_stderr

    tell = teller(progress)
    if corpus and sources:
        message = "--corpus and SOURCE are both given"
        raise mistake("phalanx data build", message, fix="build them one by one with the same --tokenizer")
    if tokenizer and vocab:
        why = "a given tokenizer has its own size"
        raise mistake("--vocab", "has no effect with --tokenizer", why=why, fix="leave one of the two out")
    origins = fetch_corpus(corpus, cache_folder(os.environ), tell) if corpus else _data_origins(sources)
    recipe = Recipe(
        origins=origins,
        tokenizer=Path(tokenizer) if tokenizer else None,
        vocab=_parse_count("--vocab", vocab, VOCAB),
        heldout=heldout,
        reading=Reading(field=field, split_on=split_on),
        end_of_text=end_of_text,
        shard_tokens=_parse_count("--shard-tokens", shard_tokens, SHARD_TOKENS),
    )
    manifest = build_dataset(recipe, Path(out), on_stderr)
    if not manifest.total("tokens", "heldout") and heldout:
        tell("warning: the held-out split is empty, so nothing can be evaluated")
        tell("  use a larger --heldout, or --split-on blank to split long texts into paragraphs")
    return Dataset(path=Path(out), manifest=manifest)


def _data_origins(sources: Sequence[str | Path] | Mapping[str, float]) -> tuple[TextOrigin, ...]:
    from phalanx.train.data.build_dataset import TextOrigin

    if isinstance(sources, Mapping):
        return tuple(TextOrigin(path=Path(path), weight=weight) for path, weight in sources.items())
    return tuple(_data_origin(str(text)) for text in sources)


def _data_origin(text: str) -> TextOrigin:
    """Parse SOURCE or SOURCE=WEIGHT; an existing file whose name has that form is taken as a source."""
    from phalanx.train.data.build_dataset import TextOrigin

    head, equals, tail = text.rpartition("=")
    if not equals or path_exists(text):
        return TextOrigin(path=Path(text))
    try:
        return TextOrigin(path=Path(head), weight=float(tail))
    except ValueError:
        raise mistake(text, f'"{tail}" is not a weight', fix="write SOURCE=2, or SOURCE alone for 1") from None


def _parse_count(option: str, text: Count | None, default: int) -> int:
    if text is None or isinstance(text, int):
        return default if text is None else text
    try:
        value = parse_count(text)
    except ValueError as error:
        raise mistake(option, str(error)) from None
    return int(value) if math.isfinite(value) else 0


def show(path: str | Path) -> Dataset:
    """Return a dataset with its contents; raise UserError if files are missing or differ in size from the manifest.

    >>> show("data/tokens").sizes()["train"]["tokens"]  # doctest: +SKIP
    1200000
    """
    from phalanx.job.dataset import check_dataset_files, read_manifest

    manifest = read_manifest(Path(path))
    check_dataset_files(Path(path), manifest)
    return Dataset(path=Path(path), manifest=manifest)


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Checksum(PublicResult):
    """The result of comparing every file of a dataset with its manifest; all of them match.

    >>> phalanx.data.checksum("data/tokens").digest[:12]  # doctest: +SKIP
    '1f0c9a5be2d4'
    """

    path: Path
    files: int
    digest: str
    seconds: float
    added: int = 0  # files of block digests that were missing or damaged, and were written again
    trouble: str = ""  # the reason why there are none and none could be added

    def __str__(self) -> str:
        match = (
            f"all {self.files:,} files match their checksums" if self.files != 1 else "its file matches its checksum"
        )
        lines = [f"{self.path}: {match} ({format_seconds(self.seconds)})"]
        if self.added:
            added = plural(self.added, "shard")
            lines.append(f"  added block digests of {added}: training now compares each block it reads")
        if self.trouble:
            lines.append(f"  block digests could not be added: {self.trouble}")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Return path, number of files, number of block digests added, and the digest of the dataset."""
        values = {"path": str(self.path), "files": self.files, "digest": self.digest, "added": self.added}
        return {**values, "trouble": self.trouble} if self.trouble else values


def checksum(path: str | Path) -> Checksum:
    """Read every file of a dataset and compare its checksum with the manifest; raise UserError with those that differ.

    The error's `exit_code` is 1 if files are damaged, like other findings, and 2 if the dataset is missing. A dataset
    of 0.6 gets digests of its blocks, so that training detects damage in the blocks it reads.

    >>> checksum("data/tokens").files  # doctest: +SKIP
    7
    """
    from phalanx.job.dataset import DamagedDataset, verify_dataset

    start = time.monotonic()
    try:
        verified = verify_dataset(Path(path))
    except DamagedDataset as error:
        error.exit_code = RuleError.exit_code
        raise
    seconds = time.monotonic() - start
    return Checksum(
        path=Path(path),
        files=(3 if verified.manifest.has_block_digests else 2) * len(verified.manifest.shards) + 1,
        digest=verified.manifest.digest,
        seconds=seconds,
        added=len(verified.written),
        trouble=verified.trouble,
    )


__all__ = ["Checksum", "Dataset", "build", "checksum", "show"]


def __dir__() -> list[str]:
    return sorted([*__all__, "__all__", "__doc__", "__file__"])
