"""Plain values as TOML: the resolved job of a run, which `phalanx train` and `phalanx plan` read again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def to_toml(table: Mapping[str, Any]) -> str:
    """A table of scalars, lists and one level of sections; None, which TOML lacks, is left out.

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
        # JSON's escapes are TOML's, but for DEL and for characters beyond 16 bits, which stay as they are.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{key} = {_value(item)}" for key, item in value.items()) + " }"
    return "[" + ", ".join(_value(item) for item in value) + "]"
