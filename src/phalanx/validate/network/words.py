"""Numbers out of the words of a row."""

from __future__ import annotations

import re
from typing import TypeVar

T = TypeVar("T")

_WORDS = {"one": 1, "single": 1, "two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8}
_WORDS |= {"sixteen": 16}
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_THOUSANDS = {"": 1, "K": 1000, "M": 1_000_000}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT])iB\b")
_NUMBER = r"\d[\d,_]*(?:\.\d+)?"


class NotSaid(Exception):
    """A row's words leave out something that its quantity depends on."""


def said(value: T | None, what: str) -> T:
    """A value that was found, or NotSaid."""
    if value is None or value == 0:
        raise NotSaid(what)
    return value


def count(text: str, noun: str) -> int | None:
    """The number before a noun: digits, with K or M for thousands and millions, or a word.

    >>> count("2 tiers, 8 planes x 100G", "planes?"), count("one plane", "planes?"), count("131072-host", "hosts?")
    (8, 1, 131072)
    >>> count("75K-GPU job", "GPUs?"), count("131,072 hosts", "hosts?")
    (75000, 131072)
    """
    found = re.search(rf"({_NUMBER}|\b(?:{'|'.join(_WORDS)}))([KM]?)[ -](?:{noun})\b", text, re.IGNORECASE)
    if found is None:
        return None
    word = found[1].lower()
    if word in _WORDS:
        return _WORDS[word]
    return round(float(re.sub(r"[,_]", "", word)[:15]) * _THOUSANDS[found[2].upper()])


def pair(text: str, after: str) -> tuple[int, int] | None:
    """Two numbers with an x between them, before what `after` matches.

    >>> pair("64x800G switches", "G"), pair("32x32 leaf-spine", " leaf"), pair("8 planes x 100G", "G")
    ((64, 800), (32, 32), None)
    """
    found = re.search(rf"(\d+) ?[x×] ?(\d+)(?:{after})", text)
    return (_whole(found[1]), _whole(found[2])) if found else None


def number(text: str, pattern: str) -> float | None:
    """The first group of a pattern as a number."""
    found = re.search(pattern, text)
    return float(found[1].replace(",", "")) if found else None


def size_bytes(text: str) -> float | None:
    """The first size with a binary unit.

    >>> size_bytes("8x H200 128KiB torch"), size_bytes("4x8 B200 16 GiB; measured")
    (131072.0, 17179869184.0)
    """
    found = _SIZE.search(text)
    return float(found[1]) * _UNITS[found[2]] if found else None


def without_size(text: str) -> str:
    """The text with its first size left out: rows that differ only there are one series."""
    return _SIZE.sub("", text, count=1)


def _whole(digits: str) -> int:
    return int(re.sub(r"\D", "", digits)[:15] or "0")
