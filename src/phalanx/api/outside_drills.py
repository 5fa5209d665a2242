"""The drill suite `outside`: what was tried on Phalanx from outside and broke it once, run again on this machine."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.api.results import PublicResult, Tell, teller
from phalanx.io.tables import text_table
from phalanx.units import format_seconds, plural

if TYPE_CHECKING:
    from phalanx.train.drill.outside import OutsideVerdict


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class OutsideSuite(PublicResult):
    """A row of verdict, steps lost and seconds for every drill."""

    verdicts: tuple[OutsideVerdict, ...]
    folder: Path
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether every drill came out as it must."""
        return all(one.ok for one in self.verdicts)

    def __str__(self) -> str:
        head = ("verdict", "drill", "lost", "seconds", "what came of it")
        rows = [
            (
                one.word,
                one.name,
                "" if one.steps_lost is None else f"{one.steps_lost:,}",
                f"{one.seconds:.1f}",
                one.reason,
            )
            for one in self.verdicts
        ]
        good = sum(one.ok for one in self.verdicts)
        unjudged = sum(not one.ok and not one.judged for one in self.verdicts)
        counts = f"{good} of {plural(len(rows), 'drill')} ok" + (f", {unjudged} not judged" if unjudged else "")
        lines = text_table([head, *rows], right=(2, 3))
        return "\n".join([*lines, f"{counts}; {format_seconds(self.seconds)}; runs and logs: {self.folder}"])

    def to_dict(self) -> dict[str, Any]:
        """The rows."""
        rows = [{**asdict(one), "seconds": round(one.seconds, 1)} for one in self.verdicts]
        return {"ok": self.ok, "seconds": round(self.seconds, 1), "folder": str(self.folder), "drills": rows}

    @property
    def exit_code(self) -> int:
        """0 when every drill came out as it must, 1 when one did not or could not be judged."""
        return 0 if self.ok else 1


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class OutsideList(PublicResult):
    """The drills of the suite: what each tries, and what must come of it."""

    rows: tuple[tuple[str, str, str, str], ...]  # name, subject, what is tried, what must come of it

    def __str__(self) -> str:
        return "\n".join(text_table([("drill", "subject", "tries", "must come of it"), *self.rows]))

    def __repr__(self) -> str:
        return f"<OutsideList: {plural(len(self.rows), 'drill')}>"

    def to_dict(self) -> dict[str, Any]:
        """The rows."""
        names = ("name", "subject", "tries", "must")
        return {"drills": [dict(zip(names, row, strict=True)) for row in self.rows]}


def list_outside_drills() -> OutsideList:
    """The drills that `drill_outside` runs; runs none of them.

    >>> print(list_outside_drills())  # doctest: +SKIP
    """
    from phalanx.train.drill.outside import outside_drills
    from phalanx.train.prepare import need_torch

    need_torch()
    return OutsideList(rows=tuple((one.name, one.subject, one.tries, one.must) for one in outside_drills()))


def drill_outside(
    only: str | Sequence[str] = (), *, runs: str | Path = "runs", progress: bool | Tell = False
) -> OutsideSuite:
    """Run the suite `outside`, or `only` the drills of these names, on a small job of its own in a new folder.

    Frozen coordinators, full disks, kills in a row, flipped bits in every kind of file and in live state, changed data,
    strangers at the ports, hostile files, a busy core: real faults, each with what must come of it.

    >>> drill_outside("frozen-coordinator").exit_code  # doctest: +SKIP
    0
    """
    from phalanx.train.drill.outside import perform_outside, select_drills
    from phalanx.train.prepare import need_torch

    tell = teller(progress)
    need_torch()
    drills = select_drills((only,) if isinstance(only, str) else tuple(only))
    began_s = time.monotonic()
    folder = Path(runs) / time.strftime("outside-%Y%m%d-%H%M%S")
    verdicts = perform_outside(drills, folder, tell=tell)
    return OutsideSuite(verdicts=verdicts, folder=folder, seconds=time.monotonic() - began_s)
