"""Tables and paragraphs keep to a width and lose nothing."""

from __future__ import annotations

import pytest

from phalanx.io.tables import folded_table
from phalanx.network.fabric.fabric_text import fold_lines, wrap_paragraph

ROWS = [("name", "switch", "one", "two"), ("a long name", "box", "1", "22,222"), ("b", "other box", "333", "4")]


def test_without_a_width_it_is_one_block() -> None:
    assert folded_table(ROWS, left=2).splitlines() == [
        "name         switch     one     two",
        "a long name  box          1  22,222",
        "b            other box  333       4",
    ]


@pytest.mark.parametrize("width", [24, 30, 34])
def test_blocks_repeat_the_first_column(width: int) -> None:
    text = folded_table(ROWS, left=2, width=width)
    assert max(map(len, text.splitlines())) <= width
    blocks = text.split("\n\n")
    assert len(blocks) > 1
    assert all(block.startswith("name") for block in blocks)
    assert {cell for row in ROWS for cell in row[1:]} <= {part for block in blocks for part in _cells(block)}


def test_a_column_wider_than_the_page_still_comes() -> None:
    assert "22,222" in folded_table(ROWS, width=1)


def test_long_lines_hang_under_their_second_column() -> None:
    line = "  near     256 hosts one switch away, and so on"
    assert fold_lines(line, 30).splitlines() == [
        "  near     256 hosts one",
        "           switch away, and so",
        "           on",
    ]
    assert fold_lines(line, None) == line
    assert fold_lines("word " * 10, 22).splitlines()[1].startswith("  word")


def test_paragraphs_are_never_wider_than_a_page() -> None:
    assert max(map(len, wrap_paragraph("word " * 100))) <= 119
    assert max(map(len, wrap_paragraph("word " * 100, 500))) <= 119
    assert max(map(len, wrap_paragraph("word " * 100, 30))) <= 30


def _cells(block: str) -> list[str]:
    return [cell.strip() for line in block.splitlines() for cell in line.split("  ") if cell.strip()]
