"""Measure this machine's cores before the first plan of `local`: a few small training steps, stored for later plans.

The file records the machine it was measured on (processor, usable cores) and the versions of torch and Phalanx; if one
of them changes, the measurement is repeated. The layout that a plan then chooses is timed too (`time_layout`) and
stored in the same file. GPUs are not measured here: their profile is fitted to real steps.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from phalanx.errors import UserError
from phalanx.hardware.cluster import LOCAL_SPEC
from phalanx.hardware.cpu_steps import CpuRates, CpuStep, fit_rates
from phalanx.hardware.discover import discover
from phalanx.hardware.machine_load import busy_processes, crowded_limit_s
from phalanx.hardware.probe import usual_path
from phalanx.hardware.types import Machine
from phalanx.io.codec import from_json_values, json_text
from phalanx.io.files import load_json, replace_text
from phalanx.io.packages import installed_version
from phalanx.units import plural

WORKER = "phalanx.train.probe_steps"  # a separate process, so that this one never imports torch
FORMAT = 2
LIMIT_S = 120.0  # on idle cores; it took 18 s on two of them, 2026-11-16
MOST_BYTES = 1 << 20
MOST_TIMED = 24  # layouts; the newest are kept
BUSY = 1.5  # processes per core
CROWDED = 0.1  # share of all cores that other processes take, which the load average shows a minute late
LOOK_S = 0.3  # for measuring that share, just before and just after something is timed
SWITCH = "PHALANX_PROBE"  # "0" measures nothing, as --no-probe


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredSteps:
    """A measurement of the reference steps, and the layouts timed later."""

    steps: tuple[CpuStep, ...]
    seconds: tuple[float, ...]
    taken_at: str
    load: float  # processes per core that wanted to run at the start; 0 if the system does not report it
    others: float = 0.0  # the larger of the shares of all cores that other processes took just before and just after
    timed: tuple[TimedLayout, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class TimedLayout:
    """A timed step of a layout that a plan chose, with fewer micro-batches if the whole step takes long."""

    step: CpuStep
    seconds: float
    load: float
    others: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return the layout as it is stored."""
        return {"step": asdict(self.step), "seconds": self.seconds, "load": self.load, "others": self.others}


def machine_identity(machine: Machine) -> dict[str, object]:
    """Return the properties that must be unchanged for a measurement to be valid."""
    versions = {name: installed_version(name) for name in ("torch", "phalanx")}
    return {"processor": machine.cpu_model, "cores": machine.usable_cores, **versions}


def steps_path(machine: Machine, environ: Mapping[str, str]) -> Path:
    """Return the path of this machine's measurement."""
    return usual_path(machine.hostname, environ).with_suffix(".steps.json")


def read_steps(machine: Machine, environ: Mapping[str, str]) -> MeasuredSteps | None:
    """Read the stored measurement; None if it is missing, damaged, or of another machine or version."""
    path = steps_path(machine, environ)
    try:
        data = load_json(path, MOST_BYTES)
        if data["format"] != FORMAT or data["identity"] != machine_identity(machine):
            return None
        samples = [_read_sample(record) for record in data["samples"]]
        return MeasuredSteps(
            steps=tuple(step for step, _ in samples),
            seconds=tuple(seconds for _, seconds in samples),
            taken_at=str(data["taken_at"])[:40],
            load=float(data["load"]),
            others=float(data.get("others", 0.0)),
            timed=tuple(
                TimedLayout(
                    step=step, seconds=seconds, load=float(record["load"]), others=float(record.get("others", 0.0))
                )
                for record in data["timed"][-MOST_TIMED:]
                for step, seconds in [_read_sample(record)]
            ),
        )
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _read_sample(one: Mapping[str, Any]) -> tuple[CpuStep, float]:
    values = {item.name: float(one["step"][item.name]) for item in fields(CpuStep)}
    seconds = float(one["seconds"])
    if not all(math.isfinite(value) and 0 <= value < 1e12 for value in (*values.values(), seconds)) or seconds <= 0:
        raise ValueError("a number out of range")
    return CpuStep(**values), seconds


