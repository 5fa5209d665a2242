"""The time of a collective on one system from two measurements of it.

Between nodes: t = α + W/B, with W the bytes a rank puts on the wire (2(n-1)/n of the message for an all-reduce).
Inside a node the message runs through in chunks, and the best chunk balances its start-up against its transfer, which
gives t = (√α + √(W/B))² (pipelining with the optimal segment; Thakur et al. 2005, section 4 use it for long messages).
Which form holds where was seen on three measured systems (docs/validation.md, "Collectives") and held on a fourth: it
is a calibration of the form. α and B then belong to one system, operation and number of ranks, and are not physics.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from phalanx.errors import mistake

Operation = Literal["all-reduce", "all-gather", "reduce-scatter", "all-to-all", "broadcast", "reduce"]

MIB = 2**20
# Below, launches and protocol changes decide, and two points say nothing about them.
LEAST_BYTES = 16 * MIB
LARGE_BYTES = 1024 * MIB
LARGE_ERROR, MEDIUM_ERROR = 0.10, 0.25  # of the time; what two points must give from LARGE_BYTES on, and below
WHERE = "fit"


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
    piped: bool  # the form inside a node

    def seconds(self, nbytes: float) -> float:
        """Predicted time of a message."""
        transfer_s = self.wire_share * nbytes / self.bytes_per_s
        both = self.alpha_s + transfer_s
        return both + 2 * math.sqrt(self.alpha_s * transfer_s) if self.piped else both

    def bus_bytes_per_s(self, nbytes: float) -> float:
        """The same as nccl-tests' busbw."""
        return self.wire_share * nbytes / self.seconds(nbytes)


def wire_share(operation: Operation, ranks: int) -> float:
    """Bytes a rank sends per byte of the message, as nccl-tests counts (doc/PERFORMANCE.md).

    >>> wire_share("all-reduce", 8), wire_share("all-gather", 8)
    (1.75, 0.875)
    """
    if ranks < 2:
        raise mistake(WHERE, f"a collective of {ranks} ranks", fix="use 2 or more")
    if operation == "all-reduce":
        return 2 * (ranks - 1) / ranks
    return 1.0 if operation in ("broadcast", "reduce") else (ranks - 1) / ranks


def fit_two(points: Sequence[Point], *, ranks: int, nodes: int = 1, operation: Operation = "all-reduce") -> AlphaBeta:
    """α and B from two measurements; raises UserError where no α ≥ 0 and B > 0 meet both.

    Use a small and a large message, as 16 MiB and 4 GiB: they pin the two numbers apart.
    """
    share = wire_share(operation, ranks)
    small, large = _ordered(points)
    piped = nodes == 1
    root = math.sqrt if piped else float
    x0, x1 = root(share * small.nbytes), root(share * large.nbytes)
    y0, y1 = root(small.seconds), root(large.seconds)
    slope = (y1 - y0) / (x1 - x0)
    start = max(0.0, y0 - slope * x0)
    if slope <= 0:
        raise mistake(
            WHERE,
            f"{large.nbytes:,.0f} bytes took {large.seconds:g} s, {small.nbytes:,.0f} bytes {small.seconds:g} s",
            why="more bytes must take longer",
            fix="measure again, or take sizes further apart",
        )
    power = 2 if piped else 1
    return AlphaBeta(alpha_s=start**power, bytes_per_s=slope**-power, wire_share=share, piped=piped)


def _ordered(points: Sequence[Point]) -> tuple[Point, Point]:
    if len(points) != 2 or points[0].nbytes == points[1].nbytes:
        raise mistake(WHERE, f"{len(points)} points", why="α and B are two numbers", fix="give two different sizes")
    for one in points:
        if not (math.isfinite(one.nbytes) and one.nbytes > 0 and math.isfinite(one.seconds) and one.seconds > 0):
            raise mistake(WHERE, f"{one.nbytes:g} bytes in {one.seconds:g} s", fix="both are above zero")
    small, large = sorted(points, key=lambda one: one.nbytes)
    return small, large


def ends(points: Sequence[Point]) -> tuple[Point, Point] | None:
    """The points to fit on: the smallest from LEAST_BYTES on, and the largest; None without a third to judge by."""
    usable = sorted((one for one in points if one.nbytes >= LEAST_BYTES), key=lambda one: one.nbytes)
    return (usable[0], usable[-1]) if len({one.nbytes for one in usable}) > 2 else None


def allowed_error(nbytes: float) -> float:
    """The error of a held-out time that a two-point fit must stay below."""
    return LARGE_ERROR if nbytes >= LARGE_BYTES else MEDIUM_ERROR
