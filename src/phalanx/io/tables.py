"""Tables, bars and sparklines of text, for terminals and Markdown."""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence

from phalanx.io.values import printable
from phalanx.io.visible import one_line

TICKS = "▁▂▃▄▅▆▇█"
MOST_DRAWN = 1e300  # a larger value is a damaged one, and would make sums infinite
# What Markdown or the HTML inside it would take for its own.
_MARKDOWN = re.compile(r"([\\`*_{}\[\]<>#|~&!])")


def text_table(rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()) -> list[str]:
    """Columns padded to their widest cell; the columns in `right` are aligned to the right. A row stays one line.

    >>> text_table([("a", "1"), ("bb", "20")], right=(1,))
    ['a    1', 'bb  20']
    """
    if not rows:
        return []
    rows = [[one_line(cell) for cell in row] for row in rows]  # a line break in a cell would begin a row of its own
    widths = [max(len(row[index]) for row in rows) for index in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if index in right else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of Markdown; its cells are Markdown already.

    >>> print(markdown_table(("a", "b"), [("1", "2")]))
    | a | b |
    | --- | --- |
    | 1 | 2 |
    """
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *rows])


def markdown_text(text: object, *, most: int = 500) -> str:
    r"""A stranger's text that stays text in Markdown.

    >>> markdown_text("a|b <script> [x](y)")
    'a\\|b \\<script\\> \\[x\\](y)'
    """
    return _MARKDOWN.sub(r"\\\1", printable(text, most=most))


def text_bar(share: float, width: int) -> str:
    """A bar of eighths of a character.

    >>> text_bar(0.5, 4), text_bar(0.3, 4)
    ('██', '█▎')
    """
    eighths = round(min(1.0, max(0.0, share)) * width * 8)
    return "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()


def sparkline(values: Sequence[float | None], room: int) -> str:
    """A line of small bars, the newest at the right.

    >>> sparkline([1.0, 2.0, None, 3.0], 4)
    '▁▄ █'
    """
    if not values or room <= 0:
        return ""
    groups = [values[number * len(values) // room : (number + 1) * len(values) // room] for number in range(room)]
    means = [_mean_of(group) for group in groups if group]
    known = [value for value in means if value is not None]
    if not known:
        return ""
    low, span = min(known), max(known) - min(known)
    return "".join(" " if one is None else TICKS[int(7 * (one - low) / span) if span else 0] for one in means)


def _mean_of(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None and abs(value) < MOST_DRAWN]
    return statistics.fmean(known) if known else None
