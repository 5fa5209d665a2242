"""One setting of another trainer's configuration: its key, its value, and its line."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from phalanx.errors import mistake

MOST_LEAVES = 5_000  # a full Megatron-Bridge dump has about 600
MOST_DEPTH = 24


@dataclass(frozen=True, kw_only=True, slots=True)
class Leaf:
    """A scalar, a list of scalars, or an empty table. `key` is dotted, or a flag as it was written."""

    key: str
    value: object
    line: int  # from 1; 0 is the file as a whole


def leaves_of(table: object, *, file: str, line: Callable[[tuple[str | int, ...]], int]) -> dict[str, Leaf]:
    """All leaves of nested tables and lists; raises UserError for more or deeper ones than a configuration has."""
    found: dict[str, Leaf] = {}
    for path, value in _walk(table, (), file):
        key = ".".join(str(part) for part in path)
        found[key] = Leaf(key=key, value=value, line=line(path))
        if len(found) > MOST_LEAVES:
            raise mistake(file, f"holds more than {MOST_LEAVES:,} settings", why="no training configuration does")
    return found


def _walk(value: object, path: tuple[str | int, ...], file: str) -> Iterator[tuple[tuple[str | int, ...], object]]:
    if len(path) > MOST_DEPTH:
        raise mistake(file, f"nests deeper than {MOST_DEPTH} levels", why="no training configuration does")
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from _walk(inner, (*path, str(name)), file)
    elif isinstance(value, list) and any(isinstance(one, dict | list) for one in value):
        for index, inner in enumerate(value):
            yield from _walk(inner, (*path, index), file)
    elif path:
        yield path, value
