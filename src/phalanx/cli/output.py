"""Results on stdout, everything else on stderr."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from pathlib import Path

from phalanx.errors import Problem
from phalanx.io.visible import visible, visible_json


def print_json(value: object) -> None:
    """One JSON document on stdout; dataclasses become objects, infinities and NaN become null."""
    print(visible_json(json.dumps(plain(value), indent=2, ensure_ascii=False, allow_nan=False)))


def say(text: object, *, end: str = "\n", flush: bool = False) -> None:
    """A result on stdout. Names in it may be a stranger's: control characters are spelt out."""
    print(visible(str(text)), end=end, flush=flush)


def plain(value: object) -> object:
    """A value as JSON can hold it."""
    if is_dataclass(value) and not isinstance(value, type):
        return {item.name: plain(getattr(value, item.name)) for item in fields(value)}
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Path):
        return str(value)
    # numpy scalars and arrays, without importing numpy to ask
    to_list = getattr(value, "tolist", None)
    return plain(to_list()) if callable(to_list) else value


def own_version() -> str:
    """Of the installed package; `unknown` in a source tree that was never installed."""
    from importlib.metadata import PackageNotFoundError, version  # 20 ms, needed by few calls

    try:
        return version("phalanx")
    except PackageNotFoundError:
        return "unknown"


def note(text: str) -> None:
    """A line of progress or advice for a person, on stderr."""
    print(visible(text), file=sys.stderr, flush=True)


def warn(problems: Iterable[Problem]) -> None:
    """Warnings on stderr; they never change the exit code."""
    for problem in problems:
        note(f"warning: {problem.render()}")
