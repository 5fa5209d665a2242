"""Resolve a cluster specification (`8xH100:16`, `H100:64`, `local`, a TOML file) to a Cluster."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from phalanx.errors import Problem, UserError, mistake
from phalanx.hardware.catalog import (
    ACCELERATOR_FIELDS,
    CLUSTER_FIELDS,
    build_accelerator,
    find_accelerator,
    read_numbers,
    unknown_keys,
)
from phalanx.hardware.cluster_defaults import assemble_cluster
from phalanx.hardware.types import Accelerator, Cluster
from phalanx.io.limits import MAX_RANKS
from phalanx.io.toml import TomlFile, read_toml

_DOMAINS = re.compile(r"^\s*(-?\d{1,12})\s*[xX*]\s*([^:]+?)\s*(?::\s*(-?\d{1,12})\s*)?$")
_DEVICES = re.compile(r"^\s*([^:]+?)\s*(?::\s*(-?\d{1,12})\s*)?$")
LOCAL_SPEC = re.compile(r"^local(-cpu)?\s*(?::\s*(-?\d{1,12}))?$")
FORMS = (
    "write 8xH100:16 (16 domains of 8), H100:64 (64 devices), local, local:4 (4 ranks of this machine), "
    "or the path of a .toml file"
)


def resolve_cluster(
    spec: str | Path,
    *,
    base: Path | None = None,
    files: Sequence[Path] = (),
    environ: Mapping[str, str] | None = None,
    profile: Path | None = None,
    ranks: int = 0,
    ranks_per_gpu: int = 1,
) -> Cluster:
    """Return the Cluster that a spec describes.

    `base` is the folder that relative paths start from, `ranks` splits a CPU machine. `ranks_per_gpu` lets as many
    ranks of `local:N` share a GPU, as the environment may too (this_machine.allowed_ranks).

    `8xH100:16` is 16 fast domains of 8 devices; `H100:64` is 64 devices in domains as large as the device allows.
    `local:4` is 4 GPUs of this machine, or 4 processes that share its cores; `local-cpu:4` is always the latter.

    >>> resolve_cluster("8xH100:16").devices, resolve_cluster("H100:64").domains
    (128, 8)
    """
    if not isinstance(spec, str | Path):
        raise mistake("cluster", f"{str(spec)[:60]!r} is of type {type(spec).__name__}, not a text", fix=FORMS)
    text = str(spec).strip()
    if not text:
        raise mistake("cluster", "the spec is empty", why="it must name what to run on", fix=FORMS)
    local_match = LOCAL_SPEC.match(text)
    if local_match:
        # Discovery reads /proc and may load NVML, so it is imported only for specs of this machine.
        from phalanx.hardware.this_machine import local_cluster

        ranks = int(local_match.group(2)) if local_match.group(2) else ranks
        if local_match.group(2):
            _check_counts(f"cluster {text[:60]!r}", {"ranks": ranks}, ranks)
        return local_cluster(
            environ=environ,
            profile=profile,
            ranks=ranks,
            files=files,
            cpu=bool(local_match.group(1)),
            ranks_per_gpu=ranks_per_gpu,
        )
    if text.endswith(".toml") or "/" in text:
        return load_cluster((base or Path()) / text, files=files, environ=environ)
    return _parse_spec(text, files, environ)


def _parse_spec(text: str, files: Sequence[Path], environ: Mapping[str, str] | None) -> Cluster:
    where = f"cluster {text[:60]!r}"
    domain_match = _DOMAINS.match(text)
    if domain_match:
        per_domain, name, domains = int(domain_match.group(1)), domain_match.group(2), int(domain_match.group(3) or 1)
        _check_counts(where, {"devices per domain": per_domain, "domains": domains}, per_domain * domains)
        accelerator = find_accelerator(name, files=files, environ=environ, where=where)
        _check_domain(where, accelerator, per_domain, domains)
        return _build_cluster(accelerator, per_domain, domains, text)
    device_match = _DEVICES.match(text)
    if not device_match or not re.search(r"[A-Za-z]", device_match.group(1)):
        raise mistake(where, "is not a cluster", why="it must name a device and count in whole numbers", fix=FORMS)
    devices = int(device_match.group(2) or 1)
    _check_counts(where, {"devices": devices}, devices)
    accelerator = find_accelerator(device_match.group(1), files=files, environ=environ, where=where)
    per_domain = min(devices, accelerator.domain_devices)
    if devices % per_domain:
        raise _uneven_hosts(where, accelerator, devices)
    return _build_cluster(accelerator, per_domain, devices // per_domain, text)


def _build_cluster(accelerator: Accelerator, per_domain: int, domains: int, text: str) -> Cluster:
    name = f"{per_domain}x{accelerator.name}:{domains}"
    source = f"{text}, with catalogue figures"
    return assemble_cluster(
        name=name, accelerator=accelerator, domain_devices=per_domain, domains=domains, source=source
    )


def _check_counts(where: str, counts: Mapping[str, int], devices: int) -> None:
    for noun, count in counts.items():
        if count < 1:
            raise mistake(where, f"has {count} {noun}", why="a cluster needs at least one", fix=FORMS)
    if devices > MAX_RANKS:
        why = "so large a number is likelier a typing mistake than a machine"
        raise mistake(where, f"has {devices:,} devices", why=why, fix=f"use at most {MAX_RANKS:,}; {FORMS}")


def _check_domain(where: str, accelerator: Accelerator, per_domain: int, domains: int) -> None:
    max_devices = accelerator.domain_devices
    if per_domain <= max_devices:
        return
    devices = per_domain * domains
    corrected = (
        f"{max_devices}x{accelerator.name}:{devices // max_devices}"
        if devices % max_devices == 0
        else f"{max_devices}x{accelerator.name}:N"
    )
    raise mistake(
        where,
        f"puts {per_domain} devices in one fast domain, but {accelerator.link} joins {max_devices} {accelerator.name}",
        why="devices beyond the domain talk over NICs, which are many times slower",
        fix=f"write {corrected}, or a cluster file with its own domain_devices",
    )


def _uneven_hosts(where: str, accelerator: Accelerator, devices: int) -> UserError:
    fits = accelerator.domain_devices
    lower = devices - devices % fits
    even = max(size for size in range(1, fits + 1) if devices % size == 0)
    return mistake(
        where,
        f"{devices} devices do not fill whole domains of {fits} {accelerator.name}",
        why="every fast domain of a cluster holds equally many devices",
        fix=f"use {lower} or {lower + fits} devices, or write {even}x{accelerator.name}:{devices // even}",
    )


# A cluster as a TOML file: every key is optional except the accelerator and the number of domains.
#
# version = 1
# name = "blue"
# accelerator = "H100"          # a catalogue name, or a table [accelerator] with the columns of the catalogue
# domains = 16                  # fast (NVLink) domains
# domain_devices = 8            # devices per domain; the catalogue's by default
# host_devices = 8              # devices that fail together
# link_gb_per_s = 450           # per device, one direction, inside a domain
# nic_gbps = 400                # per device, one direction, between domains
# link_latency_us = 3.4
# nic_latency_us = 14
# host_memory_gib = 2048        # per host
# failures_per_host_day = 0.0038
# usd_per_device_hour = [2.0, 2.5, 3.0]   # low, middle, high; or one number
# power_w_per_device = 856      # whole server divided by its devices
# pue = 1.1
# grid_gco2_per_kwh = 300
# disk_gb_per_s = 5             # checkpoint writes, per host
# matmul_tflops = 600           # measured; overrides the catalogue
# launch_us = 5                 # measured cost of one small operation
#
# A file with [[site]] is a cluster of sites joined by slow links instead: hardware/sites.py.


VERSION = 1
_TEXT_KEYS = ("version", "name", "accelerator", "usd_per_device_hour")


def load_cluster(path: Path, *, files: Sequence[Path] = (), environ: Mapping[str, str] | None = None) -> Cluster:
    """Read the cluster that a file describes; raises UserError with every mistake in it, each with file:line."""
    file = read_toml(path)
    if "site" in file.table:
        # Imported here because sites.py resolves the spec of every site with this module.
        from phalanx.hardware.sites import cluster_of_sites

        return cluster_of_sites(file, files=files, environ=environ)
    data = file.table
    known_keys = [*_TEXT_KEYS, *(field.key for field in CLUSTER_FIELDS)]
    problems = unknown_keys(data, known_keys, lambda key: file.where(key))
    numbers, complaints = read_numbers(data, CLUSTER_FIELDS, lambda key: file.where(key))
    problems += complaints + _head_problems(file)
    price = _price_range(file, problems)
    accelerator = _file_accelerator(file, problems, files, environ)
    if accelerator is None or problems:
        raise UserError(problems)
    name = str(data.get("name") or path.stem)
    numbers.setdefault("domain_devices", accelerator.domain_devices)
    _check_size(file, numbers)
    cluster = assemble_cluster(name=name, accelerator=accelerator, source=str(path), **numbers)  # type: ignore[arg-type]
    return dataclasses.replace(cluster, price_usd_per_device_hour=price) if price else cluster


def render_cluster(cluster: Cluster) -> str:
    """Return a cluster file with every value written out, for editing."""
    if cluster.sites:
        fix = f"edit {cluster.source}; phalanx cluster --toml SPEC writes the file of one site"
        raise mistake(cluster.name, "is a cluster of sites, whose file names other clusters", fix=fix)
    lines = [
        "# A Phalanx cluster. Speeds are per device and one direction; keys left out take their documented default.",
        f"version = {VERSION}",
        f"name = {_toml_string(cluster.name)}",
    ]
    for field in CLUSTER_FIELDS:
        value = getattr(cluster, field.attribute)
        # only there 0 is a value of its own, different from "not given"
        if value or field.key == "failures_per_host_day":
            lines.append(f"{field.key} = {_toml_value(value / field.scale if not field.whole else value)}")
    if cluster.price_usd_per_device_hour is not None:
        lines.append(f"usd_per_device_hour = [{', '.join(f'{usd:g}' for usd in cluster.price_usd_per_device_hour)}]")
    lines += ["", "[accelerator]"]
    for key in ("name", "vendor", "family", "link", "price_item", "source", "notes"):
        text = getattr(cluster.accelerator, key)
        if text:
            lines.append(f"{key} = {_toml_string(text)}")
    for field in ACCELERATOR_FIELDS:
        value = getattr(cluster.accelerator, field.attribute)
        lines.append(f"{field.key} = {_toml_value(value / field.scale if not field.whole else value)}")
    return "\n".join(lines) + "\n"


def _toml_value(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.12g}"


def _toml_string(text: str) -> str:
    """Return text as a TOML string; unprintable characters are escaped, because the file may be shown in a terminal."""
    return '"' + "".join(f"\\{char}" if char in '"\\' else _toml_escape(char) for char in text) + '"'


def _toml_escape(char: str) -> str:
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


def _price_range(file: TomlFile, problems: list[Problem]) -> tuple[float, float, float] | None:
    raw = file.table.get("usd_per_device_hour")
    if raw is None:
        return None
    values = raw if isinstance(raw, list) else [raw] * 3
    numbers = [float(value) for value in values if isinstance(value, int | float) and not isinstance(value, bool)]
    if len(values) == 3 == len(numbers) and 0 <= numbers[0] <= numbers[1] <= numbers[2] <= 1e6:
        return numbers[0], numbers[1], numbers[2]
    what = f"usd_per_device_hour = {str(raw)[:40]} is neither a price nor [low, middle, high] in rising order"
    fix = "write one number, such as 2.5, or three, such as [2.0, 2.5, 3.0]"
    problems.append(Problem(where=file.where("usd_per_device_hour"), what=what, fix=fix))
    return None


def _file_accelerator(
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
    if devices > MAX_RANKS:
        what = f"domains x domain_devices = {devices:,.0f} devices is over {MAX_RANKS:,}"
        raise UserError(Problem(where=file.where("domains"), what=what, fix="check both numbers"))
    if numbers.get("host_devices", 0) > devices:
        what = f"host_devices = {numbers['host_devices']:.0f} is more than the cluster's {devices:.0f} devices"
        raise UserError(Problem(where=file.where("host_devices"), what=what, fix=f"use at most {devices:.0f}"))
