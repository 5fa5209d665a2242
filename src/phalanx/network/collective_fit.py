"""The time of a collective on one system, fitted to two or more measurements of it.

A message of W bytes on the wire of a rank (2(n-1)/n of the message for an all-reduce) is sent in chunks: t = α + W/B
+ k √(α W/B). The root is the time to fill the pipeline: with the best chunk for every size k is 2 (t = (√α +
√(W/B))², Thakur et al. 2005, section 4), with a chunk of constant size it is 0. Inside a node k = 2 fits, as does
anything above 1.25; between nodes, where many steps start up and only small messages get smaller chunks, k = 0.4.
These values come from measured sweeps of 12 sources, each source left out in turn
(benchmarks/2026-11-15-collective-fit.md): they calibrate the form. α and B belong to one system, operation and number
of ranks; they are not physical constants.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from phalanx.errors import UserError, mistake
from phalanx.io.files import csv_columns
from phalanx.network.sizes import parse_size
from phalanx.units import plural

Operation = Literal["all-reduce", "all-gather", "reduce-scatter", "all-to-all", "broadcast", "reduce"]

MIB = 2**20
# Below this size launches and protocol changes decide the time, which two points cannot describe.
LEAST_BYTES = 16 * MIB
LARGE_BYTES = 1024 * MIB
# Largest allowed errors of a two-point fit, as shares of the time: from LARGE_BYTES on, and below.
LARGE_ERROR, MEDIUM_ERROR = 0.10, 0.25
FILL_INSIDE, FILL_ACROSS = 2.0, 0.4  # k of the formula above
# Errors that 80 % of held-out sizes stay below, fitted on a size up to 64 MiB and one from 1 GiB on: the 80th
# percentiles of 1,242 and 1,718 of them are 4.2 and 12.9 % (benchmarks/2026-11-16-collective-fit.md).
LIKELY_LARGE_ERROR, LIKELY_MEDIUM_ERROR = 0.042, 0.129
WHERE = "fit"
HALVINGS = 200  # bisections; more than a double can resolve
SCAN = 240  # grid points of α·B (see _least_squares) before the best is refined


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """One measurement: a message of `nbytes` bytes took `seconds`."""

    nbytes: float
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class AlphaBeta:
    """Start-up time and bandwidth of one operation on one system."""

    alpha_s: float
    bytes_per_s: float  # on the wire of one rank: comparable with nccl-tests' busbw
    wire_share: float  # bytes on the wire per byte of the message
    fill: float  # k

    def seconds(self, nbytes: float) -> float:
        """Return the predicted time of a message of `nbytes`."""
        return _unit_time(self.alpha_s * self.bytes_per_s, self.wire_share * nbytes, self.fill) / self.bytes_per_s

    def interval_s(self, nbytes: float) -> tuple[float, float]:
        """Return the range that holds 80 % of the measured times of sizes that were not part of the fit."""
        error = LIKELY_LARGE_ERROR if nbytes >= LARGE_BYTES else LIKELY_MEDIUM_ERROR
        return self.seconds(nbytes) * (1 - error), self.seconds(nbytes) * (1 + error)

    def bus_bytes_per_s(self, nbytes: float) -> float:
        """Return the bandwidth as nccl-tests' busbw counts it."""
        return self.wire_share * nbytes / self.seconds(nbytes)


def _unit_time(start_bytes: float, wire_bytes: float, fill: float) -> float:
    """Return the time at a bandwidth of one byte per second; `start_bytes` is α·B."""
    return start_bytes + wire_bytes + fill * math.sqrt(start_bytes * wire_bytes)


def wire_share(operation: Operation, ranks: int) -> float:
    """Return the bytes a rank sends per byte of the message, as nccl-tests counts them (doc/PERFORMANCE.md).

    >>> wire_share("all-reduce", 8), wire_share("all-gather", 8)
    (1.75, 0.875)
    """
    if ranks < 2:
        raise mistake(WHERE, f"a collective of {plural(ranks, 'rank')}", fix="use 2 or more")
    if operation == "all-reduce":
        return 2 * (ranks - 1) / ranks
    return 1.0 if operation in ("broadcast", "reduce") else (ranks - 1) / ranks


