"""Texts of which a part is not known: a mark stands in its place, and says why.

A mark is one character out of a private range, a number, and one more: it passes through quoting, splitting and joining
like any other text, so nothing that touches it can lose it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

OPEN, CLOSE = "\ue000", "\ue001"
MARK = re.compile(f"{OPEN}(\\d+){CLOSE}")
MOST_TEXT = 1 << 16  # characters of one value: variables within variables could grow without end
MOST_CHOICES = 12

Text = str | tuple[str, ...] | dict[str, str]  # a variable: text, an array, or a table


@dataclass(frozen=True, kw_only=True, slots=True)
class Unknown:
    """Why a text is not known. `unset` is a variable that nothing sets; `choices` are the texts it may be."""

    kind: Literal["unset", "open", "either"]
    why: str
    name: str = ""
    line: int = 0
    file: str = ""
    choices: tuple[tuple[str, ...], ...] = ()


class UnknownTable:
    """All marks of one script."""

    def __init__(self) -> None:
        self.entries: list[Unknown] = []
        self._known: dict[Unknown, str] = {}

    def mark(self, entry: Unknown) -> str:
        """The text that stands for it."""
        if entry not in self._known:
            self._known[entry] = f"{OPEN}{len(self.entries)}{CLOSE}"
            self.entries.append(entry)
        return self._known[entry]

    def first(self, text: str) -> Unknown | None:
        """Of the unknown parts of a text, the first."""
        found = MARK.search(text)
        return self.entries[int(found.group(1))] if found else None

    def alone(self, text: str) -> Unknown | None:
        """The unknown that is all of a text."""
        found = MARK.fullmatch(text)
        return self.entries[int(found.group(1))] if found else None

    def derived(self, text: str) -> str:
        """A mark for what was computed from a text that is not known."""
        cause = self.first(text)
        assert cause is not None
        return self.mark(Unknown(kind="open", why=cause.why, name=cause.name, line=cause.line, file=cause.file))

    def is_unset(self, text: str) -> bool:
        """Whether the text is nothing but a variable that nothing sets."""
        cause = self.alone(text)
        return cause is not None and cause.kind == "unset"

    def shown(self, text: str) -> str:
        """The text for a person, with $NAME where a part is not known."""

        def name(found: re.Match[str]) -> str:
            entry = self.entries[int(found.group(1))]
            return f"${entry.name}" if entry.name else "$(…)"

        return MARK.sub(name, text)


def is_known(text: str) -> bool:
    """Whether no part of it is unknown."""
    return OPEN not in text


def merged_values(
    first: Text | None, second: Text | None, table: UnknownTable, *, why: str, line: int, file: str
) -> Text:
    """What holds where either of two ways may have been taken: what they share, and a mark for what differs."""
    if isinstance(first, dict) or isinstance(second, dict):
        old, new = (value if isinstance(value, dict) else {} for value in (first, second))
        mark = table.mark(Unknown(kind="open", why=why, line=line, file=file))
        return {
            key: old[key] if old.get(key) == new.get(key) else mark for key in (*old, *(k for k in new if k not in old))
        }
    if isinstance(first, tuple) or isinstance(second, tuple):
        left, right = (value if isinstance(value, tuple) else ((value,) if value else ()) for value in (first, second))
        share = 0
        while share < min(len(left), len(right)) and left[share] == right[share]:
            share += 1
        rest = _choices(left[share:], right[share:], table)
        return (*left[:share], table.mark(Unknown(kind="either", why=why, line=line, file=file, choices=rest)))
    one, two = first or "", second or ""
    words, others = one.split(" "), two.split(" ")
    share = 0
    while share < min(len(words), len(others)) - 0 and words[share] == others[share]:
        share += 1
    if share and "--" in one + two:  # a list of flags that grew in one of the ways
        rest = _choices(tuple(" ".join(words[share:]).split()), tuple(" ".join(others[share:]).split()), table)
        return " ".join(
            [*words[:share], table.mark(Unknown(kind="either", why=why, line=line, file=file, choices=rest))]
        )
    rest = _choices((one,) if one else (), (two,) if two else (), table)
    return table.mark(Unknown(kind="either", why=why, line=line, file=file, choices=rest))


def _choices(one: tuple[str, ...], two: tuple[str, ...], table: UnknownTable) -> tuple[tuple[str, ...], ...]:
    """Both lists; one that is itself a choice gives its own."""
    found: list[tuple[str, ...]] = []
    for words in (one, two):
        inner = table.alone(words[0]) if len(words) == 1 else None
        for choice in inner.choices if inner is not None and inner.kind == "either" else (words,):
            if choice not in found:
                found.append(choice)
    return tuple(found[:MOST_CHOICES]) if len(found) <= MOST_CHOICES else ()
