"""The kernel search problem: RMSNorm templates with chosen numbers, or a language model's source, with its speed.

The evaluator is a function passed in by the caller: for every source it returns whether the results are right and how
close the time comes to the speed of light. The axes of the grid on a GPU are the values per thread and the warps of a
program; on a CPU they are the rows in a chunk and the template.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from phalanx.evolve.kernel_templates import SEEDS, TEMPLATES, VALUES, plain_values, render_source
from phalanx.evolve.problem import Floats, Genome, SearchAxis, SearchOutcome

BATCH = 12  # candidates that one process measures: importing PyTorch takes longer than most of them
MOST_SOURCE = 64 << 10
MOST_HELD = 12  # cells of the first axis: 2^0 to 2^11


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelMeasurement:
    """The evaluator's verdict on one source: accepted or not, with its time."""

    accepted: bool
    why: str = ""
    seconds: float | None = None
    # Share of the speed of light: the time to move the minimum bytes at full bandwidth, divided by the measured time.
    light_share: float | None = None


Evaluator = Callable[[Sequence[str]], Sequence[KernelMeasurement]]


@dataclass(frozen=True, kw_only=True)
class KernelProblem:
    """Kernels of one operation at one shape on one device."""

    op: str
    device: str  # cuda or cpu
    shape: Mapping[str, int]
    # Device name, driver, versions: another machine is another problem, as its times differ.
    about: Mapping[str, Any]
    evaluator: Evaluator
    # Whether the evaluator accepts sources that are not from the templates.
    allows_source: bool = False
    name: str = "kernels"
    batch: int = BATCH
    axes: tuple[SearchAxis, SearchAxis] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        powers = [2**power for power in range(MOST_HELD)]
        first_name = "values per thread" if self.device == "cuda" else "rows in a chunk"
        first = SearchAxis(
            name=first_name,
            edges=tuple(power * 1.5 for power in powers[:-1]),
            labels=tuple(f"about {power}" for power in powers),
        )
        warps = (1, 2, 4, 8, 16)
        second = SearchAxis(
            name="warps" if self.device == "cuda" else "template",
            edges=tuple(warp_count * 1.5 for warp_count in warps[:-1]),
            labels=tuple(str(warp_count) for warp_count in warps),
        )
        object.__setattr__(self, "axes", (first, second))

    @cached_property
    def values(self) -> Mapping[str, tuple[Any, ...]]:
        """The legal values of each gene."""
        return {"template": tuple(TEMPLATES[self.device]), **VALUES[self.device]}

    def describe(self) -> Mapping[str, Any]:
        """Return the operation, the device, the shape and the facts in `about`."""
        return {"op": self.op, "device": self.device, "shape": dict(self.shape), **self.about}

    def source(self, genome: Genome) -> str:
        """Return the source of a candidate: its own text, or its template filled in."""
        written = genome.get("source")
        return written if isinstance(written, str) else render_source(genome, self.device)

    def seeds(self) -> Sequence[Genome]:
        """Return one slow candidate to start from."""
        return (dict(SEEDS[self.device]),)

    def random_genome(self, rng: np.random.Generator) -> Genome:
        """Draw a template and its values at random."""
        return plain_values(
            {name: legal_values[int(rng.integers(len(legal_values)))] for name, legal_values in self.values.items()},
            self.device,
        )

    def mutate(self, genome: Genome, rng: np.random.Generator) -> Genome:
        """Change one value or a few, mostly to a list neighbour; a language model's source becomes its template."""
        changed = {name: value for name, value in genome.items() if name != "source"}
        genes = [name for name, legal_values in self.values.items() if len(legal_values) > 1]
        for name in rng.choice(genes, size=min(len(genes), int(rng.geometric(0.6))), replace=False):
            legal_values = self.values[str(name)]
            index = legal_values.index(changed[str(name)])
            neighbours = [neighbour for neighbour in (index - 1, index + 1) if 0 <= neighbour < len(legal_values)]
            choices = neighbours if rng.random() < 0.7 else list(range(len(legal_values)))
            changed[str(name)] = legal_values[choices[int(rng.integers(len(choices)))]]
        return plain_values(changed, self.device)

    def cross(self, first: Genome, second: Genome, rng: np.random.Generator) -> Genome:
        """Take each value from one of two candidates at random."""
        chosen = {name: (first if rng.random() < 0.5 else second)[name] for name in self.values}
        return plain_values(chosen, self.device)

    def evaluate(self, genomes: Sequence[Genome]) -> Sequence[SearchOutcome]:
        """Measure the candidates; the fitness is the share of the speed of light."""
        measurements = self.evaluator([self.source(genome) for genome in genomes])
        if len(measurements) != len(genomes):
            raise ValueError(f"the evaluator answered {len(measurements)} of {len(genomes)} candidates")
        outcomes = []
        for genome, measurement in zip(genomes, measurements, strict=True):
            if not measurement.accepted or measurement.light_share is None:
                outcomes.append(SearchOutcome(fitness=None, why=measurement.why[:500] or "refused"))
                continue
            details = {"seconds": measurement.seconds}
            outcomes.append(SearchOutcome(fitness=measurement.light_share, place=self._place(genome), details=details))
        return outcomes

    def _place(self, genome: Genome) -> tuple[float, float]:
        """Return a candidate's values on the two axes of the grid."""
        if self.device != "cuda":
            return float(genome["rows"]), float(2 ** list(TEMPLATES[self.device]).index(genome["template"]))
        row = genome["block"] if genome["template"] == "blocked" else 1 << (self.shape["width"] - 1).bit_length()
        tile = row * (genome["rows"] if genome["template"] == "tiled" else 1)
        return max(1.0, tile / (32 * genome["warps"])), float(genome["warps"])

    def features(self, genomes: Sequence[Genome]) -> Floats | None:
        """Return the logarithms of numbers and their squares, words one-hot, and their products with the template."""
        rows = []
        for genome in genomes:
            numbers: list[float] = []
            for name, legal_values in self.values.items():
                if isinstance(legal_values[0], str):
                    numbers += [float(genome[name] == word) for word in legal_values]
                else:
                    numbers += [np.log2(genome[name]), np.log2(genome[name]) ** 2]
            is_template = np.array([float(genome["template"] == word) for word in self.values["template"]])
            rows.append(np.concatenate((numbers, np.outer(is_template, numbers).ravel(), np.log2(self._place(genome)))))
        return np.array(rows, dtype=np.float64).reshape(len(genomes), -1)

    def read_genome(self, data: object) -> Genome:
        """Read a candidate from JSON: values of the lists or, if `allows_source`, a full source or edits of one.

        Raises ValueError with the reason.
        """
        if not isinstance(data, Mapping):
            raise ValueError("not a JSON object")
        genome = {name: data.get(name) for name in self.values}
        render_source(genome, self.device)
        edits, source = data.get("edits"), data.get("source")
        if edits is None and source is None:
            return plain_values(genome, self.device)
        if not self.allows_source:
            raise ValueError("a source of its own, which only the guard of the kernel lab may run")
        text = source if isinstance(source, str) else render_source(genome, self.device)
        for edit in edits if isinstance(edits, list) else []:
            if not isinstance(edit, Mapping) or not isinstance(edit.get("old"), str) or text.count(edit["old"]) != 1:
                raise ValueError("an edit whose old text is not found once in the source")
            text = text.replace(edit["old"], str(edit.get("new", "")))
        if not 0 < len(text.encode()) <= MOST_SOURCE:
            raise ValueError("a source of more than 64 KiB")
        return {**genome, "source": text}

    def prompt(self, genome: Genome, outcome: SearchOutcome) -> str:
        """Return the prompt: the source, its measurement, the values that may change and the form of the answer."""
        values = "\n".join(
            f"  {name}: {', '.join(map(str, legal_values))}" for name, legal_values in self.values.items()
        )
        source_advice = (
            '\nOr change the source: {"edits": [{"old": text that stands in it once, "new": text}]}, a diff, or '
            '{"source": the whole file}.'
            if self.allows_source
            else ""
        )
        return (
            f"Make a kernel faster: {self.op} at {dict(self.shape)} on {dict(self.about)}.\n"
            f"It reaches {outcome.fitness:.1%} of the speed of light.\n\n{self.source(genome)}\n"
            f"Values that may change:\n{values}\n"
            f"Answer with one JSON object that holds only the values to change.{source_advice}"
        )
