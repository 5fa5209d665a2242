"""A file of words, line by line, from somebody else: bounded, and every mistake with its file and line."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from phalanx.errors import UserError, mistake, nearest

DIGITS = 15  # beyond these a number is a slip


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """The words of a line, and where it stands."""

    path: Path
    number: int
    words: tuple[str, ...]

    @property
    def where(self) -> str:
        """`file:line`."""
        return f"{self.path}:{self.number}"

    def wrong(self, what: str, *, why: str = "", fix: str = "") -> UserError:
        """A mistake in this line."""
        return mistake(self.where, what, why=why, fix=fix)

    def whole(self, at: int, *, least: int = 0, most: int = 10**DIGITS) -> int:
        """The word at a place as a whole number."""
        name = self.words[at - 1]
        if at >= len(self.words):
            raise self.wrong(f'"{name[:40]}" has no number', fix=f"write {name[:40]} {max(least, 1)}")
        text = self.words[at]
        if not (text.isascii() and text.isdecimal() and len(text) <= DIGITS):
            raise self.wrong(f'{name[:40]} "{text[:40]}" is not a whole number')
        if not least <= int(text) <= most:
            raise self.wrong(f"{name[:40]} {int(text):,} is out of range", fix=f"use {least:,} to {most:,}")
        return int(text)

    def unknown(self, word: str, known: Iterable[str]) -> UserError:
        """A word that the format does not have."""
        near, choices = nearest(word, known), ", ".join(known)
        return self.wrong(f'there is no "{word[:40]}"', fix=f"did you mean {near}?" if near else f"use {choices}")


def read_lines(path: Path, *, most_bytes: int) -> list[Line]:
    """Lines with words, without comments; raises UserError for what is no such file."""
    found: list[Line] = []
    for number, text in enumerate(_text(path, most_bytes).splitlines(), start=1):
        words = tuple(text.split("#", 1)[0].split())
        if words:
            found.append(Line(path=path, number=number, words=words))
    if not found:
        raise mistake(str(path), "is empty", fix="a .topo and a .cm begin with Nodes N")
    return found


def _text(path: Path, most_bytes: int) -> str:
    try:
        with path.open("rb") as stream:
            raw = stream.read(most_bytes + 1)
    except (OSError, ValueError) as error:
        what = getattr(error, "strerror", None) or str(error)
        raise mistake(str(path), f"cannot be read: {what[:120]}", fix="check the path and its permissions") from None
    if len(raw) > most_bytes:
        raise mistake(str(path), f"is larger than {most_bytes / 2**20:g} MiB", fix="check the path")
    try:
        return raw.decode("ascii")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise mistake(f"{path}:{line}", "is not plain text", fix="name a .topo or .cm file") from None
