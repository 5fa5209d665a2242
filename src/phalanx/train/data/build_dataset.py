"""`phalanx data build`: turn documents into a dataset folder, published complete or not at all, and resumable."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

from phalanx.errors import PhalanxError, Problem, UserError, mistake, nearest
from phalanx.io.files import replace_text
from phalanx.io.path_probes import is_file, path_exists, resolve_path
from phalanx.io.write_errors import write_failure
from phalanx.job.dataset import (
    BLOCK_BYTES,
    MANIFEST,
    SPLITS,
    TOKENIZER,
    DatasetManifest,
    Shard,
    Source,
    Split,
    Tally,
    read_manifest,
    source_from,
)
from phalanx.job.model import VOCAB
from phalanx.train.data.documents import SPLIT_ON, Reading, Record, list_files, read_records
from phalanx.train.data.fetch import only_builder
from phalanx.train.data.progress import BuildProgress
from phalanx.train.data.shard_writer import ShardWriter
from phalanx.train.data.tokenizer import (
    LEAST_VOCAB,
    MOST_VOCAB,
    HashSample,
    TextTokenizer,
    load_tokenizer,
    train_tokenizer,
)
from phalanx.units import plural

STATE = "progress.json"
# 268 MB of uint16: a trillion tokens are 7,451 files, and a killed build loses minutes
SHARD_TOKENS = 1 << 27
# Text encoded at once; 1,000 reviews take 5 to 20 % more CPU inside the tokenizer than 250
BATCH_BYTES = 1 << 18
# 2.4 s of CPU for 8,192 tokens; 33 MB took 21.6 s for 0.3 % fewer tokens (docs/data.md)
SAMPLE_BYTES = 5 * 10**6
# Share of records without text above which the field name is considered wrong
MOST_MISSING = 0.1
FIRST_LOOK = 100  # records after which that share is meaningful


@dataclass(frozen=True, kw_only=True, slots=True)
class TextOrigin:
    """A file or folder to read, and the relative frequency of its samples in training."""

    path: Path
    weight: float = 1.0
    licence: str = ""
    name: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """Everything that determines the content of a dataset."""

    origins: tuple[TextOrigin, ...]
    tokenizer: Path | None = None
    vocab: int = VOCAB
    heldout: float = 0.01
    reading: Reading = field(default_factory=Reading)
    end_of_text: str = ""
    shard_tokens: int = SHARD_TOKENS
    sample_bytes: int = SAMPLE_BYTES


@dataclass(kw_only=True, slots=True)
class _BuildState:
    """Finished work of a build, stored next to the shards after each of them."""

    fingerprint: str
    sources: list[Source] = field(default_factory=list)
    complete: bool = True  # whether the last source is complete

    def dump(self) -> str:
        return json.dumps(dataclasses.asdict(self))


def build_dataset(
    recipe: Recipe, out: Path, progress_for: Callable[[int], BuildProgress], *, wait_s: float = 0.0, reuse: bool = False
) -> DatasetManifest:
    """Build the dataset folder `out`, and return its manifest.

    Args:
        recipe: Sources, tokenizer and options.
        out: The folder to create; a hidden partial folder next to it holds unfinished work, which a later call resumes.
        progress_for: Makes the progress display from the number of bytes to read.
        wait_s: Seconds to wait for another process that builds the same folder.
        reuse: Return the dataset that another process finished meanwhile instead of failing.

    Raises UserError for bad input and SystemFailure for a full disk or another builder.
    """
    check_recipe(recipe)
    if not reuse:
        _check_out(out)
    files = [list_files(origin.path) for origin in recipe.origins]
    progress = progress_for(sum(path.stat().st_size for source_files, _ in files for path in source_files))
    for origin, (_, num_skipped) in zip(recipe.origins, files, strict=True):
        if num_skipped:
            progress.note(
                f"note: {origin.path} holds {plural(num_skipped, 'file')} that an ending says are not text; left out"
            )
    partial = out.parent / f".{out.name}.partial"
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with only_builder(out, wait_s=wait_s):
            if reuse and is_file(out / MANIFEST):
                return read_manifest(out)
            _check_out(out)
            partial.mkdir(exist_ok=True)
            work = _Work(recipe, [source_files for source_files, _ in files], partial, progress)
            manifest = work.run()
            _publish_dataset(partial, out, manifest)
    except OSError as error:
        raise _cannot_write(out, error) from error
    finally:
        progress.end()
    return manifest


class _Work:
    """One build in its partial folder."""

    def __init__(self, recipe: Recipe, files: list[list[Path]], folder: Path, progress: BuildProgress) -> None:
        self.recipe, self.files, self.folder, self.progress = recipe, files, folder, progress
        self.state = self._resume_state()

    def run(self) -> DatasetManifest:
        """Load or train the tokenizer, then write the shards of every source; return the manifest."""
        tokenizer = self._get_tokenizer()
        self.progress.begin("tokens")
        for number, (origin, files) in enumerate(zip(self.recipe.origins, self.files, strict=True)):
            self._build_source(number, origin, files, tokenizer)
        manifest = DatasetManifest(
            phalanx=_tokenizers_version(),
            vocab=tokenizer.vocab,
            dtype=_token_dtype(tokenizer),
            end_of_text=tokenizer.end_of_text,
            tokenizer_sha256=tokenizer.sha256,
            heldout=self.recipe.heldout,
            split_on=self.recipe.reading.split_on,
            sources=tuple(self.state.sources),
            block_bytes=BLOCK_BYTES,
        )
        if not manifest.total("tokens", "train"):
            raise _nothing_found(self.recipe)
        return manifest

    def _resume_state(self) -> _BuildState:
        """Return the stored state if it belongs to the same inputs, and delete all files that it does not name."""
        fingerprint = _recipe_fingerprint(self.recipe, self.files)
        state = _stored_state(self.folder / STATE)
        matches = state is not None and state.fingerprint == fingerprint
        if state is not None and not matches:
            self.progress.note("note: the sources or options changed since the unfinished build; starting over")
        current = state if state is not None and matches else _BuildState(fingerprint=fingerprint)
        kept_names = {STATE, TOKENIZER} if matches else set()
        for source in current.sources:
            kept_names |= {name for shard in source.shards for name in (shard.file, shard.index_file, shard.block_file)}
        for path in self.folder.iterdir():
            if path.name not in kept_names:
                path.unlink()
        if current.sources:
            tokens = sum(shard.tokens for source in current.sources for shard in source.shards)
            self.progress.note(f"going on after {tokens:,} tokens of an unfinished build")
        return current

    def _get_tokenizer(self) -> TextTokenizer:
        path, given_path = self.folder / TOKENIZER, self.recipe.tokenizer
        if given_path is not None:
            tokenizer = load_tokenizer(given_path, end_of_text=self.recipe.end_of_text)
        elif path_exists(path):
            return load_tokenizer(path)
        else:
            tokenizer = self._train_tokenizer()
        replace_text(path, tokenizer.text)
        replace_text(self.folder / STATE, self.state.dump())
        return tokenizer

    def _train_tokenizer(self) -> TextTokenizer:
        """Train a tokenizer on training documents only; held-out documents are not used."""
        sample = HashSample(self.recipe.sample_bytes)
        self.progress.begin("choosing text for the tokenizer")
        for origin, files in zip(self.recipe.origins, self.files, strict=True):
            count = _SourceCount(origin, self.recipe.reading, Tally())
            for record in _all_records(files, self.recipe.reading):
                count.see(record)
                if record.text and record.text.strip() and not held_out(record.text, self.recipe.heldout):
                    sample.show(record.text)
                self.progress.advance(record.read_bytes)
            count.finish()
        texts = sample.texts()
        if not texts:
            raise _nothing_found(self.recipe)
        self.progress.note(
            f"training a tokenizer with {self.recipe.vocab:,} tokens on {plural(len(texts), 'document')}"
        )
        return train_tokenizer(texts, self.recipe.vocab)

    def _build_source(self, number: int, origin: TextOrigin, files: list[Path], tokenizer: TextTokenizer) -> None:
        source = self._begin_source(number, origin)
        if source is None:
            for path in files:
                self.progress.advance(path.stat().st_size, skipped=True)
            return
        records = _all_records(files, self.recipe.reading)
        for record in itertools.islice(records, source.tally.records):
            self.progress.advance(record.read_bytes, skipped=True)
        count = _SourceCount(origin, self.recipe.reading, source.tally)
        chunk = _Chunk(self.folder, f"{number:03d}", source, tokenizer)
        try:
            for batch in _record_batches(records, min(BATCH_BYTES, 2 * self.recipe.shard_tokens)):
                for record in batch:
                    count.see(record)
                chunk.add(batch, self.recipe.heldout)
                self.progress.advance(sum(record.read_bytes for record in batch), chunk.last_tokens)
                if chunk.tokens >= self.recipe.shard_tokens:
                    source = chunk.close(count.tally)
                    self._save_state(source, complete=False)
                    chunk = _Chunk(self.folder, f"{number:03d}", source, tokenizer)
            count.finish()
            self._save_state(chunk.close(count.tally), complete=True)
        except BaseException:
            chunk.abandon()
            raise

    def _begin_source(self, number: int, origin: TextOrigin) -> Source | None:
        """Return the source's progress, as the last one of the state; None if it is finished."""
        state = self.state
        if number < len(state.sources):
            finished = number < len(state.sources) - 1 or state.complete
            return None if finished else state.sources[number]
        name = origin.name or origin.path.name
        state.sources.append(Source(name=name, path=str(origin.path), weight=origin.weight, licence=origin.licence))
        return state.sources[-1]

    def _save_state(self, source: Source, *, complete: bool) -> None:
        self.state.sources[-1], self.state.complete = source, complete
        replace_text(self.folder / STATE, self.state.dump())


