"""Measured times of a collective, out of nccl-tests' own output or a table of sizes and times."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Mapping, Sequence

from phalanx.errors import mistake
from phalanx.network.fit import Operation, Point, wire_share
from phalanx.network.sizes import parse_size

PROGRAMS: Mapping[str, Operation] = {
    "all_reduce": "all-reduce",
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "alltoall": "all-to-all",
    "broadcast": "broadcast",
    "reduce": "reduce",
}
SIZE_COLUMNS = ("bytes", "nbytes", "size")
SECONDS = {"s": 1.0, "seconds": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "time_us": 1e-6}
BUS_COLUMNS = ("busbw", "busbw_gb_s")
FORMS = "give the output of all_reduce_perf, or a CSV with the columns bytes and us (or ms, s, busbw)"
# size, count, type, operator, root (newer versions), µs, algbw and busbw in GB/s; a log may put anything before
_NUMBER = r"(\d+(?:\.\d+)?)"
_LINE = re.compile(
    rf"(?:^|\s)(\d+)\s+\d+\s+[a-z]\w+\s+[a-z]\w+\s+(?:-?\d+\s+)?{_NUMBER}\s+{_NUMBER}\s+{_NUMBER}(?=\s|$)"
)
_OLD_LINE = re.compile(rf"(?:^|\s)(\d+)\s+\d+\s+[a-z]\w+\s+[a-z]\w+\s+{_NUMBER}\s+{_NUMBER}\s+{_NUMBER}(?=\s|$)")
_PROGRAM = re.compile(rf"\b({'|'.join(PROGRAMS)})_perf\b")
_RANK = re.compile(r"#\s+Rank\s+(\d+)\b")
ROUNDING = 0.03  # of algbw, which is printed with two digits


def read_points(text: str, *, where: str, operation: Operation, ranks: int) -> tuple[Point, ...]:
    """What the text holds about this operation; raises UserError where it is of other ranks, or of nothing."""
    found = list(_rows(text))
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    if not found and lines and "," in lines[0]:
        return _from_table(lines, where, wire_share(operation, ranks))
    if not found:
        raise mistake(where, "no line of it is a measurement", fix=FORMS)
    _check_ranks(text, where, ranks)
    ours = tuple(point for name, point in found if name in (operation, None))
    if not ours:
        names = sorted({str(name) for name, _ in found})
        raise mistake(where, f"holds {', '.join(names)}, not {operation}", fix=f"add --kind {names[0]}")
    return ours


def _check_ranks(text: str, where: str, ranks: int) -> None:
    measured = max((int(one[1]) + 1 for one in _RANK.finditer(text)), default=ranks)
    if measured != ranks:
        what = f"was measured on {measured:,} ranks, and the cluster has {ranks:,}"
        raise mistake(where, what, why="start-up and bandwidth belong to one number of ranks", fix="name that cluster")


def _rows(text: str) -> Iterator[tuple[Operation | None, Point]]:
    """Out-of-place times; the name of the test stands in the command or the heading above them."""
    name: Operation | None = None
    for line in text.splitlines():
        if named := _PROGRAM.search(line):
            name = PROGRAMS[named[1]]
        for pattern in (_LINE, _OLD_LINE):
            found = pattern.search(line)
            if found and _agrees(nbytes := float(found[1]), us := float(found[2]), float(found[3])):
                yield name, Point(nbytes=nbytes, seconds=us * 1e-6)
                break


def _agrees(nbytes: float, us: float, algbw_gb: float) -> bool:
    """Is the third number the first over the second? Tells a root from a time."""
    if nbytes <= 0 or us <= 0:
        return False
    rate_gb = nbytes / us / 1e3
    return abs(rate_gb - algbw_gb) <= max(0.01, ROUNDING * rate_gb)


def _from_table(lines: Sequence[str], where: str, share: float) -> tuple[Point, ...]:
    reader = csv.DictReader(lines)
    columns = {(name or "").strip().lower(): name for name in reader.fieldnames or ()}
    size = next((columns[name] for name in SIZE_COLUMNS if name in columns), None)
    value = next((name for name in (*SECONDS, *BUS_COLUMNS) if name in columns), None)
    if size is None or value is None:
        raise mistake(where, f"has the columns {', '.join(columns) or 'of nothing'}"[:160], fix=FORMS)
    try:
        found = [
            _point(row, where=f"{where}:{reader.line_num}", size=size, column=columns[value], unit=value, share=share)
            for row in reader
        ]
    except csv.Error as error:
        raise mistake(f"{where}:{reader.line_num}", f"is no table: {error}", fix=FORMS) from None
    if not found:
        raise mistake(where, "holds no rows", fix=FORMS)
    return tuple(found)


def _point(row: Mapping[str, str | None], *, where: str, size: str, column: str, unit: str, share: float) -> Point:
    nbytes, text = parse_size(row.get(size) or "", where), (row.get(column) or "").strip()
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise mistake(where, f"{unit} = {text[:40]!r}", fix="write a number above zero")
    seconds = share * nbytes / (number * 1e9) if unit in BUS_COLUMNS else number * SECONDS[unit]
    return Point(nbytes=nbytes, seconds=seconds)


def worst(points: Sequence[Point], predicted: Sequence[float]) -> tuple[float, Point]:
    """The largest error of predicted seconds, with its sign, and where it is."""
    errors = [(mine / one.seconds - 1, one) for one, mine in zip(points, predicted, strict=True)]
    return max(errors, key=lambda one: abs(one[0]))
