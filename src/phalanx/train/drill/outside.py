"""The drill suite `outside`: attacks on Phalanx from outside that once broke it, as drills that any user can run.

Each is a real fault in a real run, or real damage between a stop and the next start, with one sentence that states the
required outcome.
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
    """The outcome of one drill. Not `judged`: this machine gave no chance to try it."""

    ok: bool
    reason: str
    # Steps that memory held and that were lost; None where nothing trained.
    steps_lost: int | None = None
    judged: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class OutsideDrill:
    """One attack, and its required outcome."""

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
        """The verdict in one word, for the table."""
        return "ok" if self.ok else ("not ok" if self.judged else "not judged")


def outside_drills() -> tuple[OutsideDrill, ...]:
    """Return every drill of the suite, in the order in which they run."""
    from phalanx.train.drill.outside_files import FILE_DRILLS
    from phalanx.train.drill.outside_runs import RUN_DRILLS

    return (*RUN_DRILLS, *FILE_DRILLS)


def select_drills(only: Sequence[str]) -> tuple[OutsideDrill, ...]:
    """Return the named drills, or all of them; raises UserError that names the valid ones."""
    every = {drill.name: drill for drill in outside_drills()}
    problems = []
    for name in only:
        if name not in every:
            close = nearest(name, every)
            fix = f"did you mean {close}?" if close else "phalanx drill --suite outside --list shows them all"
            problems.append(Problem(where=f"--only {name[:60]}", what="is no drill of the suite outside", fix=fix))
    if problems:
        raise UserError(problems)
    return tuple(drill for name, drill in every.items() if not only or name in only)


def perform_outside(
    drills: Sequence[OutsideDrill], folder: Path, *, tell: Callable[[str], None]
) -> tuple[OutsideVerdict, ...]:
    """Run the drills one after another in `folder`; a drill that cannot be run gets a verdict too."""
    stage = OutsideStage(folder, tell=tell)
    stage.prepare()
    return tuple(play_drill(drill, stage) for drill in drills)


def play_drill(drill: OutsideDrill, stage: OutsideStage) -> OutsideVerdict:
    """Run one drill and return its verdict."""
    stage.tell(f"{drill.name}: {drill.tries}")
    began_s = time.monotonic()
    try:
        finding = drill.play(stage)
    except PhalanxError as error:
        # The error concerns this drill alone: the others still run.
        finding = OutsideFinding(ok=False, judged=False, reason=str(error).splitlines()[0])
    return OutsideVerdict(
        name=drill.name,
        subject=drill.subject,
        ok=finding.ok,
        judged=finding.judged,
        reason=finding.reason,
        steps_lost=finding.steps_lost,
        seconds=time.monotonic() - began_s,
    )
