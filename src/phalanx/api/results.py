"""What public functions return: `str()` is the page that the command prints, `to_dict()` what its --json prints."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from phalanx.errors import Problem
from phalanx.io.notebook import one_line_repr, text_as_html

Tell = Callable[[str], None]  # takes a line of progress or advice; the command line prints it on stderr
Overrides = Sequence[str] | Mapping[str, object]  # ["parallel.tensor=8"] or {"parallel.tensor": 8}

INTERRUPTED = 130  # 128 + SIGINT, as shells count


def silent(text: str) -> None:
    """Where nobody asked to be told."""


def warn(problems: Iterable[Problem], tell: Tell) -> None:
    """Tell warnings; they never change a result."""
    for problem in problems:
        tell(f"warning: {problem.render()}")


class PublicResult(ABC):
    """Base of results that are more than one value; a notebook shows them as the terminal does."""

    __slots__ = ()

    @abstractmethod
    def __str__(self) -> str:
        """The page that the command prints."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as `--json` prints them."""
        found = plain(self)
        assert isinstance(found, dict)
        return found

    @property
    def exit_code(self) -> int:
        """Of the command: 0 fine, 1 findings, 130 interrupted."""
        return 0

    def __repr__(self) -> str:
        return one_line_repr(self, str(self))

    def _repr_html_(self) -> str:
        return text_as_html(str(self))


def plain(value: object) -> object:
    """A value as JSON can hold it: dataclasses become objects, infinities and NaN null."""
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
