"""What token numbers mean: the vocabulary of a tokenizer.json or vocab.json, compared word by word.

A digest of the file alone says too little: a tokenizer saved again by another version of a library, or with other
settings for padding and chat, has other bytes and gives the same numbers.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.errors import UserError, mistake
from phalanx.io.files import read_bounded

TOKENIZER, WORDS = "tokenizer.json", "vocab.json"  # of any tokenizer; of GPT-2's kind, before there was the first
MOST_BYTES = 1 << 28  # Gemma's tokenizer.json, one of the largest, has 33 MB


@dataclass(frozen=True, kw_only=True, slots=True)
class Vocabulary:
    """The words of a tokenizer and their numbers."""

    file: Path
    sha256: str  # of the file's text
    numbers: Mapping[str, int]
    cutting: str  # a digest of what else decides how text is cut into words; empty where the file does not say


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """How the vocabulary of data differs from that of weights. All empty: every number means the same to both."""

    conflicts: tuple[tuple[int, str, str], ...] = ()  # number, its word in the data, its word to the weights or ""
    added: int = 0  # words of the data behind the last number of the weights
    cut_otherwise: bool = False  # the same words, and other rules which of them a text becomes


def read_vocabulary(folder: Path) -> Vocabulary | None:
    """Of the tokenizer in a folder; None where there is none. Raises UserError for a file that is no tokenizer."""
    for name in (TOKENIZER, WORDS):
        if (folder / name).is_file():
            return _read(folder / name)
    return None


def compare_vocabularies(data: Vocabulary, weights: Vocabulary) -> Comparison:
    """What the numbers of the data would mean to the weights."""
    if data.sha256 == weights.sha256:
        return Comparison()
    words = {number: word for word, number in weights.numbers.items()}
    most = max(words, default=-1)
    conflicts, added = [], 0
    for word, number in sorted(data.numbers.items(), key=lambda item: item[1]):
        if weights.numbers.get(word) == number:
            continue
        if number > most and word not in weights.numbers:
            added += 1
        else:
            conflicts.append((number, word, words.get(number, "")))
    otherwise = bool(data.cutting and weights.cutting) and data.cutting != weights.cutting
    return Comparison(conflicts=tuple(conflicts), added=added, cut_otherwise=otherwise)


def _read(path: Path) -> Vocabulary:
    try:
        data = read_bounded(path, MOST_BYTES)
        found = json.loads(data.decode())
    except (OSError, ValueError, RecursionError) as error:
        raise _none(path, f"cannot be read: {getattr(error, 'strerror', None) or error}") from error
    numbers, cutting = (found, "") if path.name == WORDS else _parts(path, found)
    if not isinstance(numbers, dict) or not all(type(number) is int for number in numbers.values()):
        raise _none(path, "has words without a number")
    return Vocabulary(file=path, sha256=hashlib.sha256(data).hexdigest(), numbers=numbers, cutting=cutting)


def _parts(path: Path, found: Any) -> tuple[dict[str, int], str]:
    """The words of a tokenizer.json, added ones too, and a digest of how it cuts text."""
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
        merges = [one if isinstance(one, str) else " ".join(one) for one in model.pop("merges", None) or ()]
        rules = [found.get("normalizer"), found.get("pre_tokenizer"), merges, scores]
        stated = {name: value for name, value in model.items() if value}  # newer versions also write what is off
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _none(path, f"is not a tokenizer: {type(error).__name__} {str(error)[:60]}") from error
    told = json.dumps([rules, stated], sort_keys=True, ensure_ascii=True)
    return numbers, hashlib.sha256(told.encode()).hexdigest()


def _none(path: Path, what: str) -> UserError:
    return mistake(
        str(path),
        what,
        why="the numbers in the data and in the weights cannot be compared",
        fix="copy it again from where the weights or the data come from",
    )
