"""Rows of a table, in the forms that people keep their runs in, before any column is looked for.

CSV with commas, semicolons or tabs, also with what spreadsheets add: a byte order mark, empty rows, decimal commas,
thousands separators. JSON lines (an object per run), or a JSON array of objects.
"""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path
from typing import Any

from phalanx.errors import UserError, mistake
from phalanx.io.files import csv_columns, read_text
from phalanx.units import parse_count, plural

Row = tuple[int, dict[str, str]]  # its line, and its values by column

MOST_ROWS = 1_000_000
LARGEST_TABLE_BYTES = 256 * 2**20
_DECIMAL_COMMA = re.compile(r"[+-]?\d+,\d+([eE][+-]?\d+)?")
_THOUSANDS_COMMAS = re.compile(r"\d{1,3}(,\d{3})+(\.\d+)?")
_THOUSANDS_POINTS = re.compile(r"\d{1,3}(\.\d{3})+(,\d+)?")


def read_rows(path: Path) -> tuple[list[str], list[Row]]:
    """Columns and rows; raises UserError for a file that is no table."""
    text = read_text(path, noun="table", most_bytes=LARGEST_TABLE_BYTES)
    if not text.strip():
        raise mistake(str(path), "is empty", fix="a header such as params,tokens,loss, then a row per trained model")
    if text.lstrip()[0] in "{[":
        columns, rows = _json_rows(path, text)
    else:
        columns, rows = _csv_rows(path, text)
    if len(rows) > MOST_ROWS:
        raise mistake(str(path), f"has more than {MOST_ROWS:,} rows", fix="split it")
    return columns, rows


def read_number(text: str, *, is_count: bool) -> float:
    """The number of a cell; a count may be 125M, 1.5B or 125,000,000. Raises ValueError.

    >>> read_number("1.5B", is_count=True), read_number("1,500", is_count=True)
    (1500000000.0, 1500.0)
    """
    try:
        return float(text)
    except ValueError:
        if not is_count:
            raise
    if _THOUSANDS_COMMAS.fullmatch(text):
        return float(text.replace(",", ""))
    try:
        return parse_count(text)
    except UserError as error:
        raise ValueError(str(error)) from error


def _csv_rows(path: Path, text: str) -> tuple[list[str], list[Row]]:
    skipped, header = 0, ""
    for line in io.StringIO(text, newline=""):
        header = line.strip()
        if header and not header.startswith("#"):
            break
        skipped += 1
    # What stands most often in the header: a comma may also be the decimal sign of a spreadsheet's rows.
    delimiter = max((",", ";", "\t"), key=header.count)
    source = io.StringIO(text, newline="")
    for _ in range(skipped):
        source.readline()
    reader = csv.DictReader(source, delimiter=delimiter)
    rows: list[Row] = []
    try:
        columns = [name.strip() for name in csv_columns(reader, str(path))]
        reader.fieldnames = columns
        for row in reader:
            line_number = skipped + reader.line_num
            if more := row.get(None):
                raise mistake(
                    f"{path}:{line_number}",
                    f"has {len(columns) + len(more)} values, but the header names {plural(len(columns), 'column')}",
                    fix="write decimals with a point (2.5, not 2,5), and quote texts that hold a comma",
                )
            values = {key: (value or "").strip() for key, value in row.items() if key}
            if any(values.values()):  # a spreadsheet ends a table with rows of empty cells
                rows.append((line_number, values))
            if len(rows) > MOST_ROWS:
                break
    except csv.Error as error:
        fix = "save it as UTF-8 CSV"
        raise mistake(f"{path}:{skipped + reader.line_num}", f"is not CSV: {error}", fix=fix) from error
    if twice := sorted({name for name in columns if name and columns.count(name) > 1}):
        raise mistake(f"{path}:1", f'has two columns called "{twice[0]}"', fix="rename or remove one of them")
    if delimiter != "," and _has_decimal_commas(rows, delimiter):
        rows = [(line, {key: _with_point(value) for key, value in row.items()}) for line, row in rows]
    return columns, rows


def _has_decimal_commas(rows: list[Row], delimiter: str) -> bool:
    """Semicolons stand where the comma is the decimal sign; in a table with tabs 557,132 may be a count."""
    commas = (value for _, row in rows for value in row.values() if _DECIMAL_COMMA.fullmatch(value))
    return any(delimiter == ";" or not _THOUSANDS_COMMAS.fullmatch(value) for value in commas)


def _with_point(value: str) -> str:
    if _THOUSANDS_POINTS.fullmatch(value):
        value = value.replace(".", "")
    return value.replace(",", ".") if _DECIMAL_COMMA.fullmatch(value) else value


def _json_rows(path: Path, text: str) -> tuple[list[str], list[Row]]:
    """Objects of one array, or one per line."""
    fix = 'write an object per line, such as {"params": 1.2e8, "tokens": 2.4e9, "loss": 3.1}'
    found: list[tuple[int, Any]] = []
    try:
        if text.lstrip().startswith("["):
            found = list(enumerate(json.loads(text), start=1))
        else:
            for number, line in enumerate(text.splitlines(), start=1):
                if line.strip():
                    found.append((number, json.loads(line)))
    except (ValueError, RecursionError) as error:
        where = f"{path}:{len(found) + 1}"
        raise mistake(where, f"is not a table of JSON objects: {error}", fix=fix) from error
    if not found:
        raise mistake(str(path), "is a JSON array without objects", fix=fix)
    rows: list[Row] = []
    columns: dict[str, None] = {}
    for number, one in found:
        if not isinstance(one, dict):
            raise mistake(f"{path}:{number}", "is no JSON object", fix=fix)
        flat = {str(key).strip(): value for key, value in one.items() if not isinstance(value, dict | list)}
        rows.append((number, {key: "" if value is None else str(value).strip() for key, value in flat.items()}))
        columns.update(dict.fromkeys(flat))
    return list(columns), rows
