"""Dataset folders (`manifest.json`, written last, with a digest for every file) and the vocabularies of tokenizers.

The manifest holds its own digest, that of every file, and that of each list of block digests, which is stored next to
the tokens: any block can be compared when it is read, and one changed bit anywhere is detected. This is not in train/
because plan and check read the data of a job too.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from phalanx.errors import Problem, UserError, mistake
from phalanx.io.checksums import file_sha256
from phalanx.io.files import FileTooLargeError, read_bounded, read_failure, replace_bytes
from phalanx.io.path_probes import is_file, is_folder, os_reason
from phalanx.io.write_errors import write_failure
from phalanx.job.model import VOCAB

FORMAT = 2
FORMATS = (1, 2)  # format 1, until 0.6, has digests of whole files only, and none of the manifest itself
# Small, because a read takes whole blocks: a sample of 256 tokens of two bytes is half a kilobyte. The digests are a
# five-hundredth of the tokens' size.
BLOCK_BYTES = 1 << 13
BLOCK_DIGEST_BYTES = 16
MOST_BLOCK_BYTES = 1 << 24
MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"
Split = Literal["train", "heldout"]
SPLITS: tuple[Split, ...] = ("train", "heldout")
LEAST_VOCAB = 257  # the 256 bytes and the end of text
# Increased when the cleaning of a corpus changes, so that text cleaned by older code is not reused from the cache.
CLEANING = 1
MOST_MANIFEST_BYTES = 1 << 28  # a trillion tokens are 7,451 shards and 3 MB
REBUILD = "build it again with phalanx data build, or copy it again from where it is whole"


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """A file of tokens, and a file with the index of its documents (cumulative tokens and bytes of text, as int64)."""

    file: str
    split: Split
    tokens: int
    documents: int
    text_bytes: int
    sha256: str
    index_sha256: str
    blocks_sha256: str = ""  # of the file of block digests; empty if there is none, as before 0.7

    @property
    def index_file(self) -> str:
        """The name of the document index."""
        return Path(self.file).with_suffix(".idx").name

    @property
    def block_file(self) -> str:
        """The name of the file of block digests, BLOCK_DIGEST_BYTES for each block of the tokens."""
        return Path(self.file).with_suffix(".blocks").name


@dataclass(frozen=True, kw_only=True, slots=True)
class Tally:
    """Counts of what was found while a source was read."""

    records: int = 0  # documents, lines or rows read
    documents: int = 0
    empty: int = 0
    missing: int = 0  # lines or rows without readable text
    bad_utf8: int = 0  # byte sequences replaced by U+FFFD
    cut: int = 0  # documents too long to be held in one piece, and therefore cut


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """One source of a dataset: its own shards, read in turn with those of other sources by weight."""

    name: str
    path: str
    weight: float
    licence: str = ""
    tally: Tally = field(default_factory=Tally)
    shards: tuple[Shard, ...] = ()

    def of(self, split: Split) -> tuple[Shard, ...]:
        """Return the shards of one split, in order."""
        return tuple(shard for shard in self.shards if shard.split == split)


@dataclass(frozen=True, kw_only=True, slots=True)
class DatasetManifest:
    """The manifest of a dataset."""

    format: int = FORMAT
    phalanx: str
    vocab: int
    dtype: Literal["uint16", "uint32"]
    end_of_text: int
    tokenizer_sha256: str
    heldout: float
    split_on: str
    sources: tuple[Source, ...]
    block_bytes: int = 0  # 0 if shards have no block digests

    @property
    def token_bytes(self) -> int:
        """The size of one token in bytes."""
        return 2 if self.dtype == "uint16" else 4

    @property
    def has_block_digests(self) -> bool:
        """True if every block of every shard can be compared when it is read."""
        return self.block_bytes > 0 and all(shard.blocks_sha256 for shard in self.shards)

    @property
    def shards(self) -> tuple[Shard, ...]:
        """Every shard of every source."""
        return tuple(shard for source in self.sources for shard in source.shards)

    def total(self, what: str, split: Split) -> int:
        """Return the sum over a split of "tokens", "documents" or "text_bytes"."""
        return sum(int(getattr(shard, what)) for shard in self.shards if shard.split == split)

    @property
    def digest(self) -> str:
        """A digest that changes if, and only if, a sampler would return different tokens."""
        parts = [self.tokenizer_sha256, self.dtype]
        parts += [f"{source.weight!r}" + "".join(s.split + s.sha256 for s in source.shards) for source in self.sources]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    def dump(self) -> str:
        """Return the text of manifest.json, including the digest of the rest of it."""
        return _text_with_digest(dataclasses.asdict(self))


def _text_with_digest(body: dict[str, Any]) -> str:
    """Return the canonical text of a manifest, which reveals any changed bit, even one that changes no value."""
    digest = hashlib.sha256(json.dumps(body, indent=1, ensure_ascii=False).encode()).hexdigest()
    return json.dumps({**body, "sha256": digest}, indent=1, ensure_ascii=False) + "\n"


class DamagedDataset(UserError):
    """Raised for a file of a dataset that is missing, cut or changed since it was written."""


def read_manifest(folder: Path) -> DatasetManifest:
    """Read the manifest of a dataset folder; raises UserError if there is none that can be used."""
    path = folder / MANIFEST
    try:
        text = read_bounded(path, MOST_MANIFEST_BYTES).decode()
        raw = json.loads(text)
    except FileNotFoundError:
        what = "is not a dataset: it has no manifest.json" if is_folder(folder) else "is no folder"
        why = "the manifest is written last, so a folder without one was never finished" if is_folder(folder) else ""
        raise mistake(str(folder), what, why=why, fix=f"make it with phalanx data build {folder} SOURCE...") from None
    except OSError as error:
        raise read_failure(path, error) from error
    except FileTooLargeError as error:
        raise _damaged_manifest(path, str(error)) from error
    except (ValueError, RecursionError) as error:
        raise _damaged_manifest(path, f"is not JSON: {error}") from error
    version = raw.get("format") if isinstance(raw, dict) else None
    if version not in FORMATS:
        fix = "use the Phalanx that made it, or build it again"
        known = " and ".join(map(str, FORMATS))
        raise mistake(str(path), f"has format {version!r}, and this Phalanx reads {known}", fix=fix)
    if version != 1:
        raw.pop("sha256", None)
        if _text_with_digest(raw) != text:
            raise _damaged_manifest(path, "has changed since it was written: its digest does not match its text")
    try:
        manifest = DatasetManifest(**{**raw, "sources": tuple(map(source_from, raw["sources"]))})
    except (KeyError, TypeError, AttributeError) as error:
        raise _damaged_manifest(path, f"has changed or is damaged: {_key_problem(error)}") from error
    if problem := _manifest_problem(manifest):
        raise _damaged_manifest(path, problem)
    return manifest


def _key_problem(error: Exception) -> str:
    """Describe the missing or unknown key that an exception of a constructor or lookup names."""
    if isinstance(error, KeyError):
        return f"it lacks the key {error}"
    match = re.search(r"unexpected keyword argument ('.*')$", str(error))
    if match is not None:
        return f"nobody knows its key {match[1]}"
    match = re.search(r"missing \d+ required keyword-only arguments?: (.*)$", str(error))
    return f"it lacks the key {match[1]}" if match is not None else "a value is of another kind than it should be"


def _manifest_problem(manifest: DatasetManifest) -> str:
    """Describe an impossible value in a manifest, which may come from an untrusted source; empty if there is none."""
    counts = (manifest.vocab, *(count for shard in manifest.shards for count in (shard.tokens, shard.documents)))
    if not all(type(count) is int and count >= 0 for count in counts):
        return "has a vocabulary or a count of tokens or documents that is no whole number"
    if not isinstance(manifest.tokenizer_sha256, str) or manifest.dtype not in ("uint16", "uint32"):
        return "has a digest or a type of tokens that is none"
    for source in manifest.sources:
        weight = source.weight
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < math.inf:
            return f"gives a source the weight {str(weight)[:40]!r}"
    for shard in manifest.shards:
        if not isinstance(shard.file, str) or Path(shard.file).name != shard.file or shard.split not in SPLITS:
            return f"names a shard {str(shard.file)[:80]!r}, and only files of its own folder are read"
    size = manifest.block_bytes
    if type(size) is not int or not (size == 0 or (size % 8 == 0 and 8 <= size <= MOST_BLOCK_BYTES)):
        return f"has blocks of {str(size)[:40]!r} bytes"
    return ""


def source_from(raw: dict[str, Any]) -> Source:
    """Build a Source from JSON."""
    return Source(**{**raw, "tally": Tally(**raw["tally"]), "shards": tuple(Shard(**shard) for shard in raw["shards"])})


def _damaged_manifest(path: Path, what: str) -> DamagedDataset:
    return DamagedDataset(
        Problem(where=str(path), what=what, why="nothing else says which shards there are", fix=REBUILD)
    )


def check_dataset_files(folder: Path, manifest: DatasetManifest, *, with_blocks: bool = True) -> None:
    """Check that every file exists with its size, without reading contents; raises UserError with all that do not."""
    problems: list[Problem] = []
    for shard in manifest.shards:
        size = shard.tokens * manifest.token_bytes
        problems += _size_problem(folder / shard.file, size)
        problems += _size_problem(folder / shard.index_file, shard.documents * 16)
        if shard.blocks_sha256 and with_blocks:
            digest_bytes = count_blocks(size, manifest.block_bytes) * BLOCK_DIGEST_BYTES
            problems += _size_problem(
                folder / shard.block_file, digest_bytes, fix=f"make it again: {add_blocks(folder)}"
            )
    problems += [] if is_file(folder / TOKENIZER) else _size_problem(folder / TOKENIZER, 1)
    if problems:
        raise DamagedDataset(problems)


def _size_problem(path: Path, size: int, *, fix: str = REBUILD) -> Iterator[Problem]:
    try:
        size_found = path.stat().st_size
    except FileNotFoundError:
        yield Problem(where=str(path), what="is missing", why="the manifest lists it", fix=fix)
        return
    if size_found != size:
        kind = "is truncated" if size_found < size else "is too long"
        what = f"{kind}: {size_found:,} bytes where the manifest says {size:,}"
        yield Problem(where=str(path), what=what, why="every sample behind it would be another", fix=fix)


def add_blocks(folder: Path) -> str:
    """Return the command that computes block digests."""
    return f"phalanx data checksum {folder}"


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifiedDataset:
    """A dataset of which every byte is as it was written."""

    manifest: DatasetManifest
    written: tuple[str, ...] = ()  # files of block digests that were missing or damaged, and were written again
    trouble: str = ""  # the reason why block digests that never existed could not be added


def verify_dataset(folder: Path) -> VerifiedDataset:
    """Read every byte and compare it; raises UserError with all files that are not as they were written.

    Block digests that are missing or damaged are computed from the tokens, once those are found intact: a dataset of
    0.6, which has none, gets them and a new manifest. Raises SystemFailure if damaged ones cannot be replaced.
    """
    manifest = read_manifest(folder)
    check_dataset_files(folder, manifest, with_blocks=False)
    block_bytes = manifest.block_bytes or BLOCK_BYTES
    problems = list(_changed_digest(folder / TOKENIZER, file_sha256(folder / TOKENIZER), manifest.tokenizer_sha256))
    blocks: dict[str, bytes] = {}
    for shard in manifest.shards:
        sha256, blocks[shard.file] = digest_blocks(folder / shard.file, block_bytes)
        problems += _changed_digest(folder / shard.file, sha256, shard.sha256)
        problems += _changed_digest(
            folder / shard.index_file, file_sha256(folder / shard.index_file), shard.index_sha256
        )
    if problems:
        raise DamagedDataset(problems)
    return _with_blocks(folder, manifest, block_bytes, blocks)


def _changed_digest(path: Path, found: str, wanted: str) -> Iterator[Problem]:
    if found != wanted:
        what = f"has changed: its digest is {found[:12]}…, and the manifest says {wanted[:12]}…"
        yield Problem(where=str(path), what=what, why="training on it would not repeat", fix=REBUILD)


def _with_blocks(
    folder: Path, manifest: DatasetManifest, block_bytes: int, blocks: Mapping[str, bytes]
) -> VerifiedDataset:
    """Write the block digests that are missing or wrong, and then the manifest if it has none of them."""
    written_files, path = [], folder / MANIFEST
    sources = []
    try:
        for source in manifest.sources:
            shards = []
            for shard in source.shards:
                path, block_digests = folder / shard.block_file, blocks[shard.file]
                if not _holds_bytes(path, block_digests):
                    replace_bytes(path, block_digests)
                    written_files.append(path.name)
                shards.append(replace(shard, blocks_sha256=hashlib.sha256(block_digests).hexdigest()))
            sources.append(replace(source, shards=tuple(shards)))
        complete = replace(manifest, format=FORMAT, block_bytes=block_bytes, sources=tuple(sources))
        if complete != manifest:
            path = folder / MANIFEST
            replace_bytes(path, complete.dump().encode())
    except OSError as error:
        what = os_reason(error, "written")
        if not manifest.has_block_digests:
            return VerifiedDataset(manifest=manifest, trouble=f"{path}: {what}")
        fix = "run it where the folder can be written; training only reads it"
        raise write_failure(path, error, fix=fix) from error
    return VerifiedDataset(manifest=complete, written=tuple(written_files))


def _holds_bytes(path: Path, data: bytes) -> bool:
    try:
        return read_bounded(path, len(data)) == data
    except (OSError, FileTooLargeError):
        return False


def count_blocks(size_bytes: int, block_bytes: int) -> int:
    """Return the number of blocks of a file; the last may be shorter."""
    return -(-size_bytes // block_bytes) if block_bytes else 0


def block_digest(data: bytes | memoryview) -> bytes:
    """Return the digest of one block of tokens. BLAKE2b is faster than sha256 without sha256 instructions."""
    return hashlib.blake2b(data, digest_size=BLOCK_DIGEST_BYTES).digest()


def digest_blocks(path: Path, block_bytes: int) -> tuple[str, bytes]:
    """Return the sha256 of a file and the digests of its blocks, reading it once."""
    file_digest, blocks = hashlib.sha256(), bytearray()
    with path.open("rb") as stream:
        while data := stream.read(block_bytes):
            file_digest.update(data)
            blocks += block_digest(data)
    return file_digest.hexdigest(), bytes(blocks)


def cache_folder(environ: Mapping[str, str]) -> Path:
    """Return the folder in which fetched and built text is cached for this user."""
    base = environ.get("XDG_CACHE_HOME") or ""
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "phalanx"


def corpus_vocab(model_vocab: int) -> int:
    """Return the vocabulary of a corpus for a model.

    A model with fewer rows than VOCAB gets a tokenizer of its size.

    >>> corpus_vocab(128_256), corpus_vocab(512)
    (8192, 512)
    """
    return max(LEAST_VOCAB, min(model_vocab, VOCAB))


def corpus_folder(name: str, cache: Path, *, vocab: int) -> Path:
    """Return the folder of a corpus for a model with `vocab` rows, whether or not it has been built."""
    return cache / "datasets" / f"{name}-{corpus_vocab(vocab)}-{CLEANING}"


# The meaning of token ids: the vocabulary of a tokenizer.json or vocab.json, compared word by word.
#
# A digest of the file alone is not enough: a tokenizer saved again by another version of a library, or with other
# settings for padding and chat, has other bytes and gives the same ids.


WORDS = "vocab.json"  # of GPT-2-style tokenizers without a tokenizer.json
MOST_TOKENIZER_BYTES = 1 << 28  # Gemma's tokenizer.json, one of the largest, has 33 MB


@dataclass(frozen=True, kw_only=True, slots=True)
class Vocabulary:
    """The words of a tokenizer and their token ids."""

    file: Path
    sha256: str  # of the file's text
    numbers: Mapping[str, int]
    # A digest of the other settings that decide how text is split into words; empty where the file has none.
    cutting: str


@dataclass(frozen=True, kw_only=True, slots=True)
class VocabularyComparison:
    """Differences between the vocabularies of data and weights; all empty if every token id means the same to both."""

    conflicts: tuple[tuple[int, str, str], ...] = ()  # token id, its word in the data, its word to the weights or ""
    added: int = 0  # words of the data beyond the last token id of the weights
    cut_otherwise: bool = False  # the same words, but other rules for splitting text into them


def read_vocabulary(folder: Path) -> Vocabulary | None:
    """Read the vocabulary of the tokenizer in a folder; None if there is none. Raises UserError for an invalid file."""
    for name in (TOKENIZER, WORDS):
        if is_file(folder / name):
            return _read_vocabulary(folder / name)
    return None


def compare_vocabularies(data: Vocabulary, weights: Vocabulary) -> VocabularyComparison:
    """Compare the meaning of the data's token ids with their meaning to the weights."""
    if data.sha256 == weights.sha256:
        return VocabularyComparison()
    words = {number: word for word, number in weights.numbers.items()}
    max_number = max(words, default=-1)
    conflicts, added = [], 0
    for word, number in sorted(data.numbers.items(), key=lambda item: item[1]):
        if weights.numbers.get(word) == number:
            continue
        if number > max_number and word not in weights.numbers:
            added += 1
        else:
            conflicts.append((number, word, words.get(number, "")))
    splits_differently = bool(data.cutting and weights.cutting) and data.cutting != weights.cutting
    return VocabularyComparison(conflicts=tuple(conflicts), added=added, cut_otherwise=splits_differently)


