"""The suite `outside`: what was tried on Phalanx from outside and broke it, as drills that anybody can run.

Each is a real fault in a real run, or real damage between a stop and the next start, and one sentence says what must
come of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from phalanx.errors import PhalanxError, Problem, UserError, nearest
from phalanx.train.drill.outside_stage import OutsideStage


@dataclass(frozen=True, kw_only=True, slots=True)
class OutsideFinding:
    """What came of one drill. Not `judged`: this machine gave no chance to try it."""

    ok: bool
    reason: str
    steps_lost: int | None = None  # that memory held; None where nothing trained
    judged: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class OutsideDrill:
    """One thing that is tried, and what must come of it."""

    name: str
    subject: str  # control plane, state, damage, doors or stragglers
    tries: str
    must: str
    play: Callable[[OutsideStage], OutsideFinding]


@dataclass(frozen=True, kw_only=True, slots=True)
class OutsideVerdict:
    """One row of the suite's table."""

    name: str
    subject: str
    ok: bool
    judged: bool
    reason: str
    steps_lost: int | None
    seconds: float

    @property
    def word(self) -> str:
        """For the table."""
        return "ok" if self.ok else ("not ok" if self.judged else "not judged")


def outside_drills() -> tuple[OutsideDrill, ...]:
    """Every drill of the suite, in the order in which they are run."""
    from phalanx.train.drill.outside_files import FILE_DRILLS
    from phalanx.train.drill.outside_runs import RUN_DRILLS

    return (*RUN_DRILLS, *FILE_DRILLS)


def select_drills(only: Sequence[str]) -> tuple[OutsideDrill, ...]:
    """Those that are named, or all; raises UserError that names what there is."""
    every = {one.name: one for one in outside_drills()}
    problems = []
    for name in only:
        if name not in every:
            close = nearest(name, every)
            fix = f"did you mean {close}?" if close else "phalanx drill --suite outside --list shows them all"
            problems.append(Problem(where=f"--only {name[:60]}", what="is no drill of the suite outside", fix=fix))
    if problems:
        raise UserError(problems)
    return tuple(one for name, one in every.items() if not only or name in only)


def perform_outside(
    drills: Sequence[OutsideDrill], folder: Path, *, tell: Callable[[str], None]
) -> tuple[OutsideVerdict, ...]:
    """Run the drills one after another in `folder`; one that fails to be run is a verdict too."""
    stage = OutsideStage(folder, tell=tell)
    stage.prepare()
    return tuple(play_drill(one, stage) for one in drills)


def play_drill(drill: OutsideDrill, stage: OutsideStage) -> OutsideVerdict:
    """Run one drill and judge it."""
    stage.tell(f"{drill.name}: {drill.tries}")
    began_s = time.monotonic()
    try:
        found = drill.play(stage)
    except PhalanxError as error:  # of this drill alone: the others may still say something
        found = OutsideFinding(ok=False, judged=False, reason=str(error).splitlines()[0])
    return OutsideVerdict(
        name=drill.name,
        subject=drill.subject,
        ok=found.ok,
        judged=found.judged,
        reason=found.reason,
        steps_lost=found.steps_lost,
        seconds=time.monotonic() - began_s,
    )
