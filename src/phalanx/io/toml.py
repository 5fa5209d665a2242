"""Read untrusted TOML files with the line of every key, and write plain values as TOML.

tomllib parses the values. A scanner in this file finds the lines: it walks the text once, follows strings, arrays and
tables, and checks nothing but depth. On text that is not TOML it stops, and tomllib reports the error.
"""

from __future__ import annotations

import json
import re
import tomllib
from bisect import bisect_right
from collections.abc import Mapping
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from phalanx.errors import UserError, mistake
from phalanx.io.files import read_text

MOST_DEPTH = 32

KeyPath = tuple[str | int, ...]

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


_DATE = re.compile(r"=\s*(\d{4}-\d{2}-\d{2})\b")
_PLACE = re.compile(r"\s*\(at line (\d+), column (\d+)\)$")


@dataclass(frozen=True, kw_only=True, slots=True)
class TomlFile:
    """A parsed TOML file: `table` has the values, `lines` the line of each key path."""

    path: Path
    table: dict[str, object]
    lines: Mapping[KeyPath, int]

    def where(self, *key: str | int) -> str:
        """Return `file:line` of a key such as ("accelerator", 1, "name"), else of its table, else just the file."""
        for length in range(len(key), 0, -1):
            if key[:length] in self.lines:
                return f"{self.path}:{self.lines[key[:length]]}"
        return str(self.path)


def read_toml(path: Path, *, noun: str = "file") -> TomlFile:
    """Parse a TOML file; raise UserError with the line unless it is small, shallow and valid."""
    text = read_text(path, noun=noun)
    try:
        lines, table = _parse_text(text)
    except TooDeep as error:
        raise _too_deep(f"{path}:{error.line}", noun) from error
    except RecursionError as error:
        raise _too_deep(str(path), noun) from error
    except tomllib.TOMLDecodeError as error:
        raise _syntax_error(path, text, str(error)) from error
    except ValueError as error:
        # int() refuses more than 4,300 digits, dates their impossible days.
        raise mistake(str(path), f"holds a value no computer can use: {str(error).split(';')[0]}") from error
    return TomlFile(path=path, table=deepcopy(table), lines=lines)


@lru_cache(
    maxsize=4
)  # a command reads one job file several times: to know its kind, its waivers, its plug-ins, the job
def _parse_text(text: str) -> tuple[dict[KeyPath, int], dict[str, object]]:
    return key_lines(text), tomllib.loads(text)


def _too_deep(where: str, noun: str) -> UserError:
    message, reason = f"nests deeper than {MOST_DEPTH} levels", f"no {noun.removesuffix(' file')} needs more than 3"
    return mistake(where, message, why=reason, fix="flatten the tables")


def _syntax_error(path: Path, text: str, message: str) -> UserError:
    place = _PLACE.search(message)
    where = f"{path}:{place.group(1)}" if place else f"{path}:{text.count(chr(10)) + 1}"
    reason = _PLACE.sub("", message).removesuffix(" (at end of document)")
    lines = text.split("\n")
    date = _DATE.search(lines[int(place.group(1)) - 1]) if place else None
    # tomllib complains about newlines if the month is 13.
    if date:
        return mistake(where, f"{date.group(1)} is no date", fix="a date is  YYYY-MM-DD, as 2026-12-31")
    fix = 'a line is  key = value  or  [section]; text needs quotes, as name = "first-run"'
    return mistake(where, f"is not TOML: {reason[:1].lower()}{reason[1:200]}", fix=fix)


# ---- the line of every key -------------------------------------------------------------------------------------------


class TooDeep(Exception):
    """The text nests tables or arrays deeper than MOST_DEPTH."""

    def __init__(self, line: int) -> None:
        super().__init__(line)
        self.line = line


class _Lost(Exception):
    """The text is not TOML; tomllib reports the position."""


def key_lines(text: str) -> dict[KeyPath, int]:
    """Return the line of every key, including tables and array elements.

    >>> key_lines("a = 1\\n[b]\\nc.d = [{e = 2}]\\n")[("b", "c", "d", 0, "e")]
    3
    """
    scanner = _Scanner(text=text, starts=[match.end() for match in re.finditer("\n", text)])
    with suppress(_Lost):
        scanner.document()
    return scanner.lines