def measured_rates(machine: Machine, environ: Mapping[str, str]) -> tuple[CpuRates | None, str]:
    """Return the constants of this machine's cores and the date of their measurement; None if they were not measured.

    Fitting them takes 0.1 to 0.3 s, more than the rest of a small plan, so the fit is stored next to the measurement.
    """
    measurement = read_steps(machine, environ)
    if measurement is None or not measurement.steps:
        return None, ""
    path = usual_path(machine.hostname, environ).with_suffix(".rates.json")
    formula = Path(__file__).with_name("cpu_steps.py").read_bytes()
    inputs = repr((measurement.steps, measurement.seconds, measurement.timed, machine.usable_cores)).encode()
    digest = hashlib.sha256(formula + inputs).hexdigest()
    try:
        stored = load_json(path, MOST_BYTES)
        if stored["made_of"] == digest:
            return from_json_values(CpuRates, stored["rates"], str(path)), measurement.taken_at
    except (OSError, ValueError, KeyError, TypeError, RecursionError, UserError):
        pass  # not fitted yet, or damaged
    steps = (*measurement.steps, *(layout.step for layout in measurement.timed))
    seconds = (*measurement.seconds, *(layout.seconds for layout in measurement.timed))
    rates = fit_rates(steps, seconds, machine.usable_cores, timed=len(measurement.timed))
    # In a folder that cannot be written it is fitted again next time.
    with contextlib.suppress(OSError):
        replace_text(path, json_text({"made_of": digest, "rates": rates}, indent=1) + "\n")
    return rates, measurement.taken_at


def measure_first(target: str, *, environ: Mapping[str, str], tell: Callable[[str], None]) -> None:
    """Measure before the first plan of this machine's cores; do nothing if `target` does not mean them.

    A failed measurement is reported with `tell`, and planning continues without it. Ctrl-C ends the measurement and is
    raised again.
    """
    local_match = LOCAL_SPEC.match(target.strip())
    if not local_match or environ.get(SWITCH) == "0" or importlib.util.find_spec("torch") is None:
        return
    machine = discover(environ=environ)
    if machine.gpus and not local_match.group(1):
        return
    load = busy_processes(machine.usable_cores)
    stored = read_steps(machine, environ)
    # A measurement next to busy neighbours is repeated once they are gone.
    if stored is not None and not _is_quieter(stored, load):
        return
    others = _share_of_others()
    if others > CROWDED:
        tell(f"this machine is busy (others take {others:.0%} of its cores): steps are slower now than when it is idle")
    tell(
        f"measuring this machine's {plural(machine.usable_cores, 'core')}, once, for about 20 s (--no-probe skips it); "
        f"the result is stored in {steps_path(machine, environ)}"
    )
    start_s = time.monotonic()
    try:
        samples = _run_worker([str(machine.usable_cores)], _read_sample, environ)
        taken_at, others = datetime.now(UTC).isoformat(timespec="seconds"), max(others, _share_of_others())
        measurement = {"taken_at": taken_at, "load": load, "others": others, "samples": samples, "timed": []}
        _keep_measurement(machine, measurement, environ)
    except (OSError, ValueError, KeyError, TypeError, subprocess.SubprocessError) as error:
        tell(f"not measured: {type(error).__name__}: {str(error)[:200]}; planned with typical figures")
        return
    tell(f"measured in {time.monotonic() - start_s:.0f} s")


