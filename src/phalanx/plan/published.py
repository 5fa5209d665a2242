"""Tables of published training runs: read them, fill what they leave out, and say why a row cannot be priced.

Columns are those of `throughput_public.csv`. Only layout columns are read here; what was measured never reaches a
prediction.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from phalanx.errors import Problem, UserError, mistake, nearest
from phalanx.io.files import read_text

REQUIRED = ("id", "layers", "hidden", "seq", "gpu", "gpus", "global_batch")
OPTIONAL = (
    "source", "model_name", "heads", "kv_heads", "ffn", "vocab", "experts", "topk", "moe_ffn", "params_b", "nodes_gpu",
    "inter_link_gbps_per_gpu", "tp", "pp", "vpp", "cp", "ep", "dp", "zero_stage", "micro_batch", "recompute",
    "precision", "seq_parallel", "attention", "framework", "task", "date",
)  # fmt: skip
LARGEST_TABLE_BYTES = 256 * 2**20
MOST_ROWS = 2_000_000

_COUNTS = ("tp", "pp", "vpp", "cp", "ep", "dp", "heads", "kv_heads", "ffn", "vocab", "nodes_gpu")
_AMOUNTS = ("experts", "topk", "moe_ffn", "params_b", "inter_link_gbps_per_gpu", "zero_stage")

PublishedRun = Mapping[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishedTable:
    """The rows of a file as text, with the line each stands on."""

    path: Path
    rows: tuple[PublishedRun, ...]
    lines: tuple[int, ...]
    columns: tuple[str, ...]


def read_table(path: Path) -> PublishedTable:
    """The rows of a CSV file, or a UserError that says what is wrong with it."""
    text = read_text(path, noun="CSV file", most_bytes=LARGEST_TABLE_BYTES)
    reader = csv.DictReader(io.StringIO(text, newline=""))
    try:
        columns = tuple(name.strip() for name in reader.fieldnames or ())
        reader.fieldnames = list(columns)
        _check_columns(path, columns)
        rows, lines = [], []
        for row in reader:
            rows.append({key: (value or "").strip() for key, value in row.items() if isinstance(key, str)})
            lines.append(reader.line_num)
            if len(rows) > MOST_ROWS:
                raise mistake(str(path), f"has more than {MOST_ROWS:,} rows", fix="split it")
    except csv.Error as error:
        raise mistake(f"{path}:{reader.line_num}", f"is not CSV: {error}", fix="save the table as UTF-8 CSV") from error
    if not rows:
        raise mistake(str(path), "has a header but no rows", fix="add at least one run")
    _check_ids(path, rows, lines)
    return PublishedTable(path=path, rows=tuple(rows), lines=tuple(lines), columns=columns)


def _check_columns(path: Path, columns: Sequence[str]) -> None:
    missing = [name for name in REQUIRED if name not in columns]
    if not missing:
        return
    if len(columns) < 2:
        raise mistake(str(path), "is not a table of training runs", why="its first line is not a CSV header",
                      fix=f"it needs at least the columns {', '.join(REQUIRED)}")  # fmt: skip
    extra = [name for name in columns if name not in REQUIRED and name not in OPTIONAL]
    problems = []
    for name in missing:
        near = nearest(name, extra)
        fix = f'rename the column "{near}"' if near else f"add it; required are {', '.join(REQUIRED)}"
        problems.append(Problem(where=f"{path}:1", what=f'has no column "{name}"', fix=fix))
    raise UserError(problems)


def _check_ids(path: Path, rows: Sequence[PublishedRun], lines: Sequence[int]) -> None:
    seen: dict[str, int] = {}
    problems = []
    for row, line in zip(rows, lines, strict=True):
        name = row["id"]
        if not name:
            problems.append(Problem(where=f"{path}:{line}", what="has an empty id", fix="give every row its own id"))
        elif name in seen:
            what = f'repeats the id "{name[:60]}" of line {seen[name]}'
            problems.append(Problem(where=f"{path}:{line}", what=what, fix="give every row its own id"))
        seen.setdefault(name, line)
    if problems:
        raise UserError(problems[:20])


def number(row: PublishedRun, name: str) -> float | None:
    """A finite number, or None where the cell is empty or garbage."""
    text = row.get(name, "")
    try:
        value = float(text)
    except ValueError:
        return None
    return value if abs(value) < 1e18 else None  # NaN and infinities compare false


def why_not_priced(row: PublishedRun) -> str:
    """Why a row cannot be priced at all, or an empty string."""
    for name in ("layers", "hidden", "seq", "gpus", "global_batch"):
        value = number(row, name)
        if value is None:
            text = row.get(name, "")
            return f"{name} is empty" if not text else f"{name} = {text[:40]!r} is not a number"
        if value < 1:
            return f"{name} = {value:g} is less than 1"
        if value > 1e9:
            return f"{name} = {value:g} is too large to be meant"
    for name in _COUNTS:
        value = number(row, name)
        if row.get(name) and (value is None or value < 1 or value != int(value)):
            return f"{name} = {row[name][:40]!r} is not a whole number of 1 or more"
    micro = number(row, "micro_batch")  # a fraction where one sequence is split over devices (MaxText)
    if row.get("micro_batch") and (micro is None or micro <= 0):
        return f"micro_batch = {row['micro_batch'][:40]!r} is not a positive number"
    for name in _AMOUNTS:
        value = number(row, name)
        if row.get(name) and (value is None or value < 0):
            return f"{name} = {row[name][:40]!r} is not a number of 0 or more"
    if not row.get("gpu"):
        return "gpu is empty"
    split = [number(row, name) or 1.0 for name in ("tp", "pp", "cp", "dp")]
    product = split[0] * split[1] * split[2] * split[3]
    gpus = number(row, "gpus") or 0.0
    if row.get("dp") and abs(product - gpus) > 0.5:
        return f"tp x pp x cp x dp = {product:g} is not gpus = {gpus:g}"
    if gpus % product:
        return f"tp x pp x cp = {product:g} does not divide gpus = {gpus:g}"
    return _contradiction(row, split[0], gpus / (split[0] * split[1] * split[2]))


def _contradiction(row: PublishedRun, tp: float, dp: float) -> str:
    """Stated sizes that cannot hold together."""
    heads, experts, ep = number(row, "heads"), number(row, "experts"), number(row, "ep") or 1.0
    if heads and heads % tp:
        return f"tp = {tp:g} does not divide heads = {heads:g}"
    if experts and experts % ep:
        return f"ep = {ep:g} does not divide experts = {experts:g}"
    micro, batch = number(row, "micro_batch"), number(row, "global_batch") or 0.0
    if micro and micro * dp > batch:
        return f"micro_batch = {micro:g} on {dp:g} data ranks exceeds global_batch = {batch:g}"
    return ""
