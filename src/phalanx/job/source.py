"""A job file before it means anything: its table, and the line of every key."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from phalanx.errors import UserError, mistake
from phalanx.job import scan
from phalanx.job.textfile import read_text

_DATE = re.compile(r"=\s*(\d{4}-\d{2}-\d{2})\b")
_PLACE = re.compile(r"\s*\(at line (\d+), column (\d+)\)$")


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """A parsed TOML file: `table` holds the values, `lines` the line of each key path."""

    path: Path
    table: dict[str, object]
    lines: Mapping[scan.Path, int]


def read_source(path: Path) -> Source:
    """Parse a TOML file. Raises UserError, with the line, for anything that is not a small and shallow one."""
    text = read_text(path, noun="job file")
    try:
        lines = scan.key_lines(text)
        table = tomllib.loads(text)
    except scan.TooDeep as error:
        raise _too_deep(f"{path}:{error.line}") from error
    except RecursionError as error:
        raise _too_deep(str(path)) from error
    except tomllib.TOMLDecodeError as error:
        raise _syntax(path, text, str(error)) from error
    except ValueError as error:  # int() refuses more than 4,300 digits, dates their impossible days
        raise mistake(str(path), f"holds a value no computer can use: {str(error).split(';')[0]}") from error
    return Source(path=path, table=table, lines=lines)


def _too_deep(where: str) -> UserError:
    return mistake(
        where, f"nests deeper than {scan.MOST_DEPTH} levels", why="no job needs more than 3", fix="flatten the tables"
    )


def _syntax(path: Path, text: str, message: str) -> UserError:
    place = _PLACE.search(message)
    where = f"{path}:{place.group(1)}" if place else f"{path}:{text.count(chr(10)) + 1}"
    what = _PLACE.sub("", message).removesuffix(" (at end of document)")
    lines = text.split("\n")
    date = _DATE.search(lines[int(place.group(1)) - 1]) if place else None
    if date:  # tomllib speaks of newlines when the month is 13
        return mistake(where, f"{date.group(1)} is no date", fix="a date is  YYYY-MM-DD, as 2026-12-31")
    fix = 'a line is  key = value  or  [section]; text needs quotes, as name = "first-run"'
    return mistake(where, f"is not TOML: {what[:1].lower()}{what[1:200]}", fix=fix)
