"""`phalanx.evolve.plans`: one search for the best plans over device memory and traffic between hosts."""

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
    """The best plan found for a device memory and a speed of the link between hosts."""

    memory_gb: float
    link_gbits: float
    tokens_per_s: float | None  # None: no plan of the archive fits
    layout: str = ""
    exchange: str = ""  # how parts of the cluster exchange updates
    memory_bytes: float = 0.0
    sent_bytes: float = 0.0  # by a host, per step
    genome: dict[str, Any] | None = None


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class EvolvedPlans(PublicResult):
    """A search over plans, and its answers.

    >>> result = phalanx.evolve.plans("job.toml", evaluations=2000)  # doctest: +SKIP
    >>> result.answers[0].layout  # doctest: +SKIP
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
        """Return the answers, the counts, and the best plan of every cell."""
        from phalanx.io.codec import json_values

        return {
            "job": self.job,
            "cluster": self.cluster,
            "answers": json_values(self.answers),
            **json_values(self.search.to_dict()),
        }

    def __str__(self) -> str:
        rows = [["device", "link per host", "tokens/s", "memory", "host sends per step", "layout", "exchange"]]
        for answer in self.answers:
            head = [f"{answer.memory_gb:g} GB", f"{answer.link_gbits:g} Gbit/s"]
            if answer.tokens_per_s is None:
                rows.append([*head, "no plan found that fits", "", "", "", ""])
                continue
            sizes = [format_bytes(answer.memory_bytes), format_bytes(answer.sent_bytes)]
            rows.append([*head, f"{answer.tokens_per_s:,.0f}", *sizes, answer.layout, answer.exchange])
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
    `most_inner_steps` bounds H, since fewer exchanges cost loss that a price per token does not show; 1 allows only
    synchronous training. The `archive`, a file of JSON lines, is created or continued; without it the search is not
    stored. `proposer` is a command that reads a prompt and writes a change as JSON. `picture` is an SVG file, updated
    during the search. Raises UserError for an archive of another problem.

    >>> import phalanx
    >>> result = phalanx.evolve.plans("examples/llama-3-8b-64xH100.toml", "8xH100:2", evaluations=50)
    >>> len(result.answers), result.search.archive.best() is not None
    (9, True)
    """
    from phalanx.evolve.plan_problem import INNER_STEPS, PlanProblem
    from phalanx.io.codec import json_values
    from phalanx.plan.request import request_from_job

    memory, links = _limits("--memory", memory_gb), _limits("--links", links_gbits)
    if not 1 <= most_inner_steps <= MAX_INNER_STEPS:
        message = f"{number_text(most_inner_steps)} is not between 1 and {MAX_INNER_STEPS:,}"
        raise mistake("--most-inner-steps", message, fix="use 500, as DiLoCo did")
    inner_steps = tuple(count for count in INNER_STEPS if count <= most_inner_steps)
    resolved = read_job(job, overrides, where=WHERE)
    requested_job = resolved.job
    requested_cluster = cluster if cluster is not None else requested_job.cluster.target
    target = requested_cluster if isinstance(requested_cluster, Cluster) else resolve_cluster(requested_cluster)
    if target.sites:
        raise mistake(WHERE, "plans of a cluster with sites are not searched", fix="name the cluster of one site")
    request, _ = request_from_job(
        requested_job, target, origins={key: origin.where for key, origin in resolved.origins.items()}
    )
    about = {
        "job": requested_job.name,
        "cluster": target.name,
        "model": json_values(requested_job.model),
        "parallel": json_values(requested_job.parallel),
        "batch": json_values(requested_job.batch),
        "sequence": requested_job.data.sequence,
        "precision": json_values(requested_job.precision),
        "optim": requested_job.optim.name,
        "hardware": json_values(target),
        "inner_steps": inner_steps,
    }
    problem = PlanProblem(
        request=request,
        memory_limits=tuple(limit_gb * DEVICE_GB for limit_gb in memory),
        inner_steps=inner_steps,
        about=about,
    )
    if not problem.spaces:
        raise mistake(
            WHERE, "no layout is legal for this job and cluster", fix=f"phalanx plan says why: {requested_job.name}"
        )
    search = finish_search(
        problem,
        archive=Path(archive) if archive is not None else None,
        evaluations=evaluations,
        seed=seed,
        proposer=proposer,
        picture=picture,
        title=f"{requested_job.name} on {target.name}: tokens per second",
        show=lambda value: f"{value:,.0f} tokens/s",
        tell=teller(progress),
    )
    answers = [answer for link in links for answer in _answer_link(problem, search, link, memory)]
    return EvolvedPlans(
        job=requested_job.name,
        cluster=target.name,
        search=search,
        answers=tuple(sorted(answers, key=lambda answer: (answer.memory_gb, answer.link_gbits))),
    )


def _limits(option: str, values: Sequence[float]) -> list[float]:
    limits = sorted({float(value) for value in values})
    if not limits or len(limits) > MOST_LIMITS or not all(0 < limit < 1e6 for limit in limits):
        raise mistake(option, f"not 1 to {MOST_LIMITS} numbers above 0", fix=f"such as {option} 40,48,80")
    return limits


def _answer_link(
    problem: PlanProblem, search: FinishedSearch, link_gbits: float, memory_gb: Sequence[float]
) -> list[PlanAnswer]:
    """Price the elites at another speed of the hosts' links, and return the fastest for each memory."""
    entries = [search.archive.entries[place_of_elite] for place_of_elite in search.archive.elites.values()]
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
        genome, limits_used = genomes[place], outcomes[place].place
        assert limits_used is not None
        peers = genome["peers"]
        answers.append(
            PlanAnswer(
                memory_gb=limit,
                link_gbits=link_gbits,
                tokens_per_s=fitness,
                layout=problem.layout(genome).short,
                exchange=f"{peers} peers, {genome['codec']}, H = {genome['h']}" if peers > 1 else "every step",
                memory_bytes=limits_used[0],
                sent_bytes=limits_used[1],
                genome=genome,
            )
        )
    return answers