class _Chunk:
    """The open shards, one per split, which are closed together."""

    def __init__(self, folder: Path, stem: str, source: Source, tokenizer: TextTokenizer) -> None:
        self.folder, self.source, self.tokenizer = folder, source, tokenizer
        self.last_tokens = 0
        number = 1 + max((int(shard.file[-9:-4]) for shard in source.shards), default=-1)
        self.stems: dict[Split, str] = {split: f"{stem}-{split}-{number:05d}" for split in SPLITS}
        self.writers: dict[Split, ShardWriter] = {}

    @property
    def tokens(self) -> int:
        """Number of tokens of this chunk so far."""
        return sum(writer.tokens for writer in self.writers.values())

    def add(self, batch: Sequence[Record], heldout: float) -> None:
        """Encode documents and write each to its split."""
        texts = [record.text for record in batch if record.text and record.text.strip()]
        documents_of: dict[Split, list[tuple[list[int], int]]] = {split: [] for split in SPLITS}
        for text, tokens in zip(texts, self.tokenizer.encode(texts), strict=True):
            documents_of["heldout" if held_out(text, heldout) else "train"].append((tokens, len(text.encode())))
        tokens_before = self.tokens
        for split, documents in documents_of.items():
            if documents:
                if split not in self.writers:
                    self.writers[split] = ShardWriter(
                        self.folder, self.stems[split], split, _token_dtype(self.tokenizer)
                    )
                self.writers[split].write(documents, self.tokenizer.end_of_text)
        self.last_tokens = self.tokens - tokens_before

    def close(self, tally: Tally) -> Source:
        """Close the shards, and return the source with them."""
        shards: tuple[Shard, ...] = tuple(self.writers[split].close() for split in SPLITS if split in self.writers)
        return dataclasses.replace(self.source, tally=tally, shards=self.source.shards + shards)

    def abandon(self) -> None:
        """Close the files after a failure."""
        for writer in self.writers.values():
            writer.abandon()