def split_key(text: str) -> tuple[str, ...] | None:
    """Return the parts of a dotted key, or None if the text is not one.

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
    starts: list[int]  # offsets of the first characters of lines 2, 3, …
    at: int = 0
    lines: dict[KeyPath, int] = field(default_factory=dict)
    # For each array of tables, the index of its newest element.
    elements: dict[KeyPath, int] = field(default_factory=dict)

    def document(self) -> None:
        prefix: KeyPath = ()
        self.skip(_BLANK)
        while self.at < len(self.text):
            if self.text[self.at] == "[":
                prefix = self.header()
            else:
                self.pair(prefix, depth=len(prefix))
            self.skip(_BLANK)

    def header(self) -> KeyPath:
        line = self.line()
        opening = "[[" if self.text.startswith("[[", self.at) else "["
        self.at += len(opening)
        self.skip(_SPACE)
        parts = self.key()
        self.expect("]" * len(opening))
        path: KeyPath = ()
        for key in parts[:-1]:
            path = self.newest((*path, key))
            self.lines.setdefault(path, line)
        path = (*path, parts[-1])
        if opening == "[[":
            self.lines.setdefault(path, line)
            self.elements[path] = self.elements.get(path, -1) + 1
            path = (*path, self.elements[path])
        self.lines.setdefault(path, line)
        return path

    def newest(self, path: KeyPath) -> KeyPath:
        """Return the path of an array's newest element, to which keys below its header belong; else the path."""
        return (*path, self.elements[path]) if path in self.elements else path

    def pair(self, prefix: KeyPath, *, depth: int) -> None:
        line = self.line()
        parts = self.key()
        self.deepen(depth + len(parts))
        path = prefix
        for key in parts:
            path = (*path, key)
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

    def value(self, path: KeyPath, *, depth: int) -> None:
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

    def array(self, path: KeyPath, *, depth: int) -> None:
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

    def inline_table(self, path: KeyPath, *, depth: int) -> None:
        self.at += 1
        # TOML 1.0 allows no newlines here; tomllib reports them.
        self.skip(_BLANK)
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
        match = pattern.match(self.text, self.at)
        if match is None:
            raise _Lost
        self.at = match.end()

    def expect(self, literal: str) -> None:
        if not self.text.startswith(literal, self.at):
            raise _Lost
        self.at += len(literal)

    def skip(self, pattern: re.Pattern[str]) -> None:
        match = pattern.match(self.text, self.at)
        self.at = match.end() if match else self.at

    def line(self) -> int:
        return bisect_right(self.starts, self.at) + 1

    def deepen(self, depth: int) -> None:
        if depth > MOST_DEPTH:
            raise TooDeep(self.line())


# ---- writing ---------------------------------------------------------------------------------------------------------


def to_toml(table: Mapping[str, Any]) -> str:
    """Return a table of scalars, lists and one level of sections as TOML; None, which TOML lacks, is left out.

    >>> print(to_toml({"name": "a", "data": {"seed": 0, "path": ["x"]}, "cost": {"pue": None}}))
    name = "a"
    <BLANKLINE>
    [data]
    seed = 0
    path = ["x"]
    <BLANKLINE>
    """
    top = [f"{key} = {_value(value)}" for key, value in table.items() if not isinstance(value, Mapping | None)]
    sections = []
    for name, inner in table.items():
        if isinstance(inner, Mapping):
            lines = [f"{key} = {_value(value)}" for key, value in inner.items() if value is not None]
            if lines:
                sections.append("\n".join([f"[{name}]", *lines]))
    return "\n\n".join(["\n".join(top), *sections]) + "\n"


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # JSON's escapes are TOML's too, except for DEL and for characters beyond 16 bits, which stay as they are.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{key} = {_value(item)}" for key, item in value.items()) + " }"
    return "[" + ", ".join(_value(item) for item in value) + "]"
