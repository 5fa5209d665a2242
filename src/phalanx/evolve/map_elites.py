"""MAP-Elites (Mouret and Clune, arXiv:1504.04909): keep the best candidate of every cell, and breed from these
elites.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from phalanx.evolve.archive import Archive, ArchiveEntry, ArchiveWriter
from phalanx.evolve.problem import Genome, SearchProblem, genome_key
from phalanx.evolve.proposer import ChangeProposer
from phalanx.evolve.surrogate import expected_gain, fit_surrogate

RANDOM_SHARE = 0.1  # of the evaluations, at the start: the surrogate model is first fitted to these
CHILDREN = 20  # bred for each one that is evaluated, where a surrogate model ranks them
# Of a batch: neighbours of the fittest, chosen without the model, which may be wrong.
UNRANKED_SHARE = 0.2
FITTEST = 5  # elites whose neighbours these are
CROSSED_SHARE = 0.3  # of the children
NEW_SHARE = 0.1  # of the children: random ones without a parent
MOST_TRIES = 20  # draws per place in a batch for a candidate that was not evaluated yet

Child = tuple[Genome, str, int | None]  # candidate, origin, parent


@dataclass(kw_only=True, slots=True)
class SearchCounts:
    """Counts of one search call, which its archive does not hold."""

    evaluated: int = 0  # in this call
    proposed: int = 0  # by the language model
    nonsense: int = 0  # of these, answers that held no new candidate
    reasons: Counter[str] = field(default_factory=Counter)  # of the rejected answers
    exhausted: bool = False  # no unevaluated candidate was left


def run_search(
    problem: SearchProblem,
    writer: ArchiveWriter,
    *,
    evaluations: int,
    seed: int,
    proposer: ChangeProposer | None = None,
    watch: Callable[[Archive, SearchCounts], None] = lambda archive, counts: None,
    counts: SearchCounts | None = None,
) -> SearchCounts:
    """Evaluate until the archive holds `evaluations` entries, a batch at a time; `watch` is called after each batch.

    A search is reproducible for one seed, also when it continues from an archive that was interrupted between two
    batches: the random generator of a batch depends on the seed and the number of entries only.
    """
    archive, counts = writer.archive, counts or SearchCounts()
    features = _FeatureRows(problem)
    while len(archive.entries) < evaluations:
        rng = np.random.default_rng((seed, len(archive.entries)))
        size = min(problem.batch, evaluations - len(archive.entries))
        children = _next_batch(problem, archive, features, rng, room=size, first=int(RANDOM_SHARE * evaluations))
        if proposer is not None and archive.elites and children:
            children[-1] = _propose(problem, archive, proposer, rng, counts) or children[-1]
        if not children:
            counts.exhausted = True
            return counts
        outcomes = problem.evaluate([genome for genome, _, _ in children])
        writer.add(
            [
                ArchiveEntry(genome=genome, outcome=outcome, origin=origin, parent=parent)
                for (genome, origin, parent), outcome in zip(children, outcomes, strict=True)
            ]
        )
        counts.evaluated += len(children)
        watch(archive, counts)
    return counts


@dataclass(kw_only=False, slots=True)
class _FeatureRows:
    """Cache of the features of the archive's entries: each is computed once."""

    problem: SearchProblem
    rows: list[np.ndarray] = field(default_factory=list)

    def of_archive(self, archive: Archive) -> np.ndarray | None:
        """Return the features of all entries, [entry, feature]; None where the problem has none."""
        new_genomes = [entry.genome for entry in archive.entries[len(self.rows) :]]
        features = self.problem.features(new_genomes) if new_genomes else np.zeros((0, 0))
        if features is None:
            return None
        self.rows.extend(features)
        return np.array(self.rows)


