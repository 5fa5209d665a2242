"""Read a table of network claims (source, quantity, value, unit, conditions), and judge computed numbers against it."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

from phalanx.errors import mistake, nearest
from phalanx.io.files import csv_columns, read_text

COLUMNS = ("source", "quantity", "value", "unit", "conditions")
LARGEST_BYTES = 64 * 2**20
MOST_ROWS = 100_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """One claim of the table. `conditions` that begin with "same" are those of the row above, plus what follows."""

    line: int
    source: str
    quantity: str
    value: float | None  # None: the cell is not a number
    unit: str
    conditions: str
    rounding: float = 0.0  # half of the last printed digit; 0 if the digits do not show the precision


def is_network_table(path: Path) -> bool:
    """Return True if a file has the header of network claims; False also if it cannot be read."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            header = file.readline(4096)
    except (OSError, UnicodeDecodeError):
        return False
    names = {name.strip().strip('"').lower() for name in header.split(",")}
    return "quantity" in names and len(names & set(COLUMNS)) > 1


def read_claims(path: Path) -> tuple[Claim, ...]:
    """Return the claims in a file; raise UserError with the problem if it is not a valid table."""
    reader = csv.DictReader(io.StringIO(read_text(path, noun="CSV file", most_bytes=LARGEST_BYTES), newline=""))
    try:
        names = [name.strip().lower() for name in csv_columns(reader, str(path))]
        _check_columns(path, names)
        reader.fieldnames = names
        rows: list[Claim] = []
        for raw in reader:
            rows.append(_read_claim(raw, reader.line_num, rows[-1] if rows else None))
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
        near = nearest(missing[0], [name for name in names if name and name not in COLUMNS])
        fix = f'is "{near}" meant to be {missing[0]}?' if near else f"the columns are {', '.join(COLUMNS)}"
        plural = "column" if len(missing) == 1 else "columns"
        raise mistake(str(path), f"lacks the {plural} {', '.join(missing)}", fix=fix)
    repeated = sorted({name for name in names if name and names.count(name) > 1})
    if repeated:
        raise mistake(str(path), f"has the column {repeated[0]} twice", fix="keep one of them")


def _read_claim(raw: dict[str, str], line: int, before: Claim | None) -> Claim:
    cells = {name: (raw.get(name) or "").strip() for name in COLUMNS}
    conditions = cells["conditions"]
    first, _, rest = conditions.partition(",")
    if first.strip().lower() == "same" and before is not None:
        conditions = ", ".join(
            conditions_part for conditions_part in (before.conditions, rest.strip()) if conditions_part
        )
    return Claim(
        line=line,
        source=cells["source"],
        quantity=cells["quantity"],
        value=_cell_number(cells["value"]),
        unit=cells["unit"],
        conditions=conditions,
        rounding=_half_digit(cells["value"]),
    )


def _half_digit(text: str) -> float:
    """Return half of the last digit; 0 for a single digit, which may be a count.

    6.1 stands for 6.05 to 6.15, and 85 for 84.5 to 85.5.
    """
    digits = text.replace(",", "").replace("_", "").lstrip("+-")
    integer_digits, point, decimals = digits.partition(".")
    if not (integer_digits + decimals).isdecimal() or (not point and len(integer_digits) < 2):
        return 0.0
    return 0.5 * 10.0 ** -len(decimals)


def _cell_number(text: str) -> float | None:
    try:
        value = float(text.replace(",", "").replace("_", ""))
    except ValueError:
        return None
    return value if math.isfinite(value) else None


# ---- numbers in the texts of a row -----------------------------------------------------------------------------------


T = TypeVar("T")

_WORDS = {"one": 1, "single": 1, "two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8}
_WORDS |= {"sixteen": 16}
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_THOUSANDS = {"": 1, "K": 1000, "M": 1_000_000}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT])iB\b")
_NUMBER = r"\d[\d,_]*(?:\.\d+)?"


class NotStated(Exception):
    """A row's texts lack something that its quantity depends on."""


