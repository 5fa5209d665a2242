"""Results on stdout, everything else on stderr."""

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
    """Print what a public function returned; the exit code that it stands for."""
    if as_json:
        print_json(result.to_dict())
    else:
        say(result)
    return result.exit_code


def print_json(value: object) -> None:
    """One JSON document on stdout; dataclasses become objects, infinities and NaN become null."""
    from phalanx.io.codec import json_text

    print(visible_json(json_text(value, indent=2)))


def say(text: object, *, end: str = "\n", flush: bool = False) -> None:
    """A result on stdout. Names in it may be a stranger's: control characters are spelt out."""
    print(visible(str(text)), end=end, flush=flush)


def say_page(page: str, *, is_heading: str) -> None:
    """A page as it is; on a terminal lines that begin like headings stand out (`#`, or a letter for "A")."""
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
    """Whether a person reads stdout, and wants colours."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")


def page_width() -> int | None:
    """Columns of the terminal, or what COLUMNS says; None where the result goes to a file or a pipe."""
    said = os.environ.get("COLUMNS", "")
    if said.isdecimal() and len(said) < 6 and int(said) > 0:
        return int(said)
    if not sys.stdout.isatty():
        return None
    import shutil

    return shutil.get_terminal_size((0, 0)).columns or None


def note(text: str) -> None:
    """A line of progress or advice for a person, on stderr."""
    print(visible(text), file=sys.stderr, flush=True)


def warn(problems: Iterable[Problem]) -> None:
    """Warnings on stderr; they never change the exit code."""
    for problem in problems:
        note(f"warning: {problem.render()}")
