"""Rows with a measured bus bandwidth of a collective.

A series (the same system, operation and tool at three sizes or more from 16 MiB on) is fitted on its two ends, which
count as calibrated; the sizes between are held out. Below 16 MiB the range of the NCCL model is held against the row,
which it was fitted to among others. Everything else is NCCL's model, which knows nothing of the system
but its links: a prediction without any fit, meant for sizes from about 1 GiB on.
"""

from __future__ import annotations

import re

from phalanx.errors import UserError
from phalanx.network.fit import LEAST_BYTES, Point, allowed_error, ends, fit_points, wire_share
from phalanx.network.nccl_choice import (
    OPERATIONS,
    Choice,
    Operation,
    bus_bytes_per_s,
    choices,
    choose,
    expect,
    expected_s,
)
from phalanx.network.nccl_system import System
from phalanx.validate.network.machines import machine
from phalanx.validate.network.outcome import Context, Outcome, Reader, calibrated, reproduced, skipped
from phalanx.validate.network.table import Row
from phalanx.validate.network.words import size_bytes, without_size

GB = 1e9
LARGE = 8 * 2**30  # where a row names no size, it means the plateau
MODEL_ERROR = 0.10
SMALL = "the call and the range of small messages are fitted to this source among others"


def bus_bandwidth(row: Row, context: Context) -> Outcome | None:
    """By the two ends of its series, or by NCCL's model."""
    operation = next((one for one in OPERATIONS if one in row.quantity), None)
    if operation is None or row.unit != "GB/s":
        return None
    words = f"{row.quantity}; {row.conditions}"
    off = "NVLS off" in row.quantity or "no SHARP" in row.quantity
    comm = machine(words, nvls=not off)
    if comm is None:
        return skipped(row, "its GPUs are not among those of NCCL's model")
    nbytes, measured = size_bytes(row.conditions), "computed" not in row.source
    if measured and nbytes is not None and nbytes < LEAST_BYTES:
        return _small(row, comm, operation, nbytes)
    series = _series(row, context) if measured and nbytes is not None else ()
    picked = ends(_points(series, operation, comm.ranks))
    if nbytes is not None and picked is not None:
        return _fitted(row, comm, operation, nbytes, picked)
    return _modelled(row, comm, operation, nbytes or LARGE)


def _small(row: Row, comm: System, operation: Operation, nbytes: float) -> Outcome:
    """Below 16 MiB the range is what the model stands for, not its middle: the call depends on the network."""
    found = expect(comm, nbytes, operation=operation)
    assert found is not None  # rings exist for every operation
    low, high = (bus_bytes_per_s(comm, nbytes, one, operation=operation) / GB for one in (found.high_s, found.low_s))
    ours = bus_bytes_per_s(comm, nbytes, found.seconds, operation=operation) / GB
    held = row.value is not None and low <= row.value <= high
    note = f"{SMALL}; 80 % of systems: {low:.3g} to {high:.3g}"
    return calibrated(row, ours, note, tolerance=found.high_s / found.seconds - 1 if held else 0.0)


def _series(row: Row, context: Context) -> tuple[Row, ...]:
    key = (row.source, row.quantity, without_size(row.conditions))
    return tuple(
        one
        for one in context.rows
        if (one.source, one.quantity, without_size(one.conditions)) == key and size_bytes(one.conditions)
    )


def _points(series: tuple[Row, ...], operation: Operation, ranks: int) -> tuple[Point, ...]:
    share = wire_share(operation, ranks)
    found = []
    for one in series:
        nbytes = size_bytes(one.conditions)
        if nbytes and one.value and one.value > 0:
            found.append(Point(nbytes=nbytes, seconds=share * nbytes / (one.value * GB)))
    return tuple(found)


def _fitted(row: Row, comm: System, operation: Operation, nbytes: float, picked: tuple[Point, Point]) -> Outcome:
    try:
        fit = fit_points(picked, ranks=comm.ranks, nodes=comm.nodes, operation=operation)
    except UserError as error:
        return skipped(row, f"its series makes no fit: {error.problems[0].what}")
    ours = fit.bus_bytes_per_s(nbytes) / GB
    sizes = " and ".join(_named(one.nbytes) for one in picked)
    if nbytes in (picked[0].nbytes, picked[1].nbytes):
        return calibrated(row, ours, "one of the two points its series is fitted on")
    return reproduced(row, ours, f"fitted on {sizes}", tolerance=allowed_error(nbytes), inverse=True)


def _modelled(row: Row, comm: System, operation: Operation, nbytes: float) -> Outcome | None:
    wanted = _named_algorithm(row.quantity)
    best = _best(comm, nbytes, operation, wanted)
    if best is None:
        return skipped(row, f"NCCL has no {wanted} for it")
    # Rows computed from NCCL's model have its rounded rates and no filling; measured ones have the wire's.
    computed = "computed" in row.source
    seconds = best.seconds if computed else expected_s(comm, best, nbytes, operation=operation)
    ours = bus_bytes_per_s(comm, nbytes, seconds, operation=operation) / GB
    picks = f"NCCL's model, no fit: {best.algorithm} {best.protocol}"
    logged = re.search(r"\balgo (\w+)", row.conditions)
    if logged is None:
        return reproduced(row, ours, picks, tolerance=MODEL_ERROR)
    agrees = logged[1].lower() == best.algorithm.lower()
    note = f"{picks}, as logged" if agrees else f"{picks}, but {logged[1]} was logged"
    return reproduced(row, ours, note, tolerance=MODEL_ERROR if agrees else 0.0)


def _named_algorithm(quantity: str) -> str | None:
    rest = quantity.partition("busbw")[2].lower()
    if "nvls off" in rest or "no sharp" in rest:
        return None
    if "nvls" in rest or "sharp" in rest:
        return "NVLS"
    return "Ring" if "ring" in rest else None


def _best(comm: System, nbytes: float, operation: Operation, wanted: str | None) -> Choice | None:
    if wanted is None:
        return choose(comm, nbytes, operation=operation)
    found = [one for one in choices(comm, nbytes, operation=operation) if one.algorithm == wanted]
    return min(found, key=lambda one: one.seconds, default=None)


def _named(nbytes: float) -> str:
    mib = nbytes / 2**20
    return f"{mib / 1024:g} GiB" if mib >= 1024 else f"{mib:g} MiB"


READERS: tuple[tuple[str, Reader], ...] = ((rf"\b({'|'.join(OPERATIONS)}) busbw", bus_bandwidth),)
