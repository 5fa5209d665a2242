"""Tables and paragraphs of plain text, as wide as they need or as narrow as a terminal."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Sequence

PAGE = 119  # columns of prose where nobody says how wide the page is
LEAST = 20  # narrower than any terminal: a slip

Rows = Sequence[Sequence[str]]


def table(rows: Rows, *, left: int = 1, width: int | None = None) -> str:
    """Columns as wide as their widest cell; the first `left` to the left, the others to the right.

    Where that is wider than `width`, the columns come in blocks below each other, each with the first column again.

    >>> print(table([("a", "one", "two"), ("b", "1", "2")], width=6))
    a  one
    b    1
    <BLANKLINE>
    a  two
    b    2
    """
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n\n".join(_lines(rows, columns, widths, left) for columns in _blocks(widths, width))


def _lines(rows: Rows, columns: Sequence[int], widths: Sequence[int], left: int) -> str:
    lines = (
        "  ".join(
            row[column].ljust(widths[column]) if column < left else row[column].rjust(widths[column])
            for column in columns
        )
        for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)


def _blocks(widths: Sequence[int], width: int | None) -> Iterator[list[int]]:
    """The first column and as many others as fit, at least one, until all were."""
    block, used = [0], widths[0]
    for column in range(1, len(widths)):
        if width is not None and len(block) > 1 and used + 2 + widths[column] > width:
            yield block
            block, used = [0], widths[0]
        block.append(column)
        used += 2 + widths[column]
    yield block


def wrapped(words: str, width: int | None = None) -> list[str]:
    """A paragraph."""
    narrow = PAGE if width is None else max(LEAST, min(PAGE, width))
    return textwrap.wrap(words, narrow, break_long_words=False, break_on_hyphens=False)


def folded(text: str, width: int | None) -> str:
    """Lines that are still too long, broken: under the second column where there is one, else a little further in."""
    if width is None:
        return text
    return "\n".join(line for whole in text.split("\n") for line in _fold(whole, max(LEAST, width)))


def _fold(line: str, width: int) -> list[str]:
    if len(line) <= width:
        return [line]
    begun = re.match(r" *(?:\S+(?: \S+)*  +)?", line)
    start = begun.end() if begun is not None else 0
    inner = len(line) - len(line.lstrip())
    hang = start if inner < start <= width // 2 else inner if inner > width // 4 else inner + 2
    return textwrap.wrap(
        line, width, subsequent_indent=" " * hang, break_long_words=False, break_on_hyphens=False, drop_whitespace=True
    )
