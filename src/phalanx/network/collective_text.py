"""Answers about a collective as a person reads them."""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.io.tables import text_table
from phalanx.network.collective_answer import CollectiveAnswer, PickRange
from phalanx.network.collective_fit import AlphaBeta
from phalanx.network.sizes import format_size
from phalanx.units import format_seconds

NONE = "-"
# benchmarks/2026-11-16-collective-interval.md
MODEL_NOTE = """
The range holds 80 % of systems: without a measurement nobody knows a network's start-up, nor whether it delivers. For
yours: --fit FILE, with the output of nccl-tests or two sizes of your own"""


def show_pairs(one: CollectiveAnswer) -> str:
    """Every pair at one size, the pick first."""
    rows = [("", "algorithm", "protocol", "start-up", "transfer", "NCCL reckons", "")]
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
        f"({span}: {_span(interval)}; {_gb(rate)} GB/s busbw)"
        for name, seconds, interval, span, rate in found
        if seconds is not None
    ]
    return "\n".join(lines or [f"{format_size(one.nbytes)}: fits speak from 16 MiB on"])


def show_sizes(found: Sequence[CollectiveAnswer]) -> str:
    """A line per size; columns that nobody filled are left out."""
    modelled, fitted = any(one.pairs for one in found), any(one.fitted_s for one in found)
    head = ["size"]
    head += ["NCCL picks", "time", "80% of systems", "busbw GB/s", "next best"] if modelled else []
    head += ["fitted", "80%", "busbw GB/s"] if fitted else []
    rows = [head]
    for one in found:
        by_model = _picked(one) if modelled else []
        by_fit = (
            [_seconds(one.fitted_s), _span(one.fitted_interval_s), _gb(one.fitted_bus_bytes_per_s)] if fitted else []
        )
        rows.append([format_size(one.nbytes), *by_model, *by_fit])
    left = (1, 5) if modelled else ()
    return "\n".join(text_table(rows, right=[place for place in range(len(head)) if place not in left]))


def _picked(one: CollectiveAnswer) -> list[str]:
    if not one.pairs:
        return [NONE] * 5
    first, *others = one.pairs
    then = (
        f"{others[0].algorithm} {others[0].protocol} {others[0].seconds / first.seconds - 1:+.0%}" if others else NONE
    )
    return [
        f"{first.algorithm} {first.protocol}",
        _seconds(one.expected_s),
        _span(one.expected_interval_s),
        _gb(one.bus_bytes_per_s),
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
        f"fitted on {count} sizes from 16 MiB on: start-up {format_seconds(fit.alpha_s)}, "
        f"{fit.bytes_per_s / 1e9:,.1f} GB/s ({said})"
    )


def _span(interval: tuple[float, float] | None) -> str:
    return NONE if interval is None else f"{format_seconds(interval[0])} to {format_seconds(interval[1])}"


def _gb(rate: float | None) -> str:
    return NONE if not rate else f"{rate / 1e9:,.4g}"


def _seconds(value: float | None) -> str:
    return NONE if value is None else format_seconds(value)
