"""What `phalanx probe` measured on a machine: a small versioned JSON file that later plans read."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.errors import Problem, SystemFailure, mistake
from phalanx.io.files import read_text, replace_text

VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class MachineProfile:
    """Measured rates of one device (a core or a GPU) while all devices of the machine work; 0 is "not measured"."""

    hostname: str
    taken_at: str  # ISO 8601, UTC
    engine: str  # "numpy 2.4.6", "torch 2.11.0"
    device: str  # "cpu" or "cuda"
    device_name: str
    ranks: int
    precision: str  # of the matmul: "fp32" on CPUs, "bf16" on GPUs
    matmul_flops: float  # best over sizes
    matmul_by_size: tuple[tuple[int, float], ...]  # (n, FLOP/s) of n x n x n
    memory_bytes_per_s: float
    launch_s: float
    backend: str  # "tcp", "gloo", "nccl" or "" when there was one device
    link_latency_s: float
    link_bytes_per_s: float
    all_reduce: tuple[tuple[int, float], ...]  # (bytes, seconds) behind the two fitted figures
    disk_bytes_per_s: float
    seconds: float  # how long the probe took


def usual_path(hostname: str, environ: Mapping[str, str]) -> Path:
    """Where this machine's profile is kept unless someone names another place."""
    home = environ.get("XDG_DATA_HOME") or os.path.join(environ.get("HOME") or ".", ".local", "share")
    safe = re.sub(r"[^A-Za-z0-9._-]", "_", hostname).strip(".") or "localhost"
    return Path(home) / "phalanx" / "profiles" / f"{safe[:100]}.json"


def save_profile(profile: MachineProfile, path: Path, *, folders: bool = False) -> None:
    """Write the whole file or nothing; `folders` makes those that lead to it, for a place Phalanx chose itself."""
    text = json.dumps({"version": VERSION, **dataclasses.asdict(profile)}, indent=1, allow_nan=False) + "\n"
    try:
        if folders:
            path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, text)
    except OSError as error:
        fix = "give another place with --out FILE"
        raise SystemFailure(
            Problem(where=str(path), what=f"cannot write the profile: {error.strerror or error}", fix=fix)
        ) from None


def load_profile(path: Path) -> MachineProfile:
    """The profile in a file; UserError when it is missing, damaged or from another version."""
    again = "run phalanx probe again"
    try:
        data = json.loads(read_text(path))
    except (ValueError, RecursionError):
        raise mistake(str(path), "is not JSON", why="the profile is damaged", fix=again) from None
    if not isinstance(data, dict) or data.get("version") != VERSION:
        found = data.get("version") if isinstance(data, dict) else None
        raise mistake(str(path), f"has profile version {str(found)[:20]}, not {VERSION}", fix=again)
    values: dict[str, Any] = {}
    for field in dataclasses.fields(MachineProfile):
        value = data.get(field.name)
        if not _fits(str(field.type), value):
            raise mistake(
                str(path), f"{field.name} = {str(value)[:40]} is wrong", why="the profile is damaged", fix=again
            )
        values[field.name] = _pairs(value) if isinstance(value, list) else value
    return MachineProfile(**values)


def _fits(kind: str, value: object) -> bool:
    if kind == "str":
        return isinstance(value, str) and len(value) <= 500
    if kind == "int":
        return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= 1e7
    if kind == "float":
        return _positive(value)
    return isinstance(value, list) and all(
        isinstance(pair, list) and len(pair) == 2 and _positive(pair[0]) and _positive(pair[1]) for pair in value
    )


def _positive(value: object) -> bool:
    return (
        isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1e30 and math.isfinite(value)
    )


def _pairs(value: list[list[float]]) -> tuple[tuple[int, float], ...]:
    return tuple((int(first), float(second)) for first, second in value)