def fit_points(
    points: Sequence[Point],
    *,
    ranks: int,
    nodes: int = 1,
    operation: Operation = "all-reduce",
    fill: float | None = None,
) -> AlphaBeta:
    """Fit α and B: exactly through two measurements, by least squares of log errors through more.

    Use a small and a large message, such as 16 MiB and 4 GiB, which separate the two numbers well. `fill` is k; None
    takes the value for the number of nodes. Raises UserError for fewer than two sizes, and where the larger message
    took no longer.
    """
    share = wire_share(operation, ranks)
    k = fill if fill is not None else FILL_INSIDE if nodes == 1 else FILL_ACROSS
    samples = [(share * point.nbytes, point.seconds) for point in _checked_points(points)]
    start_bytes = _exact_fit(samples[0], samples[-1], k) if len(samples) == 2 else _least_squares(samples, k)
    logs = [math.log(_unit_time(start_bytes, wire, k) / seconds) for wire, seconds in samples]
    # Without start-up, two points need not lie on the line. The large one sets the rate, as most of the time is
    # there.
    rate = math.exp(logs[-1] if len(samples) == 2 else sum(logs) / len(logs))
    return AlphaBeta(alpha_s=start_bytes / rate, bytes_per_s=rate, wire_share=share, fill=k)


def _exact_fit(small: tuple[float, float], large: tuple[float, float], fill: float) -> float:
    """Return α·B at which the model has the measured ratio of the two times.

    0 where the times differ by a larger factor than the bytes.
    """
    measured_ratio = large[1] / small[1]

    def ratio(start_bytes: float) -> float:
        return _unit_time(start_bytes, large[0], fill) / _unit_time(start_bytes, small[0], fill)

    if measured_ratio >= ratio(0.0):
        return 0.0
    low, high = 0.0, large[0]
    while ratio(high) > measured_ratio:
        low, high = high, 4 * high
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if ratio(middle) > measured_ratio else (low, middle)
    return high


def _least_squares(known: Sequence[tuple[float, float]], fill: float) -> float:
    """Return α·B with the least variance of log errors: the best of a grid, refined between its neighbours."""

    def spread(start_bytes: float) -> float:
        log_errors = [math.log(_unit_time(start_bytes, wire, fill) / seconds) for wire, seconds in known]
        middle = sum(log_errors) / len(log_errors)
        return sum((log_error - middle) ** 2 for log_error in log_errors)

    span = math.log(1e3 * known[-1][0] / (1e-4 * known[0][0]))
    grid = [0.0, *(1e-4 * known[0][0] * math.exp(span * index / SCAN) for index in range(SCAN + 1))]
    best = min(range(len(grid)), key=lambda place: spread(grid[place]))
    return _golden_section(spread, grid[max(0, best - 1)], grid[min(len(grid) - 1, best + 1)])


def _golden_section(cost: Callable[[float], float], low: float, high: float) -> float:
    """Return the minimum of a function with one valley, by ternary search."""
    for _ in range(HALVINGS):
        low_third, high_third = low + (high - low) / 3, high - (high - low) / 3
        low, high = (low, high_third) if cost(low_third) <= cost(high_third) else (low_third, high)
    return (low + high) / 2


