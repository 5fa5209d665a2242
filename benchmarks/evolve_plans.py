"""How good `phalanx evolve plans` is where every plan can be priced: against the best of each cell and against chance.

    PYTHONPATH=src python benchmarks/evolve_plans.py [--seeds 10] [--evaluations 2000] [--only NAME] [--jobs 1]
        [--out FILE.jsonl]

Every space is enumerated once (minutes). Random search takes the same number of plans, drawn evenly from all of them
without repeats. The links' answers are held against the best of all plans at that speed, for the first seed.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from statistics import median
from typing import Any

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
    # Chosen before anything of it was seen, and not tuned to.
    "405B in step on 64 hosts": ("8xH200:64", ["model.preset=llama-3.1-405b", "batch.global_sequences=1024"], ()),
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


def search_once(problem: PlanProblem, seed: int, *, evaluations: int) -> tuple[Best, dict[str, float], list[Genome]]:
    """(best of every cell that one search filled, what it took, the candidates)."""
    start, busy = time.monotonic(), time.process_time()
    with open_archive(None, problem) as writer:
        run_search(problem, writer, evaluations=evaluations, seed=seed)
    counts = {
        "evaluations": len(writer.archive.entries),
        "seconds": round(time.monotonic() - start, 1),
        "processor_s": round(time.process_time() - busy, 1),
    }
    problem.prices.clear()
    elites = {cell: writer.archive.entries[one] for cell, one in writer.archive.elites.items()}
    return {cell: one.fitness for cell, one in elites.items()}, counts, [one.genome for one in elites.values()]


FORKED: list[Callable[[int], Any]] = []  # what a forked process runs; it inherits the problem with it


def run_forked(seed: int) -> Any:
    """In a process of its own."""
    return FORKED[-1](seed)


def mapped(search: Callable[[int], Any], seeds: Sequence[int], jobs: int) -> Iterator[Any]:
    """One after the other, or some at a time in processes that are forked: only a seed is passed to them."""
    if jobs == 1:
        yield from map(search, seeds)
        return
    FORKED.append(search)
    with multiprocessing.get_context("fork").Pool(jobs) as pool:
        yield from pool.imap(run_forked, seeds)


def main() -> None:
    """Print a line per space and seed, then the answers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--evaluations", type=int, default=2000)
    parser.add_argument("--only", default="")
    parser.add_argument("--jobs", type=int, default=1, help="searches at a time")
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
        search = partial(search_once, problem, evaluations=args.evaluations)
        for seed, (found, counts, genomes) in enumerate(mapped(search, range(args.seeds), args.jobs)):
            row = {
                "space": name,
                "plans": plans,
                "seed": seed,
                **counts,
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
                ours = best_under_limits(problem, iter([genomes]))
                truth = best_under_limits(problem, chunks(problem))
                shares = ", ".join(
                    f"{limit:g} GB {link:g} Gbit/s {ours.get((limit, link), 0.0) / value:.4f}"
                    for (limit, link), value in sorted(truth.items())
                )
                print(f"  answers over the best of all plans: {shares}")


if __name__ == "__main__":
    main()
