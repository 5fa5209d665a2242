"""NCCL's choice of algorithm and protocol for a collective, by message size, with the expected times.

The results are values (`CollectiveAnswer`, `PickRange`) and text.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from phalanx.io.tables import text_table
from phalanx.network.collective_fit import LEAST_BYTES, AlphaBeta
from phalanx.network.nccl_choice import (
    AlgorithmChoice,
    Operation,
    bus_bytes_per_s,
    choose_pair,
    expect_collective,
    possible_pairs,
)
from phalanx.network.nccl_system import NcclSystem
from phalanx.network.nccl_tables import Algorithm, Protocol
from phalanx.network.sizes import format_size
from phalanx.units import format_seconds, plural

# Message sizes checked per doubling. A pick that holds for less than an eighth of a doubling gets no line.
STEPS = 8
HALVINGS = 40


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectiveAnswer:
    """The choices for one message size: all pairs of algorithm and protocol, and the expected time of NCCL's pick.

    `pairs` is sorted by NCCL's estimate, so the first one is the pick.
    """

    nbytes: float
    pairs: tuple[AlgorithmChoice, ...]  # empty where NCCL's model does not cover the collective
    # Expected time of the first pair: with the call, unrounded links and a filled pipeline.
    expected_s: float | None
    expected_interval_s: tuple[float, float] | None  # of 80 % of systems
    bus_bytes_per_s: float | None
    fitted_s: float | None  # from measurements; None without a fit, and below 16 MiB
    fitted_interval_s: tuple[float, float] | None  # of 80 % of held-out sizes
    fitted_bus_bytes_per_s: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class PickRange:
    """A range of message sizes for which NCCL picks the same algorithm and protocol."""

    from_bytes: float
    to_bytes: float
    algorithm: Algorithm
    protocol: Protocol


def collective_answers(
    comm: NcclSystem | None, operation: Operation | None, sizes: Sequence[float], fit: AlphaBeta | None
) -> tuple[CollectiveAnswer, ...]:
    """Return one answer per message size.

    `comm` and `operation` are None where NCCL has no choice to make; then only the fitted times are filled.
    """
    return tuple(_answer_for_size(comm, operation, nbytes, fit) for nbytes in sizes)


def _answer_for_size(
    comm: NcclSystem | None, operation: Operation | None, nbytes: float, fit: AlphaBeta | None
) -> CollectiveAnswer:
    """Evaluate the model, where NCCL has a choice, and the fit, where it applies, for one message size."""
    pairs: tuple[AlgorithmChoice, ...] = ()
    seconds = bus = interval = None
    if comm is not None and operation is not None:
        pairs = tuple(sorted(possible_pairs(comm, nbytes, operation=operation), key=lambda pair: pair.seconds))
        expected = expect_collective(comm, nbytes, operation=operation)
        assert expected is not None  # a pair exists for every operation
        seconds, interval = expected.seconds, (expected.low_s, expected.high_s)
        bus = bus_bytes_per_s(comm, nbytes, seconds, operation=operation)
    fits = fit is not None and nbytes >= LEAST_BYTES
    return CollectiveAnswer(
        nbytes=nbytes,
        pairs=pairs,
        expected_s=seconds,
        expected_interval_s=interval,
        bus_bytes_per_s=bus,
        fitted_s=fit.seconds(nbytes) if fit and fits else None,
        fitted_interval_s=fit.interval_s(nbytes) if fit and fits else None,
        fitted_bus_bytes_per_s=fit.bus_bytes_per_s(nbytes) if fit and fits else None,
    )


def pick_ranges(comm: NcclSystem, operation: Operation, low: float, high: float) -> tuple[PickRange, ...]:
    """Return the size ranges between `low` and `high` with NCCL's pick in each; the borders are exact to about 1e-9."""
    ranges: list[PickRange] = []
    for from_bytes, to_bytes, picked in _size_ranges(comm, operation, low, high):
        current = PickRange(
            from_bytes=from_bytes, to_bytes=to_bytes, algorithm=picked.algorithm, protocol=picked.protocol
        )
        last = ranges[-1] if ranges else None
        if last and (last.algorithm, last.protocol) == (current.algorithm, current.protocol):
            current = PickRange(
                from_bytes=last.from_bytes, to_bytes=to_bytes, algorithm=current.algorithm, protocol=current.protocol
            )
            ranges.pop()
        ranges.append(current)
    return tuple(ranges)


def _size_ranges(
    comm: NcclSystem, operation: Operation, low: float, high: float
) -> Iterator[tuple[float, float, AlgorithmChoice]]:
    """Yield (from, to, choice) for sizes of `low` to `high`, sampled STEPS times per doubling; borders by bisection."""
    samples = max(1, math.ceil(STEPS * math.log2(high / low))) if high > low else 1
    at, picked = low, choose_pair(comm, low, operation=operation)
    for index in range(1, samples + 1):
        next_at = min(high, low * 2 ** (index / STEPS))
        next_choice = choose_pair(comm, next_at, operation=operation)
        if _algorithm_protocol(next_choice) != _algorithm_protocol(picked):
            border = _range_border(comm, operation, at, next_at)
            yield at, border, picked
            at, picked = border, next_choice
        else:
            yield at, next_at, picked
            at = next_at
    yield at, high, picked