def _checked_points(points: Sequence[Point]) -> list[Point]:
    """Return the points by size; raises UserError for values out of range, too few sizes, or times that do not grow."""
    for point in points:
        if not (
            math.isfinite(point.nbytes) and point.nbytes > 0 and math.isfinite(point.seconds) and point.seconds > 0
        ):
            raise mistake(WHERE, f"{point.nbytes:g} bytes in {point.seconds:g} s", fix="both are above zero")
    by_size = sorted(points, key=lambda point: point.nbytes)
    if len({point.nbytes for point in by_size}) < 2:
        raise mistake(
            WHERE,
            f"{len(points)} points of {len({point.nbytes for point in by_size})} sizes",
            why="α and B are two numbers",
            fix="give two different sizes, as 16 MiB and 4 GiB",
        )
    small, large = by_size[0], by_size[-1]
    if large.seconds <= small.seconds:
        raise mistake(
            WHERE,
            f"{large.nbytes:,.0f} bytes took {large.seconds:g} s, {small.nbytes:,.0f} bytes {small.seconds:g} s",
            why="more bytes must take longer",
            fix="measure again, or take sizes further apart",
        )
    return by_size


def fit_ends(points: Sequence[Point]) -> tuple[Point, Point] | None:
    """Return the two points to fit: the smallest of at least LEAST_BYTES, and the largest.

    None where there is no third size to judge the fit by.
    """
    usable = sorted((point for point in points if point.nbytes >= LEAST_BYTES), key=lambda point: point.nbytes)
    return (usable[0], usable[-1]) if len({point.nbytes for point in usable}) > 2 else None


def allowed_error(nbytes: float) -> float:
    """Return the error, as a share of the time, that a two-point fit must stay below at a held-out size."""
    return LARGE_ERROR if nbytes >= LARGE_BYTES else MEDIUM_ERROR


# Measured times of a collective, from the output of nccl-tests or from a table of sizes and times.


PROGRAMS: Mapping[str, Operation] = {
    "all_reduce": "all-reduce",
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "alltoall": "all-to-all",
    "broadcast": "broadcast",
    "reduce": "reduce",
}
KIND_COLUMNS = ("kind", "operation", "collective")
SIZE_COLUMNS = ("bytes", "nbytes", "size")
SECONDS = {"s": 1.0, "seconds": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "time_us": 1e-6}
BUS_COLUMNS = ("busbw", "busbw_gb_s")
FORMS = "give the output of all_reduce_perf, or a CSV with the columns bytes and us (or ms, s, busbw)"
# Columns of nccl-tests: size, count, type, operator (older versions only where there is one), root (newer versions),
# µs, algbw and busbw in GB/s. A log may have any prefix before them.
_NUMBER = r"(\d+(?:\.\d+)?)"
_WORDS = r"(?:^|\s)(\d+)\s+\d+\s+[a-z]\w+(?:\s+(?P<operator>[a-z]\w+))?"
_TIMES = rf"\s+{_NUMBER}\s+{_NUMBER}\s+{_NUMBER}(?=\s|$)"
_LINES = (re.compile(_WORDS + r"\s+(?P<root>-?\d+)" + _TIMES), re.compile(_WORDS + _TIMES))
# Programs of nccl-tests for operations that cannot be fitted here.
OTHERS = ("sendrecv", "gather", "scatter", "hypercube", "alltoallv")
_PROGRAM = re.compile(rf"\b({'|'.join((*PROGRAMS, *OTHERS))})_perf\b")
_RANK = re.compile(r"#\s+Rank\s+(\d+)\b")
ROUNDING = 0.03  # share of algbw, which is printed with two digits
BUS_ROUNDING = 0.005  # share of busbw, likewise
# Operations with an operator; the others print "none".
SUMS: tuple[Operation, ...] = ("all-reduce", "reduce-scatter", "reduce")
ROOTED: tuple[Operation, ...] = ("broadcast", "reduce")  # have a root; the others print -1


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """The measurements that a file holds for one operation.

    `named` is True where the file names the operation; otherwise the rows are assumed to be of the requested one.
    """

    points: tuple[Point, ...]
    named: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class _Row:
    """A line of nccl-tests; `test` is the program's name, or None where no program is named above the line."""

    test: str | None
    operator: str | None
    root: int | None
    algbw: float
    busbw: float
    point: Point

    def may_be(self, operation: Operation, ranks: int) -> bool:
        """Return True if the operator, the root and the ratio of busbw to algbw fit the operation."""
        if self.operator is not None and (self.operator != "none") != (operation in SUMS):
            return False
        if self.root is not None and (self.root >= 0) != (operation in ROOTED):
            return False
        bus = wire_share(operation, ranks) * self.algbw
        # 0.015 GB/s: busbw is printed with two decimals.
        return abs(bus - self.busbw) <= max(0.015, BUS_ROUNDING * bus)


