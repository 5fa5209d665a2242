"""Texts with unknown parts: a mark takes the place of each, and refers to its reason.

A mark is a private-use character, a number, and another private-use character: it passes through quoting, splitting
and joining like any other text, so that no operation loses it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

OPEN, CLOSE = "\ue000", "\ue001"
MARK = re.compile(f"{OPEN}(\\d+){CLOSE}")
# Characters of one value: variables within variables could grow without end
MOST_TEXT = 1 << 16
MOST_CHOICES = 12

# A variable: text, an array, or a table
Text = str | tuple[str, ...] | dict[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Unknown:
    """The reason why a text is not known.

    `unset` is a variable that nothing sets; `choices` are the texts that it may be.
    """

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
        """Return the mark for an unknown."""
        if entry not in self._known:
            self._known[entry] = f"{OPEN}{len(self.entries)}{CLOSE}"
            self.entries.append(entry)
        return self._known[entry]

    def first(self, text: str) -> Unknown | None:
        """Return the first unknown in a text; None if there is none."""
        match = MARK.search(text)
        return self.entries[int(match.group(1))] if match else None

    def alone(self, text: str) -> Unknown | None:
        """Return the unknown if it makes up the full text; None otherwise."""
        match = MARK.fullmatch(text)
        return self.entries[int(match.group(1))] if match else None

    def derived(self, text: str) -> str:
        """Return a mark for a value that was computed from an unknown text."""
        cause = self.first(text)
        assert cause is not None
        return self.mark(Unknown(kind="open", why=cause.why, name=cause.name, line=cause.line, file=cause.file))

    def is_unset(self, text: str) -> bool:
        """Return whether the text consists of one variable that nothing sets."""
        cause = self.alone(text)
        return cause is not None and cause.kind == "unset"

    def shown(self, text: str) -> str:
        """Return the text for messages, with $NAME for unknown parts."""

        def name(found: re.Match[str]) -> str:
            entry = self.entries[int(found.group(1))]
            return f"${entry.name}" if entry.name else "$(…)"

        return MARK.sub(name, text)


def is_known(text: str) -> bool:
    """Return whether no part of a text is unknown."""
    return OPEN not in text


def merged_values(
    first: Text | None, second: Text | None, table: UnknownTable, *, why: str, line: int, file: str
) -> Text:
    """Merge the values of two branches: shared values are kept, and a mark replaces those that differ."""
    if isinstance(first, dict) or isinstance(second, dict):
        old, new = (value if isinstance(value, dict) else {} for value in (first, second))
        mark = table.mark(Unknown(kind="open", why=why, line=line, file=file))
        return {
            key: old[key] if old.get(key) == new.get(key) else mark
            for key in (*old, *(key for key in new if key not in old))
        }
    if isinstance(first, tuple) or isinstance(second, tuple):
        first_items, second_items = (
            value if isinstance(value, tuple) else ((value,) if value else ()) for value in (first, second)
        )
        num_shared = 0
        while (
            num_shared < min(len(first_items), len(second_items))
            and first_items[num_shared] == second_items[num_shared]
        ):
            num_shared += 1
        choices = _choices(first_items[num_shared:], second_items[num_shared:], table)
        return (
            *first_items[:num_shared],
            table.mark(Unknown(kind="either", why=why, line=line, file=file, choices=choices)),
        )
    first_text, second_text = first or "", second or ""
    words, other_words = first_text.split(" "), second_text.split(" ")
    num_shared = 0
    while num_shared < min(len(words), len(other_words)) - 0 and words[num_shared] == other_words[num_shared]:
        num_shared += 1
    # A list of arguments that grew in one of the branches
    if num_shared and "--" in first_text + second_text:
        choices = _choices(
            tuple(" ".join(words[num_shared:]).split()), tuple(" ".join(other_words[num_shared:]).split()), table
        )
        return " ".join(
            [*words[:num_shared], table.mark(Unknown(kind="either", why=why, line=line, file=file, choices=choices))]
        )
    choices = _choices((first_text,) if first_text else (), (second_text,) if second_text else (), table)
    return table.mark(Unknown(kind="either", why=why, line=line, file=file, choices=choices))


def _choices(one: tuple[str, ...], two: tuple[str, ...], table: UnknownTable) -> tuple[tuple[str, ...], ...]:
    """Return both lists; a list that is itself a choice contributes its alternatives."""
    choices: list[tuple[str, ...]] = []
    for words in (one, two):
        inner = table.alone(words[0]) if len(words) == 1 else None
        for choice in inner.choices if inner is not None and inner.kind == "either" else (words,):
            if choice not in choices:
                choices.append(choice)
    return tuple(choices[:MOST_CHOICES]) if len(choices) <= MOST_CHOICES else ()
