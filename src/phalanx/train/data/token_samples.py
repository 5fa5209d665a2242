"""Numbered samples from the tokens of dataset folders; opening reads no tokens, however large the dataset."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from phalanx.errors import Problem, UserError, mistake
from phalanx.job.dataset import (
    TOKENIZER,
    DatasetManifest,
    Shard,
    Source,
    Split,
    add_blocks,
    check_dataset_files,
    read_manifest,
)
from phalanx.plan.inputs import too_many_tokens
from phalanx.train.data.sampler import Sampler, make_sampler
from phalanx.train.data.token_blocks import BlockReader, TokenLimit

Tokens = NDArray[np.int64]


class _Stream:
    """The shards of a source as one run of tokens."""

    def __init__(self, folder: Path, manifest: DatasetManifest, shards: Sequence[Shard], reader: BlockReader) -> None:
        self._files, self._reader = [reader.add(folder, shard, manifest) for shard in shards], reader
        self._ends = np.cumsum([0, *(shard.tokens for shard in shards)])
        self.tokens = int(self._ends[-1])

    def read(self, start: int, out: Tokens) -> None:
        """Fill `out` with the tokens from `start`; raise UserError if they are not what was written."""
        num_done = 0
        while num_done < len(out):
            number = int(np.searchsorted(self._ends, start + num_done, side="right")) - 1
            offset = start + num_done - int(self._ends[number])
            count = min(len(out) - num_done, int(self._ends[number + 1]) - start - num_done)
            self._reader.read(self._files[number], offset, out[num_done : num_done + count])
            num_done += count


class TokenDataset:
    """One split of one or several dataset folders that share a tokenizer."""

    def __init__(
        self, folders: Sequence[tuple[Path, DatasetManifest]], split: Split, *, limit: TokenLimit | None = None
    ) -> None:
        self.split: Split = split
        self.folders = tuple(folder for folder, _ in folders)
        self.manifests = tuple(manifest for _, manifest in folders)
        reader = BlockReader(limit=limit)
        self._sources: list[tuple[Source, _Stream]] = []
        for folder, manifest in folders:
            for source in manifest.sources:
                if shards := [shard for shard in source.of(split) if shard.tokens]:
                    self._sources.append((source, _Stream(folder, manifest, shards, reader)))

    @classmethod
    def open(cls, path: Path | Sequence[Path], split: Split, *, vocab: int = 0) -> TokenDataset:
        """Open a split after checking that every file exists with its size; raise UserError otherwise.

        Blocks are compared with their digests when they are read. `vocab` is the model's: a token beyond it is
        refused.
        """
        paths = [path] if isinstance(path, Path) else list(path)
        folders = [(folder, read_manifest(folder)) for folder in paths]
        for folder, manifest in folders:
            check_dataset_files(folder, manifest)
        _check_same_tokenizer(folders)
        dataset = cls(folders, split, limit=TokenLimit(vocab=vocab) if vocab else None)
        if not dataset.num_tokens:
            problem = f"has no {split} text"
            fix = (
                "build it with a larger --heldout, or with more documents (--split-on blank cuts a text in paragraphs)"
            )
            raise mistake(", ".join(map(str, paths)), problem, fix=fix)
        return dataset

    @property
    def vocab(self) -> int:
        """One more than the largest token number."""
        return self.manifests[0].vocab

    @property
    def end_of_text(self) -> int:
        """The token after every document."""
        return self.manifests[0].end_of_text

    @property
    def digest(self) -> str:
        """Identifies the tokens: a resumed run must have the same."""
        return "+".join(manifest.digest for manifest in self.manifests)

    @property
    def tokenizer_path(self) -> Path:
        """The path of the dataset's tokenizer.json."""
        return self.folders[0] / TOKENIZER

    @property
    def num_tokens(self) -> int:
        """Tokens of the split, including end-of-text tokens."""
        return sum(stream.tokens for _, stream in self._sources)

    @property
    def num_bytes(self) -> int:
        """Bytes of the text that the tokens encode."""
        return sum(shard.text_bytes for shard in self.shards)

    @property
    def bytes_per_token(self) -> float:
        """Converts nats per token to bits per byte: loss / ln 2 / bytes_per_token."""
        return self.num_bytes / self.num_tokens

    @property
    def shards(self) -> tuple[Shard, ...]:
        """The shards of the split."""
        return tuple(shard for source, _ in self._sources for shard in source.of(self.split))

    @property
    def source_names(self) -> tuple[str, ...]:
        """The names of the sources that have tokens in this split."""
        return tuple(source.name for source, _ in self._sources)

    def source_samples(self, length: int) -> tuple[int, ...]:
        """Return the samples of each source: windows of `length` inputs and one more token as the last target."""
        return tuple(max(0, (stream.tokens - 1) // length) for _, stream in self._sources)

    def num_samples(self, length: int) -> int:
        """Return the number of samples of all sources."""
        return sum(self.source_samples(length))

    def sampler(self, length: int, seed: int) -> Sampler:
        """Return the order of the samples, with sources blended by their weights."""
        sizes = self.source_samples(length)
        if not any(sizes):
            raise too_long(self, length)
        return make_sampler(sizes, [source.weight for source, _ in self._sources], seed)

    def sample(self, index: int, length: int) -> Tokens:
        """Return length + 1 tokens: the inputs, and one more, so that the targets are the inputs shifted by one."""
        return np.asarray(self.samples(np.asarray([index]), length)[0])

    def samples(self, indices: Tokens, length: int) -> Tokens:
        """Return several samples as rows [count, length + 1]."""
        ends = np.cumsum([0, *self.source_samples(length)])
        if len(indices) and (int(indices.min()) < 0 or int(indices.max()) >= int(ends[-1])):
            raise IndexError(f"samples {indices.min()} to {indices.max()} asked for, of {ends[-1]}")
        rows = np.empty((len(indices), length + 1), dtype=np.int64)
        for row, index in zip(rows, indices, strict=True):
            number = int(np.searchsorted(ends, index, side="right")) - 1
            self._sources[number][1].read((int(index) - int(ends[number])) * length, row)
        return rows

    def tokens(self, most: int) -> list[Tokens]:
        """Return the first `most` tokens of the split, source by source."""
        runs = []
        for _, stream in self._sources:
            run = np.empty(min(stream.tokens, most), dtype=np.int64)
            stream.read(0, run)
            runs.append(run)
            most -= len(run)
        return runs


def too_long(dataset: TokenDataset, length: int) -> UserError:
    """Return the error for a sequence longer than every source."""
    longest = max(stream.tokens for _, stream in dataset._sources) - 1
    return mistake(
        str(dataset.folders[0]),
        f"data.sequence = {length:,} is longer than its {dataset.split} text of {dataset.num_tokens:,} tokens",
        why="a sample is that many tokens and one more from one source",
        fix=f"use data.sequence = {max(1, longest):,} or less, or build from more text",
    )


def check_dataset(dataset: TokenDataset, *, model_vocab: int, sequence: int) -> tuple[Problem, ...]:
    """Check a dataset against a model and sequence length: raise UserError for errors, return warnings."""
    location, vocab = str(dataset.folders[0]), dataset.vocab
    problems = [too_many_tokens(location, "the data", vocab, model_vocab=model_vocab)] if vocab > model_vocab else []
    if not dataset.num_samples(sequence):
        problems += too_long(dataset, sequence).problems
    if problems:
        raise UserError(problems)
    unchecked = [
        Problem(
            where=str(folder),
            what="has no digests of its blocks, as before 0.7: damaged tokens would go unnoticed",
            fix=f"add them: {add_blocks(folder)}",
        )
        for folder, manifest in zip(dataset.folders, dataset.manifests, strict=True)
        if not manifest.has_block_digests
    ]
    short_sources = [
        Problem(where=name, what=f"is shorter than one sequence of {sequence:,} and is left out")
        for name, samples in zip(dataset.source_names, dataset.source_samples(sequence), strict=True)
        if not samples
    ]
    return (*short_sources, *unchecked)


def _check_same_tokenizer(folders: Sequence[tuple[Path, DatasetManifest]]) -> None:
    (first_folder, first_manifest), *further = folders
    for folder, manifest in further:
        if manifest.tokenizer_sha256 != first_manifest.tokenizer_sha256:
            problem = f"was made with another tokenizer than {first_folder}"
            fix = f"build it again with --tokenizer {first_folder / TOKENIZER}"
            raise mistake(str(folder), problem, why="the same number would mean two words", fix=fix)