class _SourceCount:
    """Counts the records of a source, and raises early if the text field seems misspelt."""

    def __init__(self, origin: TextOrigin, reading: Reading, tally: Tally) -> None:
        self.origin, self.reading, self.tally = origin, reading, tally
        self._fault = ""

    def see(self, record: Record) -> None:
        """Count a record."""
        self.tally = _count_record(self.tally, record)
        if record.fault:
            self._fault = self._fault or record.fault
            if self.tally.records >= FIRST_LOOK:
                self.finish()

    def finish(self) -> None:
        """Raise UserError if too many records had no text."""
        tally = self.tally
        if tally.missing > MOST_MISSING * tally.records:
            problem = f'{tally.missing:,} of {tally.records:,} records have no text in "{self.reading.field}"'
            fix = "name the field that holds the text with --field"
            raise mistake(str(self.origin.path), problem, why=f"such as {self._fault}", fix=fix)


def held_out(text: str, share: float) -> bool:
    """Return whether a document is held out from training; its hash decides, whatever the order, source or build.

    >>> held_out("a", 0.0), held_out("a", 1.0)
    (False, True)
    """
    digest = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8, person=b"heldout").digest(), "big")
    return digest < share * 2.0**64


def _all_records(files: Sequence[Path], reading: Reading) -> Iterator[Record]:
    return itertools.chain.from_iterable(read_records(path, reading) for path in files)


def _record_batches(records: Iterator[Record], most_bytes: int) -> Iterator[list[Record]]:
    batch: list[Record] = []
    size = 0
    for record in records:
        batch.append(record)
        # So that a million empty lines are not one batch
        size += len(record.text or "") + 64
        if size >= most_bytes:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _count_record(tally: Tally, record: Record) -> Tally:
    is_missing, is_empty = record.text is None, record.text is not None and not record.text.strip()
    return Tally(
        records=tally.records + 1,
        documents=tally.documents + (not is_missing and not is_empty),
        empty=tally.empty + is_empty,
        missing=tally.missing + is_missing,
        bad_utf8=tally.bad_utf8 + record.bad_utf8,
        cut=tally.cut + record.cut,
    )


