"""A catalogue of one's own: the switches somebody can buy, at the prices they were quoted.

A CSV with the columns of data/switches.csv; only box, port_gbps and radix are needed.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping
from pathlib import Path

from phalanx.errors import Problem, UserError, mistake, nearest
from phalanx.hardware.tomlfile import read_text
from phalanx.network.fabric.catalogue import switch_of
from phalanx.network.fabric.sizing import LEAST_RADIX, MOST_RADIX
from phalanx.network.fabric.types import Switch

NEEDED = ("box", "port_gbps", "radix")
COLUMNS = (*NEEDED, "lanes", "watts", "usd_low", "usd_high", "evidence", "also", "source")
MOST_ROWS = 2000  # enumerated in well under a second
EXAMPLE = "box,port_gbps,radix,watts,usd_low,usd_high"


def read_catalogue(path: Path) -> tuple[Switch, ...]:
    """Every row as a switch; raises UserError with all wrong lines at once."""
    text = read_text(path)
    if "," not in text:
        raise mistake(str(path), "is not a table with commas", fix=f"begin it with {EXAMPLE}")
    reader = csv.DictReader(io.StringIO(text, newline=""), strict=True, restkey="", restval="")
    try:
        _check_columns(path, [name.strip() for name in reader.fieldnames or ()])
        rows = [
            (reader.line_num, {(key or "").strip(): str(value).strip() for key, value in row.items()}) for row in reader
        ]
    except csv.Error as error:
        raise mistake(f"{path}:{reader.line_num}", f"is not CSV: {error}", fix=f"begin it with {EXAMPLE}") from None
    if not 1 <= len(rows) <= MOST_ROWS:
        raise mistake(str(path), f"has {len(rows):,} switches", fix=f"write 1 to {MOST_ROWS:,}, one in a line")
    found = [_read(f"{path}:{line}", row) for line, row in rows]
    problems = [one for one in found if isinstance(one, Problem)]
    if problems:
        raise UserError(problems)
    return tuple({one.name: one for one in found if isinstance(one, Switch)}.values())


def _check_columns(path: Path, names: list[str]) -> None:
    where = f"{path}:1"
    for name in names:
        if name and name not in COLUMNS:
            near = nearest(name, COLUMNS)
            fix = f"did you mean {near}?" if near else f"the columns are {', '.join(COLUMNS)}"
            raise mistake(where, f'there is no column "{name[:40]}" in a catalogue', fix=fix)
    missing = [name for name in NEEDED if name not in names]
    if missing:
        raise mistake(where, f"the column {missing[0]} is missing", fix=f"begin the file with {EXAMPLE}")


def _read(where: str, row: Mapping[str, str]) -> Switch | Problem:
    try:
        one = switch_of(row)
    except (ValueError, OverflowError) as error:
        return Problem(where=where, what=f"{error}"[:120], fix="write plain numbers, as 512 or 100")
    wrong = _wrong(one)
    return Problem(where=where, what=wrong[0], fix=wrong[1]) if wrong else one


def _wrong(one: Switch) -> tuple[str, str] | None:
    """(what is wrong, what to do), or nothing."""
    if not one.box:
        return "the box has no name", "write its name first"
    if not LEAST_RADIX <= one.radix <= MOST_RADIX:
        return f"a radix of {one.radix:,}", f"use {LEAST_RADIX} to {MOST_RADIX:,} ports"
    if not (math.isfinite(one.port_gbps) and one.port_gbps > 0):
        return f"ports of {one.port_gbps:g} Gb/s", "use 100, 200, 400, 800 or 1600"
    if not (math.isfinite(one.watts) and one.watts >= 0):
        return f"{one.watts:g} W", "use watts above 0, or leave them empty"
    low, high = one.usd or (1.0, 1.0)
    if not (math.isfinite(high) and 0 < low <= high):
        return f"a price of {low:g} to {high:g} dollars", "use a low and a high price above 0, or leave both empty"
    return None
