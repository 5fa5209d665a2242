"""Results of public functions: `str()` is the page that the command prints, `to_dict()` what its --json prints."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from phalanx.errors import Problem

# Receives a line of progress or advice; the command line prints it on stderr.
Tell = Callable[[str], None]
# ["parallel.tensor=8"] or {"parallel.tensor": 8}
Overrides = Sequence[str] | Mapping[str, object]

INTERRUPTED = 130  # 128 + SIGINT, as in shells


def silent(text: str) -> None:
    """Print nothing."""


def tell_stderr(text: str) -> None:
    """Print a line of progress or advice on stderr, with control characters escaped."""
    from phalanx.io.visible import visible

    print(visible(text), file=sys.stderr, flush=True)


def teller(progress: bool | Tell) -> Tell:
    """Return the function that receives lines of progress: stderr for True, none for False, or the given function."""
    if callable(progress):
        return progress
    return tell_stderr if progress else silent


def warn(problems: Iterable[Problem], tell: Tell) -> None:
    """Print warnings; they never change a result."""
    for problem in problems:
        tell(f"warning: {problem.render()}")


class PublicResult(ABC):
    """Base of results that are more than one value; a notebook shows them as the terminal does."""

    __slots__ = ()

    @abstractmethod
    def __str__(self) -> str:
        """Return the page that the command prints."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, as `--json` prints them."""
        from phalanx.io.codec import json_values

        return dict(json_values(self))

    @property
    def exit_code(self) -> int:
        """The command's exit code: 0 fine, 1 findings, 130 interrupted."""
        return 0

    def __repr__(self) -> str:
        from phalanx.io.notebook import one_line_repr

        return one_line_repr(self, str(self))

    def _repr_html_(self) -> str:
        from phalanx.io.notebook import text_as_html

        return text_as_html(str(self))


def own_version() -> str:
    """Return the version of the installed package; `unknown` in a source tree that was never installed."""
    from phalanx.io.packages import installed_version

    return installed_version("phalanx") or "unknown"
