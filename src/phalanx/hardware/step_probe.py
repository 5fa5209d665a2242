"""Measure this machine's cores before the first plan of `local`: a few small training steps, kept for later plans.

The file names the machine it was measured on (processor, usable cores) and the versions of torch and Phalanx; where
one of them changed it is measured again. The layout that a plan then chooses is timed itself (`time_layout`) and kept
in the same file. GPUs are not measured here: their profile is fitted on real steps.
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

WORKER = "phalanx.train.probe_steps"  # a process of its own: this one never imports torch
FORMAT = 2
LIMIT_S = 120.0  # on idle cores; it took 18 s on two of them, 2026-11-16
MOST_BYTES = 1 << 20
MOST_TIMED = 24  # layouts; the newest are kept
BUSY = 1.5  # processes per core
CROWDED = 0.1  # share of all cores that others take: a load average tells it a minute late
LOOK_S = 0.3  # to see that share, just before and just after something is timed
SWITCH = "PHALANX_PROBE"  # "0" measures nothing, as --no-probe


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredSteps:
    """What was measured, and when."""

    steps: tuple[CpuStep, ...]
    seconds: tuple[float, ...]
    taken_at: str
    load: float  # processes per core that wanted to run when it began; 0 where the system does not say
    others: float = 0.0  # share of all cores that other processes took just before or after, the larger
    timed: tuple[TimedLayout, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class TimedLayout:
    """A step of a layout that a plan chose, with fewer micro-batches where the whole step takes long."""

    step: CpuStep
    seconds: float
    load: float
    others: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """As it is kept."""
        return {"step": asdict(self.step), "seconds": self.seconds, "load": self.load, "others": self.others}


def machine_identity(machine: Machine) -> dict[str, object]:
    """What must be the same for a measurement to hold."""
    known = {name: installed_version(name) for name in ("torch", "phalanx")}
    return {"processor": machine.cpu_model, "cores": machine.usable_cores, **known}


def steps_path(machine: Machine, environ: Mapping[str, str]) -> Path:
    """Where the measurement of this machine is kept."""
    return usual_path(machine.hostname, environ).with_suffix(".steps.json")


def read_steps(machine: Machine, environ: Mapping[str, str]) -> MeasuredSteps | None:
    """The kept measurement; None where there is none, or it is damaged or of another machine or version."""
    path = steps_path(machine, environ)
    try:
        data = load_json(path, MOST_BYTES)
        if data["format"] != FORMAT or data["identity"] != machine_identity(machine):
            return None
        found = [_read_sample(one) for one in data["samples"]]
        return MeasuredSteps(
            steps=tuple(step for step, _ in found),
            seconds=tuple(seconds for _, seconds in found),
            taken_at=str(data["taken_at"])[:40],
            load=float(data["load"]),
            others=float(data.get("others", 0.0)),
            timed=tuple(
                TimedLayout(step=step, seconds=seconds, load=float(one["load"]), others=float(one.get("others", 0.0)))
                for one in data["timed"][-MOST_TIMED:]
                for step, seconds in [_read_sample(one)]
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
    """The constants of this machine's cores, and the date they were measured; None where they were not.

    Fitting them takes 0.1 to 0.3 s, more than the rest of a small plan: the fit is kept beside what it was made of.
    """
    found = read_steps(machine, environ)
    if found is None or not found.steps:
        return None, ""
    path = usual_path(machine.hostname, environ).with_suffix(".rates.json")
    formula = Path(__file__).with_name("cpu_steps.py").read_bytes()
    made_of = repr((found.steps, found.seconds, found.timed, machine.usable_cores)).encode()
    digest = hashlib.sha256(formula + made_of).hexdigest()
    try:
        known = load_json(path, MOST_BYTES)
        if known["made_of"] == digest:
            return from_json_values(CpuRates, known["rates"], str(path)), found.taken_at
    except (OSError, ValueError, KeyError, TypeError, RecursionError, UserError):
        pass  # not fitted yet, or damaged
    steps = (*found.steps, *(one.step for one in found.timed))
    seconds = (*found.seconds, *(one.seconds for one in found.timed))
    rates = fit_rates(steps, seconds, machine.usable_cores, timed=len(found.timed))
    with contextlib.suppress(OSError):  # a folder that cannot be written: fitted again next time
        replace_text(path, json_text({"made_of": digest, "rates": rates}, indent=1) + "\n")
    return rates, found.taken_at


def measure_first(target: str, *, environ: Mapping[str, str], tell: Callable[[str], None]) -> None:
    """Measure before the first plan of this machine's cores; nothing where that is not what `target` means.

    A measurement that fails is told, and the plan goes on without it. Ctrl-C ends the measurement and is passed on.
    """
    written = LOCAL_SPEC.match(target.strip())
    if not written or environ.get(SWITCH) == "0" or importlib.util.find_spec("torch") is None:
        return
    machine = discover(environ=environ)
    if machine.gpus and not written.group(1):
        return
    load = busy_processes(machine.usable_cores)
    known = read_steps(machine, environ)
    # What was measured beside busy neighbours is measured again once they are gone.
    if known is not None and not _is_quieter(known, load):
        return
    others = _share_of_others()
    if others > CROWDED:
        tell(f"this machine is busy (others take {others:.0%} of its cores): steps are slower now than when it is idle")
    tell(
        f"measuring this machine's {plural(machine.usable_cores, 'core')}, once, for about 20 s (--no-probe skips it); "
        f"the result is stored in {steps_path(machine, environ)}"
    )
    began_s = time.monotonic()
    try:
        samples = _run_worker([str(machine.usable_cores)], _read_sample, environ)
        taken_at, others = datetime.now(UTC).isoformat(timespec="seconds"), max(others, _share_of_others())
        kept = {"taken_at": taken_at, "load": load, "others": others, "samples": samples, "timed": []}
        _keep_measurement(machine, kept, environ)
    except (OSError, ValueError, KeyError, TypeError, subprocess.SubprocessError) as error:
        tell(f"not measured: {type(error).__name__}: {str(error)[:200]}; planned with typical figures")
        return
    tell(f"measured in {time.monotonic() - began_s:.0f} s")


def time_layout(
    step: CpuStep, plan_json: str, *, environ: Mapping[str, str], tell: Callable[[str], None], name: str
) -> bool:
    """Time a planned layout on this machine's cores and keep it; whether there is something new to plan with.

    `step` is what is timed, as the formula reads it: the plan's, with `count` micro-batches. Nothing is timed where it
    already was, unless neighbours that were busy then are gone. A failure is told, and the plan stands as it is.
    """
    machine = discover(environ=environ)
    known = read_steps(machine, environ)
    if known is None or environ.get(SWITCH) == "0":
        return False
    load = busy_processes(machine.usable_cores)
    before = [one for one in known.timed if one.step == step]
    if any(not _is_quieter(one, load) for one in before):
        return False
    tell(f"timing {name} on this machine for a few seconds, once (--no-probe plans without)")
    try:
        arguments = ["--plan", str(int(step.count)), str(machine.usable_cores)]
        others = _share_of_others()
        (found,) = _run_worker(arguments, _read_seconds, environ, plan_json)
        others = max(others, _share_of_others())
        timed = TimedLayout(step=step, seconds=_read_seconds(found), load=load, others=others)
        kept = [one for one in known.timed if one.step != step]
        data = load_json(steps_path(machine, environ))
        _keep_measurement(machine, {**data, "timed": [one.to_dict() for one in (*kept, timed)][-MOST_TIMED:]}, environ)
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
    """The lines of JSON that the worker prints, each of which `read` can read; `given` is its standard input."""
    samples = []
    began_s = time.monotonic()
    with _step_worker(arguments, environ, given) as process:
        assert process.stdout is not None
        for line in process.stdout:
            samples.append(json.loads(line))
            read(samples[-1])
            if time.monotonic() - began_s > crowded_limit_s(LIMIT_S):
                raise subprocess.TimeoutExpired(WORKER, LIMIT_S)
        if process.wait() or not samples:
            raise ValueError(f"{WORKER} ended with code {process.returncode}")
    return samples


@contextlib.contextmanager
def _step_worker(arguments: list[str], environ: Mapping[str, str], given: str) -> Iterator[subprocess.Popen[str]]:
    """The worker and all its ranks; gone when this ends, however it ends."""
    with tempfile.TemporaryFile("w+", encoding="utf-8") as asked:  # not a pipe, which a worker that fails would break
        asked.write(given)
        asked.seek(0)
        process = subprocess.Popen(
            [sys.executable, "-m", WORKER, *arguments],
            stdin=asked, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=dict(environ),
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
    """Whether neighbours were busy when this was measured, and are gone."""
    if known.load > BUSY and load < known.load / 2.0:
        return True
    return known.others > CROWDED and _share_of_others() < known.others / 2.0


def _share_of_others() -> float:
    """What other processes take of all cores while this one sleeps for a moment; 0 where the system does not say.

    Time that other virtual machines take of them counts too.
    """
    before = _busy_seconds()
    began_s = time.monotonic()
    time.sleep(LOOK_S)
    passed_s = time.monotonic() - began_s
    return min(1.0, max(0.0, (_busy_seconds() - before) / (passed_s * (os.cpu_count() or 1))))


def _busy_seconds() -> float:
    """Of all cores together since the machine began; 0 where the system does not say."""
    try:
        with open("/proc/stat", encoding="ascii") as file:
            user, nice, system, _, _, irq, softirq, steal = (float(word) for word in file.readline().split()[1:9])
    except (OSError, ValueError):
        return 0.0
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def _keep_measurement(machine: Machine, data: Mapping[str, Any], environ: Mapping[str, str]) -> None:
    path = steps_path(machine, environ)
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = {**data, "format": FORMAT, "identity": machine_identity(machine)}
    replace_text(path, json.dumps(whole, indent=1) + "\n")
