"""What was fired: one small file per firing, on the disk before the fault acts, so that a kill leaves its own trace."""

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
    """One firing of a fault. `t_s` is Unix time, `monotonic_s` the clock of this boot; -1 where it does not apply."""

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
    """The faults to inject, for the ranks to read."""
    return run.path / "drill.json"


def firings_folder(run: Run) -> Path:
    """Where firings are noted."""
    return run.path / "drill"


def write_schedule(run: Run, faults: Sequence[Fault]) -> None:
    """Before the launch: the faults, and the folder for what was fired."""
    firings_folder(run).mkdir(exist_ok=True)
    text = json.dumps({"v": VERSION, "faults": [fault.to_dict() for fault in faults]}, indent=1) + "\n"
    replace_text(schedule_path(run), text)


def read_schedule(run: Run) -> tuple[Fault, ...]:
    """The faults of a drill."""
    return tuple(Fault.from_dict(values) for values in read_json(schedule_path(run)).get("faults", ()))


def start_clock(run: Run) -> None:
    """Faults with `at_s` count from now: the driver says so at the first step."""
    replace_text(firings_folder(run) / "clock.json", json.dumps({"t_s": time.time()}))


def drill_clock(run: Run) -> float | None:
    """Unix time of the first step, once it is known."""
    try:
        return float(load_json(firings_folder(run) / "clock.json")["t_s"])
    except (OSError, ValueError, KeyError):
        return None


def claim_firing(run: Run, fault: Fault, *, whom: int = -1, **where: Any) -> bool:
    """Whether this firing is ours: its file is made now, once, and is on the disk before this returns.

    `whom` tells the ranks of a fault that hits several apart; a fault with `times` has so many files.
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
    """Every firing, oldest first."""
    return new_firings(run, set())


def new_firings(run: Run, seen: set[str]) -> list[Firing]:
    """Firings whose files are not in `seen`, oldest first, and put there; a file that a kill left empty is left out."""
    found = []
    for path in firings_folder(run).glob("fired-*.json"):
        if path.name in seen:
            continue
        try:
            found.append(from_message(Firing, load_json(path)))
        except (ValueError, OSError):
            continue
        seen.add(path.name)
    return sorted(found, key=lambda fired: fired.t_s)