def read_points(text: str, *, where: str, operation: Operation, ranks: int) -> Measured:
    """Return the measurements of `operation` in a text: output of nccl-tests, or a CSV table.

    Raises UserError where the text holds another operation, another number of ranks, or no measurement.
    """
    rows = list(_test_rows(text))
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    if not rows and lines and "," in lines[0]:
        return _from_table(lines, where, operation, ranks)
    if not rows:
        raise mistake(where, "no line of it is a measurement", fix=FORMS)
    measured = max((int(match[1]) + 1 for match in _RANK.finditer(text)), default=ranks)
    if measured != ranks:
        problem = f"was measured on {measured:,} ranks, and the cluster has {ranks:,}"
        raise mistake(
            where, problem, why="start-up and bandwidth belong to one number of ranks", fix="name that cluster"
        )
    candidates = [row for row in rows if row.test is None or PROGRAMS.get(row.test) == operation]
    if not candidates:
        raise _other_system(where, operation, [PROGRAMS.get(str(row.test), str(row.test)) for row in rows])
    fitting = [row for row in candidates if row.may_be(operation, ranks)]
    # Without names, lines of other tests may stand in between; below a name every line must fit it.
    unlike = [row for row in candidates if row not in fitting and (row.test or not fitting)]
    if unlike:
        raise _unlike_row(unlike[0], where, operation, ranks)
    return Measured(points=tuple(row.point for row in fitting), named=all(row.test for row in fitting))


def _other_system(where: str, operation: Operation, held: Sequence[str], why: str = "") -> UserError:
    names = sorted(set(held))
    supported = [name for name in names if name in PROGRAMS.values()]
    fix = f"add --kind {supported[0]}" if supported else f"measure {operation}"
    return mistake(where, f"holds {' or '.join(names) if why else ', '.join(names)}, not {operation}", why=why, fix=fix)


def _unlike_row(row: _Row, where: str, operation: Operation, ranks: int) -> UserError:
    """Return the error for a line whose bandwidths cannot belong to this operation on this number of ranks."""
    ratio = f"{row.busbw / max(row.algbw, 1e-9):.3g}"
    matching = [candidate for candidate in PROGRAMS.values() if row.may_be(candidate, ranks)]
    if matching and row.test is None:
        clues = [f"operator {row.operator}"] * (row.operator is not None) + [f"root {row.root}"] * (
            row.root is not None
        )
        return _other_system(where, operation, matching, why=", ".join([*clues, f"busbw {ratio} times algbw"]))
    return mistake(
        where,
        f"busbw is {ratio} times algbw, and {wire_share(operation, ranks):.3g} for {operation} on {ranks:,} ranks",
        why="start-up and bandwidth belong to one operation and one number of ranks",
        fix="name the cluster it was measured on, or the right --kind",
    )


def _test_rows(text: str) -> Iterator[_Row]:
    """Yield the rows with out-of-place times; a row's test is the program that the last line above it names."""
    test: str | None = None
    for line in text.splitlines():
        if named := _PROGRAM.search(line):
            test = named[1]
        row = next(filter(None, (_test_row(pattern.search(line), test) for pattern in _LINES)), None)
        if row:
            yield row


