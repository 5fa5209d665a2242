"""From what a person writes (`8xH100:16`, `H100:64`, `local`, a file) to a Cluster."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from phalanx.errors import UserError, mistake
from phalanx.hardware.catalog import find
from phalanx.hardware.clusterfile import load_cluster
from phalanx.hardware.codec import from_dict, to_dict
from phalanx.hardware.fields import MAX_DEVICES
from phalanx.hardware.shape import assemble
from phalanx.hardware.types import Accelerator, Cluster

__all__ = ["from_dict", "resolve", "to_dict"]

_DOMAINS = re.compile(r"^\s*(-?\d{1,12})\s*[xX*]\s*([^:]+?)\s*(?::\s*(-?\d{1,12})\s*)?$")
_DEVICES = re.compile(r"^\s*([^:]+?)\s*(?::\s*(-?\d{1,12})\s*)?$")
_LOCAL = re.compile(r"^local(-cpu)?\s*(?::\s*(-?\d{1,12}))?$")
FORMS = (
    "write 8xH100:16 (16 domains of 8), H100:64 (64 devices), local, local:4 (4 ranks of this machine), "
    "or the path of a .toml file"
)


def resolve(
    spec: str | Path,
    *,
    base: Path | None = None,
    files: Sequence[Path] = (),
    environ: Mapping[str, str] | None = None,
    profile: Path | None = None,
    ranks: int = 0,
    ranks_per_gpu: int = 1,
) -> Cluster:
    """The Cluster a spec means; `base` is the folder relative paths start from, `ranks` splits a CPU machine.

    `ranks_per_gpu` lets so many ranks of `local:N` share a GPU, as the environment may too (hardware.sharing).

    `8xH100:16` is 16 fast domains of 8 devices; `H100:64` is 64 devices in domains as large as the device allows.
    `local:4` is 4 GPUs of this machine, or 4 processes that share its cores; `local-cpu:4` the latter in any case.

    >>> resolve("8xH100:16").devices, resolve("H100:64").domains
    (128, 8)
    """
    if not isinstance(spec, str | Path):
        raise mistake("cluster", f"{str(spec)[:60]!r} is of type {type(spec).__name__}, not a text", fix=FORMS)
    text = str(spec).strip()
    if not text:
        raise mistake("cluster", "the spec is empty", why="it must name what to run on", fix=FORMS)
    here = _LOCAL.match(text)
    if here:
        # Discovery reads /proc and may load NVML: only a caller who asks for this machine pays for that.
        from phalanx.hardware.local import local_cluster

        ranks = int(here.group(2)) if here.group(2) else ranks
        if here.group(2):
            _check_counts(f"cluster {text[:60]!r}", {"ranks": ranks}, ranks)
        return local_cluster(
            environ=environ,
            profile=profile,
            ranks=ranks,
            files=files,
            cpu=bool(here.group(1)),
            ranks_per_gpu=ranks_per_gpu,
        )
    if text.endswith(".toml") or "/" in text:
        return load_cluster((base or Path()) / text, files=files, environ=environ)
    return _parse(text, files, environ)


def _parse(text: str, files: Sequence[Path], environ: Mapping[str, str] | None) -> Cluster:
    where = f"cluster {text[:60]!r}"
    written = _DOMAINS.match(text)
    if written:
        per_domain, name, domains = int(written.group(1)), written.group(2), int(written.group(3) or 1)
        _check_counts(where, {"devices per domain": per_domain, "domains": domains}, per_domain * domains)
        accelerator = find(name, files=files, environ=environ, where=where)
        _check_domain(where, accelerator, per_domain, domains)
        return _build(accelerator, per_domain, domains, text)
    counted = _DEVICES.match(text)
    if not counted or not re.search(r"[A-Za-z]", counted.group(1)):
        raise mistake(where, "is not a cluster", why="it must name a device and count in whole numbers", fix=FORMS)
    devices = int(counted.group(2) or 1)
    _check_counts(where, {"devices": devices}, devices)
    accelerator = find(counted.group(1), files=files, environ=environ, where=where)
    per_domain = min(devices, accelerator.domain_devices)
    if devices % per_domain:
        raise _uneven(where, accelerator, devices)
    return _build(accelerator, per_domain, devices // per_domain, text)


def _build(accelerator: Accelerator, per_domain: int, domains: int, text: str) -> Cluster:
    name = f"{per_domain}x{accelerator.name}:{domains}"
    source = f"{text}, with catalogue figures"
    return assemble(name=name, accelerator=accelerator, domain_devices=per_domain, domains=domains, source=source)


def _check_counts(where: str, counts: Mapping[str, int], devices: int) -> None:
    for noun, count in counts.items():
        if count < 1:
            raise mistake(where, f"has {count} {noun}", why="a cluster needs at least one", fix=FORMS)
    if devices > MAX_DEVICES:
        why = "so large a number is likelier a typing mistake than a machine"
        raise mistake(where, f"has {devices:,} devices", why=why, fix=f"use at most {MAX_DEVICES:,}; {FORMS}")


def _check_domain(where: str, accelerator: Accelerator, per_domain: int, domains: int) -> None:
    fits = accelerator.domain_devices
    if per_domain <= fits:
        return
    devices = per_domain * domains
    cure = f"{fits}x{accelerator.name}:{devices // fits}" if devices % fits == 0 else f"{fits}x{accelerator.name}:N"
    raise mistake(
        where,
        f"puts {per_domain} devices in one fast domain, but {accelerator.link} joins {fits} {accelerator.name}",
        why="devices beyond the domain talk over NICs, which are many times slower",
        fix=f"write {cure}, or a cluster file with its own domain_devices",
    )


def _uneven(where: str, accelerator: Accelerator, devices: int) -> UserError:
    fits = accelerator.domain_devices
    below = devices - devices % fits
    half = max(size for size in range(1, fits + 1) if devices % size == 0)
    return mistake(
        where,
        f"{devices} devices do not fill whole domains of {fits} {accelerator.name}",
        why="every fast domain of a cluster holds equally many devices",
        fix=f"use {below} or {below + fits} devices, or write {half}x{accelerator.name}:{devices // half}",
    )
