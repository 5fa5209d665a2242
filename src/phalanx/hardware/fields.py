"""How the numbers of a hardware file are named, scaled and bounded; one table per kind of record."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from phalanx.errors import Problem, nearest
from phalanx.units import GIB

MAX_DEVICES = 10_000_000  # 76 times the 131,072 GPUs Phalanx is made for; beyond it a typing mistake is likelier


@dataclass(frozen=True, kw_only=True, slots=True)
class Field:
    """One key of a file: the attribute it fills, what to multiply it by, and which values make sense."""

    key: str
    attribute: str
    scale: float = 1.0
    least: float = 0.0
    most: float = 1e6  # in the file's own unit
    whole: bool = False
    required: bool = False


ACCELERATOR_FIELDS = (
    Field(key="peak_bf16_tflops", attribute="peak_bf16_flops", scale=1e12, least=1e-4, required=True),
    Field(key="peak_fp8_tflops", attribute="peak_fp8_flops", scale=1e12),
    Field(key="peak_fp4_tflops", attribute="peak_fp4_flops", scale=1e12),
    Field(key="peak_fp32_tflops", attribute="peak_fp32_flops", scale=1e12),
    Field(key="matmul_bf16_tflops", attribute="matmul_bf16_flops", scale=1e12),
    Field(key="matmul_fp8_tflops", attribute="matmul_fp8_flops", scale=1e12),
    # What vendors print as GB of device memory is GiB: an "80 GB" H100 reports 81,559 MiB.
    Field(key="memory_gib", attribute="memory_bytes", scale=GIB, least=1e-3, required=True),
    Field(key="memory_tb_per_s", attribute="memory_bytes_per_s", scale=1e12, least=1e-4, required=True),
    Field(key="link_gb_per_s", attribute="link_bytes_per_s", scale=1e9),
    Field(key="domain_devices", attribute="domain_devices", least=1, whole=True, required=True),
    Field(key="host_devices", attribute="host_devices", least=1, whole=True, required=True),
    Field(key="nic_gbps", attribute="nic_bytes_per_s", scale=1e9 / 8),
    Field(key="tdp_w", attribute="tdp_w"),
)
ACCELERATOR_TEXTS = ("name", "vendor", "family", "link", "price_item", "source", "notes")

CLUSTER_FIELDS = (
    Field(key="domain_devices", attribute="domain_devices", least=1, most=MAX_DEVICES, whole=True),
    Field(key="domains", attribute="domains", least=1, most=MAX_DEVICES, whole=True, required=True),
    Field(key="host_devices", attribute="host_devices", least=1, most=MAX_DEVICES, whole=True),
    Field(key="link_gb_per_s", attribute="link_bytes_per_s", scale=1e9, least=1e-6),
    Field(key="nic_gbps", attribute="nic_bytes_per_s", scale=1e9 / 8, least=1e-6),
    Field(key="link_latency_us", attribute="link_latency_s", scale=1e-6),
    Field(key="nic_latency_us", attribute="nic_latency_s", scale=1e-6),
    Field(key="host_memory_gib", attribute="host_memory_bytes", scale=GIB, least=1e-3),
    Field(key="failures_per_host_day", attribute="failures_per_host_day", most=24 * 60),
    Field(key="power_w_per_device", attribute="power_w_per_device"),
    Field(key="pue", attribute="pue", least=1, most=10),
    Field(key="grid_gco2_per_kwh", attribute="grid_gco2_per_kwh", most=5000),
    Field(key="disk_gb_per_s", attribute="disk_bytes_per_s", scale=1e9, least=1e-6),
    Field(key="matmul_tflops", attribute="matmul_flops", scale=1e12, least=1e-6),
    Field(key="launch_us", attribute="launch_s", scale=1e-6),
)


def read_numbers(
    record: Mapping[str, object], fields: Iterable[Field], where: Callable[[str], str]
) -> tuple[dict[str, float], list[Problem]]:
    """Attributes in SI units from a record in file units, and every mistake in it."""
    values: dict[str, float] = {}
    problems: list[Problem] = []
    for field in fields:
        raw = record.get(field.key)
        if raw is None or raw == "":
            if field.required:
                problems.append(_missing(field, where))
            continue
        number = _number(raw)
        problem = _complaint(field, raw, number, where)
        if problem is not None:
            problems.append(problem)
        else:
            values[field.attribute] = int(number) if field.whole else number * field.scale
    return values, problems


def unknown_keys(keys: Iterable[str], known: Iterable[str], where: Callable[[str], str]) -> list[Problem]:
    """A problem for every key that means nothing here, naming the near miss."""
    choices = list(known)
    problems = []
    for key in keys:
        if key not in choices:
            near = nearest(key, choices)
            fix = f"did you mean {near}?" if near else f"known keys: {', '.join(choices)}"
            problems.append(Problem(where=where(key), what=f"unknown key {key}", fix=fix))
    return problems


def _number(raw: object) -> float:
    if isinstance(raw, bool) or not isinstance(raw, int | float | str):
        return math.nan
    try:
        return float(raw)
    except (ValueError, OverflowError):
        return math.nan


def _complaint(field: Field, raw: object, number: float, where: Callable[[str], str]) -> Problem | None:
    shown = f"{field.key} = {str(raw)[:40]!r}" if isinstance(raw, str) else f"{field.key} = {str(raw)[:40]}"
    if not math.isfinite(number):
        return Problem(where=where(field.key), what=f"{shown} is not a number", fix=_range(field))
    if field.whole and number != int(number):
        return Problem(where=where(field.key), what=f"{shown} is not a whole number", fix=_range(field))
    if not field.least <= number <= field.most:
        return Problem(where=where(field.key), what=f"{shown} is out of range", fix=_range(field))
    return None


def _range(field: Field) -> str:
    kind = "a whole number" if field.whole else "a number"
    return f"give {kind} from {field.least:,g} to {field.most:,.0f}"


def _missing(field: Field, where: Callable[[str], str]) -> Problem:
    return Problem(where=where(""), what=f"{field.key} is missing", fix=_range(field))
