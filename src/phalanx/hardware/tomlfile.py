"""Read a small TOML file someone else wrote: bounded, with the line of every key for error messages."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from phalanx.errors import UserError, mistake, nearest

MAX_BYTES = 1 << 20  # a hardware file is a page; a megabyte is the wrong file
_HEADER = re.compile(r"^\s*\[+\s*([A-Za-z0-9_.-]+)\s*\]+\s*(?:#.*)?$")
_KEY = re.compile(r"^\s*\"?([A-Za-z0-9_-]+)\"?\s*[=.]")
_LINE = re.compile(r"\(at line (\d+), column \d+\)")


@dataclass(frozen=True, kw_only=True, slots=True)
class TomlFile:
    """A parsed file and where each key of each table stands (`("", "domains")`, `("accelerator#2", "name")`)."""

    path: Path
    data: Mapping[str, object]
    lines: Mapping[tuple[str, str], int]

    def where(self, table: str, key: str) -> str:
        """`file:line` of a key, of its table when the key is absent, or just the file."""
        line = self.lines.get((table, key)) or self.lines.get((table, ""))
        return f"{self.path}:{line}" if line else str(self.path)


def read_toml(path: Path) -> TomlFile:
    """Parse a TOML file; every way it can be unreadable is a UserError that names the file and the cure."""
    text = read_text(path)
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise _syntax_error(path, str(error)) from None
    except RecursionError:
        raise mistake(str(path), "tables are nested too deeply", fix="use the flat keys of the documentation") from None
    except ValueError as error:  # tomllib lets int() speak for integers over 4,300 digits
        raise mistake(str(path), f"not readable as TOML: {str(error)[:120]}", fix="use ordinary numbers") from None
    return TomlFile(path=path, data=data, lines=_key_lines(text))


def read_text(path: Path) -> str:
    """A file's text, refused when it is missing, a folder, too large or not text."""
    try:
        with path.open("rb") as stream:
            raw = stream.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise mistake(str(path), "no such file", fix=_near_file(path)) from None
    except IsADirectoryError:
        raise mistake(str(path), "is a folder, not a file", fix="name a .toml file inside it") from None
    except (OSError, ValueError) as error:
        raise mistake(str(path), f"cannot be read: {error}", fix="check the path and its permissions") from None
    if len(raw) > MAX_BYTES:
        raise mistake(str(path), "is larger than 1 MiB", why="a hardware file is about a page", fix="check the path")
    if b"\0" in raw:
        raise mistake(str(path), "is a binary file", fix="name a text file")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise mistake(str(path), f"is not UTF-8 text (byte {error.start})", fix="save it as UTF-8") from None


def _syntax_error(path: Path, message: str) -> UserError:
    match = _LINE.search(message)
    where = f"{path}:{match.group(1)}" if match else str(path)
    what = _LINE.sub("", message).strip()
    return mistake(where, f"not valid TOML: {what[:160]}", fix='write key = value, with text in "quotes"')


def _near_file(path: Path) -> str:
    try:
        names = [entry.name for entry in path.parent.iterdir()]
    except OSError:
        return f"the folder {path.parent} does not exist either"
    near = nearest(path.name, names)
    return f"did you mean {path.parent / near}?" if near else "check the path"


def _key_lines(text: str) -> dict[tuple[str, str], int]:
    lines: dict[tuple[str, str], int] = {}
    counts: dict[str, int] = {}
    table = ""
    for number, line in enumerate(text.splitlines(), start=1):
        header = _HEADER.match(line)
        if header:
            name = header.group(1)
            counts[name] = counts.get(name, 0) + 1
            table = f"{name}#{counts[name]}"
            lines[(table, "")] = number
            continue
        key = _KEY.match(line)
        if key:
            lines.setdefault((table, key.group(1)), number)
    return lines
