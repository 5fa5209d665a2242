"""What NCCL will pick for a collective on a cluster, how long it takes, and where the pick changes."""

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

STEPS = 8  # looks per doubling; a pick that holds for less than that is not worth a line
HALVINGS = 40


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectiveAnswer:
    """One size: the pairs that exist, fastest first as NCCL reckons, and what the first will take."""

    nbytes: float
    pairs: tuple[AlgorithmChoice, ...]  # empty where NCCL's model has nothing to say
    expected_s: float | None  # of the first: with the call, unrounded links and a filled pipeline
    expected_interval_s: tuple[float, float] | None  # of 80 % of systems
    bus_bytes_per_s: float | None
    fitted_s: float | None  # from measurements; None without, and below 16 MiB
    fitted_interval_s: tuple[float, float] | None  # of 80 % of held-out sizes
    fitted_bus_bytes_per_s: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class PickRange:
    """The sizes for which one pair is picked."""

    from_bytes: float
    to_bytes: float
    algorithm: Algorithm
    protocol: Protocol


def collective_answers(
    comm: NcclSystem | None, operation: Operation | None, sizes: Sequence[float], fit: AlphaBeta | None
) -> tuple[CollectiveAnswer, ...]:
    """One per size; `comm` and `operation` are None where NCCL has no choice, and only the fit speaks."""
    return tuple(_answer_for_size(comm, operation, nbytes, fit) for nbytes in sizes)


def _answer_for_size(
    comm: NcclSystem | None, operation: Operation | None, nbytes: float, fit: AlphaBeta | None
) -> CollectiveAnswer:
    pairs: tuple[AlgorithmChoice, ...] = ()
    seconds = bus = interval = None
    if comm is not None and operation is not None:
        pairs = tuple(sorted(possible_pairs(comm, nbytes, operation=operation), key=lambda one: one.seconds))
        one = expect_collective(comm, nbytes, operation=operation)
        assert one is not None  # a pair exists for every operation
        seconds, interval = one.seconds, (one.low_s, one.high_s)
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
    """Which pair is picked from where to where, to about a byte in a thousand million."""
    found: list[PickRange] = []
    for from_bytes, to_bytes, picked in _size_ranges(comm, operation, low, high):
        one = PickRange(from_bytes=from_bytes, to_bytes=to_bytes, algorithm=picked.algorithm, protocol=picked.protocol)
        last = found[-1] if found else None
        if last and (last.algorithm, last.protocol) == (one.algorithm, one.protocol):
            one = PickRange(
                from_bytes=last.from_bytes, to_bytes=to_bytes, algorithm=one.algorithm, protocol=one.protocol
            )
            found.pop()
        found.append(one)
    return tuple(found)


def _size_ranges(
    comm: NcclSystem, operation: Operation, low: float, high: float
) -> Iterator[tuple[float, float, AlgorithmChoice]]:
    """Stretches without a change, as far as STEPS looks per doubling see."""
    looks = max(1, math.ceil(STEPS * math.log2(high / low))) if high > low else 1
    at, picked = low, choose_pair(comm, low, operation=operation)
    for place in range(1, looks + 1):
        next_at = min(high, low * 2 ** (place / STEPS))
        then = choose_pair(comm, next_at, operation=operation)
        if _algorithm_protocol(then) != _algorithm_protocol(picked):
            border = _range_border(comm, operation, at, next_at)
            yield at, border, picked
            at, picked = border, then
        else:
            yield at, next_at, picked
            at = next_at
    yield at, high, picked


def _range_border(comm: NcclSystem, operation: Operation, low: float, high: float) -> float:
    """Where the pair of `low` ends."""
    kept = _algorithm_protocol(choose_pair(comm, low, operation=operation))
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (
            (middle, high)
            if _algorithm_protocol(choose_pair(comm, middle, operation=operation)) == kept
            else (low, middle)
        )
    return high


def _algorithm_protocol(one: AlgorithmChoice) -> tuple[Algorithm, Protocol]:
    return one.algorithm, one.protocol


# Answers about a collective as a person reads them.


NONE = "-"
# benchmarks/2026-11-16-collective-interval.md
MODEL_NOTE = """
The range covers 80 % of systems: networks differ in start-up time and in the bandwidth they deliver. To narrow it,
measure yours: --fit FILE takes the output of nccl-tests, or two sizes of your own"""


