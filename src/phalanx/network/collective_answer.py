"""What NCCL will pick for a collective on a cluster, how long it takes, and where the pick changes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from phalanx.network.fit import LEAST_BYTES, AlphaBeta
from phalanx.network.nccl_choice import Choice, Operation, bus_bytes_per_s, choices, choose, expect
from phalanx.network.nccl_system import System
from phalanx.network.nccl_tables import Algorithm, Protocol

STEPS = 8  # looks per doubling; a pick that holds for less than that is not worth a line
HALVINGS = 40


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """One size: the pairs that exist, fastest first as NCCL reckons, and what the first will take."""

    nbytes: float
    pairs: tuple[Choice, ...]  # empty where NCCL's model has nothing to say
    expected_s: float | None  # of the first: with the call, unrounded links and a filled pipeline
    expected_interval_s: tuple[float, float] | None  # of 80 % of systems
    bus_bytes_per_s: float | None
    fitted_s: float | None  # from measurements; None without, and below 16 MiB
    fitted_interval_s: tuple[float, float] | None  # of 80 % of held-out sizes
    fitted_bus_bytes_per_s: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Reign:
    """The sizes for which one pair is picked."""

    from_bytes: float
    to_bytes: float
    algorithm: Algorithm
    protocol: Protocol


def answers(
    comm: System | None, operation: Operation | None, sizes: Sequence[float], fit: AlphaBeta | None
) -> tuple[Answer, ...]:
    """One per size; `comm` and `operation` are None where NCCL has no choice, and only the fit speaks."""
    return tuple(_answer(comm, operation, nbytes, fit) for nbytes in sizes)


def _answer(comm: System | None, operation: Operation | None, nbytes: float, fit: AlphaBeta | None) -> Answer:
    pairs: tuple[Choice, ...] = ()
    seconds = bus = interval = None
    if comm is not None and operation is not None:
        pairs = tuple(sorted(choices(comm, nbytes, operation=operation), key=lambda one: one.seconds))
        one = expect(comm, nbytes, operation=operation)
        assert one is not None  # a pair exists for every operation
        seconds, interval = one.seconds, (one.low_s, one.high_s)
        bus = bus_bytes_per_s(comm, nbytes, seconds, operation=operation)
    fits = fit is not None and nbytes >= LEAST_BYTES
    return Answer(
        nbytes=nbytes,
        pairs=pairs,
        expected_s=seconds,
        expected_interval_s=interval,
        bus_bytes_per_s=bus,
        fitted_s=fit.seconds(nbytes) if fit and fits else None,
        fitted_interval_s=fit.interval_s(nbytes) if fit and fits else None,
        fitted_bus_bytes_per_s=fit.bus_bytes_per_s(nbytes) if fit and fits else None,
    )


def reigns(comm: System, operation: Operation, low: float, high: float) -> tuple[Reign, ...]:
    """Which pair is picked from where to where, to about a byte in a thousand million."""
    found: list[Reign] = []
    for from_bytes, to_bytes, picked in _pieces(comm, operation, low, high):
        one = Reign(from_bytes=from_bytes, to_bytes=to_bytes, algorithm=picked.algorithm, protocol=picked.protocol)
        last = found[-1] if found else None
        if last and (last.algorithm, last.protocol) == (one.algorithm, one.protocol):
            one = Reign(from_bytes=last.from_bytes, to_bytes=to_bytes, algorithm=one.algorithm, protocol=one.protocol)
            found.pop()
        found.append(one)
    return tuple(found)


def _pieces(comm: System, operation: Operation, low: float, high: float) -> Iterator[tuple[float, float, Choice]]:
    """Stretches without a change, as far as STEPS looks per doubling see."""
    looks = max(1, math.ceil(STEPS * math.log2(high / low))) if high > low else 1
    at, picked = low, choose(comm, low, operation=operation)
    for place in range(1, looks + 1):
        next_at = min(high, low * 2 ** (place / STEPS))
        then = choose(comm, next_at, operation=operation)
        if _pair(then) != _pair(picked):
            border = _border(comm, operation, at, next_at)
            yield at, border, picked
            at, picked = border, then
        else:
            yield at, next_at, picked
            at = next_at
    yield at, high, picked


def _border(comm: System, operation: Operation, low: float, high: float) -> float:
    """Where the pair of `low` ends."""
    kept = _pair(choose(comm, low, operation=operation))
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if _pair(choose(comm, middle, operation=operation)) == kept else (low, middle)
    return high


def _pair(one: Choice) -> tuple[Algorithm, Protocol]:
    return one.algorithm, one.protocol
