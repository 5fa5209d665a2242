"""JSON as a checkpoint uses it: one text per value, so that any change of a file is seen, and strict on the way in."""

from __future__ import annotations

import json
from typing import Any, TypeAlias

JSON: TypeAlias = "bool | int | float | str | list[JSON] | dict[str, JSON] | None"


def to_text(value: Any) -> bytes:
    """The one text of a value: sorted keys, a line per entry, ASCII; raises ValueError for NaN and infinity."""
    try:
        return (json.dumps(value, sort_keys=True, indent=1, allow_nan=False) + "\n").encode("ascii")
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def to_line(value: Any) -> str:
    """A value on one line, without spaces."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def from_text(data: bytes) -> Any:
    """The value of a text; raises ValueError for anything that is not plain JSON."""
    try:
        return json.loads(data, parse_constant=_refuse, object_pairs_hook=_object)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("it says one thing twice")
    return found


def _refuse(text: str) -> None:
    raise ValueError(f"it holds {text}")
