"""The interface of a search problem: candidates as JSON values, two axes that describe them, and one fitness."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from phalanx.io.checksums import text_digest

Genome = Mapping[str, Any]  # JSON values only: archives store it, a language model may write it
Floats = NDArray[np.float64]
Cell = tuple[int, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchAxis:
    """One axis of the grid: cell i holds values from edge i - 1 (included) to edge i; the outer cells are open."""

    name: str
    edges: tuple[float, ...]
    labels: tuple[str, ...]  # one per cell: one more than edges
    logarithmic: bool = False  # the surrogate model uses the logarithm of the value

    @property
    def size(self) -> int:
        """The number of cells along this axis."""
        return len(self.edges) + 1

    def cell_of(self, value: float) -> int:
        """Return the index of the cell that holds a value.

        >>> SearchAxis(name="x", edges=(1.0, 2.0), labels=("a", "b", "c")).cell_of(1.0)
        1
        """
        return bisect_right(self.edges, value)


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchOutcome:
    """The result of an evaluation: fitness and position on the axes, or the reason why there is none."""

    fitness: float | None
    place: tuple[float, float] | None = None
    why: str = ""
    details: Mapping[str, Any] = field(default_factory=dict)


class SearchProblem(Protocol):
    """The space of candidates of one search. Results of `mutate`, `cross` and `read_genome` are always well-formed."""

    @property
    def name(self) -> str:
        """The kind of the problem: plans, schedules or kernels."""

    @property
    def axes(self) -> tuple[SearchAxis, SearchAxis]:
        """The two axes of the grid."""

    @property
    def batch(self) -> int:
        """The number of candidates that are evaluated together."""

    def describe(self) -> Mapping[str, Any]:
        """Return all facts that an evaluation depends on, as JSON: an archive is only valid for equal facts."""

    def seeds(self) -> Sequence[Genome]:
        """Return known candidates to start from."""

    def random_genome(self, rng: np.random.Generator) -> Genome:
        """Draw a candidate at random."""

    def mutate(self, genome: Genome, rng: np.random.Generator) -> Genome:
        """Return a neighbour of a candidate."""

    def cross(self, first: Genome, second: Genome, rng: np.random.Generator) -> Genome:
        """Combine two candidates."""

    def evaluate(self, genomes: Sequence[Genome]) -> Sequence[SearchOutcome]:
        """Return the fitness and position of each candidate."""

    def features(self, genomes: Sequence[Genome]) -> Floats | None:
        """Return numbers, [candidate, feature], that a linear model can predict the outcome from, or None."""

    def read_genome(self, data: object) -> Genome:
        """Read a candidate from untrusted JSON, repaired where needed; raise ValueError with the reason."""

    def prompt(self, genome: Genome, outcome: SearchOutcome) -> str:
        """Return the prompt for a language model: this candidate, its measurement, and the form of the answer."""


def genome_key(genome: Genome) -> str:
    """Return a canonical text of a candidate: equal for equal candidates."""
    return json.dumps(genome, sort_keys=True, separators=(",", ":"))


def problem_digest(problem: SearchProblem) -> str:
    """Return a digest of everything that decides a problem's results, axes included."""
    axes = [[axis.name, list(axis.edges)] for axis in problem.axes]
    return text_digest(json.dumps([problem.name, problem.describe(), axes], sort_keys=True))


def cell_of(axes: tuple[SearchAxis, SearchAxis], place: tuple[float, float]) -> Cell:
    """Return the cell of the grid that holds a position."""
    return axes[0].cell_of(place[0]), axes[1].cell_of(place[1])
