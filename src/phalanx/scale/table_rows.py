"""Rows of a table file, before its columns are interpreted: CSV, JSON lines or a JSON array of objects.

CSV may have commas, semicolons or tabs, and the additions of spreadsheets: a byte order mark, empty rows, decimal
commas, thousands separators. JSON lines have an object per run.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from phalanx.errors import UserError, mistake
from phalanx.io.files import csv_columns, read_text
from phalanx.scale.decimal_commas import THOUSANDS_COMMAS, has_decimal_commas, with_point
from phalanx.units import parse_count, plural

Row = tuple[int, dict[str, str]]  # line number, and values by column

MOST_ROWS = 1_000_000
LARGEST_TABLE_BYTES = 256 * 2**20
# Header -> columns of numbers by name; "loss" names the column of losses.
FindColumns = Callable[[Sequence[str]], Mapping[str, str]]


def read_rows(path: Path, find_columns: FindColumns = lambda columns: {}) -> tuple[list[str], list[Row]]:
    """Return columns and rows; raises UserError for a file that is not a table.

    `find_columns` returns the columns of numbers and that of the loss. They decide the meaning of commas where it is
    ambiguous.
    """
    text = read_text(path, noun="table", most_bytes=LARGEST_TABLE_BYTES)
    if not text.strip():
        raise mistake(str(path), "is empty", fix="a header such as params,tokens,loss, then a row per trained model")
    if text.lstrip()[0] in "{[":
        columns, rows = _json_rows(path, text)
    else:
        columns, rows = _csv_rows(path, text, find_columns)
    if len(rows) > MOST_ROWS:
        raise mistake(str(path), f"has more than {MOST_ROWS:,} rows", fix="split it")
    return columns, rows


def read_number(text: str, *, is_count: bool) -> float:
    """Return the number of a cell; a count may be 125M, 1.5B or 125,000,000. Raises ValueError.

    >>> read_number("1.5B", is_count=True), read_number("1,500", is_count=True)
    (1500000000.0, 1500.0)
    """
    try:
        return float(text)
    except ValueError:
        if not is_count:
            raise
    if THOUSANDS_COMMAS.fullmatch(text):
        return float(text.replace(",", ""))
    try:
        return parse_count(text)
    except UserError as error:
        raise ValueError(str(error)) from error


def _csv_rows(path: Path, text: str, find_columns: FindColumns) -> tuple[list[str], list[Row]]:
    """Read columns and rows of a CSV table with commas, semicolons or tabs.

    Empty lines and lines with # before the header are skipped. Raises UserError for a file that is not such a table.
    """
    skipped, header = 0, ""
    for line in io.StringIO(text, newline=""):
        header = line.strip()
        if header and not header.startswith("#"):
            break
        skipped += 1
    # The most frequent separator of the header: in rows, a comma may also be a spreadsheet's decimal sign.
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
            # A spreadsheet may end a table with rows of empty cells.
            if any(values.values()):
                rows.append((line_number, values))
            if len(rows) > MOST_ROWS:
                break
    except csv.Error as error:
        fix = "save it as UTF-8 CSV"
        raise mistake(f"{path}:{skipped + reader.line_num}", f"is not CSV: {error}", fix=fix) from error
    if repeated_names := sorted({name for name in columns if name and columns.count(name) > 1}):
        raise mistake(f"{path}:1", f'has two columns called "{repeated_names[0]}"', fix="rename or remove one of them")
    if delimiter != "," and _has_decimal_commas(path, rows, find_columns(columns), delimiter):
        rows = [(line, {key: with_point(value) for key, value in row.items()}) for line, row in rows]
    return columns, rows


def _has_decimal_commas(path: Path, rows: list[Row], known: Mapping[str, str], delimiter: str) -> bool:
    """Return True if commas are decimal signs; raises UserError where a table with semicolons has two readings.

    With tabs, an ambiguous 557,132 is read as a count.
    """
    numbers = [row.get(name, "") for _, row in rows for name in known.values()]
    losses = [row.get(known.get("loss", ""), "") for _, row in rows]
    answer = has_decimal_commas(numbers, losses, unsure=None if delimiter == ";" else False)
    if answer is None:
        cell = next(number for number in numbers if "," in number)
        problem = (
            f'has numbers such as "{cell[:40]}", where the comma may be the decimal sign or stand between thousands'
        )
        raise mistake(str(path), problem, fix="write counts without separators, and losses with a point")
    return answer


def _json_rows(path: Path, text: str) -> tuple[list[str], list[Row]]:
    """Return the objects of one array, or one per line."""
    fix = 'write an object per line, such as {"params": 1.2e8, "tokens": 2.4e9, "loss": 3.1}'
    entries: list[tuple[int, Any]] = []
    try:
        if text.lstrip().startswith("["):
            entries = list(enumerate(json.loads(text), start=1))
        else:
            for number, line in enumerate(text.splitlines(), start=1):
                if line.strip():
                    entries.append((number, json.loads(line)))
    except (ValueError, RecursionError) as error:
        place = f"{path}:{len(entries) + 1}"
        raise mistake(place, f"is not a table of JSON objects: {error}", fix=fix) from error
    if not entries:
        raise mistake(str(path), "is a JSON array without objects", fix=fix)
    rows: list[Row] = []
    columns: dict[str, None] = {}
    for number, entry in entries:
        if not isinstance(entry, dict):
            raise mistake(f"{path}:{number}", "is no JSON object", fix=fix)
        flat = {str(key).strip(): value for key, value in entry.items() if not isinstance(value, dict | list)}
        rows.append((number, {key: "" if value is None else str(value).strip() for key, value in flat.items()}))
        columns.update(dict.fromkeys(flat))
    return list(columns), rows
