"""MAP-Elites (Mouret and Clune, arXiv:1504.04909): keep the best candidate of every cell, and breed from them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from phalanx.evolve.archive import Archive, ArchiveEntry, ArchiveWriter
from phalanx.evolve.problem import Genome, SearchProblem, genome_key
from phalanx.evolve.proposer import ChangeProposer
from phalanx.evolve.surrogate import expected_gain, fit_surrogate

RANDOM_SHARE = 0.1  # of the evaluations, at the start: what the model of the problem is first fitted to
CHILDREN = 20  # bred for every one that is evaluated, where a model ranks them
UNRANKED_SHARE = 0.2  # of a batch, taken without the model, which may be wrong: neighbours of the fittest
FITTEST = 5  # elites whose neighbours those are
CROSSED_SHARE = 0.3
NEW_SHARE = 0.1  # of the children, made of no parent
MOST_TRIES = 20  # for a candidate that was not evaluated yet

Child = tuple[Genome, str, int | None]  # candidate, origin, parent


@dataclass(kw_only=True, slots=True)
class SearchCounts:
    """What a search did, beside its archive."""

    evaluated: int = 0  # in this call
    proposed: int = 0  # by the language model
    nonsense: int = 0  # of those, answers that were no candidate
    reasons: Counter[str] = field(default_factory=Counter)  # why they were none
    exhausted: bool = False  # no candidate was left


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
    """Evaluate until the archive holds `evaluations`, a batch at a time; `watch` is called after each.

    The same seed goes the same way, also from an archive that was interrupted between two batches.
    """
    archive, counts = writer.archive, counts or SearchCounts()
    features = _FeatureRows(problem)
    while len(archive.entries) < evaluations:
        rng = np.random.default_rng((seed, len(archive.entries)))
        room = min(problem.batch, evaluations - len(archive.entries))
        children = _next_batch(problem, archive, features, rng, room=room, first=int(RANDOM_SHARE * evaluations))
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
    """Features of the archive's entries, computed once each."""

    problem: SearchProblem
    rows: list[np.ndarray] = field(default_factory=list)

    def of_archive(self, archive: Archive) -> np.ndarray | None:
        new = [entry.genome for entry in archive.entries[len(self.rows) :]]
        found = self.problem.features(new) if new else np.zeros((0, 0))
        if found is None:
            return None
        self.rows.extend(found)
        return np.array(self.rows)


def _next_batch(
    problem: SearchProblem, archive: Archive, features: _FeatureRows, rng: np.random.Generator, *, room: int, first: int
) -> list[Child]:
    """Children to evaluate: seeds, then random ones, then those of elites that promise most."""
    taken: set[str] = set(archive.known)
    batch: list[Child] = []

    def take(child: Child) -> bool:
        key = genome_key(child[0])
        if key in taken:
            return False
        taken.add(key)
        batch.append(child)
        return True

    if not archive.entries:
        for genome in problem.seeds():
            if len(batch) < room:
                take((genome, "seed", None))
    if len(archive.entries) < first or not archive.elites:
        for _ in range(MOST_TRIES * room):
            if len(batch) == room:
                return batch
            take((problem.random_genome(rng), "random", None))
    known = features.of_archive(archive) if archive.elites else None
    model = fit_surrogate(archive, known) if known is not None else None
    if model is not None:
        pool = {
            genome_key(child[0]): child for child in (_breed(problem, archive, rng) for _ in range(CHILDREN * room))
        }
        fresh = [child for key, child in pool.items() if key not in taken]
        if fresh:
            found = problem.features([genome for genome, _, _ in fresh])
            assert found is not None
            gain, cells = expected_gain(model, archive, found)
            used: Counter[tuple[int, int]] = Counter()
            wanted = room - int(UNRANKED_SHARE * room)
            # A second child of a cell is worth half, a third a quarter: the first may already take the cell.
            for _ in range(min(wanted - len(batch), len(fresh))):
                worth = gain * np.array([0.5 ** used[cell] for cell in cells])
                chosen = int(np.argmax(worth))
                if gain[chosen] < 0:
                    break
                take(fresh[chosen])
                used[cells[chosen]] += 1
                gain[chosen] = -1.0
    for _ in range(MOST_TRIES * room):
        if len(batch) >= room:
            break
        chance = rng.random()
        if not archive.elites or chance < 0.1:
            take((problem.random_genome(rng), "random", None))
        elif model is not None and chance < 0.8:
            take(_improve(problem, archive, rng))
        else:
            take(_breed(problem, archive, rng))
    return batch


def _improve(problem: SearchProblem, archive: Archive, rng: np.random.Generator) -> Child:
    """A neighbour of one of the fittest."""
    fittest = sorted(archive.elites.values(), key=lambda one: -archive.entries[one].fitness)[:FITTEST]
    chosen = fittest[int(rng.integers(len(fittest)))]
    return problem.mutate(archive.entries[chosen].genome, rng), "mutation", chosen


def _breed(problem: SearchProblem, archive: Archive, rng: np.random.Generator) -> Child:
    """A child of one elite or two, or of none."""
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
    """What the language model makes of an elite; None, and a count, where its answer is no new candidate."""
    parents = sorted(archive.elites.values(), key=lambda one: archive.entries[one].fitness)
    # The better half: a proposer is slow, and improving the best is what it is asked for.
    chosen = parents[int(rng.integers(len(parents) // 2, len(parents)))]
    parent = archive.entries[chosen]
    counts.proposed += 1
    try:
        genome = proposer.propose(problem, parent)
        if genome_key(genome) in archive.known:
            raise ValueError("it was evaluated before")
    except ValueError as error:
        counts.nonsense += 1
        counts.reasons[str(error)[:200]] += 1
        return None
    return genome, "proposer", chosen
