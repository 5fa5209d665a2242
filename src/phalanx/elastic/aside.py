"""Checkpoints of a state that is not to be trusted: renamed, so that no resumed run takes one for its newest."""

from __future__ import annotations

from contextlib import suppress

from phalanx.record.run import Run

PREFIX = "untrusted-"


def set_aside(run: Run, *, after: int) -> str:
    """Rename the commits of more than `after` steps; what to tell a person, empty when there were none.

    An object store cannot rename, and it takes the trainer's libraries to delete there: then it is the person's to do.
    """
    steps, root = [step for step in run.saved_steps() if step > after], run.checkpoints
    if not steps:
        return ""
    named = ", ".join(f"{step:,}" for step in steps)
    if isinstance(root, str):
        return f"saved after that and not to be trusted: step {named} in {root}; delete them before --resume"
    for step in steps:
        for folder in root.glob(f"step-*{step:08d}"):
            with suppress(OSError):
                folder.rename(folder.with_name(f"{PREFIX}{folder.name}"))
    return f"saved after that and not to be trusted: step {named}, now called {PREFIX}step-… in {root}"
