"""The drill suite `outside`: failures that external tests once found in Phalanx, repeated on this machine."""

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
        """True if every drill had the required outcome."""
        return all(verdict.ok for verdict in self.verdicts)

    def __str__(self) -> str:
        head = ("verdict", "drill", "lost", "seconds", "what came of it")
        rows = [
            (
                verdict.word,
                verdict.name,
                "" if verdict.steps_lost is None else f"{verdict.steps_lost:,}",
                f"{verdict.seconds:.1f}",
                verdict.reason,
            )
            for verdict in self.verdicts
        ]
        good = sum(verdict.ok for verdict in self.verdicts)
        unjudged = sum(not verdict.ok and not verdict.judged for verdict in self.verdicts)
        counts = f"{good} of {plural(len(rows), 'drill')} ok" + (f", {unjudged} not judged" if unjudged else "")
        lines = text_table([head, *rows], right=(2, 3))
        return "\n".join([*lines, f"{counts}; {format_seconds(self.seconds)}; runs and logs: {self.folder}"])

    def to_dict(self) -> dict[str, Any]:
        """Return the rows."""
        rows = [{**asdict(verdict), "seconds": round(verdict.seconds, 1)} for verdict in self.verdicts]
        return {"ok": self.ok, "seconds": round(self.seconds, 1), "folder": str(self.folder), "drills": rows}

    @property
    def exit_code(self) -> int:
        """0 if every drill had the required outcome, 1 if one did not or could not be judged."""
        return 0 if self.ok else 1


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class OutsideList(PublicResult):
    """The drills of the suite: what each tries, and its required outcome."""

    rows: tuple[tuple[str, str, str, str], ...]  # name, subject, what is tried, required outcome

    def __str__(self) -> str:
        return "\n".join(text_table([("drill", "subject", "tries", "must come of it"), *self.rows]))

    def __repr__(self) -> str:
        return f"<OutsideList: {plural(len(self.rows), 'drill')}>"

    def to_dict(self) -> dict[str, Any]:
        """Return the rows."""
        names = ("name", "subject", "tries", "must")
        return {"drills": [dict(zip(names, row, strict=True)) for row in self.rows]}


def list_outside_drills() -> OutsideList:
    """Return the drills that `drill_outside` runs, without running any.

    >>> print(list_outside_drills())  # doctest: +SKIP
    """
    from phalanx.train.drill.outside import outside_drills
    from phalanx.train.prepare import need_torch

    need_torch()
    return OutsideList(
        rows=tuple(
            (outside_drill.name, outside_drill.subject, outside_drill.tries, outside_drill.must)
            for outside_drill in outside_drills()
        )
    )


def drill_outside(
    only: str | Sequence[str] = (), *, runs: str | Path = "runs", progress: bool | Tell = False
) -> OutsideSuite:
    """Run the suite `outside`, or `only` the drills of these names, on a small job in a new folder.

    The drills inject real faults: frozen coordinators, full disks, repeated kills, flipped bits in every kind of file
    and in live state, changed data, unauthorized connections, hostile files, a busy core. Each has a required outcome.

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
