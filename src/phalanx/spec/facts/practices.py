"""The habits of trainers, with where they are written."""

from __future__ import annotations

from phalanx.spec.facts.practice import Practice

PHALANX = Practice(trainer="phalanx")


def practice_of(framework: str) -> Practice:
    """The habits of a trainer; nothing is assumed of one that is not known."""
    return PHALANX if framework == "phalanx" else Practice(trainer=framework)