def time_layout(
    step: CpuStep, plan_json: str, *, environ: Mapping[str, str], tell: Callable[[str], None], name: str
) -> bool:
    """Time a planned layout on this machine's cores and store it; return True if there is something new to plan with.

    `step` is the timed step as the formula reads it: the plan's, with `count` micro-batches. A layout that was already
    timed is skipped, unless neighbours that were busy then are gone. A failure is reported with `tell`, and the plan
    stays unchanged.
    """
    machine = discover(environ=environ)
    stored = read_steps(machine, environ)
    if stored is None or environ.get(SWITCH) == "0":
        return False
    load = busy_processes(machine.usable_cores)
    before = [layout for layout in stored.timed if layout.step == step]
    if any(not _is_quieter(layout, load) for layout in before):
        return False
    tell(f"timing {name} on this machine for a few seconds, once (--no-probe plans without)")
    try:
        arguments = ["--plan", str(int(step.count)), str(machine.usable_cores)]
        others = _share_of_others()
        (sample,) = _run_worker(arguments, _read_seconds, environ, plan_json)
        others = max(others, _share_of_others())
        timed = TimedLayout(step=step, seconds=_read_seconds(sample), load=load, others=others)
        other_layouts = [layout for layout in stored.timed if layout.step != step]
        data = load_json(steps_path(machine, environ))
        _keep_measurement(
            machine, {**data, "timed": [layout.to_dict() for layout in (*other_layouts, timed)][-MOST_TIMED:]}, environ
        )
    except (OSError, ValueError, KeyError, TypeError, subprocess.SubprocessError) as error:
        tell(f"not timed: {type(error).__name__}: {str(error)[:200]}; predicted from reference steps")
        return False
    return True


def _read_seconds(found: Mapping[str, Any]) -> float:
    seconds = float(found["seconds"])
    if not 0.0 < seconds < LIMIT_S:
        raise ValueError(f"a step of {seconds} s")
    return seconds


def _run_worker(
    arguments: list[str], read: Callable[[Mapping[str, Any]], object], environ: Mapping[str, str], given: str = ""
) -> list[dict[str, Any]]:
    """Return the JSON lines that the worker prints, each checked with `read`; `given` is its standard input."""
    samples = []
    start_s = time.monotonic()
    with _step_worker(arguments, environ, given) as process:
        assert process.stdout is not None
        for line in process.stdout:
            samples.append(json.loads(line))
            read(samples[-1])
            if time.monotonic() - start_s > crowded_limit_s(LIMIT_S):
                raise subprocess.TimeoutExpired(WORKER, LIMIT_S)
        if process.wait() or not samples:
            raise ValueError(f"{WORKER} ended with code {process.returncode}")
    return samples


@contextlib.contextmanager
def _step_worker(arguments: list[str], environ: Mapping[str, str], given: str) -> Iterator[subprocess.Popen[str]]:
    """Run the worker and its ranks; all of them have ended when the context exits."""
    # not a pipe, which a worker that fails would break
    with tempfile.TemporaryFile("w+", encoding="utf-8") as worker_input:
        worker_input.write(given)
        worker_input.seek(0)
        process = subprocess.Popen(
            [sys.executable, "-m", WORKER, *arguments],
            stdin=worker_input, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=dict(environ),
            # A separate process group, so that the worker can be killed together with its ranks.
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


def _is_quieter(known: MeasuredSteps | TimedLayout, load: float) -> bool:
    """Return whether neighbours were busy during a measurement and are gone now."""
    if known.load > BUSY and load < known.load / 2.0:
        return True
    return known.others > CROWDED and _share_of_others() < known.others / 2.0


def _share_of_others() -> float:
    """Return the share of all cores that other processes take while this one sleeps; 0 if unknown.

    Time that other virtual machines take of the cores counts too.
    """
    before = _busy_seconds()
    start_s = time.monotonic()
    time.sleep(LOOK_S)
    passed_s = time.monotonic() - start_s
    return min(1.0, max(0.0, (_busy_seconds() - before) / (passed_s * (os.cpu_count() or 1))))


def _busy_seconds() -> float:
    """Return the busy seconds of all cores together since the machine started; 0 if the system does not report them."""
    try:
        with open("/proc/stat", encoding="ascii") as file:
            user, nice, system, _, _, irq, softirq, steal = (float(word) for word in file.readline().split()[1:9])
    except (OSError, ValueError):
        return 0.0
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def _keep_measurement(machine: Machine, data: Mapping[str, Any], environ: Mapping[str, str]) -> None:
    path = steps_path(machine, environ)
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {**data, "format": FORMAT, "identity": machine_identity(machine)}
    replace_text(path, json.dumps(content, indent=1) + "\n")
