"""Whether the comma of a spreadsheet's numbers is the decimal sign or stands between thousands.

`11,320` and `4.314` are numbers either way. One number of a table that can be read in one way alone decides for all of
them ("1,234,567", "3,1415"); without one the losses do, which are some nats in one reading and thousands in the other.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

DECIMAL_COMMA = re.compile(r"[+-]?\d+,\d+([eE][+-]?\d+)?")
THOUSANDS_COMMAS = re.compile(r"[1-9]\d{0,2}(,\d{3})+(\.\d+)?")
_DECIMAL_POINT = re.compile(r"[+-]?\d+\.\d+([eE][+-]?\d+)?")
_THOUSANDS_POINTS = re.compile(r"[1-9]\d{0,2}(\.\d{3})+(,\d+)?")
LIKELY_LOSS = 20.0  # nats: above, a number is no loss


def has_decimal_commas(numbers: Sequence[str], losses: Sequence[str], *, unsure: bool | None) -> bool | None:
    """Whether commas are decimal signs, of the cells of all columns of numbers, and of that of losses.

    `unsure` where both readings are possible.

    >>> has_decimal_commas(["11,320", "4.314"], ["4.314"], unsure=None)
    False
    >>> has_decimal_commas(["11.320", "4,314"], ["4,314"], unsure=None)
    True
    """
    if not any("," in one for one in numbers):
        return False
    with_comma = any(map(_is_surely_with_comma, numbers))
    with_point = any(map(_is_surely_with_point, numbers))
    if with_comma != with_point:
        return with_comma
    as_comma, as_point = (all(_is_likely_loss(one) for one in found) for found in _both_readings(losses))
    return as_comma if as_comma != as_point else unsure


def with_point(cell: str) -> str:
    """A number with a decimal comma in our form; anything else as it is."""
    if _THOUSANDS_POINTS.fullmatch(cell):
        cell = cell.replace(".", "")
    return cell.replace(",", ".") if DECIMAL_COMMA.fullmatch(cell) else cell


def _is_surely_with_comma(cell: str) -> bool:
    """3,14 or 1.234,5 or 1.234.567."""
    if _THOUSANDS_POINTS.fullmatch(cell):
        return "," in cell or cell.count(".") > 1
    return bool(DECIMAL_COMMA.fullmatch(cell)) and not THOUSANDS_COMMAS.fullmatch(cell)


def _is_surely_with_point(cell: str) -> bool:
    """3.14 or 1,234.5 or 1,234,567."""
    if THOUSANDS_COMMAS.fullmatch(cell):
        return "." in cell or cell.count(",") > 1
    return bool(_DECIMAL_POINT.fullmatch(cell)) and not _THOUSANDS_POINTS.fullmatch(cell)


def _both_readings(losses: Sequence[str]) -> tuple[list[str], list[str]]:
    """Cells of losses in our form, with the comma as the decimal sign and without."""
    return [with_point(one) for one in losses if one], [one.replace(",", "") for one in losses if one]


def _is_likely_loss(cell: str) -> bool:
    """Also what is no number: it is told later, with its line."""
    try:
        return not float(cell) > LIKELY_LOSS
    except ValueError:
        return True
