"""Answers about a collective as a person reads them."""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.columns import table
from phalanx.network.collective_answer import Answer, Reign
from phalanx.network.fit import AlphaBeta
from phalanx.network.sizes import format_size
from phalanx.units import format_seconds

NONE = "-"
# Measured over modelled times of 23 sweeps on 9 systems (benchmarks/2026-11-15-collective-fit.md).
MODEL_NOTE = """\
NCCL's own model: made to rank, and short of what systems take. Of 23 measured sweeps the middle one took 1.5 times
this at 16 MiB, 1.1 at 256 MiB, 1.0 from 1 GiB on. For times on your system give --fit FILE: nccl-tests' output, or two
sizes"""


def show_pairs(one: Answer) -> str:
    """Every pair at one size, the pick first."""
    rows = [("", "algorithm", "protocol", "start-up", "transfer", "in all", "")]
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
    return "\n".join(table(rows, right=(3, 4, 5, 6)))


def show_expected(one: Answer) -> str:
    """What the pick takes at one size."""
    lines = []
    if one.expected_s is not None:
        lines.append(f"{format_size(one.nbytes)} takes {_time(one.expected_s)}{_bus(one.bus_bytes_per_s)} by the model")
    if one.fitted_s is not None:
        lines.append(f"{format_size(one.nbytes)} takes {_time(one.fitted_s)}{_bus(one.fitted_bus_bytes_per_s)} by the fit")
    return "\n".join(lines)


def show_sizes(found: Sequence[Answer], *, fitted: bool) -> str:
    """A line per size."""
    head = ["size", "NCCL picks", "time", "busbw GB/s", "next best"]
    rows = [(*head, "fitted", "busbw GB/s") if fitted else tuple(head)]
    for one in found:
        row = [format_size(one.nbytes), *_picked(one)]
        if fitted:
            row += [_or_none(one.fitted_s, format_seconds), _gb(one.fitted_bus_bytes_per_s)]
        rows.append(tuple(row))
    return "\n".join(table(rows, right=(0, 2, 3, 5, 6)))


def _picked(one: Answer) -> list[str]:
    if not one.pairs:
        return [NONE] * 4
    first, *others = one.pairs
    then = f"{others[0].algorithm} {others[0].protocol} {others[0].seconds / first.seconds - 1:+.0%}" if others else NONE
    return [
        f"{first.algorithm} {first.protocol}",
        _or_none(one.expected_s, format_seconds),
        _gb(one.bus_bytes_per_s),
        then,
    ]


def show_reigns(found: Sequence[Reign]) -> str:
    """Where the pick changes."""
    parts = [f"{one.algorithm} {one.protocol} below {format_size(one.to_bytes)}" for one in found[:-1]]
    last = found[-1]
    return "changes: " + ", ".join([*parts, f"{last.algorithm} {last.protocol} above" if parts else "none"])


def show_fit(fit: AlphaBeta, count: int, error: float, at_bytes: float) -> str:
    """What was fitted, and how well it meets the points."""
    said = "met exactly" if abs(error) < 5e-4 else f"worst {error:+.1%} at {format_size(at_bytes)}"
    return (
        f"fitted on {count} sizes from 16 MiB on: start-up {format_seconds(fit.alpha_s)}, "
        f"{fit.bytes_per_s / 1e9:,.1f} GB/s ({said})"
    )


def _time(seconds: float) -> str:
    return format_seconds(seconds)


def _bus(rate: float | None) -> str:
    return f" ({rate / 1e9:,.1f} GB/s busbw)" if rate else ""


def _gb(rate: float | None) -> str:
    return NONE if not rate else f"{rate / 1e9:,.4g}"


def _or_none(value: float | None, show: object) -> str:
    assert callable(show)
    return NONE if value is None else str(show(value))
