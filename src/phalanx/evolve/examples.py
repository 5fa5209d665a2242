"""Training examples for a language model from an archive: the problem, the attempted change and its measurement."""

from __future__ import annotations

import json
from collections.abc import Iterator

from phalanx.evolve.archive import Archive


def example_lines(archive: Archive) -> Iterator[str]:
    """Yield a JSON object per evaluation; `improves` is the relative gain in fitness of the attempt over its parent."""
    about = {"kind": archive.header.get("problem"), "about": archive.header.get("about")}
    elites = set(archive.elites.values())
    for number, entry in enumerate(archive.entries):
        parent = archive.entries[entry.parent] if entry.parent is not None and entry.parent < number else None
        outcome, improves = entry.outcome, None
        if parent is not None and outcome.fitness is not None and parent.outcome.fitness:
            improves = outcome.fitness / parent.outcome.fitness - 1.0
        place = outcome.place
        yield json.dumps(
            {
                "problem": about,
                "parent": parent.genome if parent is not None else None,
                "attempt": entry.genome,
                "origin": entry.origin,
                "measurement": {
                    "fitness": outcome.fitness,
                    **({axis.name: value for axis, value in zip(archive.axes, place, strict=True)} if place else {}),
                    **({"why": outcome.why} if outcome.why else {}),
                    **({"details": outcome.details} if outcome.details else {}),
                },
                "best_of_cell": number in elites,
                "improves": improves,
            }
        )
