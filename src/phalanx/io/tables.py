"""Tables, bars and sparklines, for terminals, Markdown and HTML."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from phalanx.io.values import printable
from phalanx.io.visible import one_line

TICKS = "▁▂▃▄▅▆▇█"
# A larger value is damage, and would make sums infinite.
MOST_DRAWN = 1e300
# Characters with a meaning in Markdown or in HTML inside it.
_MARKDOWN = re.compile(r"([\\`*_{}\[\]<>#|~&!])")


def text_table(rows: Sequence[Sequence[str]], *, right: Collection[int] = (), indent: int = 0) -> list[str]:
    """Return lines of columns padded to their widest cell; columns in `right` are right-aligned. Each row is one line.

    >>> text_table([("a", "1"), ("bb", "20")], right=(1,))
    ['a    1', 'bb  20']
    """
    if not rows:
        return []
    # A line break in a cell would begin another row.
    rows = [[one_line(cell) for cell in row] for row in rows]
    widths = [max(len(row[index]) for row in rows) for index in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if index in right else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append(" " * indent + "  ".join(cells).rstrip())
    return lines


def folded_table(rows: Sequence[Sequence[str]], *, left: int = 1, width: int | None = None) -> str:
    """Return columns as wide as their widest cell; the first `left` are left-aligned, the others right-aligned.

    If the table is wider than `width`, its columns are split into blocks below each other, each with the first column.

    >>> print(folded_table([("a", "one", "two"), ("b", "1", "2")], width=6))
    a  one
    b    1
    <BLANKLINE>
    a  two
    b    2
    """
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    blocks = []
    for columns in _column_blocks(widths, width):
        right = [place for place, column in enumerate(columns) if column >= left]
        blocks.append("\n".join(text_table([[row[column] for column in columns] for row in rows], right=right)))
    return "\n\n".join(blocks)


def _column_blocks(widths: Sequence[int], width: int | None) -> Iterator[list[int]]:
    """Yield the first column with as many others as fit, at least one, until all columns were yielded."""
    block, used = [0], widths[0]
    for column in range(1, len(widths)):
        if width is not None and len(block) > 1 and used + 2 + widths[column] > width:
            yield block
            block, used = [0], widths[0]
        block.append(column)
        used += 2 + widths[column]
    yield block


@dataclass(frozen=True, slots=True)
class HtmlCell:
    """A cell of HTML code, with its CSS class."""

    html: str
    style: str = ""


def html_table(
    rows: Sequence[Sequence[str | HtmlCell]],
    *,
    head: Sequence[str | HtmlCell] = (),
    alarms: Collection[int] = (),
) -> str:
    """Return an HTML table. Texts are escaped; rows whose numbers are in `alarms` have the class `alarm`.

    >>> html_table([["a<b", HtmlCell("<b>1</b>", "n")]])
    '<table><tbody><tr><td>a&lt;b</td><td class="n"><b>1</b></td></tr></tbody></table>'
    """

    # Imported here: its table of entities takes longer than the rest of this file.
    from html import escape

    def style_attribute(style: str) -> str:
        return f' class="{escape(style, quote=True)}"' if style else ""

    def line(tag: str, cells: Sequence[str | HtmlCell], style: str = "") -> str:
        html_cells = [cell if isinstance(cell, HtmlCell) else HtmlCell(escape(cell)) for cell in cells]
        scope = ' scope="col"' if tag == "th" else ""
        cells_html = "".join(f"<{tag}{scope}{style_attribute(cell.style)}>{cell.html}</{tag}>" for cell in html_cells)
        return f"<tr{style_attribute(style)}>{cells_html}</tr>"

    top = f"<thead>{line('th', head)}</thead>" if head else ""
    body = "\n".join(line("td", row, "alarm" if place in alarms else "") for place, row in enumerate(rows))
    return f"<table>{top}<tbody>{body}</tbody></table>"


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table; the cells must be Markdown.

    >>> print(markdown_table(("a", "b"), [("1", "2")]))
    | a | b |
    |---|---|
    | 1 | 2 |
    """
    lines = [f"| {' | '.join(row)} |" for row in (head, *rows)]
    return "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:]])


def markdown_text(text: object, *, most: int = 500) -> str:
    r"""Escape an untrusted text so that it stays plain text in Markdown.

    >>> markdown_text("a|b <script> [x](y)")
    'a\\|b \\<script\\> \\[x\\](y)'
    """
    return _MARKDOWN.sub(r"\\\1", printable(text, most=most))


def text_bar(share: float, width: int) -> str:
    """Return a bar with a resolution of an eighth of a character.

    >>> text_bar(0.5, 4), text_bar(0.3, 4)
    ('██', '█▎')
    """
    eighths = round(min(1.0, max(0.0, share)) * width * 8)
    return "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()


def two_part_bar(first: float, second: float, width: int) -> str:
    """Return a bar of two shares, one after the other.

    >>> two_part_bar(0.5, 0.25, 8)
    '████░░'
    """
    full = round(min(1.0, max(0.0, first)) * width)
    return "█" * full + "░" * min(width - full, round(min(1.0, max(0.0, second)) * width))


def sparkline(values: Sequence[float | None], room: int, *, from_zero: bool = False) -> str:
    """Return a line of small bars, the newest at the right; heights start at the minimum, or at 0 with `from_zero`.

    >>> sparkline([1.0, 2.0, None, 3.0], 4)
    '▁▄ █'
    """
    if not values or room <= 0:
        return ""
    groups = [values[number * len(values) // room : (number + 1) * len(values) // room] for number in range(room)]
    means = [_mean_of(group) for group in groups if group]
    known_means = [value for value in means if value is not None]
    if not known_means:
        return ""
    low = 0.0 if from_zero else min(known_means)
    span = max(known_means) - low
    heights = [None if value is None else math.ceil(8 * (value - low) / span) if span else 0 for value in means]
    return "".join(" " if height is None else TICKS[max(0, height - 1)] for height in heights)


def _mean_of(values: Sequence[float | None]) -> float | None:
    known_values = [value for value in values if value is not None and abs(value) < MOST_DRAWN]
    return math.fsum(known_values) / len(known_values) if known_values else None