def _test_row(found: re.Match[str] | None, test: str | None) -> _Row | None:
    """Return the row of a matching line, or None where its numbers are not size, time and bandwidth."""
    if found is None:
        return None
    words = found.groupdict()
    nbytes, (us, algbw, busbw) = float(found[1]), (float(number) for number in found.groups()[-3:])
    if not _bandwidth_agrees(nbytes, us, algbw):
        return None
    root = int(words["root"]) if words.get("root") else None
    point = Point(nbytes=nbytes, seconds=us * 1e-6)
    return _Row(test=test, operator=words["operator"], root=root, algbw=algbw, busbw=busbw, point=point)


def _bandwidth_agrees(nbytes: float, us: float, algbw_gb: float) -> bool:
    """Return True if the third number is the first over the second, which distinguishes the root column from a time."""
    if nbytes <= 0 or us <= 0:
        return False
    rate_gb = nbytes / us / 1e3
    return abs(rate_gb - algbw_gb) <= max(0.01, ROUNDING * rate_gb)


def _from_table(lines: Sequence[str], where: str, operation: Operation, ranks: int) -> Measured:
    """Read the points of `operation` from the lines of a CSV table with a size and a time or busbw column."""
    reader = csv.DictReader(lines)
    try:
        names = csv_columns(reader, where)
    except csv.Error as error:
        raise mistake(f"{where}:1", f"is no table: {error}", fix=FORMS) from None
    columns = {(name or "").strip().lower(): name for name in names}
    size = next((columns[name] for name in SIZE_COLUMNS if name in columns), None)
    value = next((name for name in (*SECONDS, *BUS_COLUMNS) if name in columns), None)
    if size is None or value is None:
        raise mistake(where, f"has the columns {', '.join(columns) or 'of nothing'}"[:160], fix=FORMS)
    kind = next((columns[name] for name in KIND_COLUMNS if name in columns), None)
    share, column = wire_share(operation, ranks), columns[value]
    points: list[Point] = []
    other_kinds: list[str] = []
    try:
        for row in reader:
            at = f"{where}:{reader.line_num}"
            if kind is not None and (other_kind := _other_kind(row.get(kind), operation)):
                other_kinds.append(other_kind)
            else:
                points.append(_measured_point(row, where=at, size=size, column=column, unit=value, share=share))
    except csv.Error as error:
        raise mistake(f"{where}:{reader.line_num}", f"is no table: {error}", fix=FORMS) from None
    if not points:
        raise (
            _other_system(where, operation, other_kinds) if other_kinds else mistake(where, "holds no rows", fix=FORMS)
        )
    return Measured(points=tuple(points), named=kind is not None)


def _other_kind(text: str | None, operation: Operation) -> str | None:
    """Return the operation that a table cell names if it differs from `operation`, else None.

    Accepts AllGather, all_gather_perf and all-gather alike.
    """
    word = re.sub(r"[^a-z]", "", (text or "").strip().lower().removesuffix("_perf"))
    named = next(
        (candidate for candidate in PROGRAMS.values() if candidate.replace("-", "") == word),
        (text or "")[:40] or "nothing",
    )
    return None if named == operation else named


def _measured_point(
    row: Mapping[str, str | None], *, where: str, size: str, column: str, unit: str, share: float
) -> Point:
    nbytes, text = parse_size(row.get(size) or "", where), (row.get(column) or "").strip()
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise mistake(where, f"{unit} = {text[:40]!r}", fix="write a number above zero")
    seconds = share * nbytes / (number * 1e9) if unit in BUS_COLUMNS else number * SECONDS[unit]
    return Point(nbytes=nbytes, seconds=seconds)


def worst_error(points: Sequence[Point], predicted: Sequence[float]) -> tuple[float, Point]:
    """Return the largest relative error of the predicted seconds, with its sign, and the point where it occurs."""
    errors = [(prediction / point.seconds - 1, point) for point, prediction in zip(points, predicted, strict=True)]
    return max(errors, key=lambda entry: abs(entry[0]))