def check_recipe(recipe: Recipe) -> None:
    """Raise UserError with all problems of a recipe."""
    problems = [*_bad_origins(recipe.origins), *_bad_numbers(recipe)]
    if problems:
        raise UserError(problems)


def _bad_origins(origins: Sequence[TextOrigin]) -> Iterator[Problem]:
    if not origins:
        yield Problem(
            where="SOURCE", what="none is given", fix="name files or folders, or use --corpus offline-english"
        )
    paths: set[Path] = set()
    for origin in origins:
        if not (math.isfinite(origin.weight) and origin.weight > 0):
            fix = "use a number above 0, or leave the source out"
            why = "a source is seen in proportion to its weight"
            yield Problem(where=str(origin.path), what=f"has the weight {origin.weight:g}", why=why, fix=fix)
        if resolve_path(origin.path) in paths:
            yield Problem(
                where=str(origin.path), what="is given twice", fix=f"use {origin.path}=2 to see it twice as often"
            )
        paths.add(resolve_path(origin.path))


def _bad_numbers(recipe: Recipe) -> Iterator[Problem]:
    if not 0 <= recipe.heldout <= 0.5:
        fix = "use 0 to 0.5; 0.01 is usual"
        yield Problem(where="--heldout", what=f"{recipe.heldout:g} is not a share to hold out", fix=fix)
    if not LEAST_VOCAB <= recipe.vocab <= MOST_VOCAB:
        why = f"{LEAST_VOCAB} are the bytes and the end of text"
        fix = f"use {LEAST_VOCAB} to {MOST_VOCAB:,}"
        yield Problem(where="--vocab", what=f"{recipe.vocab:,} is out of range", why=why, fix=fix)
    if recipe.reading.split_on not in SPLIT_ON:
        suggestion = nearest(recipe.reading.split_on, SPLIT_ON)
        fix = f"use {suggestion}" if suggestion else f"use one of {', '.join(SPLIT_ON)}"
        yield Problem(where="--split-on", what=f'"{recipe.reading.split_on}" is unknown', fix=fix)
    if recipe.shard_tokens < 1:
        yield Problem(where="--shard-tokens", what=f"{recipe.shard_tokens:,} must be at least 1", fix="use 1 or more")


def _check_out(out: Path) -> None:
    if not (path_exists(out) or out.is_symlink()):
        return
    problem = "already holds a dataset" if is_file(out / MANIFEST) else "already exists"
    raise mistake(str(out), problem, why="a build never changes what is there", fix="remove it, or name another folder")


def _nothing_found(recipe: Recipe) -> UserError:
    sources = ", ".join(str(origin.path) for origin in recipe.origins)[:200]
    fix = "look at the sources, or cut them in more documents with --split-on blank"
    return mistake(sources, "no document is left to train on", why="all are empty, missing or held out", fix=fix)


def _publish_dataset(partial: Path, out: Path, manifest: DatasetManifest) -> None:
    (partial / STATE).unlink(missing_ok=True)
    replace_text(partial / MANIFEST, manifest.dump())
    partial.rename(out)
    # Flushed, so that the rename survives a power failure.
    handle = os.open(out.parent, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _cannot_write(out: Path, error: OSError) -> PhalanxError:
    fix = "finished shards are kept: make room and run the same command, which resumes"
    return write_failure(out, error, fix=fix)


def _stored_state(path: Path) -> _BuildState | None:
    """Read the state of an unfinished build; None if it is missing or damaged."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        return _BuildState(**{**raw, "sources": [source_from(source) for source in raw["sources"]]})
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _recipe_fingerprint(recipe: Recipe, files: list[list[Path]]) -> str:
    """Return a digest of everything that must not change between a build and its continuation."""
    texts = [repr(dataclasses.replace(recipe, tokenizer=None)), _tokenizers_version()]
    if recipe.tokenizer is not None:
        texts.append(load_tokenizer(recipe.tokenizer, end_of_text=recipe.end_of_text).sha256)
    for path in itertools.chain.from_iterable(files):
        stat = path.stat()
        texts.append(f"{path} {stat.st_size} {stat.st_mtime_ns}")
    return hashlib.sha256("\n".join(texts).encode("utf-8", "surrogateescape")).hexdigest()


def _token_dtype(tokenizer: TextTokenizer) -> Literal["uint16", "uint32"]:
    return "uint16" if tokenizer.vocab <= 2**16 else "uint32"


def _tokenizers_version() -> str:
    try:
        return version("phalanx")
    except PackageNotFoundError:
        return "unknown"