def show_pairs(one: CollectiveAnswer) -> str:
    """Every pair at one size, the pick first."""
    rows = [("", "algorithm", "protocol", "start-up", "transfer", "NCCL's estimate", "")]
    best = one.pairs[0].seconds if one.pairs else 0.0
    for place, pair in enumerate(one.pairs):
        rows.append(
            (
                "*" if place == 0 else "",
                pair.algorithm,
                pair.protocol,
                format_seconds(pair.latency_s),
                format_seconds(pair.transfer_s),
                format_seconds(pair.seconds),
                "NCCL's pick" if place == 0 else f"{pair.seconds / best:.3g} x" if best else "",
            )
        )
    return "\n".join(text_table(rows, right=(3, 4, 5, 6)))


def show_expected(one: CollectiveAnswer) -> str:
    """What the pick takes at one size."""
    by_links, by_fit = "by links and NICs", "by the fit"
    found = (
        (by_links, one.expected_s, one.expected_interval_s, "80% of systems", one.bus_bytes_per_s),
        (by_fit, one.fitted_s, one.fitted_interval_s, "80%", one.fitted_bus_bytes_per_s),
    )
    lines = [
        f"{format_size(one.nbytes)} takes {format_seconds(seconds)} {name} "
        f"({span}: {_span_text(interval)}; {_gigabytes_text(rate)} GB/s busbw)"
        for name, seconds, interval, span, rate in found
        if seconds is not None
    ]
    return "\n".join(lines or [f"{format_size(one.nbytes)}: the fit holds from 16 MiB on"])


def show_sizes(found: Sequence[CollectiveAnswer]) -> str:
    """A line per size; columns that nobody filled are left out."""
    modelled, fitted = any(one.pairs for one in found), any(one.fitted_s for one in found)
    head = ["size"]
    head += ["NCCL picks", "time", "80% of systems", "busbw GB/s", "next best"] if modelled else []
    head += ["fitted", "80%", "busbw GB/s"] if fitted else []
    rows = [head]
    for one in found:
        by_model = _picked_lines(one) if modelled else []
        by_fit = (
            [
                _seconds_text(one.fitted_s),
                _span_text(one.fitted_interval_s),
                _gigabytes_text(one.fitted_bus_bytes_per_s),
            ]
            if fitted
            else []
        )
        rows.append([format_size(one.nbytes), *by_model, *by_fit])
    left = (1, 5) if modelled else ()
    return "\n".join(text_table(rows, right=[place for place in range(len(head)) if place not in left]))


def _picked_lines(one: CollectiveAnswer) -> list[str]:
    if not one.pairs:
        return [NONE] * 5
    first, *others = one.pairs
    then = (
        f"{others[0].algorithm} {others[0].protocol} {others[0].seconds / first.seconds - 1:+.0%}" if others else NONE
    )
    return [
        f"{first.algorithm} {first.protocol}",
        _seconds_text(one.expected_s),
        _span_text(one.expected_interval_s),
        _gigabytes_text(one.bus_bytes_per_s),
        then,
    ]


def show_pick_ranges(found: Sequence[PickRange]) -> str:
    """Where the pick changes."""
    last = f"{found[-1].algorithm} {found[-1].protocol}"
    if len(found) == 1:
        return f"{last} at every size between"
    parts = [f"{one.algorithm} {one.protocol} below {format_size(one.to_bytes)}" for one in found[:-1]]
    return ", ".join([*parts, f"{last} above"])


def show_fit(fit: AlphaBeta, count: int, error: float, at_bytes: float) -> str:
    """What was fitted, and how well it meets the points."""
    said = "met exactly" if abs(error) < 5e-4 else f"worst {error:+.1%} at {format_size(at_bytes)}"
    return (
        f"fitted on {plural(count, 'size')} from 16 MiB on: start-up {format_seconds(fit.alpha_s)}, "
        f"{fit.bytes_per_s / 1e9:,.1f} GB/s ({said})"
    )


def _span_text(interval: tuple[float, float] | None) -> str:
    return NONE if interval is None else f"{format_seconds(interval[0])} to {format_seconds(interval[1])}"


def _gigabytes_text(rate: float | None) -> str:
    return NONE if not rate else f"{rate / 1e9:,.4g}"


def _seconds_text(value: float | None) -> str:
    return NONE if value is None else format_seconds(value)