def stated(value: T | None, what: str) -> T:
    """Return the value; raise NotStated if it is None or 0."""
    if value is None or value == 0:
        raise NotStated(what)
    return value


def count_before(text: str, noun: str) -> int | None:
    """Return the number before a noun: digits, with K or M for thousands and millions, or a word.

    >>> (
    ...     count_before("2 tiers, 8 planes x 100G", "planes?"),
    ...     count_before("one plane", "planes?"),
    ...     count_before("131072-host", "hosts?"),
    ... )
    (8, 1, 131072)
    >>> count_before("75K-GPU job", "GPUs?"), count_before("131,072 hosts", "hosts?")
    (75000, 131072)
    """
    match = re.search(rf"({_NUMBER}|\b(?:{'|'.join(_WORDS)}))([KM]?)[ -](?:{noun})\b", text, re.IGNORECASE)
    if match is None:
        return None
    word = match[1].lower()
    if word in _WORDS:
        return _WORDS[word]
    return round(float(re.sub(r"[,_]", "", word)[:15]) * _THOUSANDS[match[2].upper()])


def pair_before(text: str, after: str) -> tuple[int, int] | None:
    """Return two numbers with an x between them, before what `after` matches.

    >>> (
    ...     pair_before("64x800G switches", "G"),
    ...     pair_before("32x32 leaf-spine", " leaf"),
    ...     pair_before("8 planes x 100G", "G"),
    ... )
    ((64, 800), (32, 32), None)
    """
    match = re.search(rf"(\d+) ?[x×] ?(\d+)(?:{after})", text)
    return (_whole_number(match[1]), _whole_number(match[2])) if match else None


def number_matching(text: str, pattern: str) -> float | None:
    """Return the first group of a pattern as a number."""
    match = re.search(pattern, text)
    return float(match[1].replace(",", "")) if match else None


def size_bytes(text: str) -> float | None:
    """Return the first size with a binary unit, in bytes.

    >>> size_bytes("8x H200 128KiB torch"), size_bytes("4x8 B200 16 GiB; measured")
    (131072.0, 17179869184.0)
    """
    match = _SIZE.search(text)
    return float(match[1]) * _UNITS[match[2]] if match else None


def without_size(text: str) -> str:
    """Return the text without its first size: rows that differ only in their size form one series."""
    return _SIZE.sub("", text, count=1)


def _whole_number(digits: str) -> int:
    return int(re.sub(r"\D", "", digits)[:15] or "0")


# ---- outcomes --------------------------------------------------------------------------------------------------------


Status = Literal["reproduced", "range", "calibrated", "not attempted"]

