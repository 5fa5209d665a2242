"""How good `phalanx evolve plans` is where every plan can be priced: against the best of each cell and against chance.

    PYTHONPATH=src python benchmarks/evolve_plans.py [--seeds 10] [--evaluations 2000] [--only NAME] [--out FILE.jsonl]

Every space is enumerated once (minutes). Random search takes the same number of plans, drawn evenly from all of them
without repeats. The links' answers are held against the best of all plans at that speed, for the first seed.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from itertools import islice
from statistics import median

import numpy as np

import phalanx
from phalanx.evolve.archive import open_archive
from phalanx.evolve.map_elites import run_search
from phalanx.evolve.plan_problem import PlanProblem
from phalanx.evolve.problem import Genome, cell_of
from phalanx.plan.request import request_from_job

JOB = "examples/llama-3-8b-64xH100.toml"
# name -> (cluster, changes of the job, steps that peers may take between exchanges)
SPACES = {
    "8B on 4 hosts": ("8xH100:4", [], (50, 500)),
    "70B in step on 16 hosts": ("8xH100:16", ["model.preset=llama-3-70b"], ()),
    "8x7B experts on 2 hosts": ("8xA100:2", ["model.preset=mixtral-8x7b", "batch.global_sequences=128"], (20, 100)),
    "8B in threes on 6 hosts": ("4xL40S:6", ["batch.global_sequences=192", "data.sequence=2048"], (50, 500)),
}
GIB, GBIT = 2.0**30, 1e9 / 8
MEMORY, LINKS = (40.0, 48.0, 80.0), (1.0, 10.0, 100.0)
CHUNK = 5000
Best = dict[tuple[int, int], float]


def build_problem(name: str) -> PlanProblem:
    """One of the spaces."""
    cluster, overrides, inner_steps = SPACES[name]
    job, target = phalanx.load(JOB, overrides=overrides).job, phalanx.cluster(cluster)
    request, _ = request_from_job(job, target)
    limits = tuple(one * GIB for one in MEMORY)
    return PlanProblem(request=request, memory_limits=limits, about={"space": name}, inner_steps=inner_steps)


def chunks(problem: PlanProblem) -> Iterator[list[Genome]]:
    """All plans, some at a time."""
    every = problem.all_genomes()
    while part := list(islice(every, CHUNK)):
        yield part


def enumerate_space(problem: PlanProblem, seeds: int, evaluations: int) -> tuple[int, int, Best, list[Best]]:
    """(plans, those that fit, best of every cell, best of every cell of each random search)."""
    plans = sum(len(part) for part in chunks(problem))
    drawn = [
        set(np.random.default_rng(seed).choice(plans, min(plans, evaluations), replace=False).tolist())
        for seed in range(seeds)
    ]
    fitting, number, best = 0, 0, {}
    chance: list[Best] = [{} for _ in range(seeds)]
    for part in chunks(problem):
        for outcome in problem.evaluate(part):
            if outcome.fitness is not None and outcome.place is not None:
                fitting += 1
                cell = cell_of(problem.axes, outcome.place)
                best[cell] = max(best.get(cell, 0.0), outcome.fitness)
                for seed, own in enumerate(drawn):
                    if number in own:
                        chance[seed][cell] = max(chance[seed].get(cell, 0.0), outcome.fitness)
            number += 1
    return plans, fitting, best, chance


def best_under_limits(problem: PlanProblem, genomes: Iterator[list[Genome]]) -> dict[tuple[float, float], float]:
    """The fastest plan for each memory and link."""
    found: dict[tuple[float, float], float] = {}
    slower = {link: problem.at_link(link * GBIT) for link in LINKS}
    for part in genomes:
        for link, priced in slower.items():
            for outcome in priced.evaluate(part):
                if outcome.fitness is None or outcome.place is None:
                    continue
                for limit in MEMORY:
                    if outcome.place[0] <= limit * GIB:
                        found[limit, link] = max(found.get((limit, link), 0.0), outcome.fitness)
    return found


def main() -> None:
    """Print a line per space and seed, then the answers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--evaluations", type=int, default=2000)
    parser.add_argument("--only", default="")
    parser.add_argument("--links", action="store_true", help="also enumerate at every link speed")
    parser.add_argument("--out", default="")
    args = parser.parse_args()
    for name in SPACES:
        if args.only and args.only != name:
            continue
        problem, began = build_problem(name), time.monotonic()
        plans, fitting, best, chance = enumerate_space(problem, args.seeds, args.evaluations)
        optimum = max(best.values())
        print(
            f"{name}: {plans:,} plans, {fitting:,} fit, {len(best)} cells reachable, {time.monotonic() - began:.0f} s"
        )
        problem.prices.clear()  # a search pays for its own
        for seed in range(args.seeds):
            start, busy = time.monotonic(), time.process_time()
            with open_archive(None, problem) as writer:
                run_search(problem, writer, evaluations=args.evaluations, seed=seed)
            seconds, archive = time.monotonic() - start, writer.archive
            processor_s = time.process_time() - busy
            problem.prices.clear()
            found = {cell: archive.entries[one].fitness for cell, one in archive.elites.items()}
            row = {
                "space": name,
                "plans": plans,
                "seed": seed,
                "evaluations": len(archive.entries),
                "seconds": round(seconds, 1),
                "processor_s": round(processor_s, 1),
                "best_of_optimum": max(found.values()) / optimum,
                "cells_of_reachable": len(found) / len(best),
                "median_elite": median(found[cell] / best[cell] for cell in found),
                "qd_over_random": sum(found.values()) / sum(chance[seed].values()),
            }
            print(
                "  " + ", ".join(f"{key} {value:.4g}" for key, value in row.items() if isinstance(value, float | int))
            )
            if args.out:
                with open(args.out, "a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
            if seed == 0 and args.links:
                genomes = [archive.entries[one].genome for one in archive.elites.values()]
                ours = best_under_limits(problem, iter([genomes]))
                truth = best_under_limits(problem, chunks(problem))
                shares = ", ".join(
                    f"{limit:g} GB {link:g} Gbit/s {ours.get((limit, link), 0.0) / value:.4f}"
                    for (limit, link), value in sorted(truth.items())
                )
                print(f"  answers over the best of all plans: {shares}")


if __name__ == "__main__":
    main()
