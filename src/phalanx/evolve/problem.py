"""What a quality-diversity search is asked: candidates as JSON values, two axes of behaviour, and one fitness."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from phalanx.io.checksums import text_digest

Genome = Mapping[str, Any]  # JSON values only: an archive keeps it, a language model may write it
Floats = NDArray[np.float64]
Cell = tuple[int, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchAxis:
    """One axis of the grid: cell i holds values from edge i - 1 (included) to edge i; the outer cells are open."""

    name: str
    edges: tuple[float, ...]
    labels: tuple[str, ...]  # of the cells, as many as edges and one
    logarithmic: bool = False  # how the search's model of the problem sees the value

    @property
    def size(self) -> int:
        """Cells along it."""
        return len(self.edges) + 1

    def cell_of(self, value: float) -> int:
        """The cell that holds a value.

        >>> SearchAxis(name="x", edges=(1.0, 2.0), labels=("a", "b", "c")).cell_of(1.0)
        1
        """
        return bisect_right(self.edges, value)


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchOutcome:
    """What an evaluation found: fitness and place on the axes, or why there is none."""

    fitness: float | None
    place: tuple[float, float] | None = None
    why: str = ""
    details: Mapping[str, Any] = field(default_factory=dict)


class SearchProblem(Protocol):
    """A space of candidates. Whatever `mutate`, `cross` and `read_genome` return is well-formed."""

    @property
    def name(self) -> str:
        """Plans, schedules or kernels."""

    @property
    def axes(self) -> tuple[SearchAxis, SearchAxis]:
        """Of the grid."""

    @property
    def batch(self) -> int:
        """Candidates that are evaluated together."""

    def describe(self) -> Mapping[str, Any]:
        """Everything that decides what an evaluation finds, as JSON: an archive belongs to this and nothing else."""

    def seeds(self) -> Sequence[Genome]:
        """Candidates to begin with, known to people."""

    def random_genome(self, rng: np.random.Generator) -> Genome:
        """Any candidate."""

    def mutate(self, genome: Genome, rng: np.random.Generator) -> Genome:
        """A neighbour."""

    def cross(self, first: Genome, second: Genome, rng: np.random.Generator) -> Genome:
        """Parts of two candidates."""

    def evaluate(self, genomes: Sequence[Genome]) -> Sequence[SearchOutcome]:
        """Fitness and place of each."""

    def features(self, genomes: Sequence[Genome]) -> Floats | None:
        """Numbers that a linear model can predict the outcome from; None where there are none."""

    def read_genome(self, data: object) -> Genome:
        """The candidate that somebody wrote as JSON, repaired where needed; raises ValueError with the reason."""

    def prompt(self, genome: Genome, outcome: SearchOutcome) -> str:
        """What a language model is asked: this candidate, its measurement, and the form of the answer."""


def genome_key(genome: Genome) -> str:
    """The same text for the same candidate."""
    return json.dumps(genome, sort_keys=True, separators=(",", ":"))


def problem_digest(problem: SearchProblem) -> str:
    """Of what decides its results, axes included."""
    axes = [[axis.name, list(axis.edges)] for axis in problem.axes]
    return text_digest(json.dumps([problem.name, problem.describe(), axes], sort_keys=True))


def cell_of(axes: tuple[SearchAxis, SearchAxis], place: tuple[float, float]) -> Cell:
    """The cell of the grid that holds a place."""
    return axes[0].cell_of(place[0]), axes[1].cell_of(place[1])
