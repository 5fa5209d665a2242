"""The search itself on a small problem of its own: what is kept, what is dropped, and that it is better than chance."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest

from phalanx.errors import UserError
from phalanx.evolve.archive import Archive, ArchiveEntry, open_archive, read_archive
from phalanx.evolve.examples import example_lines
from phalanx.evolve.map_elites import SearchCounts, run_search
from phalanx.evolve.picture import SHADES, grid_svg, grid_text
from phalanx.evolve.problem import SearchAxis, SearchOutcome
from phalanx.evolve.proposer import make_proposer

SIDE, GENES = 8, 6
AXIS = SearchAxis(
    name="sum", edges=tuple(float(one) for one in range(4, 40, 4)), labels=tuple(map(str, range(4, 44, 4)))
)
OTHER = SearchAxis(name="first", edges=tuple(float(one) for one in range(1, SIDE)), labels=tuple(map(str, range(SIDE))))


class Digits:
    """Six digits; place is their sum and the first one; what is above 38 in sum has no fitness."""

    name, axes, batch = "digits", (AXIS, OTHER), 20

    def __init__(self, seed=0):
        self.weights = np.random.default_rng(seed).random((GENES, SIDE))

    def describe(self):
        return {"weights": self.weights.tolist()}

    def seeds(self):
        return ({"digits": [0] * GENES},)

    def random_genome(self, rng):
        return {"digits": rng.integers(SIDE, size=GENES).tolist()}

    def mutate(self, genome, rng):
        digits = list(genome["digits"])
        digits[int(rng.integers(GENES))] = int(rng.integers(SIDE))
        return {"digits": digits}

    def cross(self, first, second, rng):
        return {
            "digits": [a if rng.random() < 0.5 else b for a, b in zip(first["digits"], second["digits"], strict=True)]
        }

    def evaluate(self, genomes):
        found = []
        for genome in genomes:
            digits = genome["digits"]
            if sum(digits) > 38:
                found.append(SearchOutcome(fitness=None, why="too much"))
                continue
            fitness = float(sum(self.weights[place, digit] for place, digit in enumerate(digits)))
            found.append(SearchOutcome(fitness=fitness, place=(float(sum(digits)), float(digits[0]))))
        return found

    def features(self, genomes):
        return np.array([[*one["digits"], *(np.array(one["digits"]) ** 2)] for one in genomes], dtype=float)

    def read_genome(self, data):
        digits = data.get("digits")
        if not isinstance(digits, list) or len(digits) != GENES or not all(one in range(SIDE) for one in digits):
            raise ValueError("not six digits")
        return {"digits": digits}

    def prompt(self, genome, outcome):
        return json.dumps({"digits": genome["digits"], "fitness": outcome.fitness})


def search(problem, path=None, *, evaluations=400, seed=0, proposer=None):
    with open_archive(path, problem) as writer:
        counts = run_search(problem, writer, evaluations=evaluations, seed=seed, proposer=proposer)
    return writer.archive, counts


def test_it_is_better_than_chance_and_never_tries_twice():
    problem = Digits()
    ours, _ = search(problem)
    assert len(ours.known) == len(ours.entries) == 400
    rng = np.random.default_rng(5)
    chance = Archive(axes=problem.axes, header={})
    genomes = [problem.random_genome(rng) for _ in range(400)]
    for genome, outcome in zip(genomes, problem.evaluate(genomes), strict=True):
        chance.add(ArchiveEntry(genome=genome, outcome=outcome, origin="random"))
    assert ours.quality_diversity > 1.25 * chance.quality_diversity
    assert {entry.origin for entry in ours.entries} >= {"seed", "random", "mutation", "crossover"}


def test_an_archive_cut_at_any_byte_goes_on(tmp_path):
    """The whole lines stay, the torn one is dropped, and the same number of evaluations is reached."""
    path = tmp_path / "archive.jsonl"
    whole, _ = search(Digits(), path, evaluations=60)
    data = path.read_bytes()
    second = data.index(b"\n") + 1
    for cut in (1, second - 2, second, second + 1, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:cut])
        again, counts = search(Digits(), path, evaluations=60)
        kept = data[:cut].count(b"\n")
        assert counts.evaluated == 60 - max(0, kept - 1)
        assert [one.genome for one in again.entries[: kept - 1]] == [one.genome for one in whole.entries[: kept - 1]]
        read, size = read_archive(path, Digits())
        assert (len(read.entries), size) == (60, path.stat().st_size)
    # Cut between two batches it goes the very same way.
    path.write_bytes(b"".join(line + b"\n" for line in data.split(b"\n")[:41]))
    assert [one.genome for one in search(Digits(), path, evaluations=60)[0].entries] == [
        one.genome for one in whole.entries
    ]


def test_archives_that_are_refused(tmp_path):
    path = tmp_path / "archive.jsonl"
    search(Digits(), path, evaluations=30)
    before = path.read_bytes()
    with pytest.raises(UserError, match=r"is the archive of another problem: .* \(different: weights\)"):
        search(Digits(seed=1), path)
    with open_archive(path, Digits()), pytest.raises(UserError, match="another search writes this archive"):
        search(Digits(), path)
    assert path.read_bytes() == before
    lines = before.split(b"\n")
    path.write_bytes(b"\n".join([lines[0], b'{"genome": 3}', *lines[2:]]))
    with pytest.raises(UserError, match=r"archive.jsonl:2: is not a line of an archive: no candidate in it"):
        search(Digits(), path)
    for other in (b"a letter to a friend\n", b"not even a line", b'{"format": "phalanx-evolve/1", "axes": [1]}\n'):
        path.write_bytes(other)
        with pytest.raises(UserError):
            search(Digits(), path)
        assert path.read_bytes() == other


GOOD = """import json, sys
digits = json.load(sys.stdin)["digits"]
digits[1] = (digits[1] + 1) % 8
print("Try", json.dumps({"digits": digits}))
"""


def test_a_proposer_and_its_nonsense(tmp_path):
    """Good answers are evaluated; nonsense is counted by reason, and the search goes on."""
    script = tmp_path / "model.py"
    for text, nonsense in ((GOOD, ""), ("print('Have you tried more digits?')", "no JSON object in the answer")):
        script.write_text(text)
        proposer = make_proposer(f"{sys.executable} {script}")
        archive, counts = search(Digits(), evaluations=60, proposer=proposer)
        assert len(archive.entries) == 60
        assert counts.proposed == 2
        assert bool(counts.nonsense) == bool(nonsense)
        assert list(counts.reasons) == ([nonsense] if nonsense else [])
        assert any(entry.origin == "proposer" for entry in archive.entries) != bool(nonsense)
    _, counts = search(Digits(), evaluations=40, proposer=make_proposer("/no/such/command"))
    assert next(iter(counts.reasons)).startswith("the command cannot be started")


def test_pictures_and_examples():
    archive, _ = search(Digits(), evaluations=60)
    text = grid_text(archive)
    assert sum(text.split("fast\n")[1].count(mark) for mark in SHADES) >= len(archive.elites) - 1
    svg = grid_svg(archive, title="a < b", show=str)
    assert svg.count("<title>") == len(archive.elites)
    assert "a &lt; b" in svg
    examples = [json.loads(line) for line in example_lines(archive)]
    assert len(examples) == 60
    assert sum(one["best_of_cell"] for one in examples) == len(archive.elites)
    child = next(one for one in examples if one["improves"] is not None)
    assert child["parent"]["digits"] != child["attempt"]["digits"]
    assert SearchCounts().reasons == {}
