"""Values from untrusted files: numbers are finite, tables are tables, texts are printable."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

MOST_TEXT = 500  # characters of an untrusted text that are shown


def number(data: Mapping[str, Any], name: str) -> float | None:
    """Return a finite number, or None.

    >>> number({"a": 1}, "a"), number({"a": float("nan")}, "a"), number({"a": True}, "a"), number({}, "a")
    (1.0, None, None, None)
    """
    return finite(data.get(name))


def finite(value: object) -> float | None:
    """Return the value if it is a finite number, or None."""
    if value is None:
        return None
    # Nearly all values are floats: the other checks take twice as long.
    if type(value) is float:
        return value if math.isfinite(value) else None
    if not isinstance(value, int) or isinstance(value, bool):
        return None
    try:
        as_float = float(value)
    except OverflowError:  # an integer of 400 digits is valid JSON
        return None
    return as_float if math.isfinite(as_float) else None


def integer(data: Mapping[str, Any], name: str) -> int | None:
    """Return an integer of at most 63 bits, or None."""
    value = data.get(name)
    is_integer = isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63
    return value if is_integer else None


def seconds(data: Mapping[str, Any], name: str, *, most: float = 30 * 86400.0) -> float | None:
    """Return a credible duration, or None: not negative, and at most `most` seconds (30 days)."""
    value = number(data, name)
    return value if value is not None and 0.0 <= value <= most else None


def at(data: Any, *path: str) -> Mapping[str, Any]:
    """Return a nested table; empty if it is missing."""
    table = data
    for name in path:
        table = table.get(name) if isinstance(table, Mapping) else None
    return table if isinstance(table, Mapping) else {}


def text(data: Mapping[str, Any], name: str) -> str:
    """Return a text on one line without control characters; empty if it is missing."""
    value = data.get(name)
    return printable(value) if isinstance(value, str) else ""


def printable(value: object, *, most: int = MOST_TEXT) -> str:
    r"""Return an untrusted text that is safe on a terminal: no escapes, no line breaks, not too long.

    >>> printable("a\x1b[2Jb\nc")
    'a [2Jb c'
    """
    value_text = str(value)
    cut = value_text if len(value_text) <= most else value_text[: most - 1] + "…"
    return "".join(char if char.isprintable() else " " for char in cut)
