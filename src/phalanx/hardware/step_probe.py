"""Measure this machine's cores before the first plan of `local`: a few small training steps, kept for later plans.

The file names the machine it was measured on (processor, usable cores) and the versions of torch and Phalanx; where
one of them changed it is measured again. GPUs are not measured here: their profile is fitted on real steps.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from phalanx.files import replace_text
from phalanx.hardware.cpu_steps import CpuRates, CpuStep, fit_rates
from phalanx.hardware.discover import discover
from phalanx.hardware.machine import Machine
from phalanx.hardware.profile import usual_path
from phalanx.units import plural

WORKER = "phalanx.train.probe_steps"  # a process of its own: this one never imports torch
FORMAT = 1
LIMIT_S = 120.0  # 18 s on two idle cores, 2026-11-16
MOST_BYTES = 1 << 20
BUSY = 1.5  # processes per core
SWITCH = "PHALANX_PROBE"  # "0" measures nothing, as --no-probe
_LOCAL = re.compile(r"^local(-cpu)?\s*(?::\s*\d+)?$")


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredSteps:
    """What was measured, and when."""

    steps: tuple[CpuStep, ...]
    seconds: tuple[float, ...]
    taken_at: str
    load: float  # processes per core that wanted to run when it began; 0 where the system does not say


def identity(machine: Machine) -> dict[str, object]:
    """What must be the same for a measurement to hold."""
    known = {}
    for name in ("torch", "phalanx"):
        try:
            known[name] = version(name)
        except PackageNotFoundError:
            known[name] = ""
    return {"processor": machine.cpu_model, "cores": machine.usable_cores, **known}


def steps_path(machine: Machine, environ: Mapping[str, str]) -> Path:
    """Where the measurement of this machine is kept."""
    return usual_path(machine.hostname, environ).with_suffix(".steps.json")


def read_steps(machine: Machine, environ: Mapping[str, str]) -> MeasuredSteps | None:
    """The kept measurement; None where there is none, or it is damaged or of another machine or version."""
    path = steps_path(machine, environ)
    try:
        if path.stat().st_size > MOST_BYTES:
            return None
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["format"] != FORMAT or data["identity"] != identity(machine):
            return None
        found = [_sample(one) for one in data["samples"]]
        return MeasuredSteps(
            steps=tuple(step for step, _ in found),
            seconds=tuple(seconds for _, seconds in found),
            taken_at=str(data["taken_at"])[:40],
            load=float(data["load"]),
        )
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _sample(one: Mapping[str, Any]) -> tuple[CpuStep, float]:
    values = {item.name: float(one["step"][item.name]) for item in fields(CpuStep)}
    seconds = float(one["seconds"])
    if not all(math.isfinite(value) and 0 <= value < 1e12 for value in (*values.values(), seconds)) or seconds <= 0:
        raise ValueError("a number out of range")
    return CpuStep(**values), seconds


def kept_rates(machine: Machine, environ: Mapping[str, str]) -> tuple[CpuRates | None, str]:
    """The constants of this machine's cores, and the date they were measured; None where they were not."""
    found = read_steps(machine, environ)
    if found is None or not found.steps:
        return None, ""
    return fit_rates(found.steps, found.seconds, machine.usable_cores), found.taken_at


def measure_first(target: str, *, environ: Mapping[str, str], tell: Callable[[str], None]) -> None:
    """Measure before the first plan of this machine's cores; nothing where that is not what `target` means.

    A measurement that fails is told, and the plan goes on without it. Ctrl-C ends the measurement and is passed on.
    """
    written = _LOCAL.match(target.strip())
    if not written or environ.get(SWITCH) == "0" or importlib.util.find_spec("torch") is None:
        return
    machine = discover(environ=environ)
    if machine.gpus and not written.group(1):
        return
    load = _load(machine.usable_cores)
    known = read_steps(machine, environ)
    # What was measured beside busy neighbours is measured again once they are gone.
    if known is not None and not (known.load > BUSY and load < known.load / 2.0):
        return
    if load > BUSY:
        tell(f"this machine is busy ({load:.1f} processes per core): measured now, steps look as slow as they are now")
    tell(
        f"measuring this machine's {plural(machine.usable_cores, 'core')} for about 20 s, once (--no-probe plans "
        f"without; kept in {steps_path(machine, environ)})"
    )
    began_s = time.monotonic()
    try:
        samples = _run_worker(machine.usable_cores, environ, tell)
        _keep(machine, samples, load, environ)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        tell(f"not measured: {type(error).__name__}: {str(error)[:200]}; planned with typical figures")
        return
    tell(f"measured in {time.monotonic() - began_s:.0f} s")


def _run_worker(cores: int, environ: Mapping[str, str], tell: Callable[[str], None]) -> list[dict[str, Any]]:
    samples = []
    end_s = time.monotonic() + LIMIT_S
    with _worker(cores, environ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            samples.append(json.loads(line))
            _sample(samples[-1])
            if time.monotonic() > end_s:
                raise subprocess.TimeoutExpired(WORKER, LIMIT_S)
        if process.wait() or not samples:
            raise ValueError(f"{WORKER} ended with code {process.returncode}")
    return samples


@contextlib.contextmanager
def _worker(cores: int, environ: Mapping[str, str]) -> Iterator[subprocess.Popen[str]]:
    """The worker and all its ranks; gone when this ends, however it ends."""
    process = subprocess.Popen(
        [sys.executable, "-m", WORKER, str(cores)],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=dict(environ),
        start_new_session=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def _load(cores: int) -> float:
    try:
        return os.getloadavg()[0] / cores
    except OSError:
        return 0.0


def _keep(machine: Machine, samples: list[dict[str, Any]], load: float, environ: Mapping[str, str]) -> None:
    path = steps_path(machine, environ)
    path.parent.mkdir(parents=True, exist_ok=True)
    taken_at = datetime.now(UTC).isoformat(timespec="seconds")
    data = {"format": FORMAT, "identity": identity(machine), "taken_at": taken_at, "load": load, "samples": samples}
    replace_text(path, json.dumps(data, indent=1) + "\n")
