"""The common part of the searches in `phalanx.evolve`: the archive, the live picture, and the handling of Ctrl-C."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.api.results import INTERRUPTED, Tell
from phalanx.errors import mistake
from phalanx.evolve.archive import Archive, open_archive
from phalanx.evolve.map_elites import SearchCounts, run_search
from phalanx.evolve.picture import grid_svg, grid_text
from phalanx.evolve.problem import SearchProblem
from phalanx.evolve.proposer import make_proposer
from phalanx.io.files import write_text
from phalanx.units import plural

MOST_EVALUATIONS = 1_000_000
PICTURE_S = 2.0  # seconds between two updates of the picture


@dataclass(frozen=True, kw_only=True, slots=True)
class FinishedSearch:
    """A search that ended or was interrupted; its archive stays in both cases."""

    archive: Archive
    counts: SearchCounts
    path: str  # of the archive; empty if it was not stored
    wall_s: float
    interrupted: bool

    @property
    def exit_code(self) -> int:
        """130 after Ctrl-C."""
        return INTERRUPTED if self.interrupted else 0

    def to_dict(self) -> dict[str, Any]:
        """Return counts, and every filled cell."""
        archive = self.archive
        return {
            "archive": self.path,
            "evaluations": len(archive.entries),
            "evaluated_now": self.counts.evaluated,
            "without_fitness": sum(entry.outcome.fitness is None for entry in archive.entries),
            "proposed": self.counts.proposed,
            "nonsense": self.counts.nonsense,
            "wall_s": self.wall_s,
            "interrupted": self.interrupted,
            "cells": archive.axes[0].size * archive.axes[1].size,
            "quality_diversity": archive.quality_diversity,
            "axes": [{"name": axis.name, "edges": axis.edges} for axis in archive.axes],
            "elites": [
                {
                    "cell": cell,
                    "fitness": archive.entries[place].fitness,
                    "place": archive.entries[place].outcome.place,
                    "genome": archive.entries[place].genome,
                }
                for cell, place in sorted(archive.elites.items())
            ],
        }

    def summary_lines(self) -> list[str]:
        """Return the counts, the problems, and how to continue."""
        archive, counts = self.archive, self.counts
        cells = archive.axes[0].size * archive.axes[1].size
        lines = [
            f"{plural(len(archive.entries), 'evaluation')} ({counts.evaluated:,} now, {self.wall_s:.1f} s), "
            f"{len(archive.elites)} of {cells} cells filled"
        ]
        if counts.proposed:
            lines.append(
                f"proposer: {plural(counts.proposed, 'proposal')}, of which {counts.nonsense} "
                f"{'was' if counts.nonsense == 1 else 'were'} no new candidate"
            )
            lines += [f"  {number} × {reason}" for reason, number in counts.reasons.most_common(3)]
        if counts.exhausted:
            lines.append("ended early: every candidate that the search could make was evaluated")
        if self.path:
            lines.append(f"archive: {self.path}")
        if self.interrupted:
            lines.append("interrupted: nothing is lost; the same command goes on from the archive")
        return lines


def finish_search(
    problem: SearchProblem,
    *,
    archive: Path | None,
    evaluations: int,
    seed: int,
    proposer: str,
    picture: str | Path | None,
    title: str,
    show: Callable[[float], str],
    tell: Tell,
) -> FinishedSearch:
    """Search until the archive holds `evaluations` evaluations; Ctrl-C ends the search and keeps what it has."""
    if not 1 <= evaluations <= MOST_EVALUATIONS:
        raise mistake("--evaluations", f"{evaluations} is not between 1 and {MOST_EVALUATIONS:,}")
    if not 0 <= seed < 1 << 63:
        raise mistake("--seed", f"{seed} is not between 0 and 2^63", fix="use a small number such as 0")
    external_proposer = make_proposer(proposer) if proposer else None
    counts, began_s, interrupted = SearchCounts(), time.monotonic(), False
    shown_s = began_s

    def watch(state: Archive, counted: SearchCounts) -> None:
        nonlocal shown_s
        now_s = time.monotonic()
        if now_s - shown_s < PICTURE_S and len(state.entries) < evaluations:
            return
        shown_s = now_s
        best = state.best()
        tell(
            f"{len(state.entries):,} of {plural(evaluations, 'evaluation')}, {len(state.elites)} cells filled"
            + (f", best {show(best.fitness)}" if best else "")
            + (f", {counted.nonsense} of {counted.proposed} proposals nonsense" if counted.nonsense else "")
        )
        if picture:
            write_text(Path(picture), grid_svg(state, title=title, show=show) + "\n", fix="name another --picture")

    with open_archive(archive, problem) as writer:
        try:
            run_search(
                problem,
                writer,
                evaluations=evaluations,
                seed=seed,
                proposer=external_proposer,
                watch=watch,
                counts=counts,
            )
        except KeyboardInterrupt:
            interrupted = True
        if picture:
            svg = grid_svg(writer.archive, title=title, show=show)
            write_text(Path(picture), svg + "\n", fix="name another --picture")
    return FinishedSearch(
        archive=writer.archive,
        counts=counts,
        path=str(archive) if archive else "",
        wall_s=time.monotonic() - began_s,
        interrupted=interrupted,
    )


def picture_lines(search: FinishedSearch) -> list[str]:
    """Return the grid as text."""
    return [grid_text(search.archive)]
