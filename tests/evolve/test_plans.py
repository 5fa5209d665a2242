"""Plans: a small space searched against all of it, and the answers under limits.

benchmarks/evolve_plans.py does the same with large spaces and ten seeds.
"""

from __future__ import annotations

import numpy as np
import pytest

import phalanx
from phalanx.evolve.archive import open_archive
from phalanx.evolve.map_elites import run_search
from phalanx.evolve.plan_problem import PlanProblem
from phalanx.evolve.problem import cell_of
from phalanx.plan.mapping import map_axes
from phalanx.plan.request import request_from_job
from phalanx.plan.search import search_layouts

JOB = "examples/llama-3-8b-64xH100.toml"
EVALUATIONS = 200


def make_problem(cluster, overrides=(), inner_steps=(50,)):
    job = phalanx.load(JOB, overrides=list(overrides)).job
    request, _ = request_from_job(job, phalanx.cluster(cluster))
    return PlanProblem(request=request, memory_limits=(40 * 2.0**30,), about={}, inner_steps=inner_steps)


def test_a_small_space_against_all_of_it():
    """How good it is on large spaces is measured in benchmarks/; here it must beat chance, and never the truth."""
    problem = make_problem("8xH100:2", ["batch.global_sequences=16", "parallel.context=1", "parallel.tensor=2"])
    genomes = list(problem.all_genomes())
    outcomes = problem.evaluate(genomes)
    best = best_of_cells(problem, outcomes)
    assert len(genomes) >= 4 * EVALUATIONS
    best_found, best_drawn = [], []
    for seed in range(4):  # one draw may hold one of the fastest plans by luck
        drawn = np.random.default_rng(seed).choice(len(genomes), EVALUATIONS, replace=False)
        chance = best_of_cells(problem, [outcomes[place] for place in drawn])
        with open_archive(None, problem) as writer:
            run_search(problem, writer, evaluations=EVALUATIONS, seed=seed)
        found = {cell: writer.archive.entries[key].fitness for cell, key in writer.archive.elites.items()}
        assert set(found) <= set(best)
        assert all(found[cell] <= best[cell] * (1 + 1e-12) for cell in found)
        assert sum(found.values()) > sum(chance.values())
        best_found.append(max(found.values()))
        best_drawn.append(max(chance.values()))
    assert sum(best_found) > sum(best_drawn)


def best_of_cells(problem, outcomes):
    best = {}
    for outcome in outcomes:
        if outcome.fitness is not None:
            cell = cell_of(problem.axes, outcome.place)
            best[cell] = max(best.get(cell, 0.0), outcome.fitness)
    return best


def test_the_planner_agrees():
    """In step the best plan is the planner's own, and bytes between hosts are those of its axes that leave a host."""
    problem = make_problem("8xH100:2", ["batch.global_sequences=16"], inner_steps=())
    genomes = list(problem.all_genomes())
    outcomes = problem.evaluate(genomes)
    fit = [(one.fitness, place) for place, one in enumerate(outcomes) if one.fitness is not None]
    request = problem.request
    own = search_layouts(request).best
    assert max(fit)[0] == pytest.approx(request.sequence * request.global_sequences / own.step_s, rel=1e-9)
    for place in np.random.default_rng(0).choice(len(genomes), 40, replace=False):
        layout = problem.layout(genomes[place])
        across = sum(axis.bytes_per_step for axis in map_axes(request, layout) if "NIC" in axis.tier)
        price = problem.prices[problem.row_of(genomes[place])]
        assert across <= price.sent_bytes * (1 + 1e-9) <= 8 * across * (1 + 1e-6), layout.name


def test_mutations_stay_legal_and_a_written_plan_is_repaired():
    problem, rng = make_problem("8xH100:2"), np.random.default_rng(0)
    genome = problem.random_genome(rng)
    for _ in range(300):
        genome = problem.mutate(problem.cross(genome, problem.random_genome(rng), rng), rng)
        assert problem.layout(genome).devices * genome["peers"] == 16
    written = problem.read_genome({**genome, "tp": 7, "pp": 3})
    assert problem.layout(written).devices * written["peers"] == 16
    with pytest.raises(ValueError, match="schedule is none of"):
        problem.read_genome({**genome, "schedule": "fast"})
    with pytest.raises(ValueError, match="tp is no int"):
        problem.read_genome({**genome, "tp": "8"})


def test_answers_keep_their_limits():
    found = phalanx.evolve.plans(
        JOB, phalanx.cluster("8xH100:2"), evaluations=150, memory_gb=(40, 80), links_gbits=(1, 100)
    )
    answers = {(one.memory_gb, one.link_gbits): one for one in found.answers}
    assert list(answers) == [(40, 1), (40, 100), (80, 1), (80, 100)]
    for (memory, _), one in answers.items():
        assert one.memory_bytes <= memory * 2**30
    assert answers[80, 1].tokens_per_s <= answers[80, 100].tokens_per_s
    assert answers[40, 100].tokens_per_s <= answers[80, 100].tokens_per_s
    step_s = 512 * 8192 / answers[80, 1].tokens_per_s
    assert answers[80, 1].sent_bytes / step_s <= 125e6  # 1 Gbit/s
