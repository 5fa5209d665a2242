"""Handling of a failed last save: all ranks retry while they still hold the step, then write it to another place.

Every rank does the same in the same order, and all synchronise after each attempt: a checkpoint exists only if each
rank wrote its part. Training has ended, so ranks may wait for each other.
"""

from __future__ import annotations

import hashlib
import platform
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from phalanx.elastic.failure import LastSaveFailed
from phalanx.errors import Problem, SystemFailure
from phalanx.train.state.paths import Location
from phalanx.train.state.rescue import WRITE_S, claim_place, is_local_place, leave_place, rescue_places
from phalanx.train.state.save import SavedCheckpoint

# Before each new attempt at the original place: disks and stores fail temporarily
PAUSES_S = (0.0, 1.0, 2.0)

WriteTo = Callable[
    [Location, int, float], SavedCheckpoint
]  # a place, the number of the attempt, seconds allowed for all ranks


def agree_on(is_so: bool, device: torch.device) -> bool:
    """Return whether `is_so` is true on any rank."""
    flag = torch.tensor([int(is_so)], device=device)
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag.item())


def write_last_step(
    step: int,
    first_error: SystemFailure | None,
    *,
    checkpoints: Location,
    run_folder: Path,
    device: torch.device,
    write_to: WriteTo,
) -> SavedCheckpoint:
    """Write the step that could not be saved, if possible to its original place.

    `first_error` is None on ranks that had written their part. Raises LastSaveFailed if the step is saved elsewhere,
    or nowhere.
    """
    places = rescue_places(checkpoints, run_folder)
    reasons: dict[Location, str] = {}
    if first_error is not None:
        reasons[checkpoints] = _first_words(first_error)
    attempts = [*((places[0], pause_s) for pause_s in PAUSES_S), *((place, 0.0) for place in places[1:])]
    for number, (place, pause_s) in enumerate(attempts):
        time.sleep(pause_s)
        saved = None
        try:
            claim_place(place, run_folder)
            is_ready = True
        except SystemFailure as error:
            is_ready, reasons[place] = False, _first_words(error)
        if not _is_shared(place, run_folder, is_ready, device):
            reasons.setdefault(place, "not all ranks can write there")
            leave_place(place, run_folder)
            continue
        try:
            saved = write_to(place, number, WRITE_S)
        except SystemFailure as error:
            reasons[place] = _first_words(error)
        if agree_on(saved is None, device):
            leave_place(place, run_folder)
            continue
        assert saved is not None
        if place == checkpoints:
            return saved
        raise _saved_elsewhere(step, saved.path, checkpoints, run_folder, reasons)
    raise _saved_nowhere(step, checkpoints, reasons)


def _is_shared(place: Location, run_folder: Path, is_ready: bool, device: torch.device) -> bool:
    """Return whether all ranks can write to the place, and it is the same folder: /tmp of two hosts is two folders."""
    number = 1
    if isinstance(place, Path) and is_local_place(place, run_folder) and is_ready:
        folder_stat = place.stat()
        name = f"{platform.node()} {folder_stat.st_dev} {folder_stat.st_ino}"
        number = 1 + int.from_bytes(hashlib.sha256(name.encode()).digest()[:6])
    numbers = torch.tensor([number, -number, int(not is_ready)], dtype=torch.int64, device=device)
    dist.all_reduce(numbers, op=dist.ReduceOp.MAX)
    largest, negated_least, unready = numbers.tolist()
    return largest == -negated_least and not unready


def _first_words(error: SystemFailure) -> str:
    return error.problems[0].what


def _saved_elsewhere(
    step: int, path: Location, checkpoints: Location, run_folder: Path, reasons: dict[Location, str]
) -> LastSaveFailed:
    problem = Problem(
        where=str(checkpoints),
        what=reasons.get(checkpoints, f"step {step} is not saved: another rank could not write its part"),
        why=f"the ranks held step {step:,}, which is now saved: {path}",
        fix=f"make room, move it to {checkpoints}, and resume with: phalanx train --resume {run_folder}",
    )
    return LastSaveFailed(problem, is_rescued=True)


def _saved_nowhere(step: int, checkpoints: Location, reasons: dict[Location, str]) -> LastSaveFailed:
    attempts_text = "; ".join(f"{place}: {reason}" for place, reason in reasons.items() if place != checkpoints)
    problem = Problem(
        where=str(checkpoints),
        what=reasons.get(checkpoints, f"step {step} is not saved: another rank could not write its part"),
        why=f"nor could it be written elsewhere: {attempts_text}" if attempts_text else "",
        fix="make room in one of these places, or lift the limit on the size of files (ulimit -f)",
    )
    return LastSaveFailed(problem)
