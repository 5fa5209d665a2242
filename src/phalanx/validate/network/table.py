"""Read a table of network claims: source, quantity, value, unit, conditions."""

from __future__ import annotations

import csv
import io
import math
from dataclasses import dataclass
from pathlib import Path

from phalanx.errors import UserError, mistake, nearest
from phalanx.io.files import read_text

COLUMNS = ("source", "quantity", "value", "unit", "conditions")
LARGEST_BYTES = 64 * 2**20
MOST_ROWS = 100_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """One claim. `conditions` that say "same" are those of the row above, with what follows."""

    line: int
    source: str
    quantity: str
    value: float | None  # None: the cell is no number
    unit: str
    conditions: str
    rounding: float = 0.0  # half of the last digit that is printed; 0 where that says nothing


def is_network_table(path: Path) -> bool:
    """Whether a file's header is that of network claims; False for anything that cannot be read."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            header = file.readline(4096)
    except (OSError, UnicodeDecodeError):
        return False
    names = {name.strip().strip('"').lower() for name in header.split(",")}
    return "quantity" in names and len(names & set(COLUMNS)) > 1


def read_claims(path: Path) -> tuple[Claim, ...]:
    """The rows of a file, or a UserError that says what is wrong with it."""
    reader = csv.DictReader(io.StringIO(read_text(path, noun="CSV file", most_bytes=LARGEST_BYTES), newline=""))
    try:
        names = [name.strip().lower() for name in reader.fieldnames or ()]
        _check_columns(path, names)
        reader.fieldnames = names
        rows: list[Claim] = []
        for raw in reader:
            rows.append(_row(raw, reader.line_num, rows[-1] if rows else None))
            if len(rows) > MOST_ROWS:
                raise mistake(str(path), f"has more than {MOST_ROWS:,} rows", fix="split it")
    except csv.Error as error:
        raise mistake(f"{path}:{reader.line_num}", f"is not CSV: {error}", fix="save it as UTF-8 CSV") from error
    if not rows:
        raise mistake(str(path), "has a header but no rows", fix="add at least one claim")
    return tuple(rows)


def _check_columns(path: Path, names: list[str]) -> None:
    missing = [name for name in COLUMNS if name not in names]
    if missing:
        raise _lacks(path, missing, names)
    repeated = sorted({name for name in names if name and names.count(name) > 1})
    if repeated:
        raise mistake(str(path), f"has the column {repeated[0]} twice", fix="keep one of them")


def _lacks(path: Path, missing: list[str], names: list[str]) -> UserError:
    near = nearest(missing[0], [name for name in names if name and name not in COLUMNS])
    fix = f'is "{near}" meant to be {missing[0]}?' if near else f"the columns are {', '.join(COLUMNS)}"
    plural = "column" if len(missing) == 1 else "columns"
    return mistake(str(path), f"lacks the {plural} {', '.join(missing)}", fix=fix)


def _row(raw: dict[str, str], line: int, before: Claim | None) -> Claim:
    cells = {name: (raw.get(name) or "").strip() for name in COLUMNS}
    conditions = cells["conditions"]
    first, _, rest = conditions.partition(",")
    if first.strip().lower() == "same" and before is not None:
        conditions = ", ".join(part for part in (before.conditions, rest.strip()) if part)
    return Claim(
        line=line,
        source=cells["source"],
        quantity=cells["quantity"],
        value=_cell_number(cells["value"]),
        unit=cells["unit"],
        conditions=conditions,
        rounding=_rounding(cells["value"]),
    )


def _rounding(text: str) -> float:
    """Half of the last digit: 6.1 stands for 6.05 to 6.15, and 85 for 84.5 to 85.5; a single digit may be a count."""
    digits = text.replace(",", "").replace("_", "").lstrip("+-")
    whole, point, part = digits.partition(".")
    if not (whole + part).isdecimal() or (not point and len(whole) < 2):
        return 0.0
    return 0.5 * 10.0 ** -len(part)


def _cell_number(text: str) -> float | None:
    try:
        value = float(text.replace(",", "").replace("_", ""))
    except ValueError:
        return None
    return value if math.isfinite(value) else None