def _range_border(comm: NcclSystem, operation: Operation, low: float, high: float) -> float:
    """Return the size between `low` and `high` at which the pick of `low` stops to be NCCL's choice, by bisection."""
    low_pair = _algorithm_protocol(choose_pair(comm, low, operation=operation))
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (
            (middle, high)
            if _algorithm_protocol(choose_pair(comm, middle, operation=operation)) == low_pair
            else (low, middle)
        )
    return high


def _algorithm_protocol(one: AlgorithmChoice) -> tuple[Algorithm, Protocol]:
    return one.algorithm, one.protocol


# Text of the answers.


NONE = "-"
# benchmarks/2026-11-16-collective-interval.md
MODEL_NOTE = """
The range covers 80 % of systems: networks differ in start-up time and in the bandwidth they deliver. To narrow it,
measure yours: --fit FILE takes the output of nccl-tests, or two sizes of your own"""


def show_pairs(one: CollectiveAnswer) -> str:
    """Format a table of every pair at one message size, NCCL's pick first."""
    rows = [("", "algorithm", "protocol", "start-up", "transfer", "NCCL's estimate", "")]
    best = one.pairs[0].seconds if one.pairs else 0.0
    for index, pair in enumerate(one.pairs):
        rows.append(
            (
                "*" if index == 0 else "",
                pair.algorithm,
                pair.protocol,
                format_seconds(pair.latency_s),
                format_seconds(pair.transfer_s),
                format_seconds(pair.seconds),
                "NCCL's pick" if index == 0 else f"{pair.seconds / best:.3g} x" if best else "",
            )
        )
    return "\n".join(text_table(rows, right=(3, 4, 5, 6)))


def show_expected(one: CollectiveAnswer) -> str:
    """Format the expected time of NCCL's pick at one message size, from the model and from the fit."""
    by_links, by_fit = "by links and NICs", "by the fit"
    estimates = (
        (by_links, one.expected_s, one.expected_interval_s, "80% of systems", one.bus_bytes_per_s),
        (by_fit, one.fitted_s, one.fitted_interval_s, "80%", one.fitted_bus_bytes_per_s),
    )
    lines = [
        f"{format_size(one.nbytes)} takes {format_seconds(seconds)} {name} "
        f"({span}: {_span_text(interval)}; {_gigabytes_text(rate)} GB/s busbw)"
        for name, seconds, interval, span, rate in estimates
        if seconds is not None
    ]
    return "\n".join(lines or [f"{format_size(one.nbytes)}: the fit holds from 16 MiB on"])


def show_sizes(found: Sequence[CollectiveAnswer]) -> str:
    """Format a table with a line per message size; columns without any value are omitted."""
    modelled, fitted = any(answer.pairs for answer in found), any(answer.fitted_s for answer in found)
    head = ["size"]
    head += ["NCCL picks", "time", "80% of systems", "busbw GB/s", "next best"] if modelled else []
    head += ["fitted", "80%", "busbw GB/s"] if fitted else []
    rows = [head]
    for answer in found:
        by_model = _picked_lines(answer) if modelled else []
        by_fit = (
            [
                _seconds_text(answer.fitted_s),
                _span_text(answer.fitted_interval_s),
                _gigabytes_text(answer.fitted_bus_bytes_per_s),
            ]
            if fitted
            else []
        )
        rows.append([format_size(answer.nbytes), *by_model, *by_fit])
    left_aligned = (1, 5) if modelled else ()
    return "\n".join(text_table(rows, right=[column for column in range(len(head)) if column not in left_aligned]))


def _picked_lines(one: CollectiveAnswer) -> list[str]:
    """Return the table cells of NCCL's pick: pair, time, range, busbw, and the next best pair with its extra time."""
    if not one.pairs:
        return [NONE] * 5
    first, *slower = one.pairs
    next_best = (
        f"{slower[0].algorithm} {slower[0].protocol} {slower[0].seconds / first.seconds - 1:+.0%}" if slower else NONE
    )
    return [
        f"{first.algorithm} {first.protocol}",
        _seconds_text(one.expected_s),
        _span_text(one.expected_interval_s),
        _gigabytes_text(one.bus_bytes_per_s),
        next_best,
    ]


def show_pick_ranges(found: Sequence[PickRange]) -> str:
    """Format the sizes at which NCCL's pick changes, as one line."""
    last = f"{found[-1].algorithm} {found[-1].protocol}"
    if len(found) == 1:
        return f"{last} at every size between"
    phrases = [
        f"{pick_range.algorithm} {pick_range.protocol} below {format_size(pick_range.to_bytes)}"
        for pick_range in found[:-1]
    ]
    return ", ".join([*phrases, f"{last} above"])


def show_fit(fit: AlphaBeta, count: int, error: float, at_bytes: float) -> str:
    """Format the fitted start-up time and bandwidth, the number of sizes, and the largest error."""
    error_text = "met exactly" if abs(error) < 5e-4 else f"worst {error:+.1%} at {format_size(at_bytes)}"
    return (
        f"fitted on {plural(count, 'size')} from 16 MiB on: start-up {format_seconds(fit.alpha_s)}, "
        f"{fit.bytes_per_s / 1e9:,.1f} GB/s ({error_text})"
    )


def _span_text(interval: tuple[float, float] | None) -> str:
    return NONE if interval is None else f"{format_seconds(interval[0])} to {format_seconds(interval[1])}"


def _gigabytes_text(rate: float | None) -> str:
    return NONE if not rate else f"{rate / 1e9:,.4g}"


def _seconds_text(value: float | None) -> str:
    return NONE if value is None else format_seconds(value)