def _read_vocabulary(path: Path) -> Vocabulary:
    try:
        text = read_bounded(path, MOST_TOKENIZER_BYTES).decode()
        content = json.loads(text)
    except FileTooLargeError as error:
        raise _not_a_tokenizer(path, str(error)) from error
    except (OSError, ValueError, RecursionError) as error:
        raise _not_a_tokenizer(path, f"cannot be read: {getattr(error, 'strerror', None) or error}") from error
    numbers, cutting = (content, "") if path.name == WORDS else _tokenizer_parts(path, content)
    if not isinstance(numbers, dict) or not all(type(number) is int for number in numbers.values()):
        raise _not_a_tokenizer(path, "has words without a number")
    return Vocabulary(file=path, sha256=hashlib.sha256(text.encode()).hexdigest(), numbers=numbers, cutting=cutting)


def _tokenizer_parts(path: Path, found: Any) -> tuple[dict[str, int], str]:
    """Return the words of a tokenizer.json, including added ones, and a digest of its rules for splitting text."""
    try:
        model = dict(found["model"])
        words = model.pop("vocab")
        if isinstance(words, list):  # Unigram: [word, score] in the order of the numbers
            scores = [score for _, score in words]
            numbers = {str(word): number for number, (word, _) in enumerate(words)}
        else:
            scores, numbers = [], dict(words)
        numbers |= {str(token["content"]): token["id"] for token in found.get("added_tokens") or ()}
        # "a b" until version 0.20 of the tokenizers library, ["a", "b"] since.
        merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model.pop("merges", None) or ()]
        rules = [found.get("normalizer"), found.get("pre_tokenizer"), merges, scores]
        # newer versions also write settings that are off
        settings = {name: value for name, value in model.items() if value}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _not_a_tokenizer(path, f"is not a tokenizer: {type(error).__name__} {str(error)[:60]}") from error
    statement = json.dumps([rules, settings], sort_keys=True, ensure_ascii=True)
    return numbers, hashlib.sha256(statement.encode()).hexdigest()


def _not_a_tokenizer(path: Path, what: str) -> UserError:
    return mistake(
        str(path),
        what,
        why="the numbers in the data and in the weights cannot be compared",
        fix="copy it again from where the weights or the data come from",
    )
