"""Decide if the comma in a spreadsheet's numbers is the decimal sign or separates thousands.

`11,320` and `4.314` are numbers either way. One number of a table that has only one reading decides for all of them
("1,234,567", "3,1415"). Without one the losses decide: they are a few nats in one reading and thousands in the other.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

DECIMAL_COMMA = re.compile(r"[+-]?\d+,\d+([eE][+-]?\d+)?")
THOUSANDS_COMMAS = re.compile(r"[1-9]\d{0,2}(,\d{3})+(\.\d+)?")
_DECIMAL_POINT = re.compile(r"[+-]?\d+\.\d+([eE][+-]?\d+)?")
_THOUSANDS_POINTS = re.compile(r"[1-9]\d{0,2}(\.\d{3})+(,\d+)?")
LIKELY_LOSS = 20.0  # nats; a larger number is not a loss


def has_decimal_commas(numbers: Sequence[str], losses: Sequence[str], *, unsure: bool | None) -> bool | None:
    """Return True if commas are decimal signs, given the cells of all number columns and of the loss column.

    Returns `unsure` where both readings are possible.

    >>> has_decimal_commas(["11,320", "4.314"], ["4.314"], unsure=None)
    False
    >>> has_decimal_commas(["11.320", "4,314"], ["4,314"], unsure=None)
    True
    """
    if not any("," in cell for cell in numbers):
        return False
    with_comma = any(map(_is_surely_with_comma, numbers))
    with_point = any(map(_is_surely_with_point, numbers))
    if with_comma != with_point:
        return with_comma
    as_comma, as_point = (all(_is_likely_loss(cell) for cell in cells) for cells in _both_readings(losses))
    return as_comma if as_comma != as_point else unsure


def with_point(cell: str) -> str:
    """Return a number with a decimal comma in the usual notation; any other cell unchanged."""
    if _THOUSANDS_POINTS.fullmatch(cell):
        cell = cell.replace(".", "")
    return cell.replace(",", ".") if DECIMAL_COMMA.fullmatch(cell) else cell


def _is_surely_with_comma(cell: str) -> bool:
    """Return True for a number that needs a decimal comma: 3,14 or 1.234,5 or 1.234.567."""
    if _THOUSANDS_POINTS.fullmatch(cell):
        return "," in cell or cell.count(".") > 1
    return bool(DECIMAL_COMMA.fullmatch(cell)) and not THOUSANDS_COMMAS.fullmatch(cell)


def _is_surely_with_point(cell: str) -> bool:
    """Return True for a number that needs a decimal point: 3.14 or 1,234.5 or 1,234,567."""
    if THOUSANDS_COMMAS.fullmatch(cell):
        return "." in cell or cell.count(",") > 1
    return bool(_DECIMAL_POINT.fullmatch(cell)) and not _THOUSANDS_POINTS.fullmatch(cell)


def _both_readings(losses: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the loss cells in the usual notation, read with decimal commas and with commas between thousands."""
    return [with_point(cell) for cell in losses if cell], [cell.replace(",", "") for cell in losses if cell]


def _is_likely_loss(cell: str) -> bool:
    """Return True for a number up to LIKELY_LOSS, and for malformed cells, which are reported later with their line."""
    try:
        return not float(cell) > LIKELY_LOSS
    except ValueError:
        return True
