"""Printing of results, notes and warnings: results on stdout, everything else on stderr."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from phalanx.io.visible import visible, visible_json

if TYPE_CHECKING:
    from collections.abc import Iterable

    from phalanx.api.results import PublicResult
    from phalanx.errors import Problem


def show(result: PublicResult, *, as_json: bool) -> int:
    """Print the result of a public function and return its exit code."""
    if as_json:
        print_json(result.to_dict())
    else:
        say(result)
    return result.exit_code


def print_json(value: object) -> None:
    """Print one JSON document on stdout; dataclasses become objects, infinities and NaN become null."""
    from phalanx.io.codec import json_text

    print(visible_json(json_text(value, indent=2)))


def say(text: object, *, end: str = "\n", flush: bool = False) -> None:
    """Print a result on stdout. Control characters are escaped, since names in it may come from untrusted files."""
    print(visible(str(text)), end=end, flush=flush)


def say_page(page: str, *, is_heading: str) -> None:
    """Print a page on stdout; on a terminal its headings are bold.

    `is_heading` is "#" where headings begin with `#`, or "A" where they are the first two lines and those not
    indented.
    """
    if not on_colour_terminal():
        say(page)
        return
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
    for number, line in enumerate(visible(page).splitlines()):
        heading = line.startswith("#") if is_heading == "#" else number < 2 or (line and not line.startswith(" "))
        console.print(Text(line, style="bold" if heading else ""))


def on_colour_terminal() -> bool:
    """Return True if stdout is a terminal and NO_COLOR is not set."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")


def page_width() -> int | None:
    """Return the width from COLUMNS, else of the terminal; None where the result goes to a file or a pipe."""
    columns = os.environ.get("COLUMNS", "")
    if columns.isdecimal() and len(columns) < 6 and int(columns) > 0:
        return int(columns)
    if not sys.stdout.isatty():
        return None
    import shutil

    return shutil.get_terminal_size((0, 0)).columns or None


def note(text: str) -> None:
    """Print a line of progress or advice on stderr."""
    print(visible(text), file=sys.stderr, flush=True)


def warn(problems: Iterable[Problem]) -> None:
    """Print warnings on stderr; they never change the exit code."""
    for problem in problems:
        note(f"warning: {problem.render()}")