def _next_batch(
    problem: SearchProblem, archive: Archive, features: _FeatureRows, rng: np.random.Generator, *, room: int, first: int
) -> list[Child]:
    """Choose the next candidates: seeds, then random ones, then children of elites with the largest expected gain."""
    used_keys: set[str] = set(archive.known)
    batch: list[Child] = []

    def add_child(child: Child) -> bool:
        key = genome_key(child[0])
        if key in used_keys:
            return False
        used_keys.add(key)
        batch.append(child)
        return True

    if not archive.entries:
        for genome in problem.seeds():
            if len(batch) < room:
                add_child((genome, "seed", None))
    if len(archive.entries) < first or not archive.elites:
        for _ in range(MOST_TRIES * room):
            if len(batch) == room:
                return batch
            add_child((problem.random_genome(rng), "random", None))
    known_features = features.of_archive(archive) if archive.elites else None
    model = fit_surrogate(archive, known_features) if known_features is not None else None
    if model is not None:
        pool = {
            genome_key(child[0]): child for child in (_breed(problem, archive, rng) for _ in range(CHILDREN * room))
        }
        new_children = [child for key, child in pool.items() if key not in used_keys]
        if new_children:
            child_features = problem.features([genome for genome, _, _ in new_children])
            assert child_features is not None
            gain, cells = expected_gain(model, archive, child_features)
            children_in_cell: Counter[tuple[int, int]] = Counter()
            ranked_size = room - int(UNRANKED_SHARE * room)
            # A second child of a cell is worth half, a third a quarter: the first may already take the cell.
            for _ in range(min(ranked_size - len(batch), len(new_children))):
                worth = gain * np.array([0.5 ** children_in_cell[cell] for cell in cells])
                chosen = int(np.argmax(worth))
                if gain[chosen] < 0:
                    break
                add_child(new_children[chosen])
                children_in_cell[cells[chosen]] += 1
                gain[chosen] = -1.0
    for _ in range(MOST_TRIES * room):
        if len(batch) >= room:
            break
        chance = rng.random()
        if not archive.elites or chance < 0.1:
            add_child((problem.random_genome(rng), "random", None))
        elif model is not None and chance < 0.8:
            add_child(_improve(problem, archive, rng))
        else:
            add_child(_breed(problem, archive, rng))
    return batch


def _improve(problem: SearchProblem, archive: Archive, rng: np.random.Generator) -> Child:
    """Return a neighbour of one of the fittest elites."""
    fittest = sorted(archive.elites.values(), key=lambda number: -archive.entries[number].fitness)[:FITTEST]
    parent = fittest[int(rng.integers(len(fittest)))]
    return problem.mutate(archive.entries[parent].genome, rng), "mutation", parent


def _breed(problem: SearchProblem, archive: Archive, rng: np.random.Generator) -> Child:
    """Return a child of one or two elites, or a random candidate."""
    chance = rng.random()
    if chance < NEW_SHARE:
        return problem.random_genome(rng), "random", None
    parents: Sequence[int] = list(archive.elites.values())
    first = parents[int(rng.integers(len(parents)))]
    genome = archive.entries[first].genome
    if chance < NEW_SHARE + CROSSED_SHARE and len(parents) > 1:
        second = parents[int(rng.integers(len(parents)))]
        return problem.cross(genome, archive.entries[second].genome, rng), "crossover", first
    return problem.mutate(genome, rng), "mutation", first


def _propose(
    problem: SearchProblem, archive: Archive, proposer: ChangeProposer, rng: np.random.Generator, counts: SearchCounts
) -> Child | None:
    """Ask the language model to change an elite; return None, and count it, where the answer is not a new candidate."""
    parents = sorted(archive.elites.values(), key=lambda number: archive.entries[number].fitness)
    # From the better half: a proposer is slow, so its calls go to the candidates worth improving.
    parent_number = parents[int(rng.integers(len(parents) // 2, len(parents)))]
    parent = archive.entries[parent_number]
    counts.proposed += 1
    try:
        genome = proposer.propose(problem, parent)
        if genome_key(genome) in archive.known:
            raise ValueError("it was evaluated before")
    except ValueError as error:
        counts.nonsense += 1
        counts.reasons[str(error)[:200]] += 1
        return None
    return genome, "proposer", parent_number
