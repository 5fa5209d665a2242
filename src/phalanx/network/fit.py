"""The time of a collective on one system from two or more measurements of it.

A message of W bytes on the wire of a rank (2(n-1)/n of the message for an all-reduce) runs through in chunks:
t = α + W/B + k √(α W/B). The root is the filling of the pipeline: with the best chunk for every size k is 2
(t = (√α + √(W/B))², Thakur et al. 2005, section 4), with a chunk that never changes it is 0. Inside a node k = 2 holds,
as well as anything from 1.25 on; between nodes, where many steps start up and only small messages get smaller chunks,
0.4. Measured sweeps of 12 sources say so, each source left out in turn (benchmarks/2026-11-15-collective-fit.md): a
calibration of the form. α and B belong to one system, operation and number of ranks, and are not physics.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from phalanx.errors import mistake
from phalanx.units import plural

Operation = Literal["all-reduce", "all-gather", "reduce-scatter", "all-to-all", "broadcast", "reduce"]

MIB = 2**20
# Below, launches and protocol changes decide, and two points say nothing about them.
LEAST_BYTES = 16 * MIB
LARGE_BYTES = 1024 * MIB
LARGE_ERROR, MEDIUM_ERROR = 0.10, 0.25  # of the time; what two points must give from LARGE_BYTES on, and below
FILL_INSIDE, FILL_ACROSS = 2.0, 0.4  # k
# Errors that 80 % of held-out sizes stay below, fitted on a size up to 64 MiB and one from 1 GiB on: the 80th
# percentiles of 1,242 and 1,718 of them are 4.2 and 12.9 % (benchmarks/2026-11-16-collective-fit.md).
LIKELY_LARGE_ERROR, LIKELY_MEDIUM_ERROR = 0.042, 0.129
WHERE = "fit"
HALVINGS = 200  # more than doubles can tell apart
SCAN = 240  # places of the half-bandwidth size that are looked at before the best is refined


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """One measurement: a message of `nbytes` took `seconds`."""

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
        """Predicted time of a message."""
        return _shape(self.alpha_s * self.bytes_per_s, self.wire_share * nbytes, self.fill) / self.bytes_per_s

    def interval_s(self, nbytes: float) -> tuple[float, float]:
        """The range that holds 80 % of measured times of sizes that were not fitted on."""
        error = LIKELY_LARGE_ERROR if nbytes >= LARGE_BYTES else LIKELY_MEDIUM_ERROR
        return self.seconds(nbytes) * (1 - error), self.seconds(nbytes) * (1 + error)

    def bus_bytes_per_s(self, nbytes: float) -> float:
        """The same as nccl-tests' busbw."""
        return self.wire_share * nbytes / self.seconds(nbytes)


def _shape(start_bytes: float, wire_bytes: float, fill: float) -> float:
    """Time at one byte per second; `start_bytes` is α·B."""
    return start_bytes + wire_bytes + fill * math.sqrt(start_bytes * wire_bytes)


def wire_share(operation: Operation, ranks: int) -> float:
    """Bytes a rank sends per byte of the message, as nccl-tests counts (doc/PERFORMANCE.md).

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
    """α and B from two measurements exactly, from more with the least mean square of log errors.

    Use a small and a large message, as 16 MiB and 4 GiB: they pin the two numbers apart. Raises UserError where more
    bytes took no longer. `fill` None: k as the nodes have it.
    """
    share = wire_share(operation, ranks)
    k = fill if fill is not None else FILL_INSIDE if nodes == 1 else FILL_ACROSS
    known = [(share * one.nbytes, one.seconds) for one in _checked(points)]
    start_bytes = _exact(known[0], known[-1], k) if len(known) == 2 else _least(known, k)
    logs = [math.log(_shape(start_bytes, wire, k) / seconds) for wire, seconds in known]
    # Without start-up two points need not lie on the line: the large one counts, as most of the time is there.
    rate = math.exp(logs[-1] if len(known) == 2 else sum(logs) / len(logs))
    return AlphaBeta(alpha_s=start_bytes / rate, bytes_per_s=rate, wire_share=share, fill=k)


def _exact(small: tuple[float, float], large: tuple[float, float], fill: float) -> float:
    """α·B where the two times have the measured ratio; 0 where they differ more than the bytes do."""
    wanted = large[1] / small[1]

    def ratio(start_bytes: float) -> float:
        return _shape(start_bytes, large[0], fill) / _shape(start_bytes, small[0], fill)

    if wanted >= ratio(0.0):
        return 0.0
    low, high = 0.0, large[0]
    while ratio(high) > wanted:
        low, high = high, 4 * high
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if ratio(middle) > wanted else (low, middle)
    return high


def _least(known: Sequence[tuple[float, float]], fill: float) -> float:
    """α·B with the least spread of log errors: looked for on a grid, then between its neighbours."""

    def spread(start_bytes: float) -> float:
        logs = [math.log(_shape(start_bytes, wire, fill) / seconds) for wire, seconds in known]
        middle = sum(logs) / len(logs)
        return sum((one - middle) ** 2 for one in logs)

    span = math.log(1e3 * known[-1][0] / (1e-4 * known[0][0]))
    grid = [0.0, *(1e-4 * known[0][0] * math.exp(span * place / SCAN) for place in range(SCAN + 1))]
    best = min(range(len(grid)), key=lambda place: spread(grid[place]))
    return _narrow(spread, grid[max(0, best - 1)], grid[min(len(grid) - 1, best + 1)])


def _narrow(cost: Callable[[float], float], low: float, high: float) -> float:
    """The least of a function with one valley, by thirds."""
    for _ in range(HALVINGS):
        left, right = low + (high - low) / 3, high - (high - low) / 3
        low, high = (low, right) if cost(left) <= cost(right) else (left, high)
    return (low + high) / 2


def _checked(points: Sequence[Point]) -> list[Point]:
    for one in points:
        if not (math.isfinite(one.nbytes) and one.nbytes > 0 and math.isfinite(one.seconds) and one.seconds > 0):
            raise mistake(WHERE, f"{one.nbytes:g} bytes in {one.seconds:g} s", fix="both are above zero")
    known = sorted(points, key=lambda one: one.nbytes)
    if len({one.nbytes for one in known}) < 2:
        raise mistake(
            WHERE,
            f"{len(points)} points of {len({one.nbytes for one in known})} sizes",
            why="α and B are two numbers",
            fix="give two different sizes, as 16 MiB and 4 GiB",
        )
    small, large = known[0], known[-1]
    if large.seconds <= small.seconds:
        raise mistake(
            WHERE,
            f"{large.nbytes:,.0f} bytes took {large.seconds:g} s, {small.nbytes:,.0f} bytes {small.seconds:g} s",
            why="more bytes must take longer",
            fix="measure again, or take sizes further apart",
        )
    return known


def ends(points: Sequence[Point]) -> tuple[Point, Point] | None:
    """The points to fit on: the smallest from LEAST_BYTES on, and the largest; None without a third to judge by."""
    usable = sorted((one for one in points if one.nbytes >= LEAST_BYTES), key=lambda one: one.nbytes)
    return (usable[0], usable[-1]) if len({one.nbytes for one in usable}) > 2 else None


def allowed_error(nbytes: float) -> float:
    """The error of a held-out time that a two-point fit must stay below."""
    return LARGE_ERROR if nbytes >= LARGE_BYTES else MEDIUM_ERROR
