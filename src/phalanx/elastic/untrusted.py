"""Checkpoints of an untrusted state: renamed so that no run restores one, until training has replaced them."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

from phalanx.record.run import COMMIT, Run

UNTRUSTED = "untrusted-"
_SET_ASIDE = re.compile(rf"{UNTRUSTED}step-(\d{{8,18}})(?:-\d+)?", re.ASCII)


def set_aside_step(name: str) -> int | None:
    """Return the step of a checkpoint that was set aside; None for any other name.

    >>> set_aside_step("untrusted-step-00000022"), set_aside_step("untrusted-step-00000022-2"), set_aside_step("step-0")
    (22, 22, None)
    """
    match = _SET_ASIDE.fullmatch(name)
    return int(match.group(1)) if match else None


def set_untrusted_aside(run: Run, *, after: int) -> None:
    """Rename the checkpoints of more than `after` steps, so that no resumed run restores one as its newest.

    Deletes nothing. An object store cannot rename: there the trainer deletes them once it has restored an older one.
    """
    root = run.checkpoints
    if isinstance(root, str) or not root.is_dir():
        return
    for folder in list(root.iterdir()):
        match = COMMIT.fullmatch(folder.name)
        if match is not None and int(match.group(1)) > after:
            with suppress(OSError):
                folder.rename(_free_name(root, folder.name))


def untrusted_steps(run: Run, *, after: int) -> list[int]:
    """Return steps beyond `after` whose checkpoints are set aside.

    In an object store nothing is renamed: there, the steps of those still in place.
    """
    root = run.checkpoints
    if isinstance(root, str):
        return [step for step in run.saved_steps() if step > after]
    try:
        steps = {set_aside_step(folder.name) for folder in root.iterdir()}
    except OSError:
        return []
    return sorted(step for step in steps if step is not None and step > after)


def _free_name(root: Path, name: str) -> Path:
    """Return a name that no checkpoint set aside before has: a step may be untrusted twice."""
    path, count = root / f"{UNTRUSTED}{name}", 1
    while path.exists():
        count += 1
        path = root / f"{UNTRUSTED}{name}-{count}"
    return path
