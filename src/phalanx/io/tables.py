"""Text in columns, for tables in a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.io.visible import one_line


def text_table(rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()) -> list[str]:
    """Columns padded to their widest cell; the columns in `right` are aligned to the right. A row stays one line.

    >>> table([("a", "1"), ("bb", "20")], right=(1,))
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
