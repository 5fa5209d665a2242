"""Where each key of a TOML text stands: tomllib gives the values, this gives the lines.

The scanner walks the text once, follows strings, arrays and tables, and judges nothing except depth: on text that
is not TOML it stops, and tomllib says what is wrong.
"""

from __future__ import annotations

import re
import tomllib
from bisect import bisect_right
from contextlib import suppress
from dataclasses import dataclass, field

MOST_DEPTH = 32

Path = tuple[str | int, ...]

# Linear on hostile text without possessive or atomic groups, which Python 3.11.0 to 3.11.4 match wrongly (CPython issue
# 106052): each repeat stops at a character it cannot hold itself, so going back never finds another end.
_BLANK = re.compile(r"(?:[ \t\r\n]+|#[^\n]*)*")
_SPACE = re.compile(r"[ \t]*")
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_STRING = re.compile(
    r'"""[^"\\]*(?:(?:\\.|"{1,2}(?!"))[^"\\]*)*"{3,5}'
    r"|'''[^']*(?:'{1,2}(?!')[^']*)*'{3,5}"
    r'|(?!""")"[^"\\\n]*(?:\\.[^"\\\n]*)*"'
    r"|(?!''')'[^'\n]*'",
    re.DOTALL,
)
_SCALAR = re.compile(r"[^,\]}#\n\"']+")


class TooDeep(Exception):
    """The text nests tables or arrays deeper than MOST_DEPTH."""

    def __init__(self, line: int) -> None:
        super().__init__(line)
        self.line = line


class _Lost(Exception):
    """This is not TOML; tomllib will say where."""


def key_lines(text: str) -> dict[Path, int]:
    """The line of every key, tables and array elements included.

    >>> key_lines("a = 1\\n[b]\\nc.d = [{e = 2}]\\n")[("b", "c", "d", 0, "e")]
    3
    """
    scanner = _Scanner(text=text, starts=[match.end() for match in re.finditer("\n", text)])
    with suppress(_Lost):
        scanner.document()
    return scanner.lines


def split_key(text: str) -> tuple[str, ...] | None:
    """The parts of a dotted key, or None when the text is not one.

    >>> split_key('parallel . "tensor"')
    ('parallel', 'tensor')
    """
    scanner = _Scanner(text=text, starts=[])
    try:
        scanner.skip(_SPACE)
        parts = scanner.key()
    except (_Lost, TooDeep):
        return None
    return parts if scanner.at == len(text) else None


@dataclass(kw_only=True, slots=True)
class _Scanner:
    text: str
    starts: list[int]  # offset of the first character of line 2, 3, ...
    at: int = 0
    lines: dict[Path, int] = field(default_factory=dict)
    elements: dict[Path, int] = field(default_factory=dict)  # array of tables -> index of its newest element

    def document(self) -> None:
        prefix: Path = ()
        self.skip(_BLANK)
        while self.at < len(self.text):
            if self.text[self.at] == "[":
                prefix = self.header()
            else:
                self.pair(prefix, depth=len(prefix))
            self.skip(_BLANK)

    def header(self) -> Path:
        line = self.line()
        opening = "[[" if self.text.startswith("[[", self.at) else "["
        self.at += len(opening)
        self.skip(_SPACE)
        parts = self.key()
        self.expect("]" * len(opening))
        path: Path = ()
        for part in parts[:-1]:
            path = self.newest((*path, part))
            self.lines.setdefault(path, line)
        path = (*path, parts[-1])
        if opening == "[[":
            self.lines.setdefault(path, line)
            self.elements[path] = self.elements.get(path, -1) + 1
            path = (*path, self.elements[path])
        self.lines.setdefault(path, line)
        return path

    def newest(self, path: Path) -> Path:
        """Inside an array of tables, keys belong to its newest element."""
        return (*path, self.elements[path]) if path in self.elements else path

    def pair(self, prefix: Path, *, depth: int) -> None:
        line = self.line()
        parts = self.key()
        self.deepen(depth + len(parts))
        path = prefix
        for part in parts:
            path = (*path, part)
            self.lines.setdefault(path, line)
        self.expect("=")
        self.skip(_SPACE)
        self.value(path, depth=depth + len(parts))

    def key(self) -> tuple[str, ...]:
        parts = [self.key_part()]
        self.skip(_SPACE)
        while self.text.startswith(".", self.at):
            self.at += 1
            self.skip(_SPACE)
            parts.append(self.key_part())
            self.deepen(len(parts))
            self.skip(_SPACE)
        return tuple(parts)

    def key_part(self) -> str:
        bare = _BARE_KEY.match(self.text, self.at)
        if bare:
            self.at = bare.end()
            return bare.group()
        quoted = _STRING.match(self.text, self.at)
        if quoted is None or quoted.group().startswith(('"""', "'''")):
            raise _Lost
        self.at = quoted.end()
        try:
            return str(tomllib.loads(f"k = {quoted.group()}")["k"])
        except tomllib.TOMLDecodeError as error:
            raise _Lost from error

    def value(self, path: Path, *, depth: int) -> None:
        self.deepen(depth)
        match self.text[self.at : self.at + 1]:
            case "[":
                self.array(path, depth=depth)
            case "{":
                self.inline_table(path, depth=depth)
            case '"' | "'":
                self.token(_STRING)
            case _:
                self.token(_SCALAR)

    def array(self, path: Path, *, depth: int) -> None:
        self.at += 1
        index = 0
        self.skip(_BLANK)
        while not self.text.startswith("]", self.at):
            self.lines[(*path, index)] = self.line()
            self.value((*path, index), depth=depth + 1)
            index += 1
            self.skip(_BLANK)
            if self.text.startswith(",", self.at):
                self.at += 1
                self.skip(_BLANK)
            elif not self.text.startswith("]", self.at):
                raise _Lost
        self.at += 1

    def inline_table(self, path: Path, *, depth: int) -> None:
        self.at += 1
        self.skip(_BLANK)  # newlines are not TOML 1.0 here, but tomllib is the judge of that
        while not self.text.startswith("}", self.at):
            self.pair(path, depth=depth + 1)
            self.skip(_BLANK)
            if self.text.startswith(",", self.at):
                self.at += 1
                self.skip(_BLANK)
            elif not self.text.startswith("}", self.at):
                raise _Lost
        self.at += 1

    def token(self, pattern: re.Pattern[str]) -> None:
        found = pattern.match(self.text, self.at)
        if found is None:
            raise _Lost
        self.at = found.end()

    def expect(self, literal: str) -> None:
        if not self.text.startswith(literal, self.at):
            raise _Lost
        self.at += len(literal)

    def skip(self, pattern: re.Pattern[str]) -> None:
        found = pattern.match(self.text, self.at)
        self.at = found.end() if found else self.at

    def line(self) -> int:
        return bisect_right(self.starts, self.at) + 1

    def deepen(self, depth: int) -> None:
        if depth > MOST_DEPTH:
            raise TooDeep(self.line())
