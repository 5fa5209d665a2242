"""The numbers of a run that are drawn over time: which field of which event, and its unit."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """A numeric field of a frequent event. The unit is empty for counts and ratios."""

    name: str  # as RunHistory.curve knows it
    event: str
    field: str
    unit: str


def _step(field: str, unit: str = "") -> Series:
    return Series(name=field, event="step", field=field, unit=unit)


def _monitor(field: str, unit: str = "", *, name: str = "") -> Series:
    return Series(name=name or field, event="monitor", field=field, unit=unit)


# The order is that of the columns of index files, which name them: add at the end.
SERIES = (
    _step("loss", "nats/token"),
    _step("tokens", "tokens"),
    _step("duration_s", "s"),
    _step("grad_norm"),
    _step("lr"),
    _step("tokens_per_s", "tokens/s"),
    _step("memory_bytes", "bytes"),
    _step("compute_s", "s"),
    _step("wait_s", "s"),
    _step("bytes_sent", "bytes"),
    _step("expert_imbalance"),
    _step("data_s", "s"),
    _step("compile_s", "s"),
    _step("hold_s", "s"),
    _step("guard_s", "s"),
    _step("noise_scale", "samples"),
    _step("noise_trace"),
    _step("grad_squared"),
    _step("collective_s", "s"),
    _step("collective_bytes", "bytes"),
    _monitor("utilization"),
    # `memory_bytes` of a step is the most so far, this is what is used at the moment.
    _monitor("memory_bytes", "bytes", name="memory_used_bytes"),
    _monitor("memory_limit_bytes", "bytes"),
    _monitor("memory_pressure"),
    _monitor("allocation_retries"),
    _monitor("power_w", "W"),
    _monitor("energy_j", "J"),
    _monitor("temperature_c", "°C"),
)
COLUMN = {series.name: number for number, series in enumerate(SERIES)}
MFU = "mfu"  # not recorded: derived from tokens/s and the plan
FREQUENT = ("step", "monitor", "peers")  # kinds whose places in the file are not kept one by one
# Kinds that came after the first indexes were written: add at the end. An older index has their events among those of
# unknown kinds, where they are looked for too (`blocks.bits_of`).
LATER = ("memory", "communicators", "compile_check")
# Every kind a rank writes (docs/events.md), in the order of bits in index files: no place may change.
KINDS = (
    *FREQUENT,
    "ready",
    "run_start",
    "evaluate",
    "checkpoint",
    "sample",
    "stop",
    "run_end",
    "timeline",
    "remark",
    *LATER,
)


def unit_of(name: str) -> str:
    """The unit of a series; empty where it has none or is not known."""
    return SERIES[COLUMN[name]].unit if name in COLUMN else ""
