"""The record of the faults that were injected: one small file per firing in the run's folder `drill/`.

Each file is on the disk before its fault acts, so that a kill is recorded too.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from phalanx.io.codec import from_message
from phalanx.io.files import load_json, replace_text
from phalanx.record.run import Run
from phalanx.record.run_files import read_json
from phalanx.train.drill.faults import Fault

VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Firing:
    """One injection of a fault.

    `t_s` is Unix time, `monotonic_s` the clock of this boot; -1 where a field does not apply.
    """

    id: int
    kind: str
    t_s: float
    monotonic_s: float
    rank: int = -1
    slot: int = -1
    host: str = ""
    epoch: int = -1
    step: int = -1
    pid: int = -1
    note: str = ""


def schedule_path(run: Run) -> Path:
    """The file drill.json of a run: the faults to inject, which the ranks read."""
    return run.path / "drill.json"


def firings_folder(run: Run) -> Path:
    """The folder that holds the firings of a run."""
    return run.path / "drill"


def write_schedule(run: Run, faults: Sequence[Fault]) -> None:
    """Write drill.json and make the folder for firings; called before the launch."""
    firings_folder(run).mkdir(exist_ok=True)
    text = json.dumps({"v": VERSION, "faults": [fault.to_dict() for fault in faults]}, indent=1) + "\n"
    replace_text(schedule_path(run), text)


def read_schedule(run: Run) -> tuple[Fault, ...]:
    """Return the faults in a run's drill.json."""
    return tuple(Fault.from_dict(values) for values in read_json(schedule_path(run)).get("faults", ()))


def start_clock(run: Run) -> None:
    """Record now as the time from which `at_s` of faults counts; the driver calls it at the first step."""
    replace_text(firings_folder(run) / "clock.json", json.dumps({"t_s": time.time()}))


def drill_clock(run: Run) -> float | None:
    """Return the Unix time of the first step, or None before that step."""
    try:
        return float(load_json(firings_folder(run) / "clock.json")["t_s"])
    except (OSError, ValueError, KeyError):
        return None


def claim_firing(run: Run, fault: Fault, *, whom: int = -1, **where: Any) -> bool:
    """Create the file of this firing and sync it to disk; False when it was claimed before and must not act again.

    `whom` distinguishes the ranks of a fault that hits several; a fault with `times` may be claimed that many times.
    """
    fired = Firing(id=fault.id, kind=fault.kind, t_s=time.time(), monotonic_s=time.monotonic(), **where)
    for count in range(fault.times):
        path = firings_folder(run) / f"fired-{fault.id:05d}-{whom + 1}-{count}.json"
        try:
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        except FileExistsError:
            continue
        try:
            os.write(file, json.dumps(asdict(fired)).encode() + b"\n")
            os.fsync(file)
        finally:
            os.close(file)
        return True
    return False


def read_firings(run: Run) -> list[Firing]:
    """Return every firing, oldest first."""
    return new_firings(run, set())


def new_firings(run: Run, seen: set[str]) -> list[Firing]:
    """Return the firings whose files are not in `seen`, oldest first, and add these files to `seen`.

    A file that a kill left empty is skipped.
    """
    fired = []
    for path in firings_folder(run).glob("fired-*.json"):
        if path.name in seen:
            continue
        try:
            fired.append(from_message(Firing, load_json(path)))
        except (ValueError, OSError):
            continue
        seen.add(path.name)
    return sorted(fired, key=lambda firing: firing.t_s)
