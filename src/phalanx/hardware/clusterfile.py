"""A cluster as a TOML file a person writes: every key optional except the accelerator and the number of domains.

version = 1
name = "blue"
accelerator = "H100"          # a catalogue name, or a table [accelerator] with the columns of the catalogue
domains = 16                  # fast (NVLink) domains
domain_devices = 8            # devices per domain; the catalogue's by default
host_devices = 8              # devices that fail together
link_gb_per_s = 450           # per device, one direction, inside a domain
nic_gbps = 400                # per device, one direction, between domains
link_latency_us = 3.4
nic_latency_us = 14
host_memory_gib = 2048        # per host
failures_per_host_day = 0.0038
usd_per_device_hour = [2.0, 2.5, 3.0]   # low, middle, high; or one number
power_w_per_device = 856      # whole server divided by its devices
pue = 1.1
grid_gco2_per_kwh = 300
disk_gb_per_s = 5             # checkpoint writes, per host
matmul_tflops = 600           # measured; overrides the catalogue
launch_us = 5                 # measured cost of one small operation
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

from phalanx.errors import Problem, UserError
from phalanx.hardware.catalog import (
    ACCELERATOR_FIELDS,
    CLUSTER_FIELDS,
    MAX_DEVICES,
    build_accelerator,
    find_accelerator,
    read_numbers,
    unknown_keys,
)
from phalanx.hardware.cluster_defaults import assemble_cluster
from phalanx.hardware.types import Accelerator, Cluster
from phalanx.io.toml import TomlFile, read_toml

VERSION = 1
_TEXT_KEYS = ("version", "name", "accelerator", "usd_per_device_hour")


def load_cluster(path: Path, *, files: Sequence[Path] = (), environ: Mapping[str, str] | None = None) -> Cluster:
    """The cluster a file describes; every mistake in it is reported at once with file:line."""
    file = read_toml(path)
    data = file.table
    known = [*_TEXT_KEYS, *(field.key for field in CLUSTER_FIELDS)]
    problems = unknown_keys(data, known, lambda key: file.where(key))
    numbers, complaints = read_numbers(data, CLUSTER_FIELDS, lambda key: file.where(key))
    problems += complaints + _head_problems(file)
    price = _price(file, problems)
    accelerator = _accelerator(file, problems, files, environ)
    if accelerator is None or problems:
        raise UserError(problems)
    name = str(data.get("name") or path.stem)
    numbers.setdefault("domain_devices", accelerator.domain_devices)
    _check_size(file, numbers)
    cluster = assemble_cluster(name=name, accelerator=accelerator, source=str(path), **numbers)  # type: ignore[arg-type]
    return dataclasses.replace(cluster, price_usd_per_device_hour=price) if price else cluster


def render_cluster(cluster: Cluster) -> str:
    """A cluster file with every value written out, for a person to edit."""
    lines = [
        "# A Phalanx cluster. Speeds are per device and one direction; keys left out take their documented default.",
        f"version = {VERSION}",
        f"name = {_quoted(cluster.name)}",
    ]
    for field in CLUSTER_FIELDS:
        value = getattr(cluster, field.attribute)
        if value or field.key == "failures_per_host_day":  # a true 0 differs from "not said" only there
            lines.append(f"{field.key} = {_written(value / field.scale if not field.whole else value)}")
    if cluster.price_usd_per_device_hour is not None:
        lines.append(f"usd_per_device_hour = [{', '.join(f'{usd:g}' for usd in cluster.price_usd_per_device_hour)}]")
    lines += ["", "[accelerator]"]
    for key in ("name", "vendor", "family", "link", "price_item", "source", "notes"):
        text = getattr(cluster.accelerator, key)
        if text:
            lines.append(f"{key} = {_quoted(text)}")
    for field in ACCELERATOR_FIELDS:
        value = getattr(cluster.accelerator, field.attribute)
        lines.append(f"{field.key} = {_written(value / field.scale if not field.whole else value)}")
    return "\n".join(lines) + "\n"


def _written(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.12g}"


def _quoted(text: str) -> str:
    """As TOML; what is not printable by its number, for the file may go to a terminal."""
    return '"' + "".join(f"\\{char}" if char in '"\\' else _spelt(char) for char in text) + '"'


def _spelt(char: str) -> str:
    if char.isprintable():
        return char
    return f"\\u{ord(char):04x}" if ord(char) < 0x10000 else f"\\U{ord(char):08x}"


def _head_problems(file: TomlFile) -> list[Problem]:
    version, name = file.table.get("version", VERSION), file.table.get("name", "cluster")
    problems = []
    if version != VERSION or isinstance(version, bool):
        what = f"version = {str(version)[:20]} is not one this Phalanx reads"
        problems.append(Problem(where=file.where("version"), what=what, fix=f"write version = {VERSION}"))
    if not isinstance(name, str) or not 0 < len(name) <= 200:
        problems.append(Problem(where=file.where("name"), what="name is not a short text", fix='name = "blue"'))
    return problems


def _price(file: TomlFile, problems: list[Problem]) -> tuple[float, float, float] | None:
    raw = file.table.get("usd_per_device_hour")
    if raw is None:
        return None
    parts = raw if isinstance(raw, list) else [raw] * 3
    numbers = [float(part) for part in parts if isinstance(part, int | float) and not isinstance(part, bool)]
    if len(parts) == 3 == len(numbers) and 0 <= numbers[0] <= numbers[1] <= numbers[2] <= 1e6:
        return numbers[0], numbers[1], numbers[2]
    what = f"usd_per_device_hour = {str(raw)[:40]} is neither a price nor [low, middle, high] in rising order"
    fix = "write one number, such as 2.5, or three, such as [2.0, 2.5, 3.0]"
    problems.append(Problem(where=file.where("usd_per_device_hour"), what=what, fix=fix))
    return None


def _accelerator(
    file: TomlFile, problems: list[Problem], files: Sequence[Path], environ: Mapping[str, str] | None
) -> Accelerator | None:
    raw = file.table.get("accelerator")
    if isinstance(raw, dict):
        accelerator, complaints = build_accelerator(raw, lambda key: file.where("accelerator", key))
        problems += complaints
        return accelerator
    if isinstance(raw, str):
        try:
            return find_accelerator(raw, files=files, environ=environ, where=file.where("accelerator"))
        except UserError as error:
            problems += error.problems
            return None
    fix = 'write accelerator = "H100", or a table [accelerator]; phalanx cluster --list shows the names'
    problems.append(Problem(where=file.where("accelerator"), what="accelerator is missing", fix=fix))
    return None


def _check_size(file: TomlFile, numbers: Mapping[str, float]) -> None:
    devices = numbers["domain_devices"] * numbers["domains"]
    if devices > MAX_DEVICES:
        what = f"domains x domain_devices = {devices:,.0f} devices is over {MAX_DEVICES:,}"
        raise UserError(Problem(where=file.where("domains"), what=what, fix="check both numbers"))
    if numbers.get("host_devices", 0) > devices:
        what = f"host_devices = {numbers['host_devices']:.0f} is more than the cluster's {devices:.0f} devices"
        raise UserError(Problem(where=file.where("host_devices"), what=what, fix=f"use at most {devices:.0f}"))
