"""`phalanx.evolve.plans`: the best plan for every device memory and every amount of traffic between hosts, at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.api.evolve_search import FinishedSearch, finish_search, picture_lines
from phalanx.api.jobs import AnyJob, read_job
from phalanx.api.results import Overrides, PublicResult, Tell, teller
from phalanx.errors import mistake
from phalanx.hardware.cluster import resolve_cluster
from phalanx.hardware.types import Cluster
from phalanx.io.limits import MAX_INNER_STEPS
from phalanx.io.tables import text_table
from phalanx.units import format_bytes, number_text

if TYPE_CHECKING:
    from phalanx.evolve.plan_problem import PlanProblem

WHERE = "phalanx evolve plans"
MEMORY_GB = (40.0, 48.0, 80.0)
LINKS_GBITS = (1.0, 10.0, 100.0)
MOST_LIMITS = 12
GBIT_BYTES = 1e9 / 8
DEVICE_GB = 2.0**30  # a device that is sold as 80 GB has 80 GiB


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanAnswer:
    """The best plan found for a device of so much memory and hosts with so fast a link."""

    memory_gb: float
    link_gbits: float
    tokens_per_s: float | None  # None: no plan of the archive fits
    layout: str = ""
    exchange: str = ""  # how parts of the cluster exchange what they learn
    memory_bytes: float = 0.0
    sent_bytes: float = 0.0  # by a host, per step
    genome: dict[str, Any] | None = None


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class EvolvedPlans(PublicResult):
    """A search over plans, and its answers.

    >>> found = phalanx.evolve.plans("job.toml", evaluations=2000)  # doctest: +SKIP
    >>> found.answers[0].layout  # doctest: +SKIP
    """

    job: str
    cluster: str
    search: FinishedSearch
    answers: tuple[PlanAnswer, ...]

    @property
    def exit_code(self) -> int:
        """130 after Ctrl-C."""
        return self.search.exit_code

    def to_dict(self) -> dict[str, Any]:
        """The answers, the counts, and the best plan of every cell."""
        from phalanx.io.codec import json_values

        return {
            "job": self.job,
            "cluster": self.cluster,
            "answers": json_values(self.answers),
            **json_values(self.search.to_dict()),
        }

    def __str__(self) -> str:
        rows = [["device", "link per host", "tokens/s", "memory", "host sends per step", "layout", "exchange"]]
        for one in self.answers:
            head = [f"{one.memory_gb:g} GB", f"{one.link_gbits:g} Gbit/s"]
            if one.tokens_per_s is None:
                rows.append([*head, "no plan found that fits", "", "", "", ""])
                continue
            sizes = [format_bytes(one.memory_bytes), format_bytes(one.sent_bytes)]
            rows.append([*head, f"{one.tokens_per_s:,.0f}", *sizes, one.layout, one.exchange])
        return "\n".join(
            [
                f"{self.job} on {self.cluster}: the best plan under each limit, priced by the planner",
                "",
                *text_table(rows, right=range(2, 5)),
                "GB are as devices are sold (2^30 bytes). Peers with H = n exchange updates every n steps: that costs",
                "loss, which tokens/s do not show (docs/slow-links.md).",
                "",
                *picture_lines(self.search),
                "",
                *self.search.summary_lines(),
            ]
        )


def plans(
    job: AnyJob,
    cluster: str | Path | Cluster | None = None,
    *,
    evaluations: int = 2000,
    seed: int = 0,
    archive: str | Path | None = None,
    memory_gb: Sequence[float] = MEMORY_GB,
    links_gbits: Sequence[float] = LINKS_GBITS,
    most_inner_steps: int = 500,
    proposer: str = "",
    picture: str | Path | None = None,
    overrides: Overrides = (),
    progress: bool | Tell = False,
) -> EvolvedPlans:
    """Search all plans of a job by MAP-Elites: the fastest for each device memory × traffic between hosts.

    One search answers what the best plan is for devices of `memory_gb` and hosts with links of `links_gbits`.
    `most_inner_steps` bounds H, since fewer exchanges cost loss that a price per token does not show; 1 is training in
    step only. The `archive`, a file of JSON lines, is made or gone on with; without one nothing is kept. `proposer` is
    a command that reads a prompt and writes a change as JSON. `picture` is an SVG file, kept up to date while the
    search goes on.
    Raises UserError for an archive of another problem.

    >>> import phalanx
    >>> found = phalanx.evolve.plans("examples/llama-3-8b-64xH100.toml", "8xH100:2", evaluations=50)
    >>> len(found.answers), found.search.archive.best() is not None
    (9, True)
    """
    from phalanx.evolve.plan_problem import INNER_STEPS, PlanProblem
    from phalanx.io.codec import json_values
    from phalanx.plan.request import request_from_job

    memory, links = _limits("--memory", memory_gb), _limits("--links", links_gbits)
    if not 1 <= most_inner_steps <= MAX_INNER_STEPS:
        what = f"{number_text(most_inner_steps)} is not between 1 and {MAX_INNER_STEPS:,}"
        raise mistake("--most-inner-steps", what, fix="use 500, as DiLoCo did")
    inner_steps = tuple(one for one in INNER_STEPS if one <= most_inner_steps)
    resolved = read_job(job, overrides, where=WHERE)
    asked = resolved.job
    wanted = cluster if cluster is not None else asked.cluster.target
    target = wanted if isinstance(wanted, Cluster) else resolve_cluster(wanted)
    if target.sites:
        raise mistake(WHERE, "plans of a cluster with sites are not searched", fix="name the cluster of one site")
    request, _ = request_from_job(
        asked, target, origins={key: origin.where for key, origin in resolved.origins.items()}
    )
    about = {
        "job": asked.name,
        "cluster": target.name,
        "model": json_values(asked.model),
        "parallel": json_values(asked.parallel),
        "batch": json_values(asked.batch),
        "sequence": asked.data.sequence,
        "precision": json_values(asked.precision),
        "optim": asked.optim.name,
        "hardware": json_values(target),
        "inner_steps": inner_steps,
    }
    problem = PlanProblem(
        request=request,
        memory_limits=tuple(one * DEVICE_GB for one in memory),
        inner_steps=inner_steps,
        about=about,
    )
    if not problem.spaces:
        raise mistake(WHERE, "no layout is legal for this job and cluster", fix=f"phalanx plan says why: {asked.name}")
    found = finish_search(
        problem,
        archive=Path(archive) if archive is not None else None,
        evaluations=evaluations,
        seed=seed,
        proposer=proposer,
        picture=picture,
        title=f"{asked.name} on {target.name}: tokens per second",
        show=lambda value: f"{value:,.0f} tokens/s",
        tell=teller(progress),
    )
    answers = [one for link in links for one in _answer_link(problem, found, link, memory)]
    return EvolvedPlans(
        job=asked.name,
        cluster=target.name,
        search=found,
        answers=tuple(sorted(answers, key=lambda one: (one.memory_gb, one.link_gbits))),
    )


def _limits(option: str, values: Sequence[float]) -> list[float]:
    found = sorted({float(one) for one in values})
    if not found or len(found) > MOST_LIMITS or not all(0 < one < 1e6 for one in found):
        raise mistake(option, f"not 1 to {MOST_LIMITS} numbers above 0", fix=f"such as {option} 40,48,80")
    return found


def _answer_link(
    problem: PlanProblem, search: FinishedSearch, link_gbits: float, memory_gb: Sequence[float]
) -> list[PlanAnswer]:
    """The elites at another speed of the hosts' links, and the fastest under each memory."""
    entries = [search.archive.entries[one] for one in search.archive.elites.values()]
    slower = problem.at_link(link_gbits * GBIT_BYTES)
    genomes = [dict(entry.genome) for entry in entries]
    outcomes = slower.evaluate(genomes) if genomes else []
    answers = []
    for limit in memory_gb:
        fitting = [
            (outcome.fitness, place)
            for place, outcome in enumerate(outcomes)
            if outcome.fitness is not None and outcome.place is not None and outcome.place[0] <= limit * DEVICE_GB
        ]
        if not fitting:
            answers.append(PlanAnswer(memory_gb=limit, link_gbits=link_gbits, tokens_per_s=None))
            continue
        fitness, place = max(fitting)
        genome, found = genomes[place], outcomes[place].place
        assert found is not None
        peers = genome["peers"]
        answers.append(
            PlanAnswer(
                memory_gb=limit,
                link_gbits=link_gbits,
                tokens_per_s=fitness,
                layout=problem.layout(genome).short,
                exchange=f"{peers} peers, {genome['codec']}, H = {genome['h']}" if peers > 1 else "every step",
                memory_bytes=found[0],
                sent_bytes=found[1],
                genome=genome,
            )
        )
    return answers
