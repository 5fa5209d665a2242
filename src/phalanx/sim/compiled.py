"""Compiling a loop with numba where it is installed (`pip install 'phalanx[sim]'`)."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from phalanx.errors import mistake


def available() -> bool:
    """Whether numba can be imported."""
    return find_spec("numba") is not None


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as machine code; kept on disk where numba finds a place to write, else compiled again next time."""
    if not available():
        raise mistake(
            "simulation",
            "numba is not installed",
            why="this loop runs over millions of packets or links and needs compiling",
            fix="pip install 'phalanx[sim]'",
        )
    numba: Any = import_module("numba")
    try:
        made: Callable[..., Any] = numba.njit(cache=True, nogil=True)(function)
    except RuntimeError:  # numba: "no locator available": neither the package nor the home folder can be written
        made = numba.njit(nogil=True)(function)
    return made