# Published figures are rounded, and "12 %" may stand for 12.5: numbers this close count as equal.
TOLERANCE = 0.05
_RANGE = re.compile(r"any value ([\d.]+)-([\d.]+) agrees")
_LEAST = re.compile(r"accept >=\s*([\d.]+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class ClaimOutcome:
    """A computed number compared with the row's value, or the reason why there is none."""

    row: Claim
    status: Status
    ours: float | None = None
    error: float | None = None  # ours / theirs - 1; in the row's unit if the row's value is 0
    tolerance: float | None = None  # None if the row states what agrees, and for a range
    within: bool | None = None  # True if within the tolerance, the range that the row allows, or `between`
    between: tuple[float, float] | None = None  # computed numbers over the plausible values of an unpublished input
    note: str = ""  # the method, or the reason for skipping


@dataclass(frozen=True, kw_only=True, slots=True)
class NeededSimulation:
    """A simulation that a row needs, and its cost. Rows with the same key share one simulation."""

    key: Hashable
    cpu_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ClaimContext:
    """Data for readers in addition to the row. Values of other rows serve only to fit two points of a system."""

    rows: tuple[Claim, ...]
    simulate: bool = False  # run all simulations, whatever they cost
    allowed: frozenset[Hashable] = frozenset()  # simulations that are cheap enough to run without a request

    def refuses(self, one: NeededSimulation) -> str:
        """Return the reason why a simulation is not run; empty if it is."""
        if self.simulate or one.key in self.allowed:
            return ""
        return f"needs --simulate: about {max(one.cpu_s, 1):,.0f} s of CPU"


ClaimReader = Callable[[Claim, ClaimContext], ClaimOutcome | None]
SimulationNeed = Callable[[Claim], NeededSimulation | None]


def reproduced(
    row: Claim,
    ours: float,
    note: str,
    *,
    tolerance: float = TOLERANCE,
    inverse: bool = False,
) -> ClaimOutcome:
    """Judge a number computed without the row's value; `inverse` judges 1/ours, such as the time behind a rate."""
    return _judge_claim(row, "reproduced", ours, note, tolerance, inverse=inverse)


def ranged(row: Claim, ours: float, note: str, *, between: tuple[float, float]) -> ClaimOutcome:
    """Judge numbers over the plausible values of an unpublished input.

    `ours` is the middle one, or the end that the row names.

    The row's value is inside the range or not. This is weaker evidence than a single number that agrees: the wider the
    range, the weaker.
    """
    if row.value is None:
        return skipped(row, "its value is no number")
    low, high = min(between), max(between)
    within = low - row.rounding <= row.value <= high + row.rounding
    error = ours / row.value - 1 if row.value else ours
    return ClaimOutcome(row=row, status="range", ours=ours, error=error, within=within, between=(low, high), note=note)


def calibrated(row: Claim, ours: float, note: str, *, tolerance: float = TOLERANCE) -> ClaimOutcome:
    """Return an outcome without a computed number."""
    return _judge_claim(row, "calibrated", ours, note, tolerance)


def skipped(row: Claim, reason: str) -> ClaimOutcome:
    """Return an outcome without a number."""
    return ClaimOutcome(row=row, status="not attempted", note=reason)


def _judge_claim(
    row: Claim,
    status: Status,
    ours: float,
    note: str,
    tolerance: float,
    *,
    inverse: bool = False,
) -> ClaimOutcome:
    if row.value is None:
        return skipped(row, "its value is no number")
    error = ours / row.value - 1 if row.value else ours
    judged = row.value / ours - 1 if inverse and ours else error
    within = abs(judged) <= tolerance + 1e-12 or abs(ours - row.value) <= row.rounding * (1 + 1e-9)
    shown_tolerance: float | None = tolerance
    if match := _RANGE.search(row.conditions):
        shown_tolerance = None
        within = float(match[1]) <= ours <= float(match[2])
    elif match := _LEAST.search(row.conditions):
        shown_tolerance = None
        within = ours >= float(match[1])
    return ClaimOutcome(
        row=row, status=status, ours=ours, error=error, tolerance=shown_tolerance, within=within, note=note
    )


# ---- quantities that are recognized but not attempted, with the reason -----------------------------------------------


REASONS = (
    (
        r"packets per CPU-second|solve time|^ns-3 time|^software simulation of|^(speed-?up|speed) (of|over)",
        "a speed of a machine: see benchmarks/",
    ),
    (r"^largest cluster validated|^mean alignment to real", "a result of another simulator on data we do not have"),
    (r"^SRv6 locator|^SACK bitmap", "a field of a header: routes and acknowledgements are modelled, not their bits"),
    (r"^Clustermapper probe interval", "an agent that probes links for operators: no simulation here depends on it"),
    (r"^EV injected loss", "an input of an experiment; what it does is in docs/simulation/packets.md"),
    (r"^packets lost when T1", "it grows with the load and the queue pairs per GPU of that job: neither is published"),
    (r"^lost packets per QP|^T1 switches rebooted", "an observation of one cluster"),
    (r"^all-reduce gain of|^fragmented placement", "a gain over a baseline that is not described"),
)


def _skip_because(reason: str) -> ClaimReader:
    def read(row: Claim, _: ClaimContext) -> ClaimOutcome:
        return skipped(row, reason)

    return read


NOT_ATTEMPTED: tuple[tuple[str, ClaimReader], ...] = tuple(
    (pattern, _skip_because(reason)) for pattern, reason in REASONS
)
