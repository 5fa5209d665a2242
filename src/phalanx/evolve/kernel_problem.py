"""Kernels as candidates: a template with numbers in its holes, or a language model's own source; measured by a guard.

The evaluator is a function that is given: it says of every source whether it is right, and how close its time comes to
the speed of light. The grid: values that a thread (a chunk, on a CPU) holds × warps of a program.
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
    """What a guard says of one source."""

    accepted: bool
    why: str = ""
    seconds: float | None = None
    light_share: float | None = None  # of the speed of light: least bytes over bandwidth, divided by the time


Evaluator = Callable[[Sequence[str]], Sequence[KernelMeasurement]]


@dataclass(frozen=True, kw_only=True)
class KernelProblem:
    """Kernels of one operation at one shape on one device."""

    op: str
    device: str  # cuda or cpu
    shape: Mapping[str, int]
    about: Mapping[str, Any]  # device name, driver, versions: times of another machine are another problem
    evaluator: Evaluator
    allows_source: bool = False  # whether the evaluator may be given text that we did not write
    name: str = "kernels"
    batch: int = BATCH
    axes: tuple[SearchAxis, SearchAxis] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        powers = [2**power for power in range(MOST_HELD)]
        noun = "values per thread" if self.device == "cuda" else "rows in a chunk"
        held = SearchAxis(
            name=noun,
            edges=tuple(power * 1.5 for power in powers[:-1]),
            labels=tuple(f"about {power}" for power in powers),
        )
        warps = (1, 2, 4, 8, 16)
        second = SearchAxis(
            name="warps" if self.device == "cuda" else "template",
            edges=tuple(one * 1.5 for one in warps[:-1]),
            labels=tuple(str(one) for one in warps),
        )
        object.__setattr__(self, "axes", (held, second))

    @cached_property
    def values(self) -> Mapping[str, tuple[Any, ...]]:
        """All that a gene may be."""
        return {"template": tuple(TEMPLATES[self.device]), **VALUES[self.device]}

    def describe(self) -> Mapping[str, Any]:
        """Operation, shape, device."""
        return {"op": self.op, "device": self.device, "shape": dict(self.shape), **self.about}

    def source(self, genome: Genome) -> str:
        """The candidate file."""
        written = genome.get("source")
        return written if isinstance(written, str) else render_source(genome, self.device)

    def seeds(self) -> Sequence[Genome]:
        """A slow one to begin with."""
        return (dict(SEEDS[self.device]),)

    def random_genome(self, rng: np.random.Generator) -> Genome:
        """Any template with any values."""
        return plain_values(
            {name: known[int(rng.integers(len(known)))] for name, known in self.values.items()}, self.device
        )

    def mutate(self, genome: Genome, rng: np.random.Generator) -> Genome:
        """One value or two: a neighbour, or any; of a language model's source back to a template."""
        changed = {name: value for name, value in genome.items() if name != "source"}
        genes = [name for name, known in self.values.items() if len(known) > 1]
        for name in rng.choice(genes, size=min(len(genes), int(rng.geometric(0.6))), replace=False):
            known = self.values[str(name)]
            place = known.index(changed[str(name)])
            near = [one for one in (place - 1, place + 1) if 0 <= one < len(known)]
            places = near if rng.random() < 0.7 else list(range(len(known)))
            changed[str(name)] = known[places[int(rng.integers(len(places)))]]
        return plain_values(changed, self.device)

    def cross(self, first: Genome, second: Genome, rng: np.random.Generator) -> Genome:
        """Every value of one of the two."""
        chosen = {name: (first if rng.random() < 0.5 else second)[name] for name in self.values}
        return plain_values(chosen, self.device)

    def evaluate(self, genomes: Sequence[Genome]) -> Sequence[SearchOutcome]:
        """What the guard measures."""
        found = self.evaluator([self.source(genome) for genome in genomes])
        if len(found) != len(genomes):
            raise ValueError(f"the evaluator answered {len(found)} of {len(genomes)} candidates")
        outcomes = []
        for genome, one in zip(genomes, found, strict=True):
            if not one.accepted or one.light_share is None:
                outcomes.append(SearchOutcome(fitness=None, why=one.why[:500] or "refused"))
                continue
            details = {"seconds": one.seconds}
            outcomes.append(SearchOutcome(fitness=one.light_share, place=self._place(genome), details=details))
        return outcomes

    def _place(self, genome: Genome) -> tuple[float, float]:
        if self.device != "cuda":
            return float(genome["rows"]), float(2 ** list(TEMPLATES[self.device]).index(genome["template"]))
        row = genome["block"] if genome["template"] == "blocked" else 1 << (self.shape["width"] - 1).bit_length()
        tile = row * (genome["rows"] if genome["template"] == "tiled" else 1)
        return max(1.0, tile / (32 * genome["warps"])), float(genome["warps"])

    def features(self, genomes: Sequence[Genome]) -> Floats | None:
        """Logarithms of numbers, words one by one, and the products with the template."""
        rows = []
        for one in genomes:
            numbers: list[float] = []
            for name, known in self.values.items():
                if isinstance(known[0], str):
                    numbers += [float(one[name] == word) for word in known]
                else:
                    numbers += [np.log2(one[name]), np.log2(one[name]) ** 2]
            chosen = np.array([float(one["template"] == word) for word in self.values["template"]])
            rows.append(np.concatenate((numbers, np.outer(chosen, numbers).ravel(), np.log2(self._place(one)))))
        return np.array(rows, dtype=np.float64).reshape(len(genomes), -1)

    def read_genome(self, data: object) -> Genome:
        """Values of the lists, or a source of somebody's own where the evaluator may be given one."""
        if not isinstance(data, Mapping):
            raise ValueError("not a JSON object")
        genome = {name: data.get(name) for name in self.values}
        render_source(genome, self.device)
        edits, written = data.get("edits"), data.get("source")
        if edits is None and written is None:
            return plain_values(genome, self.device)
        if not self.allows_source:
            raise ValueError("a source of its own, which only the guard of the kernel lab may run")
        text = written if isinstance(written, str) else render_source(genome, self.device)
        for edit in edits if isinstance(edits, list) else []:
            if not isinstance(edit, Mapping) or not isinstance(edit.get("old"), str) or text.count(edit["old"]) != 1:
                raise ValueError("an edit whose old text is not found once in the source")
            text = text.replace(edit["old"], str(edit.get("new", "")))
        if not 0 < len(text.encode()) <= MOST_SOURCE:
            raise ValueError("a source of more than 64 KiB")
        return {**genome, "source": text}

    def prompt(self, genome: Genome, outcome: SearchOutcome) -> str:
        """The source, its measurement, and the form of a diff."""
        values = "\n".join(f"  {name}: {', '.join(map(str, known))}" for name, known in self.values.items())
        own = (
            '\nOr change the source: {"edits": [{"old": text that stands in it once, "new": text}]}, a diff, or '
            '{"source": the whole file}.'
            if self.allows_source
            else ""
        )
        return (
            f"Make a kernel faster: {self.op} at {dict(self.shape)} on {dict(self.about)}.\n"
            f"It reaches {outcome.fitness:.1%} of the speed of light.\n\n{self.source(genome)}\n"
            f"Values that may change:\n{values}\n"
            f"Answer with one JSON object that holds only the values to change.{own}"
        )
